"""`ucp.load_into` and `ucp.save` in one process: every kind of tensor and optimizer, damage, and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.formats.deepspeed import synthetic
from ucp.errors import InconsistentError, IntegrityError, UcpError, UsageError

torch = pytest.importorskip("torch")
nn = torch.nn


class ConvNet(nn.Module):
    def __init__(self, seed: int, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, width, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(width)
        self.table = nn.Embedding(5, 4)
        self.table.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(()))  # no dimensions at all
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("nothing", torch.zeros(0, 2))  # no elements: the name and the shape are all there is
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def forward(self, x: Any) -> Any:
        return (self.norm(self.conv(x)) * self.scale).square().mean() + self.table.weight.sum()


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}


def job(optimizer: str, seed: int, steps: int, *, swapped: bool = False) -> tuple[Any, Any]:
    net = ConvNet(seed)
    groups = [
        {"params": [net.conv.weight, net.scale], "weight_decay": 0.1},
        {"params": [net.conv.bias, *net.norm.parameters()], "weight_decay": 0.0},
    ]
    made = OPTIMIZERS[optimizer](groups[::-1] if swapped else groups)
    for step in range(steps):
        train(net, made, seed + step)
    return net, made


def train(net: Any, optimizer: Any, seed: int) -> float:
    torch.manual_seed(seed)
    loss = net(torch.randn(2, 3, 5, 5))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, two)) and one.dtype == two.dtype and one.stride() == two.stride()
    return bool(one == two)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("used", [0, 2])
def test_a_module_and_its_optimizer_are_restored_exactly(tmp_path: Path, optimizer: str, used: int) -> None:
    net, made = job(optimizer, 1, 3)
    handle = ucp.save(tmp_path / "atoms", net, made, client_state={"epoch": 4, "rates": torch.rand(3)})
    assert handle.done
    fresh, other = job(optimizer, 7, used)
    scratch = fresh.scratch.clone()
    report = ucp.load_into(tmp_path / "atoms", fresh, other)
    for name, value in net.state_dict().items():
        assert same(value, fresh.state_dict()[name]), name
    assert torch.equal(fresh.scratch, scratch)
    for (name, p), q in zip(net.named_parameters(), fresh.parameters(), strict=True):
        assert made.state[p].keys() == other.state[q].keys()
        for kind, value in made.state[p].items():
            assert same(value, other.state[q][kind]), (name, kind)
    assert report.client_state["epoch"] == 4
    assert report.client_state["rates"].shape == (3,)
    assert report.not_restored == []
    assert report.bytes_read <= 1.05 * report.bytes_held
    assert [train(net, made, 40), train(net, made, 41)] == [train(fresh, other, 40), train(fresh, other, 41)]


def test_a_parameter_that_never_had_a_gradient_has_no_states(tmp_path: Path) -> None:
    """The optimizer has it in a group. In a used job, its live states are dropped."""
    nets = [nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    nets[0][0].bias.requires_grad_(False)
    for net, optimizer in zip(nets, optimizers, strict=True):
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    ucp.save(tmp_path / "atoms", nets[0], optimizers[0])
    ucp.load_into(tmp_path / "atoms", nets[1], optimizers[1])
    assert nets[1][0].bias not in optimizers[1].state
    assert len(optimizers[1].state) == 3
    bare = torch.optim.AdamW(nets[1].parameters())
    ucp.convert(tmp_path / "atoms", tmp_path / "weights", only="weights")
    with pytest.raises(InconsistentError, match=r"has no 'exp_avg' for 0\.bias"):
        ucp.load_into(tmp_path / "weights", nets[1], bare)


def test_a_checkpoint_from_before_the_first_step_has_no_states(tmp_path: Path) -> None:
    """Loading it into a used job resets the states."""
    files: dict[str, Any] = {"mp_rank_00_model_states.pt": synthetic.model_state(global_steps=0, dp_world_size=1)}
    optim = synthetic.flat_optim(1, 0)
    optim["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}
    files["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"] = optim
    parts = {"embed": nn.Embedding(5, 3), "up": nn.Linear(3, 4), "down": nn.Linear(4, 3, bias=False)}
    net = nn.ModuleDict({**parts, "norm": nn.RMSNorm(3)})
    groups = [{"params": [p for p in net.parameters() if (p.dim() > 1) is matrices]} for matrices in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert ucp.load_into(synthetic.save(tmp_path / "saved", files), net, optimizer).step == 0
    assert torch.equal(net["up"].weight, synthetic.value("up.weight", "master"))
    assert not optimizer.state


class Strange(torch.optim.Optimizer):  # type: ignore[misc]
    """States with reserved names, of other dtypes, and one that is None."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state.setdefault("weight", torch.zeros_like(p)).add_(p.grad)
            state.setdefault("codes", torch.zeros_like(p, dtype=torch.uint8)).add_(3)
            state.setdefault("later", None)


