"""Running what featcal says that gives its numbers again: command lines and lines of Python."""

from __future__ import annotations

import json
import shlex
from typing import Any

from click.testing import CliRunner

from featcal.cli import commands as featcal


def document(line: str) -> dict[str, Any]:
    """What a command line prints."""
    program, *arguments = shlex.split(line)
    assert program == "featcal"
    result = CliRunner().invoke(featcal, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def printed(lines: str) -> dict[str, Any]:
    """Model → what lines of Python print of it."""
    found: dict[str, Any] = {}

    def say(model: str, value: object, sep: str) -> None:
        found[model] = value

    exec(lines, {"print": say})
    return found
