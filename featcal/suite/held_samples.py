"""Describe samples of Python code (arrays, tensors, data sets, lists of texts or rows) as sources of a suite."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from featcal.suite.other_files import refuse_other_files
from featcal.suite.source import ENDINGS, OPTIONS_OF_KIND, SOURCE_KINDS, TURNS
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.in_memory import Holdable, register_object

COLUMN_OPTIONS = (*OPTIONS_OF_KIND["rows"], "limit", "corruption")
"""Keys of `columns`, for rows."""
_VALUES = ("pixel_values", "input_ids")
_TENSORS = {"attention_mask": "mask", "labels": "labels"}
"""Keys that tokenizers and processors use for tensors besides the inputs, and the options
of a source that they correspond to.
"""
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class HeldTensors:
    """Tensors in memory by the options of a source that name them: "key", "labels" and "mask"."""

    tensors: Mapping[str, Any]
    sha256: str
    kind: str = "tensors"

    def is_unchanged(self) -> bool:
        """Say whether the values are unchanged since they were given."""
        return _digest(self.tensors) == self.sha256


@dataclass(frozen=True, eq=False)
class HeldRows:
    """Rows in memory: a table, as `samples.show_sample_table` describes it."""

    content: Any
    """A list of mappings, or a data set of `datasets`."""
    columns: tuple[str, ...]
    features: Mapping[str, Any]
    """Types of the columns of a data set."""
    sha256: str
    kind: str = "rows"
    folder: Path = Path()

    def __len__(self) -> int:
        return len(self.content)

    def is_unchanged(self) -> bool:
        """Say whether the rows are unchanged since they were given."""
        return _digest(self.content) == self.sha256

    def column(self, name: str) -> list[Any]:
        """Return every value of a column; numbers of arrays as Python's own."""
        if not isinstance(self.content, list):  # a data set reads one column without the pictures beside it
            return [_plain(value) for value in self.content[name]]
        return [row[name] for row in self.rows(range(len(self)), [name])]

    def rows(self, wanted: Sequence[int], columns: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
        """Return the given columns of the given rows, in their order, and the optional columns that a row has.

        Raises:
            InputError: a row lacks one.
        """
        found = [self.content[int(index)] for index in wanted]
        for index, row in zip(wanted, found, strict=True):
            missing = [name for name in columns if name not in row]
            if missing:
                raise InputError(f"{self.place(index)} has no field '{missing[0]}'")
        return [{name: _plain(row[name]) for name in (*columns, *optional) if name in row} for row in found]

    def class_names(self, column: str) -> tuple[str, ...] | None:
        """Return the names of the classes that the numbers of a column stand for, if the data set has them."""
        names = getattr(self.features.get(column), "names", None)
        return tuple(map(str, names)) if names else None

    def place(self, row: int) -> str:
        """Return the name of a row for messages."""
        return f"sample {row}"


def read_samples(given: Any, columns: Mapping[str, Any], label: str) -> tuple[dict[str, Any], Holdable | None]:
    """Return a source of a suite, as its file would describe it, and the objects that must stay alive while the suite
    is used.

    Args:
    given: numpy arrays or tensors (pictures uint8 `[n, H, W, 3]`, prepared ones `[n, 3, H, W]` or token ids `[n, T]`),
    a mapping of these as tokenizers and processors return it, a data set of `datasets`, a table of pandas, a list (or
    column of pandas) of texts, pictures, pairs (text or picture, answer or class), or rows; a tuple (samples, labels);
    a path; or a source as a mapping.
        columns: options of a source for rows (`COLUMN_OPTIONS`).
        label: name of the samples in messages.

    Raises:
        InputError: samples of another kind, or columns whose meaning cannot be guessed.
    """
    if isinstance(given, str | Path):
        return {**_path_source(str(given), label), **columns}, None
    if isinstance(given, Mapping) and any(kind in given for kind in SOURCE_KINDS):
        return {**given, **columns}, None
    if isinstance(given, Mapping) and any(name in given for name in _VALUES):
        return _mapping_source(given, columns, label)
    labels = None
    if isinstance(given, tuple):
        given, labels = _split_labels(given, label)
    given = _list_values(given)
    if _is_array(given) and not (str(given.dtype).endswith("uint8") and given.ndim == 4):
        named = {} if labels is None else {"labels": _tensor(labels, f"{label}, labels")}
        return _tensor_source({"key": _tensor(given, label), **named}, columns, label)
    rows = _rows_of(given, labels, label)
    if not len(rows):
        raise InputError(f"{label}: there are none")
    return {"rows": register_object(rows), **(columns or _guess_columns(rows, label))}, rows


def _path_source(given: str, label: str) -> dict[str, Any]:
    kinds = [kind for ending, kind in ENDINGS.items() if given.endswith(ending)]
    refuse_other_files(Path(given).expanduser())
    if not kinds and not Path(given).expanduser().is_dir():
        raise InputError(
            f"{label}: '{given}' is not a folder of pictures and ends like none of {', '.join(ENDINGS)}; say what "
            "it is, as in a suite file: {'hub': 'owner/name', 'split': 'train'}"
        )
    return {kinds[0] if kinds else "imagefolder": given}


def _mapping_source(
    given: Mapping[str, Any], columns: Mapping[str, Any], label: str
) -> tuple[dict[str, Any], Holdable | None]:
    key = next(name for name in _VALUES if name in given)
    unknown = [name for name in given if name != key and name not in _TENSORS]
    if unknown:
        raise InputError(
            f"{label}: the mapping has {some(unknown)}, which no source of tensors holds; give {key} with "
            f"{' and '.join(_TENSORS)}, or the samples before they were prepared"
        )
    found = {option: _tensor(given[name], f"{label}, {name}") for name, option in _TENSORS.items() if name in given}
    return _tensor_source({"key": _tensor(given[key], f"{label}, {key}"), **found}, columns, label)


def _tensor_source(
    found: dict[str, Any], columns: Mapping[str, Any], label: str
) -> tuple[dict[str, Any], Holdable | None]:
    unused = [name for name in columns if name != "limit"]
    if unused:
        raise InputError(f"{label}: columns ({', '.join(unused)}) apply to rows, but these samples are tensors")
    held = HeldTensors(found, _digest(found))
    options = {option: option for option in found if option != "key"}
    return {"tensors": register_object(held), "key": "samples", **options, **columns}, held


def _tensor(given: Any, label: str) -> Any:
    """Return numbers as a tensor on the CPU, sharing their memory if possible."""
    import torch

    try:
        return torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{label}: these numbers do not make a tensor ({error}); give rows of one length") from error


def _is_array(given: Any) -> bool:
    """Say whether a value is an array of numpy or a tensor."""
    return hasattr(given, "ndim") and hasattr(given, "dtype") and hasattr(given, "shape")


def _list_values(given: Any) -> Any:
    """Return rows or values of pandas, and texts of numpy, as a list of Python's own; anything else unchanged."""
    if hasattr(given, "iloc") and hasattr(given, "notna"):
        # A missing value is null, not the number NaN, which a template would write as a word.
        values = given.astype(object).where(given.notna(), None)
        return values.to_dict("records") if hasattr(given, "columns") else values.tolist()
    return given.tolist() if isinstance(given, np.ndarray) and given.dtype.kind in "OSTU" else given


def _split_labels(given: tuple[Any, ...], label: str) -> tuple[Any, Sequence[Any]]:
    if len(given) != 2 or isinstance(given[1], str) or not hasattr(given[1], "__len__") or not np.ndim(given[1]):
        raise InputError(f"{label}: a tuple is (samples, labels); give a list of samples otherwise")
    values, labels = given[0], _list_values(given[1])
    if not hasattr(values, "__len__") or len(values) != len(labels):
        raise InputError(f"{label}: there are {len(labels)} labels, which is not one for each sample")
    return values, labels


def _rows_of(given: Any, labels: Sequence[Any] | None, label: str) -> HeldRows:
    if hasattr(given, "column_names") and hasattr(given, "features"):
        return _dataset_rows(given, labels, label)
    if isinstance(given, str | bytes | Mapping) or not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        what = f"a mapping with {some(list(given))}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise InputError(
            f"{label}: {what} is not a list of samples; give arrays, tensors, a data set of `datasets` (one split of "
            "it), a list of texts, pictures or rows, or a path"
        )
    values = np.asarray(given) if _is_array(given) else given
    rows = [_row(values[index], label) for index in range(len(values))]
    if labels is not None and rows:
        # Words beside a text are its answer; words beside a picture name its class.
        name = "target" if isinstance(labels[0], str) and "input" in rows[0] else "label"
        rows = [{**row, name: _plain(one)} for row, one in zip(rows, labels, strict=True)]
    try:
        digest = _digest(rows)
    except (OSError, SyntaxError) as error:  # a picture of Pillow reads its file when it is looked at
        raise InputError(f"{label}: a picture cannot be read ({error})") from error
    return HeldRows(rows, tuple(dict.fromkeys(name for row in rows for name in row)), {}, digest)


