"""The commands on the command line: output on stdout, messages on stderr, exit codes that scripts can trust."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.command import ucp
from ucp.cli.main import COMMANDS
from ucp.core.checkpoint import Checkpoint, Mesh
from ucp.errors import UsageError
from ucp.formats.registry import TARGETS, WriteOptions, make_writer
from ucp.formats.sharded.rule_files import preset_names
from ucp.names.name_tables import table_names
from ucp.options import GROUPS, ConvertOptions, declared
from ucp.version import VERSION

FIXTURE = "z1_bf16_tp2_dp2"


@pytest.fixture
def checkpoint(project: Path, tmp_path: Path) -> Path:
    """A copy of a real checkpoint that a test may damage."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(project / "fixtures" / FIXTURE, copy, ignore=shutil.ignore_patterns("reference"))
    return copy


@pytest.fixture
def clean(project: Path) -> Path:
    """The same checkpoint, for tests that only read."""
    return project / "fixtures" / FIXTURE


def optimizer_file(checkpoint: Path, dp: int = 1, mp: int = 0) -> Path:
    return checkpoint / "global_step3" / f"bf16_zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def test_help_imports_nothing_large() -> None:
    for arguments in (["--help"], ["inspect", "--help"], ["convert", "--help"], ["verify", "--help"]):
        shown = ucp(*arguments)
        assert shown.returncode == 0
        assert "Usage:" in shown.stdout
    code = (
        "import sys; from ucp.cli.main import run; run(['--help']);"
        "print(sorted({'torch', 'numpy', 'deepspeed'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.splitlines()[-1] == "[]"


def test_moving_bytes_does_not_import_torch(clean: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ucp.cli.main import run; codes = [run(a.split('|')) for a in sys.argv[1:]];"
        "print(codes, 'torch' in sys.modules, 'deepspeed' in sys.modules)"
    )
    commands = [
        f"inspect|{clean}",
        f"convert|{clean}|{tmp_path / 'atoms'}",
        f"verify|{clean}",
        f"verify|{tmp_path / 'atoms'}",
    ]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] False False", done.stderr


def test_inspect(clean: Path) -> None:
    text = ucp("inspect", clean).stdout
    for word in ("deepspeed", "tp 2 × pp 1 × dp 2, ZeRO 1", "exp_avg_sq", "split(dim=1)", "vocab(dim=0"):
        assert word in text
    shown = json.loads(ucp("inspect", clean, "--json").stdout)
    assert shown["mesh"] == {"tp": 2, "pp": 1, "dp": 2, "ep": 1, "zero": 1}
    assert shown["step"] == 3
    name = next(p["name"] for p in shown["parameters"] if p["rule"]["cut"] == "split" and p["rule"]["dim"] == 1)
    places = json.loads(ucp("inspect", clean, "--param", name, "--json").stdout)["places"]
    masters = [place for place in places if place["kind"] == "master"]
    assert {(place["rank"]["tp"], place["rank"]["dp"]) for place in masters} <= {(t, d) for t in (0, 1) for d in (0, 1)}
    for place in masters:
        size = (clean / place["file"]).stat().st_size
        assert 0 < place["bytes"][0] < place["bytes"][1] <= size
    assert name in ucp("inspect", clean, "--param", name).stdout
    wrong = ucp("inspect", clean, "--param", "attn")
    assert wrong.returncode == 2
    assert "perhaps one of" in wrong.stderr


def test_the_step_folder_itself_and_a_tag(clean: Path) -> None:
    whole = ucp("inspect", clean, "--json").stdout
    for arguments in ([clean / "global_step3"], [clean, "--tag", "global_step3"]):
        shown = json.loads(ucp("inspect", *arguments, "--json").stdout)
        assert shown["parameters"] == json.loads(whole)["parameters"]
    missing = ucp("inspect", clean, "--tag", "global_step9")
    assert missing.returncode in (2, 3)
    assert "global_step9" in missing.stderr


