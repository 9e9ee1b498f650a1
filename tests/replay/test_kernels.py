"""Kernels against the real optimizers, bit for bit: schedules, clipping, groups, skipped steps, odd sizes, cuts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.replay.deepspeed_builds import lean_builds
from tests.replay.lion import Lion
from ucp.replay import kernels
from ucp.replay.gradients import consumed
from ucp.replay.kernels import CHUNK_ALIGNMENT, KERNELS, StateChunk

STEPS = 60
SKIPPED = {7, 31}
SIZES = (1, 7, 64, 1003, 4 * CHUNK_ALIGNMENT + 5)


@dataclass
class Logged:
    """One step of a log: gradients before clipping, the factor, hyper-parameters; None if skipped."""

    reduced: list[torch.Tensor]
    factor: float
    hyper: list[dict[str, Any]]


def train(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
    lr_tensor: bool = False,
) -> tuple[torch.optim.Optimizer, list[torch.Tensor], list[Logged | None]]:
    """Run a real optimizer for 60 steps on two groups; returns it, the initial parameters and the log."""
    generator = torch.Generator().manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]
    begin = [p.detach().clone() for p in parameters]
    groups = [
        {"params": parameters[::2], "weight_decay": 0.1},
        {"params": parameters[1::2], "weight_decay": 0.0},
    ]
    optimizer = make(groups)
    log: list[Logged | None] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:  # a warm-up and a decay, with values that float32 cannot hold
            lr = 3e-3 * min(1.0, (step + 1) / 10) * 0.97**step
            group["lr"] = torch.tensor(lr) if lr_tensor else lr
        if step in SKIPPED:
            log.append(None)
            continue
        reduced = [torch.randn(n, generator=generator).to(torch.bfloat16) for n in SIZES]
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in reduced)).item()
        factor = min(1.0, 20.0 / (norm + 1e-6))
        for p, g in zip(parameters, reduced, strict=True):
            p.grad = (g.float() * torch.tensor(factor, dtype=torch.float32)).to(dtype)
        hyper = [
            {
                **{key: float(v) if key == "lr" else v for key, v in group.items() if key != "params"},
                "lr_kind": "float32" if lr_tensor else "number",
            }
            for group in optimizer.param_groups
        ]
        log.append(Logged(reduced, factor, hyper))
        optimizer.step()
    return optimizer, begin, log


def replay(
    kernel_id: str, begin: list[torch.Tensor], log: list[Logged | None], *, cut: int | None
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor], int]]:
    """Every parameter, its states and counter, replayed in chunks of `cut` elements."""
    kernel = KERNELS[kernel_id]
    first = next(entry for entry in log if entry is not None)
    done = []
    for number, whole in enumerate(begin):
        constant = first.hyper[number % 2]
        parts = []
        for start in range(0, whole.numel(), cut or whole.numel()):
            piece = slice(start, start + (cut or whole.numel()))
            chunk = StateChunk(whole[piece].clone())
            for kind in kernel.kinds(constant):
                value = kernel.initial(kind, constant)
                if value is not None:
                    chunk.states[kind] = torch.full_like(chunk.param, value)
            for entry in log:
                if entry is not None:
                    grad = consumed(entry.reduced[number][piece], entry.factor, chunk.param.dtype)
                    kernel.update(chunk, grad, entry.hyper[number % 2])
                    chunk.step += 1
            parts.append(chunk)
        kinds = parts[0].states
        done.append(
            (
                torch.cat([part.param for part in parts]),
                {kind: torch.cat([part.states[kind] for part in parts]) for kind in kinds},
                parts[0].step,
            )
        )
    return done


def assert_same_bits(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    assert a.dtype == b.dtype, what
    assert a.shape == b.shape, what
    integer = {4: torch.int32, 2: torch.int16}[a.element_size()]
    assert torch.equal(a.contiguous().view(integer), b.contiguous().view(integer)), what


def spy(function: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    """The function, counting."""

    def counted(*arguments: Any) -> None:
        calls.append(1)
        function(*arguments)

    return counted


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
CASES: dict[str, tuple[str, Make]] = {
    "adamw-single": ("torch.adamw.single", lambda g: torch.optim.AdamW(g, foreach=False)),
    "adamw-foreach": ("torch.adamw.foreach", lambda g: torch.optim.AdamW(g, foreach=True)),
    "adamw-fused": ("torch.adamw.fused", lambda g: torch.optim.AdamW(g, fused=True)),
    "adamw-amsgrad": ("torch.adamw.single", lambda g: torch.optim.AdamW(g, amsgrad=True, foreach=False)),
    "adamw-fused-amsgrad": ("torch.adamw.fused", lambda g: torch.optim.AdamW(g, amsgrad=True, fused=True)),
    "adamw-maximize": ("torch.adamw.single", lambda g: torch.optim.AdamW(g, maximize=True)),
    "adamw-betas": ("torch.adamw.single", lambda g: torch.optim.AdamW(g, betas=(0.83, 0.951), eps=3e-7)),
    "adam-single": ("torch.adam.single", lambda g: torch.optim.Adam(g, foreach=False)),
    "adam-foreach": ("torch.adam.foreach", lambda g: torch.optim.Adam(g, foreach=True)),
    "adam-fused": ("torch.adam.fused", lambda g: torch.optim.Adam(g, fused=True)),
    "sgd": ("torch.sgd.single", lambda g: torch.optim.SGD(g, momentum=0.9, foreach=False)),
    "sgd-foreach": ("torch.sgd.foreach", lambda g: torch.optim.SGD(g, momentum=0.9, foreach=True)),
    "sgd-fused": ("torch.sgd.fused", lambda g: torch.optim.SGD(g, momentum=0.9, fused=True)),
    "sgd-dampening": ("torch.sgd.single", lambda g: torch.optim.SGD(g, momentum=0.8, dampening=0.3)),
    "sgd-nesterov": ("torch.sgd.single", lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True)),
    "sgd-plain": ("torch.sgd.single", lambda g: torch.optim.SGD(g)),
    "adagrad": ("torch.adagrad.single", lambda g: torch.optim.Adagrad(g, lr_decay=0.01, foreach=False)),
    "adagrad-foreach": (
        "torch.adagrad.foreach",
        lambda g: torch.optim.Adagrad(g, initial_accumulator_value=0.1, foreach=True),
    ),
    "lion": ("lion", Lion),
}


def deepspeed_optimizer(name: str) -> tuple[str, Make]:
    """A DeepSpeed optimizer, which is compiled on first use."""
    from ucp.errors import UsageError
    from ucp.replay.kernels import load_native_op

    try:
        with lean_builds():
            load_native_op(name)
    except UsageError as error:
        pytest.skip(error.what)
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    made = {"adam": DeepSpeedCPUAdam, "lion": DeepSpeedCPULion}[name]
    return f"deepspeed.cpu_{name}", made


def check(kernel_id: str, optimizer: torch.optim.Optimizer, begin: list[torch.Tensor], log: Any, cut: int) -> None:
    parameters = {p.numel(): p for group in optimizer.param_groups for p in group["params"]}
    assert any(not torch.equal(parameters[n], b) for n, b in zip(SIZES, begin, strict=True)), "nothing was trained"
    for n, (param, states, step) in zip(SIZES, replay(kernel_id, begin, log, cut=cut), strict=True):
        held = optimizer.state[parameters[n]]
        assert_same_bits(param, parameters[n].detach(), f"parameter of {n}")
        for kind, value in states.items():
            assert_same_bits(value, held[kind], f"{kind} of {n}")
        assert {kind for kind, v in held.items() if isinstance(v, torch.Tensor) and v.dim()} <= set(states)
        if "step" in held:
            assert step == int(held["step"])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_replay_produces_the_bits_of_the_optimizer(case: str, count: int) -> None:
    kernel_id, make = CASES[case]
    with threads(count):
        optimizer, begin, log = train(make)
        check(kernel_id, optimizer, begin, log, CHUNK_ALIGNMENT)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("case", ["adamw-single", "adam-decay"])
def test_adam_is_replayed_with_and_without_reused_memory(
    case: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operation by operation if the installed torch computes the same, else with torch's own function."""
    cases = {**CASES, "adam-decay": ("torch.adam.single", lambda g: torch.optim.Adam(g, foreach=False))}
    kernel_id, make = cases[case]
    assert kernels._torch_computes_alike(kernel_id == "torch.adamw.single"), "the fast way is never taken"
    taken = []
    monkeypatch.setattr(kernels, "_torch_computes_alike", lambda _: known)
    monkeypatch.setattr(kernels, "_plain_adam", spy(kernels._plain_adam, taken))
    optimizer, begin, log = train(make)
    check(kernel_id, optimizer, begin, log, CHUNK_ALIGNMENT)
    assert bool(taken) is known


