"""scripts/newcomer notices what a newcomer would: transcripts that are not true, and a heavy installation."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import PROJECT

PROGRAMS = Path(sys.executable).parent
PAGE = """
<!-- fixtures: checkpoints=z1_bf16_tp2_dp2 -->

```console
$ ucp inspect checkpoints
format                        {format}
…
```
"""


@pytest.fixture
def newcomer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    loader = SourceFileLoader("newcomer", str(PROJECT / "scripts" / "newcomer"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "clean_environment", lambda: {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROJECT)})
    return module


@pytest.mark.parametrize("shown,fails", [("deepspeed", False), ("megatron", True)])
def test_transcripts_are_compared(
    newcomer: ModuleType, tmp_path: Path, shown: str, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    page, work = tmp_path / "page.md", tmp_path / "work"
    page.write_text(PAGE.format(format=shown))
    work.mkdir()
    table = newcomer.Table()
    newcomer.run_page(page, work, PROGRAMS, table)
    assert bool(table.rows[0].problem) == fails
    assert ("FAILED" in capsys.readouterr().out) == fails


def test_pages_that_need_torch_are_named(newcomer: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("ucp inspect", "python "))
    table = newcomer.Table()
    newcomer.run_page(page, tmp_path, PROGRAMS, table)
    assert table.rows[0].measured == "needs torch"


def test_the_size_is_that_of_the_packages_without_pip(newcomer: ModuleType, tmp_path: Path) -> None:
    for name, size in (("numpy/core.so", 3_000_000), ("six.py", 500_000), ("pip/main.py", 9_000_000)):
        path = tmp_path / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    assert newcomer.megabytes_of(tmp_path / "site-packages") == 3.5