def test_convert_dry_run_writes_nothing(clean: Path, tmp_path: Path) -> None:
    plan = json.loads(ucp("convert", clean, tmp_path / "out", "--dry-run", "--json").stdout)
    assert plan["writes"] == sum(file["bytes"] for file in plan["files"])
    assert plan["memory"] > 0
    assert not (tmp_path / "out").exists()
    assert "atoms/" in ucp("convert", clean, tmp_path / "out", "--dry-run").stdout
    done = ucp("convert", clean, tmp_path / "out", "--json")
    assert json.loads(done.stdout)["bytes"] == plan["bytes"]
    assert done.stderr == "", "no progress bar where there is no terminal"


def test_convert_options(clean: Path, tmp_path: Path) -> None:
    assert ucp("convert", clean, tmp_path / "view", "--link").returncode == 0
    assert ucp("verify", tmp_path / "view").returncode == 0
    few = ucp(
        "convert",
        tmp_path / "view",
        tmp_path / "few",
        "--only",
        "weights",
        "--dtype",
        "fp32",
        "--include",
        "blocks.0.*",
    )
    assert few.returncode == 0, few.stderr
    shown = json.loads(ucp("inspect", tmp_path / "few", "--json").stdout)
    assert {kind for p in shown["parameters"] for kind in p["states"]} == {"weight"}
    assert all(p["name"].startswith("blocks.0.") for p in shown["parameters"])
    assert ucp("convert", clean, tmp_path / "small", "--memory", "64k", "-j", "2").returncode == 0
    assert ucp("convert", clean, tmp_path / "never", "--memory", "lots").returncode == 2
    assert ucp("convert", clean, tmp_path / "small").returncode == 2, "an existing target is refused"


