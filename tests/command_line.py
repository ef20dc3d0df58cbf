"""Command lines that tests run in their own process, by the fixture `run`: what is called, and what it printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Run = Callable[..., tuple[int, str, str]]
"""Called with the words of a command line: (exit status, stdout, stderr)."""


def document(result: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = result
    assert code == 0, err
    content: dict[str, Any] = json.loads(out)  # one document and nothing else
    return content
