"""Top-k compression with error feedback on one rank; tests/interop/test_recording.py has several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ucp
from ucp.errors import UsageError

torch = pytest.importorskip("torch")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made() -> Any:
    torch.manual_seed(2)
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 10))


@pytest.mark.usefixtures("world")
def test_unsent_elements_are_added_to_the_next_gradient(tmp_path: Path) -> None:
    """Sent and unsent elements add up to all gradients so far; a tenth is sent."""
    model = made()
    topk = ucp.TopK(model, fraction=0.1)
    plain = torch.nn.Linear(30, 10)
    plain.load_state_dict(model.module.state_dict())
    total = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    sent = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ucp.record(tmp_path / "run", model, optimizer, compressed=topk) as recorder:
        for _ in range(3):
            x = torch.randn(8, 30)
            model.zero_grad()
            plain.zero_grad()
            model(x).square().sum().backward()
            plain(x).square().sum().backward()
            optimizer.step()
            for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                assert int((q.grad != 0).sum()) == p.numel() // 10
                total[name] += p.grad
                sent[name] += q.grad
                torch.testing.assert_close(sent[name] + topk.state_dict()[name], total[name])
        recorder.base()
    again = ucp.TopK(made())
    again.load(tmp_path / "run" / "base" / "base-000001")
    assert all(torch.equal(again.state_dict()[name], unsent) for name, unsent in topk.state_dict().items())


@pytest.mark.usefixtures("world")
def test_invalid_uses_of_topk_are_refused(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(UsageError, match="not for a Linear"):
        ucp.TopK(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="fraction"):
        ucp.TopK(model, fraction=0)
    topk = ucp.TopK(model)
    with pytest.raises(UsageError, match="already has a comm hook"):
        ucp.TopK(model)
    with pytest.raises(UsageError, match="of 0 ranks, but this job has 1"):
        topk.load(tmp_path)
    with pytest.raises(UsageError, match="no parameter"):
        topk.load_state_dict({"weight": torch.zeros(3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"without state_dict"):
        ucp.record(tmp_path / "run", model, optimizer, compressed=0.1)  # type: ignore[arg-type]
