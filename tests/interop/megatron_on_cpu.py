"""Let unmodified megatron-core run on CPU ranks: what it asks of CUDA goes to the CPU, its groups are gloo's.

Only what the tests of this folder need. `install` comes before the first import of megatron.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.startswith("cuda"):
        return _CPU
    return value


class _Redirect(TorchFunctionMode):
    """Sends every explicit CUDA placement to the CPU; tensors answer as if they were on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return _CPU if args and isinstance(args[0], int) else _on_cpu(func(*args, **kwargs))
        if "device" in kwargs:
            device = kwargs["device"]
            kwargs["device"] = _CPU if type(device) is int else _on_cpu(device)
        if func is torch.Tensor.to:
            args = tuple(_on_cpu(arg) for arg in args)
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Its optimizers refuse parameters whose type is not called so.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        elif func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        elif getattr(func, "__name__", "") == "__get__" and getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        return func(*args, **kwargs)


def _always(answer: Any) -> Any:
    """A function that gives the answer, whatever it is asked."""

    def give(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return answer

    return give


def _same(value: Any, *args: Any, **kwargs: Any) -> Any:
    """The value itself."""
    del args, kwargs
    return value


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Any:
        return _always(None)

    def record_event(self, event: Any = None) -> Any:
        return event or self


def _call(function: Any, **kwargs: Any) -> Any:
    del kwargs
    return function()


def _random_state(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    return torch.default_generator.get_state()


def _set_random_state(state: Any, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    torch.default_generator.set_state(state)


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 8,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "_lazy_init": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "get_device_capability": (8, 0),
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(cuda, name, _always(answer))
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = cuda.device = _always(contextlib.nullcontext())
    cuda._lazy_call = _call
    cuda.default_generators = (torch.default_generator,) * 8
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = _random_state
    cuda.set_rng_state = _set_random_state
    for kind in ("Float", "Half", "BFloat16", "Int", "Long", "Byte", "Double", "Bool"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    module: Any = torch.nn.Module
    module.cuda = _same
    tensor: Any = torch.Tensor
    tensor.cuda = _same


def _patch_groups() -> None:
    module: Any = dist
    new_group, initialise = dist.new_group, dist.init_process_group

    def new_gloo_group(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("pg_options", "device_id")}
        return new_group(*args, **{**kwargs, "backend": "gloo"})

    def initialise_gloo(*args: Any, **kwargs: Any) -> None:
        del args
        kwargs.pop("device_id", None)
        initialise(**{**kwargs, "backend": "gloo"})

    module.new_group = module.distributed_c10d.new_group = new_gloo_group
    module.init_process_group = initialise_gloo


def install() -> None:
    """Redirect everything, for the rest of the process."""
    _patch_cuda()
    _patch_groups()
    _Redirect().__enter__()


def allow_latent_attention() -> None:
    """Multi-latent attention with the attention of the local modules, which has no parameters; after the import."""
    from megatron.core.transformer import dot_product_attention, multi_latent_attention

    latent: Any = multi_latent_attention
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(latent, name, None), type):  # a stand-in for Transformer Engine's
            setattr(latent, name, type(name, (), {}))
    attention: Any = dot_product_attention.DotProductAttention
    original = attention.__init__

    def init(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        del k_channels
        original(self, *args, **kwargs)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.__init__ = init