def refused(run: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    assert "\nucp: " in f"\n{run.stderr}"
    for word in words:
        assert word in run.stderr


def both(checkpoint: Path, code: int, *words: str) -> None:
    """inspect and convert report the same, and convert leaves no output."""
    before = sorted(os.listdir(checkpoint.parent))
    refused(ucp("inspect", checkpoint), code, *words)
    refused(ucp("convert", checkpoint, checkpoint.parent / "out"), code, *words)
    assert sorted(os.listdir(checkpoint.parent)) == before


def test_a_missing_rank_is_named(checkpoint: Path) -> None:
    optimizer_file(checkpoint, 1, 1).unlink()
    both(checkpoint, 1, "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt")


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    victim = optimizer_file(checkpoint)
    victim.write_bytes(victim.read_bytes()[:-1000])
    both(checkpoint, 4, victim.name)


def test_an_empty_file_is_named(checkpoint: Path) -> None:
    victim = optimizer_file(checkpoint)
    victim.write_bytes(b"")
    run = ucp("convert", checkpoint, checkpoint.parent / "out")
    assert run.returncode in (3, 4)
    refused(run, run.returncode, victim.name)


def test_mixed_steps_are_named(checkpoint: Path, project: Path) -> None:
    other = project / "fixtures" / FIXTURE / "global_step3" / "mp_rank_01_model_states.pt"
    victim = checkpoint / "global_step3" / other.name
    data = zipfile.ZipFile(other).read("mp_rank_01_model_states/data.pkl")
    assert data.count(b"global_steps") >= 1
    at = data.index(b"global_steps")
    changed = data[:at] + data[at:].replace(b"K\x03", b"K\x04", 1)
    assert changed != data
    rewrite_pickle(victim, lambda _: changed)
    both(checkpoint, 1, "mp_rank_01_model_states.pt", "has 3", "different saves are mixed")


def rewrite_pickle(path: Path, change: object) -> None:
    """The same archive with another data.pkl."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in members.items():
            new.writestr(name, change(data) if name.endswith("/data.pkl") else data)  # type: ignore[operator]


class Attack:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.canary}",)


def test_a_pickle_that_would_run_something(checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    victim = checkpoint / "global_step3" / "mp_rank_00_model_states.pt"
    rewrite_pickle(victim, lambda _: pickle.dumps({"module": Attack(canary)}, protocol=2))
    both(checkpoint, 6, victim.name, "system")
    assert not canary.exists()


def test_paths_that_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    refused(ucp("inspect", tmp_path), 3, "not a checkpoint")
    refused(ucp("inspect", tmp_path / "nowhere"), 5, "no such file")
    assert ucp("convert", tmp_path).returncode == 2
    assert ucp("transmogrify").returncode == 2


def test_no_space_and_no_permission(clean: Path, tmp_path: Path) -> None:
    refused(ucp("convert", clean, tmp_path / "missing" / "out"), 5, "no such folder")
    code = (
        "import sys; from ucp import settings; settings.SPACE_RESERVE_SHARE = 1e12;"
        "settings.SPACE_RESERVE_BYTES = 1 << 60;"
        "from ucp.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    full = subprocess.run(
        [sys.executable, "-c", code, "convert", str(clean), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    refused(full, 5, "not enough space")
    assert sorted(p.name for p in tmp_path.iterdir()) == []


def test_space_is_checked_in_proportion_to_the_output(clean: Path, tmp_path: Path) -> None:
    """179 KiB fit on a disk of 2 MiB, and not on one of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for size, code in ((2 << 20, 0), (128 << 10, 5)):
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=False).returncode == 0:
            try:
                run = ucp("convert", clean, disk / "out")
            finally:
                subprocess.run(["umount", disk], check=True)
        else:  # not root: report another size
            patch = (
                "import os, sys; old = os.statvfs\n"
                f"os.statvfs = lambda path: os.statvfs_result((4096, 4096, *[{size >> 12}] * 3, *old(path)[5:]))\n"
                "from ucp.cli.main import run; sys.exit(run(sys.argv[1:]))"
            )
            arguments = [sys.executable, "-c", patch, "convert", str(clean), str(disk / "out")]
            run = subprocess.run(arguments, capture_output=True, text=True, check=False)
            shutil.rmtree(disk / "out", ignore_errors=True)
        assert run.returncode == code, run.stderr
    assert re.search(r"not enough space \([\d.]+ KiB needed, and [\d.]+ KiB in reserve; 128.0 KiB free\)", run.stderr)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file: run as another user")
def test_an_unreadable_file_is_named(checkpoint: Path) -> None:
    optimizer_file(checkpoint).chmod(0)
    both(checkpoint, 5, optimizer_file(checkpoint).name)


def test_a_flipped_bit_is_found_by_deep_verify(checkpoint: Path) -> None:
    victim = optimizer_file(checkpoint)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    found = ucp("verify", checkpoint, "--deep", "--json")
    assert found.returncode == 4, found.stderr
    assert victim.name in found.stdout


def test_a_flipped_bit_in_atoms_is_found(clean: Path, tmp_path: Path) -> None:
    ucp("convert", clean, tmp_path / "atoms")
    victim = max((tmp_path / "atoms" / "atoms").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-5] ^= 4
    victim.write_bytes(data)
    found = ucp("verify", tmp_path / "atoms", "--deep")
    assert found.returncode == 4
    assert victim.name in found.stdout + found.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "Traceback" in ucp("inspect", tmp_path / "nowhere", UCP_DEBUG="1").stderr