def _dataset_rows(given: Any, labels: Sequence[Any] | None, label: str) -> HeldRows:
    if isinstance(given, Mapping):
        raise InputError(f"{label}: the data set has the splits {some(list(given))}; give one of them")
    if labels is not None:
        raise InputError(f"{label}: a data set has its labels in a column; name it with columns={{'label': …}}")
    if not hasattr(given, "__len__"):
        raise InputError(
            f"{label}: a data set that streams has no number of rows; load it without streaming=True, or give "
            "list(dataset.take(1000)) of it"
        )
    # A format such as torch's would turn texts and pictures into tensors.
    plain = given.with_format(None) if hasattr(given, "with_format") else given
    return HeldRows(plain, tuple(given.column_names), dict(given.features or {}), _digest(plain))


def _row(sample: Any, label: str) -> Row:
    """Return one sample as a row: a text becomes the column "input", a picture "image", and the second of a pair
    "target" (a text) or "label"."""
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, str):
        return {"input": sample}
    if isinstance(sample, tuple | list) and len(sample) == 2:
        row = _row(sample[0], label)
        answer = _plain(sample[1])
        return {**row, "target" if isinstance(answer, str) and "input" in row else "label": answer}
    if hasattr(sample, "getbands") or isinstance(sample, np.ndarray):
        return {"image": sample}
    raise InputError(
        f"{label}: a sample is a {type(sample).__name__}; give texts, pictures (of Pillow, or uint8 [H, W, 3]), pairs "
        "of one and its answer or class, or rows"
    )


