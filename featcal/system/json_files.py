"""Read JSON files that others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from featcal.system.errors import InputError
from featcal.system.paths import require_plain

MOST = 64 << 20
"""Bytes that a JSON file of settings, an index or a record may have; the largest, indices, have some megabytes."""


def read_json(file: Path, named: str = "", missing: str = "") -> dict[str, Any]:
    """Return the mapping in a JSON file.

    Args:
        named: name of the file in messages; its path by default.
        missing: message for a file that cannot be read at all, if it is to say more.

    Raises:
        InputError: the file cannot be read, is not JSON, or holds no mapping; the message says where, and quotes
            nothing.
    """
    named = named or str(file)
    content = _content(file, named, missing)
    if not isinstance(content, dict):
        raise InputError(f"{named} must hold a mapping {{...}}")
    return content


def read_json_rows(file: Path) -> list[dict[str, Any]]:
    """Return the list of mappings in a JSON file.

    Raises:
        InputError: the file cannot be read, is not JSON, or holds no list of mappings.
    """
    content = _content(file, str(file))
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise InputError(f"{file} must hold a list of mappings [{{...}}, ...]")
    return content


def _content(file: Path, named: str, missing: str = "") -> Any:
    require_plain(file, named, MOST)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(missing or f"{named} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # `from None`: the cause carries the text of the file, which may be private or hostile.
        raise InputError(f"{named} is not valid JSON: {_problem(error)}") from None


def _problem(error: ValueError | RecursionError) -> str:
    """Describe the error in a JSON file and its place, without quoting the file."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, line {error.lineno}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"
