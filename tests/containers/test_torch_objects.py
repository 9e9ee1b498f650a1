"""Files of the real `torch.save`: every object is described, and its bytes are where the index says."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucp.containers.inert import Inert, InertOrderedDict, Size, StorageRef, TensorRef, class_path, is_class
from ucp.containers.torch_file import TorchFile
from ucp.core.dtypes import BY_NAME

torch = pytest.importorskip("torch")


class Tagged(torch.Tensor):
    """A user-defined tensor class."""


def saved(path: Path, value: object, **options: Any) -> TorchFile:
    torch.save(value, path, **options)
    return TorchFile(path)


def bits(file: TorchFile, ref: TensorRef) -> bytes:
    """The elements of `ref` in row-major order, read from the file by position and strides alone."""
    start = file.position(ref)
    data = np.fromfile(file.path, dtype=np.uint8)
    item = ref.dtype.itemsize
    shape, strides = (*ref.shape, item), (*(stride * item for stride in ref.strides), 1)
    return np.lib.stride_tricks.as_strided(data[start:], shape, strides).tobytes()


def true_bits(tensor: Any) -> bytes:
    return (
        bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""
    )


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(7)
    noise = torch.randint(
        0, 2 if name == "bool" else 256, (12 * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    tensor = noise.view(dtype).reshape(3, 4)
    file = saved(tmp_path / "x.pt", {"t": tensor, "dtype": dtype})
    ref = file.tree["t"]
    assert file.tree["dtype"] is BY_NAME[name]
    assert (ref.dtype, ref.shape, ref.strides) == (BY_NAME[name], (3, 4), (4, 1))
    assert ref.nbytes == 12 * dtype.itemsize
    assert bits(file, ref) == true_bits(tensor)


@pytest.mark.parametrize("alias", ["double", "float", "half", "long", "int", "short", "cfloat", "cdouble"])
def test_dtype_aliases(alias: str, tmp_path: Path) -> None:
    assert saved(tmp_path / "x.pt", getattr(torch, alias)).tree.name == str(getattr(torch, alias)).removeprefix(
        "torch."
    )


def test_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    views = {
        "whole": base,
        "row": base[1],
        "tail": base.reshape(-1)[17:],
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "every other": base[:, ::2, 1:],
        "expanded": base[0, 0].expand(6, 5),
        "scalar": base[2, 3, 4],
        "empty": base[:, 4:],
    }
    file = saved(tmp_path / "x.pt", views)
    refs = file.tree
    assert len({ref.storage for ref in refs.values()}) == 1
    for name, view in views.items():
        assert refs[name].shape == tuple(view.shape), name
        assert refs[name].is_contiguous == view.is_contiguous(), name
        assert bits(file, refs[name]) == true_bits(view), name


def test_zero_dimensions_and_no_elements(tmp_path: Path) -> None:
    file = saved(tmp_path / "x.pt", [torch.tensor(3.5), torch.empty(0), torch.empty(4, 0, 2, dtype=torch.bfloat16)])
    scalar, nothing, hollow = file.tree
    assert (scalar.shape, scalar.numel) == ((), 1)
    assert bits(file, scalar) == true_bits(torch.tensor(3.5))
    assert (nothing.numel, hollow.numel, hollow.shape) == (0, 0, (4, 0, 2))
    assert 0 <= file.position(nothing) <= file.size
    assert 0 <= file.position(hollow) <= file.size


def test_parameters_and_buffers(tmp_path: Path) -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    tagged = torch.nn.Parameter(torch.full((3,), 2.0))
    tagged.partition_dim = 1
    plain = torch.zeros(2)
    plain.ds_tag = "x"
    file = saved(
        tmp_path / "x.pt",
        {"frozen": frozen, "tagged": tagged, "plain": plain, "own": torch.ones(2).as_subclass(Tagged)},
    )
    tree = file.tree
    assert (tree["frozen"].parameter, tree["frozen"].requires_grad) == (True, False)
    assert (tree["tagged"].parameter, tree["tagged"].requires_grad) == (True, True)
    assert tree["tagged"].attributes == {"partition_dim": 1}
    assert (tree["plain"].parameter, tree["plain"].attributes) == (False, {"ds_tag": "x"})
    assert tree["own"].subclass == f"{__name__}.Tagged"
    assert tree["plain"].subclass is None
    for name, tensor in (("frozen", frozen), ("tagged", tagged), ("plain", plain), ("own", torch.ones(2))):
        assert bits(file, tree[name]) == true_bits(tensor)


def test_module_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    file = saved(tmp_path / "x.pt", model.state_dict())
    assert type(file.tree) is InertOrderedDict
    assert list(file.tree) == list(model.state_dict())
    assert list(file.tree.attributes) == ["_metadata"]
    for name, tensor in model.state_dict().items():
        assert bits(file, file.tree[name]) == true_bits(tensor), name


def test_whole_module_is_inert(tmp_path: Path) -> None:
    found = saved(tmp_path / "x.pt", torch.nn.Linear(3, 4)).tree
    assert found.path == "torch.nn.modules.linear.Linear"
    assert found.get("in_features") == 3
    assert found.get("_parameters")["weight"].shape == (4, 3)


def test_optimizer_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    file = saved(tmp_path / "x.pt", optimizer.state_dict())
    assert file.tree["param_groups"][0]["lr"] == 0.5
    true = optimizer.state_dict()["state"][0]["exp_avg"]
    assert bits(file, file.tree["state"][0]["exp_avg"]) == true_bits(true)


def test_other_objects(tmp_path: Path) -> None:
    tree = saved(
        tmp_path / "x.pt",
        {
            "size": torch.Size([2, 3]),
            "device": torch.device("cuda:1"),
            "class": torch.nn.Linear,
            "counts": collections.Counter("aab"),
            "rng": np.random.RandomState(3).get_state(),
            "scalar": np.float32(1.5),
            "bytes": bytes(range(256)),
            "storage": torch.arange(3).untyped_storage(),
        },
    ).tree
    assert tree["size"] == (2, 3)
    assert type(tree["size"]) is Size
    assert (tree["device"].path, tree["device"].args) == ("torch.device", ("cuda", 1))
    assert is_class(tree["class"])
    assert class_path(tree["class"]) == "torch.nn.modules.linear.Linear"
    assert np.array_equal(tree["rng"][1].to_numpy(), np.random.RandomState(3).get_state()[1])
    assert tree["scalar"].to_python() == 1.5
    assert tree["bytes"] == bytes(range(256))
    assert tree["storage"] == StorageRef("0", None, 24, "cpu")


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz", "ignore:Sparse", "ignore:.*torch.ao")
def test_tensors_that_are_not_plain_bytes_stay_inert(tmp_path: Path) -> None:
    """Each still contains its inner tensors, but none claims that its bytes are its values."""
    tree = saved(
        tmp_path / "x.pt",
        {
            "sparse": torch.eye(3).to_sparse(),
            "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
            "meta": torch.empty(3, device="meta"),
        },
    ).tree
    assert all(isinstance(value, Inert) for value in tree.values())
    assert any(isinstance(part, TensorRef) for part in tree["sparse"].args[1])


def test_location_is_kept(tmp_path: Path) -> None:
    assert saved(tmp_path / "x.pt", torch.ones(2)).tree.storage.device == "cpu"


@pytest.mark.parametrize("name", ["x.pt", "mp_rank_00_model_states.pt", "weird name ü (1).bin", "no_suffix"])
def test_any_prefix(name: str, tmp_path: Path) -> None:
    """The folder inside the archive is named after the file, and does not change when the file is renamed."""
    file = saved(tmp_path / name, {"t": torch.arange(5)})
    renamed = (tmp_path / name).rename(tmp_path / "renamed.pt")
    file = TorchFile(renamed)
    assert bits(file, file.tree["t"]) == true_bits(torch.arange(5))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_protocol(protocol: int, tmp_path: Path) -> None:
    value = {"t": torch.arange(5), "n": np.arange(3), "s": {1, 2}, "u": "ü" * 300}
    file = saved(tmp_path / "x.pt", value, pickle_protocol=protocol)
    assert bits(file, file.tree["t"]) == true_bits(torch.arange(5))
    assert file.tree["n"].to_numpy().tolist() == [0, 1, 2]
    assert (file.tree["s"], file.tree["u"]) == ({1, 2}, "ü" * 300)


def test_archive_inside_a_larger_file(tmp_path: Path) -> None:
    """Distributed checkpoints concatenate several archives."""
    torch.save(torch.arange(5), tmp_path / "a.pt")
    torch.save(torch.arange(5, 10), tmp_path / "b.pt")
    first, second = (tmp_path / "a.pt").read_bytes(), (tmp_path / "b.pt").read_bytes()
    joined = tmp_path / "joined"
    joined.write_bytes(first + second)
    file = TorchFile(joined, start=len(first), stop=len(first) + len(second))
    assert bits(file, file.tree) == true_bits(torch.arange(5, 10))
    assert bits(TorchFile(joined, stop=len(first)), file.tree) == true_bits(torch.arange(5))
