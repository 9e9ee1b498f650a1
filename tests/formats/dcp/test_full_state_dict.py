"""Whole state dicts written by `torch.save` as sources: Accelerate's FULL_STATE_DICT, and files of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ucp
from tests.formats.dcp.state_dicts import small_state
from ucp.errors import IntegrityError, NotUnderstoodError, UcpError

torch = pytest.importorskip("torch")


class TiedEmbedding(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A tied head, a transposed weight, a 0-d parameter and a tensor of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.mix = torch.nn.Parameter(torch.randn(4, 3).t())
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embed(tokens) @ self.mix.T @ self.mix) * self.scale


def trained(net: TiedEmbedding) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    for _ in range(2):
        net(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_accelerates_full_state_dict(tmp_path: Path) -> None:
    """Two files that belong together, and small ones next to them."""
    state = small_state(groups=2)
    torch.save(state["model"], tmp_path / "pytorch_model_fsdp.bin")
    torch.save(state["optim"], tmp_path / "optimizer.bin")
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.bin")
    opened = ucp.open(tmp_path)
    assert opened.index.framework == "torch.distributed.checkpoint (Accelerate)"
    assert opened.index.extras.files == {"scheduler.bin": "scheduler.bin"}
    assert [group.names for group in opened.index.groups] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias", "2.weight"],
    ]
    for name, value in state["model"].items():
        assert torch.equal(opened[name].read("weight", as_torch=True), value), name
    for name, states in state["optim"]["state"].items():
        for kind, value in states.items():
            assert torch.equal(opened[name].read(kind, as_torch=True), value), (name, kind)
    assert ucp.verify(tmp_path, level="deep").ok


def test_a_file_written_by_torch_save(tmp_path: Path) -> None:
    """Raw state dicts of a DDP module and its optimizer, a scheduler and other values, converted to DeepSpeed."""
    net = TiedEmbedding()
    optimizer = trained(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    path = tmp_path / "last.pt"
    model = {f"module.{name}": value for name, value in net.state_dict().items()}
    rest = {"sched": schedule.state_dict(), "epoch": 4, "rng": torch.get_rng_state()}
    torch.save({"net": model, "opt": optimizer.state_dict(), **rest}, path)
    (tmp_path / "another.txt").write_text("not of this checkpoint")
    opened = ucp.open(path)
    assert opened.index.framework == "torch.save"
    assert opened.index.parameters["embed.weight"].aliases == ("head.weight",)
    assert opened.index.extras.files == {}
    assert ucp.verify(path, level="deep").ok
    ucp.convert(path, tmp_path / "zero", to="deepspeed", zero=2, dp=2)
    got = ucp.open(tmp_path / "zero")
    for name, parameter in net.named_parameters():
        assert torch.equal(got[name].read("master", as_torch=True), parameter.detach()), name
        for kind, value in optimizer.state[parameter].items():
            assert torch.equal(got[name].read(kind, as_torch=True).reshape(value.shape), value), (name, kind)
    assert got.index.extras.trees["mp_rank_00_model_states.pt"]["epoch"] == 4


def test_a_model_alone(tmp_path: Path) -> None:
    net = TiedEmbedding()
    torch.save(net.state_dict(), tmp_path / "model.pth")
    ucp.convert(tmp_path / "model.pth", tmp_path / "atoms")
    opened = ucp.open(tmp_path / "atoms")
    for name, value in net.state_dict().items():
        if name in opened:
            assert torch.equal(opened[name].read("weight", as_torch=True), value), name
    assert {"embed.weight", "mix", "scale", "nothing", "seen"} <= set(opened)


def test_files_that_are_not_state_dicts(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(NotUnderstoodError, match="is not a state dict"):
        ucp.open(tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("not a zip")
    with pytest.raises(NotUnderstoodError, match="is not a checkpoint in a known format"):
        ucp.open(tmp_path / "text.pt")
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "twice.pt")
    with pytest.raises(IntegrityError, match=r"two values have the key a\.b"):
        ucp.open(tmp_path / "twice.pt")


def test_damage_is_found(tmp_path: Path) -> None:
    """A flipped byte anywhere in the tensors, and a truncated file."""
    path = tmp_path / "last.pt"
    torch.save({"model": {"weight": torch.zeros(64, 64)}}, path)
    sound = path.read_bytes()
    at = sound.index(bytes(4096)) + 2048
    path.write_bytes(sound[:at] + b"\x01" + sound[at + 1 :])
    assert not ucp.verify(path, level="deep").ok
    path.write_bytes(sound[:-100])
    with pytest.raises(UcpError):
        ucp.open(path)