@pytest.mark.parametrize("case", ["adamw-single", "adamw-fused", "sgd"])
def test_replay_of_bfloat16_parameters(case: str) -> None:
    kernel_id, make = CASES[case]
    optimizer, begin, log = train(make, torch.bfloat16)
    check(kernel_id, optimizer, begin, log, CHUNK_ALIGNMENT)


@pytest.mark.parametrize("case", ["adamw-single", "adamw-fused", "sgd"])
def test_replay_of_a_learning_rate_that_is_a_tensor(case: str) -> None:
    kernel_id, make = CASES[case]
    optimizer, begin, log = train(make, lr_tensor=True)
    check(kernel_id, optimizer, begin, log, CHUNK_ALIGNMENT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "lion"])
def test_replay_of_deepspeed_optimizers(name: str) -> None:
    kernel_id, make = deepspeed_optimizer(name)
    optimizer, begin, log = train(make)
    check(kernel_id, optimizer, begin, log, CHUNK_ALIGNMENT)


@pytest.mark.slow
def test_replay_of_deepspeed_adam_from_the_middle() -> None:
    """The job's product of betas was rounded at every step; a replay that starts later must repeat that."""
    _, make = deepspeed_optimizer("adam")
    _, begin, log = train(make)
    done = [entry for entry in log if entry is not None]
    whole = replay("deepspeed.cpu_adam", begin, done, cut=None)[3]
    kernel, number = KERNELS["deepspeed.cpu_adam"], 3
    chunk = StateChunk(begin[number].clone(), {k: torch.zeros_like(begin[number]) for k in ("exp_avg", "exp_avg_sq")})
    for entry in done:
        if chunk.step == 40:
            chunk.handle = None  # as if a base had been saved here
        kernel.update(chunk, consumed(entry.reduced[number], entry.factor, torch.float32), entry.hyper[number % 2])
        chunk.step += 1
    assert_same_bits(chunk.param, whole[0], "parameter")


