"""The version of the program. The on-disk format of atoms has a version of its own."""

from typing import Final

VERSION: Final = "0.1.0"
