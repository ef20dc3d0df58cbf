"""The site: twelve pages, all that they name is there, and what they mark as runnable runs."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import generated
import pytest
from command_line import Run, document
from marked import Runner, find_blocks, take_turns
from test_docs import PAGES

import featcal

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MOST_LINES = 120
"""Of README: a screen and a half."""
MOST_OF_AN_EXAMPLE = 80
"""Lines of a script of the gallery."""
RUNNABLE = [page for page in PAGES if find_blocks(page.read_text(encoding="utf-8"))]


def _read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _toctrees(text: str) -> list[str]:
    """Return the pages that a page has below it."""
    found = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
    return [line for tree in found for line in tree.split() if not line.startswith(":")]


def test_there_are_twelve_pages_with_others_below_them() -> None:
    listed = [line for line in _toctrees(_read("index.md")) if (DOCS / f"{line}.md").is_file()]
    assert len(listed) + 1 == 12
    below = {page: _toctrees(_read(f"{page}.md")) for page in listed}
    found = {"index", *listed, *(one for pages in below.values() for one in pages)} - {"examples/index"}
    written = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    assert written == found


def test_readme_is_a_screen_and_a_half_and_leads_to_all_pages() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    linked = set(re.findall(r"\]\(docs/([\w-]+)\.md\)", text))
    assert {line for line in _toctrees(_read("index.md")) if (DOCS / f"{line}.md").is_file()} == linked


def test_every_public_name_is_on_the_page_of_python_once() -> None:
    assert sorted(re.findall(r"^   featcal\.(\w+)$", _read("reference/python.md"), re.MULTILINE)) == featcal.__all__


def test_every_symbol_leads_to_code() -> None:
    rows = [line.split(" | ") for line in _read("theory.md").splitlines() if line.count(" | ") == 3]
    places = [name for row in rows for name in re.findall(r"`([\w.]+)`", row[3])]
    assert len(places) > 20
    for place in places:
        parts = place.split(".")
        thing: Any = import_module(".".join(["featcal", *parts[:2]]))
        for name in parts[2:]:
            thing = getattr(thing, name)


def test_all_commands_and_keys_are_written() -> None:
    from featcal.cli import SECTIONS, featcal_command

    text = "".join(map(generated.write_commands, SECTIONS))
    for name, one in featcal_command.commands.items():
        assert f"## {name}\n" in text
        for inner in getattr(one, "commands", {}):
            assert f"### {name} {inner}\n" in text
    keys = generated.write_suite_file()
    assert {f"| `{key}` |" for key in ("tasks", "expert", "jsonl", "severity", "tokens")} <= {
        line[: line.index("|", 2) + 1] for line in keys.splitlines() if line.startswith("| `")
    }
    assert len(re.findall(r"\|  \|$", keys, re.MULTILINE)) == 0, "a key without a word about it"
    places = re.findall(r"^<!-- generated: (.+) -->$", "".join(map(_read, _references())), re.MULTILINE)
    assert sorted(places) == sorted(generated.PARTS)


def _references() -> list[str]:
    return [f"reference/{page.name}" for page in (DOCS / "reference").glob("*.md")]


NEEDS_BASH = pytest.mark.skipif(sys.platform == "win32", reason="blocks of bash are run by bash")


@NEEDS_BASH
def test_marked_blocks_are_found_and_run(tmp_path: Path) -> None:
    page = "<!-- run, show -->\n```bash\nfeatcal suite list\necho $((6 * 7)) > answer\n```\n\n```bash\nnothing\n```\n"
    page += "<!-- run -->\n```python\nfrom pathlib import Path\n\nprint(Path('answer').read_text())\n```\n"
    listed, asked = find_blocks(page)
    assert (listed.shown, asked.shown) == (True, False)
    runner = Runner(tmp_path)
    assert "clip-mini" in runner.run(listed)
    assert runner.run(asked) == "42\n\n"


@NEEDS_BASH
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("featcal suite lost", "No such command 'lost'"),
        ("featcal check lost.yaml", "no suite 'lost.yaml'"),
        ("false", "1"),
    ],
)
def test_a_block_that_fails_says_why(code: str, said: str, tmp_path: Path) -> None:
    (block,) = find_blocks(f"<!-- run -->\n```bash\n{code}\n```\n")
    with pytest.raises(RuntimeError, match=f"{code}\n.*{said}"):
        Runner(tmp_path).run(block)


def test_every_example_has_its_turn() -> None:
    names = [f"plot_{i:02}.py" for i in range(10)]
    turns = [take_turns(names, 3, str(commit)) for commit in range(30)]
    assert {name for one in turns for name in one} == {*names}
    assert {len(one) for one in turns} == {3, 4}
    assert take_turns(names[:1], 3, "any") == take_turns(names[:1], 1) == names[:1]


def test_fourteen_examples_have_a_title_a_sentence_a_picture_and_what_to_keep() -> None:
    """They run while the site is built, and nowhere else."""
    scripts = sorted((DOCS / "gallery").glob("*.py"))
    assert [script.name[:8] for script in scripts] == [f"plot_{number:02}_" for number in range(1, 15)]
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        code = ast.parse(text)
        title, rule, blank, sentence, *_ = (ast.get_docstring(code) or "").splitlines()
        assert (rule, blank, sentence[-1]) == ("=" * len(title), "", "."), script.name
        assert text.rpartition("# %%")[2].strip().partition("# **What to keep:** ")[2].endswith("."), script.name
        endings = [ast.unparse(ast.parse(cell).body[-1]) for cell in text.split("# %%\n") if ast.parse(cell).body]
        pictures = [one for one in endings if re.search(r"^apply_theme\(|\.plot\(|_?charts\.|^chosen$", one)]
        assert 1 <= len(pictures) <= 2, script.name
        assert len(text.splitlines()) <= MOST_OF_AN_EXAMPLE, script.name


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_marked_blocks_of_all_pages_run(page: Path, tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    for block in find_blocks(page.read_text(encoding="utf-8")):
        printed = runner.run(block)
        assert printed or not block.shown


def test_pages_that_run_are_known() -> None:
    assert {"README.md", "first-merge.md", "broken-merge.md"} <= {page.name for page in RUNNABLE}


def _documented(section: str) -> tuple[set[str], set[str]]:
    """Return the paths of a document that always are there, and those that are under a condition."""
    text = _read("reference/json.md").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line.removeprefix("| ").removesuffix("|").split(" | ") for line in text.splitlines() if line[:3] == "| `"]
    always: set[str] = set()
    sometimes: set[str] = set()
    for paths, _, when in rows:
        (sometimes if when.strip() else always).update(re.findall(r"`([^`]+)`", paths))
    return always, sometimes


def _paths(content: Any, names: dict[str, str], prefix: str = "") -> set[str]:
    """Return the paths of all leaves of a document, with words in the place of its own names."""
    if isinstance(content, dict):
        inner = {names.get(key, key): value for key, value in content.items()}
        return {path for key, value in inner.items() for path in _paths(value, names, f"{prefix}.{key}".strip("."))}
    if isinstance(content, list):
        return {path for one in content for path in _paths(one, names, f"{prefix}[]")} or {prefix}
    return {prefix}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("check", ()),
        ("drift", ("--attribution", "--output", "--eval-samples", "4")),
        ("evaluate", ("--eval-samples", "4")),
        ("compare", ("--model", "base", "--model", "merged", "--eval-samples", "4")),
        ("calibrate, and featcal.json", ("--samples", "4", "--out", "OUT")),
        ("diagnose", ("--eval-samples", "4")),
        ("select", ("--samples", "8",)),
    ],
)  # fmt: skip
def test_documents_are_as_the_page_says(
    section: str, words: tuple[str, ...], run: Run, tiny_suite_file: Path, tmp_path: Path
) -> None:
    command = section.partition(",")[0]
    content = document(
        run(command, tiny_suite_file, *(w.replace("OUT", str(tmp_path / "out")) for w in words), "--json")
    )
    found = _paths(content, dict.fromkeys(featcal.load_suite(tiny_suite_file).tasks, "TASK"))
    always, sometimes = _documented(section)
    assert always
    bare = {path.replace("[]", "") for path in found}

    def covers(listed: str, path: str) -> bool:
        pattern = re.escape(listed.replace("[]", "")).replace("LAYER", "[^.]+").replace("MODEL", "[^.]+")
        return re.fullmatch(f"{pattern}(\\..*)?", path) is not None

    assert {path for path in bare if not any(covers(one, path) for one in always | sometimes)} == set()
    assert {one for one in always if not any(covers(one, path) for path in bare)} == set()