@pytest.mark.parametrize("used", [False, True])
def test_states_of_other_dtypes_and_states_that_are_none(tmp_path: Path, used: bool) -> None:
    nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [Strange(net.parameters()) for net in nets]
    for net, optimizer in list(zip(nets, optimizers, strict=True))[: 1 + used]:
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    ucp.save(tmp_path / "atoms", nets[0], optimizers[0])
    assert ucp.load_into(tmp_path / "atoms", nets[1], optimizers[1]).not_restored == []
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        for name in ("weight", "codes"):
            assert same(optimizers[0].state[p][name], optimizers[1].state[q][name]), name


def test_groups_are_matched_by_their_parameters(tmp_path: Path) -> None:
    net, made = job("amsgrad", 1, 1)
    made.param_groups[0]["lr"].fill_(0.5)
    made.param_groups[1]["betas"] = (0.8, 0.9)
    ucp.save(tmp_path / "atoms", net, made)
    fresh, other = job("amsgrad", 7, 0, swapped=True)
    rate = other.param_groups[1]["lr"]
    ucp.load_into(tmp_path / "atoms", fresh, other)
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]
    assert [group["betas"] for group in other.param_groups] == [(0.8, 0.9), (0.9, 0.999)]
    assert other.param_groups[1]["lr"] is rate
    assert float(rate) == 0.5


def test_groups_that_the_job_has_merged_must_agree(tmp_path: Path) -> None:
    net, made = job("adamw", 1, 1)
    ucp.save(tmp_path / "atoms", net, made)
    fresh = ConvNet(7)
    joined = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad])
    with pytest.raises(InconsistentError, match="groups 0 and 1 of the checkpoint: weight_decay differ"):
        ucp.load_into(tmp_path / "atoms", fresh, joined)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    net, made = job("sgd", 1, 1)
    ucp.save(tmp_path / "atoms", net, made)
    fresh, other = job("adamw", 7, 0)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(InconsistentError, match=r"no 'exp_avg' for conv.weight, which this optimizer \(AdamW\) needs"):
        ucp.load_into(tmp_path / "atoms", fresh, other)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in before.items())
    report = ucp.load_into(tmp_path / "atoms", fresh)
    assert torch.equal(fresh.conv.weight, net.conv.weight)
    assert report.not_restored == ["optimizer states: the job has no optimizer"]


def test_other_shapes_and_dtypes_are_refused(tmp_path: Path) -> None:
    net, made = job("adamw", 1, 1)
    ucp.save(tmp_path / "atoms", net, made)
    wide = ConvNet(7, width=8)
    with pytest.raises(InconsistentError, match=r"conv.weight: shape is \[6, 3, 3, 3\] in the checkpoint, but \[8,"):
        ucp.load_into(tmp_path / "atoms", wide)
    odd = ConvNet(7)
    odd.mask = torch.zeros(3)
    with pytest.raises(InconsistentError, match=r"mask\|weight: is bool in the checkpoint, but float32 in the job"):
        ucp.load_into(tmp_path / "atoms", odd)


def test_another_precision_is_cast_and_reported(tmp_path: Path) -> None:
    net, made = job("adamw", 1, 1)
    ucp.save(tmp_path / "atoms", net, made)
    half = ConvNet(7).bfloat16()
    report = ucp.load_into(tmp_path / "atoms", half)
    assert torch.equal(half.conv.weight, net.conv.weight.bfloat16())
    assert any("were cast from float32 to bfloat16" in note for note in report.notes)


def test_a_damaged_file_is_reported_with_the_consequence(tmp_path: Path) -> None:
    net, made = job("sgd", 1, 1)
    ucp.save(tmp_path / "atoms", net, made)
    file = tmp_path / "atoms" / "atoms" / "conv.weight.safetensors"
    file.write_bytes(file.read_bytes()[:4200])
    with pytest.raises(IntegrityError, match="partly loaded"):
        ucp.load_into(tmp_path / "atoms", *job("sgd", 7, 0))