def test_output_that_cannot_be_written_shows_no_traceback(clean: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ucp", "inspect", clean], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (5, "ucp: the output cannot be written: No space left on device\n")


def test_a_job_without_stderr(clean: Path, tmp_path: Path) -> None:
    command = (
        f"{sys.executable} -m ucp verify {clean} 2>&- && {sys.executable} -m ucp convert {clean} {tmp_path}/out 2>&-"
    )
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    assert (tmp_path / "out/ucp.json").is_file()


def test_a_selection_that_leaves_nothing_is_refused(clean: Path, tmp_path: Path) -> None:
    refused(ucp("convert", clean, tmp_path / "out", "--exclude", "*"), 2, "none of the")
    assert ucp("convert", clean, tmp_path / "hf", "--to", "safetensors").returncode == 0
    refused(ucp("convert", tmp_path / "hf", tmp_path / "out", "--only", "optimizer"), 7, "no optimizer state")
    assert not (tmp_path / "out").exists()


def test_mistyped_names_and_shards(clean: Path, tmp_path: Path) -> None:
    refused(ucp("inspect", clean, "--param", "blocks.0.attn.qkv.wieght"), 2, "perhaps one of: blocks.0.attn.qkv.weight")
    for part in ("1/0", "²/4", "a/b"):
        assert "is not a shard such as 1/4" in ucp("convert", clean, tmp_path / "out", "--shard", part).stderr


@pytest.mark.parametrize("name, suggestion", [("inspct", "'inspect'"), ("converts", "'convert'")])
def test_mistyped_commands(name: str, suggestion: str) -> None:
    shown = ucp(name, "x")
    assert shown.returncode == 2
    assert f"Did you mean {suggestion}?" in shown.stderr


def test_paths_that_do_not_exist(clean: Path, tmp_path: Path) -> None:
    refused(ucp("inspect", clean.with_name("z1_bf16_tp2_dp3")), 5, f"perhaps one of: {clean}")
    refused(ucp("inspect", tmp_path / "no" / "where"), 5, "no such file or folder")
    (tmp_path / ".out.ucp-partial").mkdir()
    refused(ucp("inspect", tmp_path / "out"), 5, "repeat that command with --resume")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "model.safetensors").touch()
    refused(ucp("inspect", tmp_path / "a"), 3, f"perhaps one of: {tmp_path / 'a' / 'b'}")
    refused(ucp("inspect", clean / "latest"), 3, f"perhaps one of: {clean}")
    (tmp_path / "empty").mkdir()
    refused(ucp("inspect", tmp_path / "empty"), 3, "is an empty folder")
    for arguments in (
        ["inspect", ""],
        ["verify", ""],
        ["convert", "", "x"],
        ["convert", clean, ""],
        ["diff", clean, ""],
    ):
        shown = ucp(*arguments)
        assert shown.returncode == 2
        assert "an empty path" in shown.stderr


def test_a_tag_with_the_slash_of_shell_completion(clean: Path) -> None:
    assert ucp("inspect", clean, "--tag", "global_step3/").returncode == 0


def test_resume_and_restart_contradict_each_other(clean: Path, tmp_path: Path) -> None:
    refused(ucp("convert", clean, tmp_path / "out", "--resume", "--restart"), 2, "choose one of them")


@pytest.mark.parametrize("arguments", [["verify", "-o"], ["report", "-o"], ["diff", "--plot"]])
def test_a_missing_folder_is_reported_before_the_work(checkpoint: Path, tmp_path: Path, arguments: list[str]) -> None:
    command, option = arguments
    checkpoints = [checkpoint, checkpoint] if command == "diff" else [checkpoint]
    shutil.rmtree(checkpoint)  # what is not looked at is not missed
    refused(ucp(command, *checkpoints, option, tmp_path / "no" / "file.svg"), 5, "does not exist")


def test_no_excuse_for_what_cannot_be_opened(checkpoint: Path, tmp_path: Path) -> None:
    """A missing rank must not pass as a lesser finding that is allowed."""
    optimizer_file(checkpoint).unlink()
    assert ucp("verify", checkpoint, "-o", tmp_path / "known.json").returncode == 1
    for excuse in (["--allow", "grid"], ["--allow", "readable"], ["--baseline", tmp_path / "known.json"]):
        assert ucp("verify", checkpoint, *excuse).returncode == 1
    assert ucp("verify", checkpoint, "--fail-on", "never").returncode == 0


