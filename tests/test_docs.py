"""The documentation is held to the program: transcripts, Python, options, checks, messages and links."""

from __future__ import annotations

import ast
import re
import subprocess
from importlib import import_module
from pathlib import Path

import click
import pytest

from tests.paths import PROJECT
from tests.transcripts import check, needs_ranks, python_blocks, set_up, steps
from ucp import errors
from ucp.checks.catalogue import BY_ID
from ucp.cli.main import COMMANDS, cli
from ucp.formats.registry import TARGETS
from ucp.formats.sharded.rule_files import parse_rules, preset_names

DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
LANGUAGES = {"bash", "console", "python", "text", "toml", "yaml"}
TEXTS["README.md"] = (PROJECT / "README.md").read_text(encoding="utf-8")


def commands() -> dict[str, click.Command]:
    with click.Context(cli, info_name="ucp") as ctx:
        found = {name: cli.get_command(ctx, name) for name in COMMANDS}
    return {name: command for name, command in found.items() if command is not None}


def options(command: click.Command) -> set[str]:
    own = {spelling for param in command.params for spelling in (*param.opts, *param.secondary_opts) if "-" in spelling}
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*map(options, inner))


# ------------------------------------------------------------------------------------------------ what is shown is so


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if steps(text) or python_blocks(text)])
def test_examples(name: str, tmp_path: Path) -> None:
    """Commands print what is shown, and Python runs as it is pasted. Examples with several ranks: see the next test."""
    run_examples(name, tmp_path, ranks=False)


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if needs_ranks(text)])
def test_examples_in_ranks(name: str, tmp_path: Path) -> None:
    run_examples(name, tmp_path, ranks=True)


def run_examples(name: str, folder: Path, *, ranks: bool) -> None:
    set_up(TEXTS[name], folder)
    assert check(TEXTS[name], folder, as_processes=name == "README.md", ranks=ranks) > 0


def test_no_block_is_in_a_language_that_no_test_reads() -> None:
    for name, text in TEXTS.items():
        assert set(re.findall(r"^ *```(\w+)$", text, re.MULTILINE)) <= LANGUAGES, name


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "```bash" in text])
def test_scripts_are_scripts(name: str) -> None:
    for block in re.findall(r"```bash\n(.*?)```", TEXTS[name], re.DOTALL):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "[[rule]]\n" in text])
def test_rules_are_rules(name: str) -> None:
    for block in re.findall(r"```toml\n(.*?)```", TEXTS[name], re.DOTALL):
        assert parse_rules(block.encode(), name, name).rules


# -------------------------------------------------------------------------------------------- what there is, is said


def test_the_page_of_commands_is_fresh() -> None:
    page = import_module("scripts.make_cli_docs").page()
    assert page == TEXTS["cli.md"], "run scripts/make_cli_docs.py"


def test_the_reference_of_the_library_is_fresh() -> None:
    make = import_module("scripts.make_library_docs")
    assert make.page() == make.find_page().read_text(encoding="utf-8"), "run scripts/make_library_docs.py"


def test_every_command_and_option_is_documented() -> None:
    for name, command in commands().items():
        _, found, rest = TEXTS["cli.md"].partition(f"## `ucp {name}`")
        assert found, name
        section = rest.partition("\n## ")[0]
        missing = [option for option in options(command) if not re.search(rf"(?<![\w-]){option}(?![\w-])", section)]
        assert not missing, f"ucp {name}: {missing}"


def test_every_check_is_documented() -> None:
    missing = [check_id for check_id in BY_ID if f"| `{check_id}` |" not in TEXTS["checks.md"]]
    assert not missing


