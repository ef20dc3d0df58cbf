"""Find the blocks of a page that are marked as runnable, and run them.

A block of code runs where `<!-- run -->` stands alone on the line before it, which no reader sees; with
`<!-- run, show -->` the site also shows what it printed. The blocks of a page run one after the other in one folder.
Lines of a block of `bash` that begin with `featcal` are run in this process, which has loaded the libraries already;
everything else goes to bash. Blocks of `python` share their names.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^<!-- run(, show)? -->\n```(bash|python)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code that runs.

    Args:
        end: place after it in the text of the page.
    """

    language: str
    code: str
    shown: bool
    end: int


def find_blocks(text: str) -> list[Block]:
    """Return the marked blocks of a page in their order.

    >>> [block.code for block in find_blocks("<!-- run -->\\n```bash\\nfeatcal suite list\\n```\\n")]
    ['featcal suite list\\n']
    """
    return [Block(found[2], found[3], bool(found[1]), found.end()) for found in _BLOCK.finditer(text)]


@dataclass
class Runner:
    """Run the blocks of one page in a folder of its own."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    """Names that blocks of Python share."""

    def run(self, block: Block) -> str:
        """Return what a block printed on stdout; RuntimeError with what it said where it fails."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            for code in _commands(block):
                failure = self._run_python(code) if block.language == "python" else self._run_line(code)
                if failure:
                    raise RuntimeError(f"{code.strip()}\n{failure}\n{err.getvalue()[-2000:]}")
        # The folder is a temporary one: on a page it is where the reader is.
        return out.getvalue().replace(f"{self.folder.resolve()}/", "")

    def _run_python(self, code: str) -> str:
        exec(compile(code, "<page>", "exec"), self.names)
        return ""

    def _run_line(self, line: str) -> str:
        """Run a line of bash; return what is wrong, "" where nothing is."""
        words = shlex.split(line, comments=True)
        if words[0] == "featcal" and not {"|", "&&", ";", ">"} & {*words}:
            return _call_featcal(words[1:])
        done = subprocess.run(["bash", "-e", "-c", line], capture_output=True, text=True, check=False)
        print(done.stdout, end="")
        return done.stderr or f"exit status {done.returncode}" if done.returncode else ""


SHARE = int(os.environ.get("FEATCAL_DOCS_SHARE", "1"))
"""One page or example in so many runs in this build; `.ci/run` sets it, the site that is published runs all."""


def take_turns(names: Sequence[str], share: int = SHARE, commit: str | None = None) -> list[str]:
    """Return the names whose turn it is, one in `share` and at least one.

    Args:
        commit: what decides; None for that of the clone.
    """
    if share < 2 or not names:
        return sorted(names)
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    first = int(hashlib.sha256(commit.encode()).hexdigest(), 16) % min(share, len(names))
    return sorted(names)[first::share]


def _commands(block: Block) -> Iterator[str]:
    """Yield what is run at once: all of a block of Python, else a line with those that it is continued on."""
    if block.language == "python":
        yield block.code
        return
    lines = block.code.replace("\\\n", " ").splitlines()
    rest = iter(lines)
    for line in rest:
        if here := re.search(r"<<-?'?(\w+)'?", line):  # a text that stands in the lines after it
            until = [line]
            for more in rest:
                until.append(more)
                if more.strip() == here[1]:
                    break
            line = "\n".join(until)
        if line.strip() and not line.lstrip().startswith("#"):
            yield line


def _call_featcal(words: list[str]) -> str:
    """Run a command line of featcal; return what is wrong, "" where nothing is."""
    import click

    from featcal.cli import featcal_command
    from featcal.system.errors import FeatcalError

    try:
        status = featcal_command.main(words, prog_name="featcal", standalone_mode=False)
    except (click.ClickException, FeatcalError) as error:
        return error.format_message() if isinstance(error, click.ClickException) else str(error)
    return f"exit status {status}" if status else ""