def test_json_is_printed_in_addition_to_a_file(clean: Path, tmp_path: Path) -> None:
    shown = ucp("verify", clean, "--json", "-o", tmp_path / "report.json")
    assert json.loads(shown.stdout) == json.loads((tmp_path / "report.json").read_bytes())


def test_every_command_shows_examples() -> None:
    for command in (
        *COMMANDS,
        "log ls",
        "log stat",
        "log verify",
        "log truncate",
        "log compact",
        "shadow status",
        "snapshot plan",
    ):
        shown = ucp(*command.split(), "--help").stdout
        assert f"\n    ucp {command.split()[0]} " in shown, command


def test_json_of_a_conversion_has_the_notes(clean: Path, tmp_path: Path) -> None:
    arguments = ["convert", clean, tmp_path / "out", "--to", "safetensors", "--json"]
    for more in (["--dry-run"], []):
        assert [note["id"] for note in json.loads(ucp(*arguments, *more).stdout)["notes"]] == ["no-config"]


def test_convert_reports_what_it_read_and_wrote(clean: Path, tmp_path: Path) -> None:
    done = ucp("convert", clean, tmp_path / "six", "--to", "deepspeed", "--tp", "1", "--dp", "6", "--zero", "3")
    assert done.stdout == ""
    read, wrote = done.stderr.splitlines()
    assert read == (
        f"read {clean}: deepspeed, step 3 in subfolder global_step3, tp 2 × pp 1 × dp 2, ZeRO 1; 32 parameters"
    )
    start = f"wrote {tmp_path / 'six'}: deepspeed, tp 1 × pp 1 × dp 6, ZeRO 3; 13 files, "
    assert re.fullmatch(re.escape(start) + r"[\d.]+ KiB in [\d.]+ s \(.*/s\)", wrote)
    weights = ucp("convert", clean / "global_step3", tmp_path / "hf", "--to", "safetensors", "--exclude", "*mask")
    read, *_, wrote = weights.stderr.splitlines()
    assert read == f"read {clean / 'global_step3'}: deepspeed, step 3, tp 2 × pp 1 × dp 2, ZeRO 1; 30 parameters"
    assert wrote.startswith(f"wrote {tmp_path / 'hf'}: safetensors; 1 file, ")
    assert ucp("convert", clean, tmp_path / "atoms", "--quiet").stderr == ""


def test_output_inside_the_source_is_noted(checkpoint: Path) -> None:
    done = ucp("convert", checkpoint, checkpoint / "atoms")
    assert f"note: {checkpoint / 'atoms'} is inside the source {checkpoint}" in done.stderr
    assert done.returncode == 0


def test_requests_that_this_checkpoint_does_not_allow_have_their_own_exit_code(clean: Path, tmp_path: Path) -> None:
    for options, words in (
        (["--to", "deepspeed", "--tp", "4"], "do not divide over tp=4"),
        (["--to", "deepspeed", "--ep", "2"], "the model has no experts"),
        (["--to", "megatron"], "do not have megatron-core's names"),
        (["--to", "safetensors", "--names", "hf"], "no packaged table knows this model"),
    ):
        refused(ucp("convert", clean, tmp_path / "out", *options), 7, words)
    refused(ucp("convert", clean, tmp_path / "out", "--dp", "3"), 2, "--dp is not supported with --to atoms")


def test_an_unknown_model_is_answered_in_two_lines(clean: Path, tmp_path: Path) -> None:
    *_, what, hint = ucp("convert", clean, tmp_path / "out", "--names", "hf").stderr.splitlines()
    assert what == (
        "ucp: --names hf: no packaged table knows this model (scale, seen, embed.weight and 16 more); the closest is"
        " gpt2 (GPT-2 with Hugging Face names), with 0 of 32 names"
    )
    assert hint.startswith("  → `ucp names` lists the models;")


