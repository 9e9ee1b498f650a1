"""Locating the step folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucp.errors import InconsistentError, NotUnderstoodError, UsageError
from ucp.formats.deepspeed.folder import detect_wrapper, find, recognises

STATE = "mp_rank_00_model_states.pt"


def step(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / STATE).touch()
    return path


@pytest.mark.parametrize("text", ["global_step2", "global_step2\n", "global_step2/"])
def test_latest_names_the_step(tmp_path: Path, text: str) -> None:
    step(tmp_path / "global_step1")
    newest = step(tmp_path / "global_step2")
    (tmp_path / "latest").write_text(text)
    assert recognises(tmp_path)
    place = find(tmp_path, None)
    assert (place.root, place.step, place.prefix) == (tmp_path, newest, "global_step2/")


def test_a_tag_wins_over_latest(tmp_path: Path) -> None:
    older = step(tmp_path / "global_step1")
    step(tmp_path / "global_step2")
    (tmp_path / "latest").write_text("global_step2")
    assert find(tmp_path, "global_step1").step == older


def test_an_unknown_tag_lists_the_known(tmp_path: Path) -> None:
    step(tmp_path / "global_step1")
    step(tmp_path / "global_step2")
    with pytest.raises(UsageError, match="global_step9") as error:
        find(tmp_path, "global_step9")
    assert "global_step1, global_step2" in str(error.value)


@pytest.mark.parametrize("tag", ["../outside", "..", "a/../../b", "/a", "a//b", ""])
def test_a_tag_cannot_leave_the_folder(tmp_path: Path, tag: str) -> None:
    step(tmp_path / "outside")
    with pytest.raises(UsageError, match="not the name of a folder"):
        find(tmp_path / "outside" / "..", tag)


def test_latest_cannot_leave_the_folder(tmp_path: Path) -> None:
    step(tmp_path / "outside")
    inner = tmp_path / "inner"
    step(inner / "global_step1")
    (inner / "latest").write_text("../outside")
    with pytest.raises(InconsistentError, match="is not a DeepSpeed checkpoint"):
        find(inner, None)
    assert find(inner, "global_step1").step == inner / "global_step1"


def test_a_tag_may_be_a_path(tmp_path: Path) -> None:
    step(tmp_path / "epoch3" / "step100")
    newer = step(tmp_path / "epoch3" / "step200")
    (tmp_path / "latest").write_text("epoch3/step200")
    place = find(tmp_path, None)
    assert (place.root, place.step, place.prefix, place.tag) == (tmp_path, newer, "epoch3/step200/", "epoch3/step200")
    assert find(tmp_path, "epoch3/step100").prefix == "epoch3/step100/"
    with pytest.raises(UsageError, match=r"epoch9/step1") as error:
        find(tmp_path, "epoch9/step1")
    assert "epoch3/step100, epoch3/step200" in str(error.value)


def test_latest_that_names_a_missing_folder(tmp_path: Path) -> None:
    step(tmp_path / "global_step1")
    (tmp_path / "latest").write_text("global_step2")
    assert recognises(tmp_path)
    with pytest.raises(InconsistentError, match="names 'global_step2'") as error:
        find(tmp_path, None)
    assert "--tag: global_step1" in str(error.value)


def test_latest_of_another_format(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step-5")
    assert recognises(tmp_path)  # the folder is missing, which must be reported
    (tmp_path / "step-5").mkdir()
    assert not recognises(tmp_path)


def test_the_step_folder_itself_or_a_file_in_it(tmp_path: Path) -> None:
    folder = step(tmp_path / "global_step1")
    for path in (folder, folder / STATE):
        assert recognises(path)
        place = find(path, None)
        assert (place.root, place.step, place.prefix) == (folder, folder, "")


def test_the_step_folder_with_the_tag_of_another(tmp_path: Path) -> None:
    folder = step(tmp_path / "global_step1")
    assert find(folder, "global_step1").step == folder
    with pytest.raises(UsageError, match="not named 'global_step2'"):
        find(folder, "global_step2")


def test_one_step_without_latest(tmp_path: Path) -> None:
    only = step(tmp_path / "anything")
    assert find(tmp_path, None).step == only


def test_several_steps_without_latest_are_listed(tmp_path: Path) -> None:
    step(tmp_path / "global_step1")
    step(tmp_path / "global_step2")
    with pytest.raises(UsageError, match="2 checkpoints") as error:
        find(tmp_path, None)
    assert "global_step1" in str(error.value)
    assert "global_step2" in str(error.value)


def test_the_trainer_s_folder_and_the_one_above(tmp_path: Path) -> None:
    inner = step(tmp_path / "out" / "checkpoint-3" / "global_step3")
    checkpoint = inner.parent
    (checkpoint / "latest").write_text("global_step3")
    (checkpoint / "trainer_state.json").write_text("{}")
    assert detect_wrapper(checkpoint) == "HF Trainer"
    for path in (checkpoint, tmp_path / "out", tmp_path, inner):
        place = find(path, None)
        assert (place.root, place.step) == (checkpoint, inner), path


def test_two_checkpoints_of_the_trainer_are_a_choice(tmp_path: Path) -> None:
    for number in (3, 6):
        folder = step(tmp_path / f"checkpoint-{number}" / f"global_step{number}").parent
        (folder / "latest").write_text(f"global_step{number}")
    with pytest.raises(UsageError, match="2 checkpoints"):
        find(tmp_path, None)
    assert find(tmp_path, "global_step6").step.name == "global_step6"


def test_lightning_s_folder_of_a_file_name(tmp_path: Path) -> None:
    inner = step(tmp_path / "logs" / "checkpoints" / "epoch=0-step=3.ckpt" / "checkpoint")
    (inner.parent / "latest").write_text("checkpoint")
    assert find(tmp_path, None).step == inner
    assert detect_wrapper(inner.parent) == "Lightning"


def test_accelerate_s_folder(tmp_path: Path) -> None:
    inner = step(tmp_path / "pytorch_model")
    (tmp_path / "latest").write_text("pytorch_model")
    (tmp_path / "random_states_0.pkl").touch()
    assert find(tmp_path, None).step == inner
    assert detect_wrapper(tmp_path) == "Accelerate"


def test_a_universal_folder_is_not_recognised(tmp_path: Path) -> None:
    folder = step(tmp_path / "global_step1_universal")
    (folder / "zero").mkdir()
    assert not recognises(folder)
    assert not recognises(tmp_path)
    with pytest.raises(NotUnderstoodError, match="no DeepSpeed checkpoint"):
        find(tmp_path, None)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert not recognises(tmp_path)
    with pytest.raises(NotUnderstoodError):
        find(tmp_path, None)
