"""Explain how to convert files of other kinds into ones that a source reads."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

from featcal.formats.conversions import python_line
from featcal.system.errors import InputError

_TABLE = (
    "import pandas, warnings; warnings.simplefilter('error', pandas.errors.ParserWarning); "
    "pandas.read_csv({old!r}, sep={sep!r}, {skip}encoding='utf-8-sig', keep_default_na=False, index_col=False)"
    ".to_json({new!r}, orient='records', lines=True)"
)
"""Without `index_col` pandas takes the first of too many values for an index and drops it; a warning says that it drops
the last."""
_ROWS = (
    "import gzip, json; from pathlib import Path; text = {unpack}(Path({old!r}).read_bytes()).decode('utf-8-sig'); "
    "Path({new!r}).write_text(''.join(json.dumps(%s) + '\\n' for one in %s))"
)
_SHARD = "import datasets; datasets.load_dataset('webdataset', data_files={old!r}, split='train').to_parquet({new!r})"
_MOST_HEADER = 1 << 16
"""Largest number of bytes of a header that is looked at."""
_CONVERSIONS = {
    ".csv": _TABLE,
    ".tsv": _TABLE,
    ".txt": _ROWS % ("{{'text': one.strip()}}", "text.split('\\n') if one.strip()"),
    "list": _ROWS % ("one", "json.loads(text)"),
    ".tar": _SHARD,
}
"""Python code that converts a file, by the ending of its name, or one that holds a list."""


def conversion(file: Path, kind: str | None = None) -> str:
    """Return the command that converts a file into one that a source reads; empty if none is known.

    Args:
        kind: "list" for a file that holds one, whatever its name is.
    """
    packed = file.suffix == ".gz"
    plain = file.with_suffix("") if packed else file
    line = _CONVERSIONS.get(kind or plain.suffix.lower())
    if line is None:
        return ""
    new = plain.with_suffix(".parquet" if line is _SHARD else ".jsonl")
    new = new.with_stem(f"{new.stem}-rows") if new == plain else new
    unpack = "gzip.decompress" if packed else "bytes"
    sep, above = _find_separator(file) if line is _TABLE else ("", 0)
    skip = f"skiprows={above}, " if above else ""
    code = line.format(old=str(file), new=str(new), unpack=unpack, sep=sep, skip=skip)
    return f"make {new} of it with: {python_line(code)}"


def _find_separator(file: Path) -> tuple[str, int]:
    """Return the separator of a table, and the number of lines above the names of its columns: what Excel's line
    "sep=;" says, a tab by the file's name, else the most frequent one between the names."""
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            header = re.sub('"[^"]*"', "", stream.readline(_MOST_HEADER).decode("utf-8-sig", "replace"))
    except (OSError, EOFError, zlib.error):
        header = ""  # whoever converts it is told
    if stated := re.fullmatch(r"sep=(.)\s*", header):
        return stated[1], 1
    if ".tsv" in file.suffixes[-2:]:
        return "\t", 0
    return max(",;\t", key=header.count), 0  # the first of equal ones


def refuse_other_files(file: Path) -> None:
    """Raise an InputError with the converting command if no source reads files of this kind."""
    if file.is_file() and (advice := conversion(file)):
        raise InputError(f"{file} is not read as it is; {advice}")