def test_objects_that_are_not_jobs_are_refused(tmp_path: Path) -> None:
    net, made = job("adamw", 1, 1)
    with pytest.raises(UsageError, match="neither a DeepSpeed engine nor a torch module"):
        ucp.load_into(tmp_path, [net], made)
    with pytest.raises(UsageError, match=r"a parameter of shape .* that is not in the module"):
        ucp.save(tmp_path / "atoms", ConvNet(3), made)
    with pytest.raises(UsageError, match=r"client_state: client_state.x is a builtins.object"):
        ucp.save(tmp_path / "atoms", net, made, client_state={"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_asynchronous_saves_contain_the_state_at_the_call(tmp_path: Path) -> None:
    net, made = job("adamw", 1, 2)
    weight = net.conv.weight.detach().clone()
    first = ucp.save(tmp_path / "first", net, made, asynchronous=True)
    train(net, made, 3)
    second = ucp.save(tmp_path / "second", net, made, asynchronous=True)  # waits for the first
    assert first.done
    train(net, made, 4)
    assert second.wait() == tmp_path / "second"
    assert torch.equal(ucp.open(tmp_path / "first")["conv.weight"].read(as_torch=True), weight)
    assert ucp.open(tmp_path / "second").index.step == 3
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


MEMORY = """
import sys, torch, ucp
verb, folder = sys.argv[1:]

def peak():  # bytes; the kernel's high-water mark
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
made = torch.optim.AdamW(net.parameters(), foreach=False)
for p in net.parameters():
    p.grad = torch.zeros_like(p)
made.step()
made.zero_grad()
ucp.save, ucp.load_into
open("/proc/self/clear_refs", "w").write("5")
before = peak()
if verb == "save":
    ucp.save(folder, net, made)
else:
    ucp.load_into(folder, net, made)
print(peak() - before, sum(p.numel() for p in net.parameters()) * 12)
"""


@pytest.mark.slow
def test_loading_and_saving_need_little_memory(tmp_path: Path) -> None:
    """200 MB of state, on top of which a save and a load take less than 64 MB."""
    for verb in ("save", "load"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, verb, str(tmp_path / "atoms")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        extra, state = map(int, done.stdout.split())
        assert state > 200_000_000
        assert extra < 64 * 2**20, (verb, extra)


def test_states_without_a_parameter_are_reported_as_not_restored(tmp_path: Path) -> None:
    """A dictionary inside a state is in the checkpoint, but no live optimizer gets it."""
    from tests.formats.deepspeed.synthetic import MODEL_FILE, flat_optim, model_state, optim_file, save

    files: dict[str, Any] = {MODEL_FILE: model_state()}
    for rank in range(2):
        files[optim_file(rank)] = flat_optim(2, rank)
        for slot in files[optim_file(rank)]["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            slot["inner"] = {"moment": torch.ones(3), "count": 2}
    source = save(tmp_path / "c", files)
    net = nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3, bias=False)})
    net.update({"embed": nn.Embedding(5, 3), "norm": nn.RMSNorm(3)})
    for path in (source, tmp_path / "atoms"):
        if path != source:
            ucp.convert(source, path)
        report = ucp.load_into(path, net, torch.optim.AdamW(net.parameters()), strict=False)
        assert any("optimizer state 'inner'" in text for text in report.not_restored), report


@pytest.mark.parametrize(
    "other",
    [
        lambda p: torch.optim.RMSprop(p),
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.Adadelta(p),
    ],
)
def test_an_optimizer_with_missing_states_starts_without_any(tmp_path: Path, other: Any) -> None:
    """With only some of its states it would fail in its next step: torch creates them only if there are none."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ucp.save(tmp_path / "atoms", net, optimizer).wait()
    twin = torch.nn.Linear(3, 2)
    another = other(twin.parameters())
    with pytest.raises(UcpError, match="which this optimizer"):
        ucp.load_into(tmp_path / "atoms", twin, another)
    report = ucp.load_into(tmp_path / "atoms", twin, another, strict=False)
    assert torch.equal(twin.weight, net.weight)
    assert any("which this optimizer" in text for text in report.not_restored)
    assert not another.state
    twin(torch.ones(1, 3)).sum().backward()
    another.step()