def differing(kernel_id: str, make: Make, change: Callable[[Logged], Logged] = lambda e: e) -> int:
    """Elements of parameters that a replay gets wrong."""
    optimizer, begin, log = train(make)
    parameters = {p.numel(): p.detach() for group in optimizer.param_groups for p in group["params"]}
    done = replay(kernel_id, begin, [entry and change(entry) for entry in log], cut=CHUNK_ALIGNMENT)
    return sum(int((param != parameters[n]).sum()) for n, (param, _, _) in zip(SIZES, done, strict=True))


def test_each_condition_of_an_exact_replay_matters() -> None:
    """Each of these changes the bits, so the tests above would notice it."""
    _, single = CASES["adamw-single"]
    assert differing("torch.adamw.fused", single), "the other kernel"

    def rounded(entry: Logged) -> Logged:
        hyper = [{**h, "lr": struct.unpack("f", struct.pack("f", h["lr"]))[0]} for h in entry.hyper]
        return Logged(entry.reduced, entry.factor, hyper)

    assert differing("torch.adamw.single", single, rounded), "a learning rate in float32"
    assert differing("torch.adamw.single", single, lambda e: Logged(e.reduced, 1.0, e.hyper)), "no clipping"


def test_a_factor_is_rounded_before_it_multiplies() -> None:
    gradient, factor = torch.full((3,), 1.0 + 2**-7, dtype=torch.bfloat16), 0.1
    expected = gradient.float() * torch.tensor(0.1, dtype=torch.float32)
    assert_same_bits(consumed(gradient, factor, torch.float32), expected, "factor")
    assert_same_bits(consumed(gradient, None, torch.float32), gradient.float(), "no factor")
