"""Every global whose meaning we know. To import this module is what makes their stand-ins known."""

from __future__ import annotations

from ucp.files import builtin_forms, numpy_forms, torch_forms
from ucp.files.torch_forms import STORAGE_DTYPES, storage_of

__all__ = ["STORAGE_DTYPES", "builtin_forms", "numpy_forms", "storage_of", "torch_forms"]
