"""Keep records in small files that are written once and never changed, so that many processes may write at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from featcal.system.atomic_files import put_new
from featcal.system.formatting import shorten

T = TypeVar("T")


class Records:
    """A folder of records, by the hash of their suite.

    A record that cannot be written or read does not make the work fail; `problems` then says why. It also lists files
    that are not records, which are skipped and never touched.

    Args:
        folder: created with the first record.
        kept: word for a record in messages, as the subject of a sentence.
    """

    def __init__(self, folder: Path, kept: str) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._kept = kept

    def write(self, file: Path, content: Mapping[str, Any]) -> bool:
        """Write a record; an existing one stays. Return False if that fails."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another process has recorded the same
                put_new(file, json.dumps(content, indent=1, allow_nan=False))
        except OSError as error:
            self.tell(f"{self._kept} is not kept in {self.folder}: {error.strerror}; set FEATCAL_CACHE to a folder")
            return False
        return True

    def read(self, file: str, kind: type[T]) -> T | None:
        """Return the record in a file; None if there is none, or if `problems` lists errors in it."""
        try:
            state = os.stat(file)
            named: Any = kind  # mypy takes a type for what its instances are, which need not be hashable
            found: T = _read(named, file, (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
            return found
        except FileNotFoundError:
            return None
        except OSError as error:
            self.tell(f"{file} cannot be read: {error.strerror}; it is left out")
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            self.tell(f"{file} holds no record{f' (see {shorten(where, 60)})' if where else ''}; it is left out")
        return None

    def tell(self, problem: str) -> None:
        """Add a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)


# Pages list the history anew whenever they are drawn, so thousands of files must not be parsed each time.
@lru_cache(maxsize=2**16)
def _read(kind: Any, path: str, state: tuple[int, ...]) -> Any:
    """Read the record from a file in its current state.

    Raises:
        OSError, ValidationError: it cannot be read, or is not such a record.
    """
    return _reader(kind).validate_json(Path(path).read_bytes())


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