def _guess_columns(rows: HeldRows, label: str) -> dict[str, Any]:
    """Return the options of a source for rows whose columns have usual names.

    Raises:
        InputError: no column has a usual name.
    """
    names = rows.columns
    first = rows.rows([0], (), TURNS)[0]
    turns = next((name for name in TURNS if isinstance(first.get(name), list)), None)
    if turns is not None:
        return {"conversation": turns}
    text = next((name for name in ("input", "text") if name in names), None)
    if text is None:
        if "image" in names:
            return {}
        raise InputError(
            f"{label}: it is not clear which column is what; there are {some(list(names))}. Give columns={{'input': "
            f"'{{…}}', "
            "'target': '{…}'} for texts or {'image': …, 'label': …} for pictures"
        )
    found = {"input": f"{{{text}}}", **({"image": "image"} if "image" in names else {})}
    found |= {"pair": "{pair}"} if "pair" in names else {}
    if "target" in names:
        return {**found, "target": "{target}"}
    return {**found, "label": "label"} if "label" in names else found


def _plain(value: Any) -> Any:
    """Return a number of numpy or a tensor of one number as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _digest(samples: Any) -> str:
    """Return the SHA-256 of tensors by name, a list of rows or a data set, in hexadecimal digits."""
    # `datasets` keeps a digest of the data and of all that was done to it, so no row has to be read.
    fingerprint = getattr(samples, "_fingerprint", None)
    digest = hashlib.sha256(str(fingerprint or "").encode())
    for value in () if fingerprint else [samples] if isinstance(samples, Mapping) else samples:
        _digest_value(value, digest)
    return digest.hexdigest()


def _digest_value(value: Any, digest: Any) -> None:
    """Add a value to a digest: numbers, texts, arrays and pictures by their content."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            digest.update(f"{name}:".encode(errors="surrogatepass"))
            _digest_value(one, digest)
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for one in value:
            _digest_value(one, digest)
    elif hasattr(value, "detach"):
        from featcal.formats.contents import tensor_digest  # needs torch, as who gives a tensor has it

        digest.update(tensor_digest(value.detach()).encode())
    elif _is_array(value):
        array = np.ascontiguousarray(value)
        digest.update(f"{array.dtype} {array.shape}\n".encode() + array.tobytes())
    elif hasattr(value, "getbands"):
        # Indices into a palette, or a colour that stands for nothing, are other pictures with other ones.
        colours = value.getpalette() if value.mode in ("P", "PA") else None
        described = value.mode, value.size, colours, value.info.get("transparency")
        digest.update(f"{described}\n".encode() + value.tobytes())
    else:
        text = json.dumps(value, default=repr) if not isinstance(value, bytes) else value.hex()
        digest.update(f"{text}\n".encode())