@pytest.mark.parametrize(
    "wish, answer",
    [
        ("hf", "ucp convert SRC DST --to safetensors --dtype bf16"),
        ("gguf", "convert_hf_to_gguf.py"),
        ("GGUF", "convert_hf_to_gguf.py"),
        ("torch_dist", "did you mean torch-dist?"),
        ("mcore", "ucp convert SRC DST --to torch-dist"),
        ("fsdp2", "ucp convert SRC DST --to dcp"),
        ("universal", "--to deepspeed-universal"),
        ("safetensor", "did you mean safetensors?"),
        ("onnx", "choose one of: atoms, "),
    ],
)
def test_formats_that_do_not_exist_lead_to_those_that_serve(wish: str, answer: str, tmp_path: Path) -> None:
    shown = ucp("convert", tmp_path, tmp_path / "out", "--to", wish)
    assert shown.returncode == 2
    assert f"'{wish}' is not a format to write.\n  → " in shown.stderr
    assert answer in shown.stderr
    with pytest.raises(UsageError) as failure:
        make_writer(wish, Checkpoint("atoms", tmp_path, Mesh(), {}), WriteOptions())
    assert answer in (failure.value.hint or "")


def test_version_and_help() -> None:
    assert ucp("-V").stdout == ucp("--version").stdout == f"ucp, version {VERSION}\n"
    assert ucp("help").stdout == ucp("--help").stdout
    assert ucp("help", "convert").stdout == ucp("convert", "--help").stdout
    assert ucp("help", "log", "ls").stdout == ucp("log", "ls", "--help").stdout
    assert "Did you mean 'convert'?" in ucp("help", "convrt").stderr


def test_the_options_of_convert_are_grouped() -> None:
    shown = ucp("convert", "--help").stdout
    groups = re.split(r"^(\S[^\n]*):\n", shown.partition("--engine ray.\n\n")[2], flags=re.MULTILINE)[1:]
    found = {
        title: re.findall(r"^  (?:-\w, )?--([\w-]+)", text, re.MULTILINE)
        for title, text in zip(groups[::2], groups[1::2], strict=True)
    }
    assert list(found) == [*GROUPS, "Run"]
    for title, names in GROUPS.items():
        assert found[title] == [name.replace("_", "-") for name in names]
    assert {"jobs", "resume", "quiet", "help"} <= set(found["Run"])
    assert set(declared(ConvertOptions)) <= {name.replace("-", "_") for names in found.values() for name in names}


def test_what_exists_is_listed() -> None:
    formats = {each["format"]: each for each in json.loads(ucp("formats", "--json").stdout)["formats"]}
    assert {name for name, each in formats.items() if each["write"]} == set(TARGETS)
    assert formats["store"]["read"]
    assert not formats["store"]["write"]
    presets = {each["preset"]: each["about"] for each in json.loads(ucp("presets", "--json").stdout)["presets"]}
    assert list(presets) == preset_names()
    names = json.loads(ucp("names", "--json").stdout)
    assert names["names"] == ["hf", "megatron", "megatron-deepspeed"]
    assert [each["table"] for each in names["tables"]] == table_names()
    assert {"Llama", "Qwen3-MoE", "DeepSeek-V3"} <= {each["family"] for each in names["families"]}
    for command in ("formats", "presets", "names"):
        text = ucp(command).stdout
        assert all(each["about"] for each in (*formats.values(), *names["tables"]))
        for word in {"formats": formats, "presets": presets, "names": table_names()}[command]:
            assert re.search(rf"^{word} ", text, re.MULTILINE), word


def test_a_folder_that_does_not_exist_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("alpha", "beta"):
        (tmp_path / "run" / name).mkdir()
    refused(ucp("inspect", tmp_path / "run" / "zzz"), 5, f"{tmp_path / 'run'} contains: alpha, beta")
    refused(ucp("inspect", tmp_path / "run" / "no" / "such" / "step"), 5, f"{tmp_path / 'run'} contains: alpha, beta")
    refused(ucp("inspect", tmp_path / "run" / "alpha" / "x"), 5, f"{tmp_path / 'run' / 'alpha'} is empty")