def test_every_exit_code_is_documented() -> None:
    known = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.UcpError)]
    classes = [each for each in known if each is not errors.UcpError]
    assert len({each.exit_code for each in classes}) == len(classes) == 7
    for each in classes:
        assert f"| {each.exit_code} | `{each.__name__}` |" in TEXTS["troubleshooting.md"]
        assert re.search(
            rf"^\| {each.exit_code} \| .* \| `ucp.errors.{each.__name__}` \|$", TEXTS["cli.md"], re.MULTILINE
        )
    said = re.search(r"^Exit codes: (.*?)\n\n", TEXTS["README.md"], re.MULTILINE | re.DOTALL)
    assert said
    codes = sorted(
        {0, errors.INTERRUPTED_EXIT_CODE, errors.TERMINATED_EXIT_CODE, *(each.exit_code for each in classes)}
    )
    assert [int(code) for code in re.findall(r"\d+", said[1])] == codes


def test_every_preset_and_target_is_documented() -> None:
    assert (
        re.findall(r"^\| `([\w-]+)` \| ", TEXTS["rules.md"].partition("## Presets")[2], re.MULTILINE) == preset_names()
    )
    for target in TARGETS:
        assert f"--to {target}" in TEXTS["formats.md"], target


# ------------------------------------------------------------------------------------------------ what is said, is so


def said_commands() -> list[tuple[str, str]]:
    """Every `ucp …` that a page names, in code or in a block: (page, command line)."""
    found = []
    for name, text in TEXTS.items():
        if name == "cli.md":
            continue
        code = re.findall(r"`(ucp \w[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        blocks = re.findall(r"^\W*(ucp \w.*)$", "\n".join(re.findall(r"```.*?```", text, re.DOTALL)), re.MULTILINE)
        found += [(name, line) for line in (*code, *blocks)]
    return found


def test_no_page_names_an_option_that_does_not_exist() -> None:
    known = commands()
    named = said_commands()
    assert len(named) > 60
    for page, line in named:
        words = line.partition("#")[0].replace("\\", "").split()
        if words[1] in known:
            used = {word.partition("=")[0] for word in words[2:] if word.startswith("-") and len(word) > 1}
            assert used <= options(known[words[1]]) | {"--help"}, f"{page}: {line}"


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    (fast,) = re.findall(r"^\| \*\*Fast\*\* \|.*$", TEXTS["README.md"], re.MULTILINE)
    ratios = re.findall(r"[\d.]+ ×", fast)
    assert len(ratios) == 2
    assert [ratio for ratio in ratios if ratio not in TEXTS["benchmarks.md"]] == []
    (memory,) = re.findall(r"in (\d+) MB of memory", fast)
    assert re.search(rf"peak memory of a process, 1 GB .* \| {memory} /", TEXTS["benchmarks.md"])
    command = re.search(r"`(scripts/[\w/.]+)` \|$", fast)
    assert command
    assert (PROJECT / command[1]).exists()


def templates() -> list[str]:
    """Every text in the program, with `…` for what is filled in."""
    found = []
    for path in sorted((PROJECT / "ucp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_of_troubleshooting_are_those_of_the_program() -> None:
    known = templates()
    messages = re.findall(r"^### `(.*)`$", TEXTS["troubleshooting.md"], re.MULTILINE)
    assert len(messages) >= 25
    notes = TEXTS["troubleshooting.md"].partition("## Notes")[2].partition("\n## ")[0]
    messages += [note for note in re.findall(r"^\| `(.*?)` \|", notes, re.MULTILINE) if note != "… (inferred: …)"]
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
        assert any(pattern.search(template) for template in known), message


# --------------------------------------------------------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    page = PROJECT / name if name == "README.md" else DOCS / name
    text = re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_map_names_every_page() -> None:
    missing = [name for name in TEXTS if f"({name})" not in TEXTS["index.md"]]
    assert missing == ["index.md", "README.md"]
    assert len(PAGES) <= 22, "merge pages by topic before adding one"


def test_nothing_that_people_paste_has_a_placeholder() -> None:
    files = [*PAGES, *PROJECT.glob("*.md"), *PROJECT.glob("*.yml"), *(PROJECT / "ci-templates").iterdir()]
    assert len(files) > 25
    assert [path.name for path in files if re.search(r"\bOWNER\b", path.read_text(encoding="utf-8"))] == []
