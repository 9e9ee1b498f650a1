"""A source without parameters, or with tensors whose values cannot be read, is an error and never an empty success."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucp
from tests.formats.deepspeed.synthetic import model_state, save
from ucp.cli.main import run
from ucp.errors import NotUnderstoodError, UsageError


def sharded_tensor() -> torch.Tensor:
    """A DTensor on a mesh of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])


@pytest.fixture(scope="module")
def dtensor(tmp_path_factory: pytest.TempPathFactory) -> object:
    from torch import distributed

    store = tmp_path_factory.mktemp("store") / "s"
    distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{store}")
    yield sharded_tensor()
    distributed.destroy_process_group()


EMPTY: dict[str, Callable[[Path], Path]] = {
    "an empty state dict": lambda folder: torch_file(folder, {}),
    "an optimizer that has not stepped": lambda folder: torch_file(folder, {"state": {}, "param_groups": []}),
    "numbers only": lambda folder: torch_file(folder, {"epoch": 3, "loss": 0.5}),
    "an empty safetensors file": lambda folder: safetensors_folder(folder, {}),
}


def torch_file(folder: Path, tree: object) -> Path:
    torch.save(tree, folder / "state.pt")
    return folder / "state.pt"


def safetensors_folder(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_nothing_to_convert_is_an_error(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(make(tmp_path))
    for arguments in (["inspect", source], ["verify", source], ["convert", source, str(tmp_path / "out")]):
        assert run(arguments) == 3
        printed = capsys.readouterr()
        assert "contains no parameters" in printed.out + printed.err
        assert "found instead: " in printed.out + printed.err
    assert not (tmp_path / "out").exists()


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("place", ["state dict", "pytorch_model.bin", "DeepSpeed"])
def test_a_tensor_whose_bytes_are_not_its_values(make: Callable[[], torch.Tensor], place: str, tmp_path: Path) -> None:
    tree = {"odd.weight": make(), "plain.weight": torch.ones(3)}
    if place == "DeepSpeed":
        source = save(tmp_path / "c", {"mp_rank_00_model_states.pt": model_state(tree) | {"param_shapes": None}})
    else:
        source = tmp_path / ("state.pt" if place == "state dict" else place)
        torch.save(tree, source)
    with pytest.raises(NotUnderstoodError, match=r"the bytes of odd\.weight are not its values"):
        ucp.open(source)


@pytest.mark.parametrize("with_others", [False, True])
def test_one_rank_of_a_sharded_state_dict(dtensor: torch.Tensor, with_others: bool, tmp_path: Path) -> None:
    tree = {"a.weight": dtensor, **({"b.weight": torch.ones(3)} if with_others else {})}
    with pytest.raises(NotUnderstoodError, match=r"a\.weight is a DTensor, of which the file has one rank's shard"):
        ucp.open(torch_file(tmp_path, tree))


def test_quantized_weights_are_not_cast(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path, {"a.weight": torch.ones(4, dtype=torch.int8)})
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    (note,) = [note for note in ucp.open(folder).index.notes if note.id == "quantized"]
    assert "gptq" in note.text
    ucp.convert(folder, tmp_path / "copied", to="safetensors")
    with pytest.raises(UsageError, match="these weights are quantized"):
        ucp.convert(folder, tmp_path / "cast", to="safetensors", dtype="bf16")
