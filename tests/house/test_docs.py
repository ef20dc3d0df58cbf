"""What the documents name is there: links and their headings, commands and their options, files, targets of make."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from featcal.cli import featcal_command

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "data").glob("*/README.md")})
PAGES += sorted([ROOT / "app" / "README.md", ROOT / "benchmarks" / "NOTES.md", *(ROOT / "featcal").glob("*/README.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```[^\n]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
INCLUDED = re.compile(r"```\{include\} (\S+)\n")
FILE = re.compile(r"(?:app|benchmarks|data|docs|featcal|pages|tests)/[\w./-]*\w\.(?:py|md|json|yaml|npz)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(_prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, heading = link.partition("#")
        there = (page.parent / name) if name else page
        assert there.exists(), link
        if heading:
            assert heading in _headings(there), link


def test_pages_of_the_site_link_to_each_other_alone() -> None:
    """A page beside README is on the site as `docs/architectures/…`, or by its own name in code."""
    outside = {
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        if page.is_relative_to(ROOT / "docs")
        for link in LINK.findall(_prose(page))
        if "://" not in link and not (page.parent / link.partition("#")[0]).resolve().is_relative_to(ROOT / "docs")
    }
    assert outside == set()


@pages
def test_commands_and_options_exist(page: Path) -> None:
    for line in _lines(page):
        for words in _commands(line):
            command: click.Command = featcal_command
            while isinstance(command, click.Group) and words and not words[0].startswith("-"):
                if words[0] not in command.commands and command is not featcal_command:
                    break  # what a group takes itself
                assert words[0] in command.commands, line
                command = command.commands[words.pop(0)]
            context = click.Context(command)
            known = {option for one in command.get_params(context) for option in (*one.opts, *one.secondary_opts)}
            asked = {word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2}
            assert asked <= known, (line, asked - known)


@pages
def test_files_exist(page: Path) -> None:
    for code in _code(page):
        for name in FILE.findall(code):
            assert (ROOT / name).exists(), name


def test_every_promise_names_a_test_that_is_there() -> None:
    page = (ROOT / "docs" / "architectures" / "promises.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| (?!what is promised)", line)]
    assert len(rows) > 40
    for row in rows:
        found = re.search(r"\| `(tests/[\w/]+\.py)(?:::(test_\w+))?` \|$", row)
        assert found is not None, row
        text = (ROOT / found[1]).read_text(encoding="utf-8")
        assert f"def {found[2] or 'main'}(" in text, row


@pages
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in _code(page):
        for target in re.findall(r"^make (\w+)", code, re.MULTILINE):
            assert target in targets, target


def _prose(page: Path) -> str:
    return CODE.sub("", page.read_text(encoding="utf-8"))


def _code(page: Path) -> list[str]:
    """Blocks and inline pieces."""
    return [block or inline for block, inline in CODE.findall(page.read_text(encoding="utf-8"))]


def _lines(page: Path) -> Iterator[str]:
    """Of all code, with lines put together that end in a backslash."""
    for code in _code(page):
        yield from code.replace("\\\n", " ").splitlines()


def _commands(line: str) -> Iterator[list[str]]:
    """Words after `featcal` of every command in a line of code, a comment left out."""
    for one in re.split(r"&&|\||;", line):
        found = re.match(r"\s*(?:torchrun .* -m )?featcal ((?:[a-z]|--).*)$", one)
        if found:
            yield shlex.split(found[1].replace("…", ""), comments=True)


def _headings(page: Path) -> set[str]:
    """As GitHub links to them, those of included pages among them."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"^#+ (.+)$", CODE.sub(_inline, text), re.MULTILINE)
    own = {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}
    return own.union(*(_headings(page.parent / name) for name in INCLUDED.findall(text)))


def _inline(code: re.Match[str]) -> str:
    return code[2] or ""


@pytest.mark.parametrize("page", sorted((ROOT / "featcal").glob("*/README.md")), ids=lambda page: page.parent.name)
def test_a_room_lists_modules_of_its_own(page: Path) -> None:
    """Before its decisions a word in code is a module or folder of the room; a file is there."""
    text, inside = page.read_text(encoding="utf-8"), [*page.parent.rglob("*.py"), *page.parent.rglob("*/")]
    listed = set(re.findall(r"`([a-z_]+)`", text.partition("## Decisions")[0]))
    assert listed <= {one.stem for one in inside}
    for name in re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / name).exists() or any((ROOT / "featcal").rglob(name)), name
