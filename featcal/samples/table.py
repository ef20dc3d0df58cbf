"""Read rows with named columns, and JSON Lines."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from featcal.suite.other_files import conversion
from featcal.system.errors import InputError
from featcal.system.fingerprints import FileStamp, stamps
from featcal.system.formatting import readable
from featcal.system.paths import require_plain

Row = dict[str, Any]
MOST_LINE = 16 << 20
"""Largest number of bytes of one line of JSON Lines."""


class ColumnTable(Protocol):
    """A data set that is read by column or by row."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def column(self, name: str) -> list[Any]:
        """Return every value of a column."""
        ...

    def rows(self, wanted: Sequence[int], columns: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
        """Return the given columns of the given rows, in their order, and of the optional ones those that a row has."""
        ...

    def class_names(self, column: str) -> tuple[str, ...] | None:
        """Return the class names of a column of class indices; None if the data set has none."""
        ...

    def place(self, row: int) -> str:
        """Return the place of a row, for messages."""
        ...

    @property
    def folder(self) -> Path:
        """Return the folder that names of files in the table are relative to."""
        ...


@dataclass(frozen=True)
class JsonTable:
    """Rows of a JSON Lines file in memory."""

    file: Path
    columns: tuple[str, ...]
    content: Sequence[Row]
    lines: Sequence[int]
    """Line of every row; blank lines are not rows."""

    def __len__(self) -> int:
        return len(self.content)

    def column(self, name: str) -> list[Any]:
        self._require(range(len(self)), name)
        return [row[name] for row in self.content]

    def rows(self, wanted: Sequence[int], columns: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
        for name in columns:
            self._require(wanted, name)
        return [self.content[index] for index in wanted]

    def _require(self, wanted: Sequence[int], name: str) -> None:
        missing = next((index for index in wanted if name not in self.content[index]), None)
        if missing is not None:
            raise InputError(f"{self.place(missing)} has no field '{name}'")

    def class_names(self, column: str) -> tuple[str, ...] | None:
        return None

    def place(self, row: int) -> str:
        return f"{self.file}, line {self.lines[row]}"

    @property
    def folder(self) -> Path:
        return self.file.parent


def picture_of(cell: Any) -> Any:
    """Return the picture in a cell: the bytes of `{"bytes", "path"}`, else the name of a file."""
    return cell.get("bytes") or cell.get("path") if isinstance(cell, dict) else cell


def read_jsonl(file: Path) -> JsonTable:
    """Return every row of a `.jsonl` or `.jsonl.gz` file, parsed once as long as the file stays the same.

    Raises:
        InputError: the file cannot be read or is damaged, or a line is not a JSON object; the message has its number.
    """
    require_plain(file)
    try:
        return _parse(file, tuple(stamps(file)))
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file} cannot be read to its end ({error}); fetch it again") from error


@lru_cache(maxsize=16)
def _parse(file: Path, state: tuple[FileStamp, ...]) -> JsonTable:
    content: list[Row] = []
    lines: list[int] = []
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
        # Bounded: a packed file of some kilobytes may hold one line of many gigabytes.
        for number, line in enumerate(iter(lambda: stream.readline(MOST_LINE + 1), b""), start=1):
            if len(line) > MOST_LINE:
                raise InputError(
                    f"{file}, line {number} has more than {readable(MOST_LINE)}; give each row its own line"
                )
            if line.isspace():
                continue
            if not content and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                raise InputError(f"{file} holds one list, not an object on each line; {conversion(file, 'list')}")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                advice = "" if content else conversion(file)
                raise InputError(
                    f"{file}, line {number} is not valid JSON ({error})" + (f"; {advice}" if advice else "")
                ) from error
            if not isinstance(row, dict):
                raise InputError(f"{file}, line {number} holds a {type(row).__name__}, expected an object {{...}}")
            content.append(row)
            lines.append(number)
    columns = tuple(dict.fromkeys(name for row in content for name in row))
    return JsonTable(file, columns, content, lines)
