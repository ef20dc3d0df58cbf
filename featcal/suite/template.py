"""Fill text templates such as `Given the sentence '{sentence}', ...` from the fields of a row.

A field is a plain name, optionally with a number format such as `{label:.1f}`; `{{` and `}}` are literal braces.
Attributes, indices and conversions are refused: a suite file names data, never code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from string import Formatter
from typing import Any

_NUMBER_FORMAT = re.compile(r"(\.\d{1,2})?[dfeg%]?")
_Piece = tuple[str, str | None, str]


def template_fields(template: str) -> tuple[str, ...]:
    """Return the names of the fields of a template, each once.

    Raises:
        ValueError: braces that do not match, or a field that is more than a name and a number format.

    >>> template_fields("'{premise}' or '{hypothesis}'?")
    ('premise', 'hypothesis')
    """
    return tuple(dict.fromkeys(field for _, field, _ in _pieces(template) if field is not None))


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """Return the template with the values of a row, which has every field.

    Raises:
        ValueError: a value that is neither text nor a number, or that its number format does not fit.

    >>> fill_template("{score:.1f} of {{5}}", {"score": 3.25})
    '3.2 of {5}'
    """
    return "".join(
        before + ("" if field is None else _format_field(field, row[field], spec))
        for before, field, spec in _pieces(template)
    )


def _format_field(field: str, value: Any, spec: str) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError(f"field '{field}' holds {_kind(value)}; templates take text and numbers")
    try:
        return format(value, spec)
    except ValueError as error:
        raise ValueError(f"field '{field}' holds {value!r}, which the format '{spec}' does not fit") from error


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


@lru_cache(maxsize=64)
def _pieces(template: str) -> tuple[_Piece, ...]:
    """Return (text before, field or None, number format) of every part."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"'{template}': {error}; write {{{{ and }}}} for literal braces") from error
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        # An attribute or an index could lead from data to code.
        if not field.strip() or conversion or any(mark in field for mark in ".[]") or field.isdigit():
            raise ValueError(
                f"'{template}': '{{{field}}}' is not a field; write the name of a column between the braces"
            )
        if not _NUMBER_FORMAT.fullmatch(spec or ""):
            raise ValueError(f"'{template}': '{spec}' is not a number format such as .1f")
    return tuple((before, field, spec or "") for before, field, spec, _ in parts)
