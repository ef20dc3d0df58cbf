"""Open pools of rows with named columns: text through templates, pictures with their labels."""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcal.samples.arrow import ArrowTable
from featcal.samples.class_names import sort_names
from featcal.samples.conversations import read_example
from featcal.samples.pool import FetchedLabels, Image, Pool, TextExample
from featcal.samples.table import ColumnTable, picture_of
from featcal.suite.source import Source
from featcal.suite.template import fill_template, template_fields
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, some
from featcal.system.paths import require_plain
from featcal.system.sandbox import require_inside

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Rows = NDArray[np.int64]
_SURROGATE = re.compile("[\ud800-\udfff]")
MOST_LABEL = 2**31 - 1
"""The largest class index."""
UNLABELLED = (
    "-1 marks rows without a label in test splits of the Hub, which cannot be scored: leave such a split out, or its "
    "labels where it is only for calibration"
)
"""Meaning of a label of -1, for messages."""
MOST_PIXELS = 64_000_000
"""Most pixels of one picture: each takes some bytes while it is read, however small the file is."""
_WHITE = 255
"""The largest value of 8 bits, to which Pillow clips others in RGB."""
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, RuntimeError)
"""Errors that Pillow raises for files that are damaged or no pictures."""


def table_pool(table: ColumnTable, source: Source, split: str | None) -> Pool:
    """Return the pool of a table's rows whose column "split" is `split`; of all rows for None.

    Raises:
        InputError: a column is missing, no row has the split, or values are not labels.
    """
    rows = np.arange(len(table)) if split is None else _rows_of_split(table, split)
    require_columns(source, table.columns)
    if source.conversation is not None:
        pool = _conversations(table, source.turn_columns, rows)
    else:
        pool = _texts(table, source, rows) if source.input is not None else _pictures(table, source, rows)
    if isinstance(table, ArrowTable) and table.fetch is not None:
        return replace(pool, prepare=lambda wanted: table.prepare(rows[list(wanted)].tolist()))
    if source.split is None and "split" in table.columns:
        return replace(pool, notes=(*pool.notes, *note_splits({str(one) for one in table.column("split")})))
    return pool


def note_splits(known: Collection[str]) -> tuple[str, ...]:
    """Note that rows of several splits are used as one, because the source names none."""
    if len(known) < 2:
        return ()
    return (f"the rows of every split are used ({some(sorted(known))}); give 'split' to take those of one",)


def require_columns(source: Source, known: Sequence[str]) -> None:
    """Raise InputError if a source names a column that its data do not have.

    Args:
        known: the existing columns.
    """
    for what, columns in _needed_columns(source).items():
        for name in columns:
            if name not in known:
                raise InputError(
                    f"{what} needs the column '{name}', which is not there ({_list_columns(known)})."
                    f"{did_you_mean(name, known)}"
                )


def label_column(source: Source, known: Sequence[str]) -> str | None:
    """Return the source's column of class indices or names; None for one without classes."""
    if source.input is None and source.conversation is None:
        return source.label or ("label" if "label" in known else None)
    return source.label if source.has_classes else None


def _needed_columns(source: Source) -> dict[str, Sequence[str]]:
    """Return the columns that a source reads, by purpose."""
    if source.conversation is not None:
        return {"'conversation'": source.turn_columns}
    label = (source.label,) if source.label is not None else ()
    if source.input is None:
        return {"a source of pictures": (source.image or "image",), "'label'": label}
    return {
        "'input'": template_fields(source.input),
        "'target'": template_fields(source.target or ""),
        "'pair'": template_fields(source.pair or ""),
        "'targets'": (source.label or "label",) if source.targets is not None else (),
        "'label'": () if source.targets is not None else label,
        "a source of pictures": () if source.image is None else (source.image,),
    }


def _rows_of_split(table: ColumnTable, split: str) -> Rows:
    if "split" not in table.columns:
        raise InputError(
            f"split '{split}' is asked for, but there is no column 'split' ({_list_columns(table.columns)})"
        )
    values = table.column("split")
    rows = np.array([row for row, value in enumerate(values) if value == split], dtype=np.int64)
    if not len(rows):
        known = sorted({str(value) for value in values})
        raise InputError(f"no row has split '{split}', only {', '.join(known[:10])}.{did_you_mean(split, known)}")
    return rows


def _list_columns(known: Sequence[str]) -> str:
    return f"columns: {', '.join(known) or 'none'}"


# ------------------------------------------------------------------------------------------------------- text


def _texts(table: ColumnTable, source: Source, rows: Rows) -> Pool:
    template, target, pair = str(source.input), source.target, source.pair
    answers = _answers(source)
    label = source.label or "label"
    needed = [template_fields(one or "") for one in (template, target, pair)]
    columns = tuple(dict.fromkeys([*(field for fields in needed for field in fields), *((label,) if answers else ())]))

    def example(row: Mapping[str, Any]) -> TextExample:
        if answers is None:
            return TextExample(
                fill_template(template, row),
                None if target is None else fill_template(target, row),
                None if pair is None else fill_template(pair, row),
            )
        # Lists and mappings cannot be hashed, so looking them up would raise.
        if isinstance(row[label], dict | list) or row[label] not in answers:
            known = ", ".join(map(repr, answers))
            hint = f"; {UNLABELLED}" if row[label] == -1 else ""
            raise ValueError(f"label {row[label]!r} has no answer in 'targets', which has {known}{hint}")
        # Without a pair: those belong to classifiers, which have no answers.
        return TextExample(fill_template(template, row), answers[row[label]])

    def texts(wanted: Sequence[int]) -> list[TextExample]:
        chosen = [int(rows[index]) for index in wanted]
        examples = []
        for place, row in zip(chosen, table.rows(chosen, columns), strict=True):
            try:
                examples.append(_not_empty(example(row)))
            except ValueError as error:
                raise InputError(f"{table.place(place)}: {error}") from error
        return examples

    images = None if source.image is None else _images(table, source.image, rows)
    pool = Pool(len(rows), None, None, images, texts=texts)
    return _with_labels(pool, table, label_column(source, table.columns), rows, source.label is not None)


def _conversations(table: ColumnTable, columns: Sequence[str], rows: Rows) -> Pool:
    def texts(wanted: Sequence[int]) -> list[TextExample]:
        chosen = [int(rows[index]) for index in wanted]
        examples = []
        for place, row in zip(chosen, table.rows(chosen, (), (*columns, "tools")), strict=True):
            try:
                examples.append(_not_empty(read_example(row, columns, table.place(place))))
            except ValueError as error:
                raise InputError(f"{table.place(place)}: {error}") from error
            if (examples[-1].target is None) != (examples[0].target is None):
                ends = "the user's turn" if examples[-1].target is None else "an answer"
                raise InputError(
                    f"{table.place(place)}: ends with {ends}, unlike {table.place(chosen[0])}; keep one kind"
                )
        return examples

    return Pool(len(rows), None, None, texts=texts)


def _answers(source: Source) -> Mapping[Any, str] | None:
    if source.targets is None or isinstance(source.targets, dict):
        return source.targets
    return dict(enumerate(source.targets))


def _not_empty(example: TextExample) -> TextExample:
    if not example.input.strip():
        raise ValueError("the input is empty")
    for text in (example.input, example.target, example.pair):
        if text is not None and _SURROGATE.search(text):
            raise ValueError("the text holds half of a surrogate pair, which is not a character")
    if example.target is not None and not example.target.strip():
        raise ValueError("the target is empty")
    return example


# --------------------------------------------------------------------------------------------------- pictures


def _pictures(table: ColumnTable, source: Source, rows: Rows) -> Pool:
    pool = Pool(len(rows), None, None, _images(table, source.image or "image", rows))
    return _with_labels(pool, table, label_column(source, table.columns), rows, source.label is not None)


def _images(table: ColumnTable, column: str, rows: Rows) -> Callable[[Sequence[int]], list[Image]]:
    """Return a function from indices to the pictures of a column."""

    def images(wanted: Sequence[int]) -> list[Image]:
        chosen = [int(rows[index]) for index in wanted]
        cells = table.rows(chosen, [column])
        return [
            _decode(row[column], table.place(place), table.folder) for place, row in zip(chosen, cells, strict=True)
        ]

    return images


def _with_labels(pool: Pool, table: ColumnTable, column: str | None, rows: Rows, named: bool) -> Pool:
    """Return a pool with the class indices of some rows and the names of the classes; as it is without a column.

    Args:
        named: whether the source names the column; if not, one without a single label is none, and one that holds
            something else than labels only gets a note, because calibration needs no labels.
    """
    if column is None:
        return pool
    if isinstance(table, ArrowTable) and table.fetch is not None and table.has_numbers(column):

        def read(wanted: Sequence[int]) -> NDArray[np.int64] | None:
            found = [row[column] for row in table.rows(rows[list(wanted)].tolist(), [column])]
            return None if not named and are_no_labels(found) else number_labels(found, f"column '{column}'")[0]

        return replace(pool, labels=FetchedLabels(read), class_names=table.class_names(column))
    every = table.column(column)
    values = [every[row] for row in rows]
    if not named and are_no_labels(values):
        return pool  # the Hub's splits without labels have such a column
    if not named and (kinds := _other_kinds(values)):
        note = (
            f"no labels, because column '{column}' holds {kinds}, and labels are whole numbers or class names, one for "
            "each row; mend it, or name another column with 'label', where samples are to be scored"
        )
        return replace(pool, class_names=table.class_names(column), notes=(*pool.notes, note))
    labels, names = number_labels(values, f"column '{column}'")
    # Labels that are words count themselves, whatever names are listed beside them.
    known = names or table.class_names(column)
    return replace(pool, labels=labels, class_names=known, counted_names=names is not None)


def are_no_labels(values: Sequence[Any]) -> bool:
    """Say whether a column has no label at all: null or -1 in every row, as the Hub's splits without labels have it."""
    # A cell may be an array, which compares cell by cell.
    return all(value is None or (isinstance(value, int | float) and value == -1) for value in values)


def _other_kinds(values: Sequence[Any]) -> str:
    """Return the kinds of values that are neither all whole numbers nor all text; "" for labels."""
    kinds = {type(value) for value in values}
    return "" if kinds <= {int, bool} or kinds == {str} else ", ".join(sorted(kind.__name__ for kind in kinds))


def number_labels(values: Sequence[Any], what: str) -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
    """Return class indices of labels: whole numbers stay as they are, names are numbered in the order of `sort_names`.

    Raises:
        InputError: labels of another type, or of several.
    """
    if kinds := _other_kinds(values):
        raise InputError(f"{what} holds {kinds}; labels are whole numbers or class names, one for each row")
    if not any(isinstance(value, str) for value in values):
        if any(abs(value) > MOST_LABEL for value in values):
            raise InputError(f"{what} holds a number beyond {MOST_LABEL}; labels count classes from 0")
        return np.array(values, dtype=np.int64), None
    names = sort_names(values)
    _refuse_spellings(names, what)
    places = {name: place for place, name in enumerate(names)}
    return np.array([places[value] for value in values], dtype=np.int64), names


def _refuse_spellings(names: Sequence[str], what: str) -> None:
    """Raise InputError for an empty label, and for two that differ in blanks around them alone."""
    seen: dict[str, str] = {}
    for name in names:
        bare = name.strip()
        if not bare:
            raise InputError(f"{what} has empty labels; fill them in, or leave these rows out")
        if bare in seen:
            raise InputError(f"{what} has the labels {seen[bare]!r} and {name!r}, two classes; write them alike")
        seen[bare] = name


def _decode(cell: Any, place: str, folder: Path) -> Image:
    """Return a picture from a cell: `{"bytes", "path"}`, bytes, a file name relative to `folder`, or, for rows in
    memory, Pillow's or an array."""
    cell = picture_of(cell)
    if isinstance(cell, bytes):
        return read_image(io.BytesIO(cell), place)
    if isinstance(cell, np.ndarray):
        if cell.dtype != np.uint8 or cell.ndim != 3 or cell.shape[-1] != 3 or 0 in cell.shape:
            raise InputError(f"{place}: a picture is {cell.dtype} {list(cell.shape)}, expected uint8 [H, W, 3]")
        return cell
    if hasattr(cell, "getbands"):
        return _to_array(cell, place)
    if isinstance(cell, str):
        # The table may be a stranger's, and name any file.
        require_inside(folder / cell, place)
        return read_image(folder / cell, f"{place}: {cell}")
    raise InputError(f"{place}: holds a {type(cell).__name__}, expected a picture")


def read_image(file: Path | io.BytesIO, place: str) -> Image:
    """Return any picture that Pillow opens as RGB: rotated by its EXIF data, with transparent parts on white.

    Raises:
        InputError: the file is damaged, or not a picture.
    """
    from PIL import Image as Pillow

    if isinstance(file, Path):
        require_plain(file)
    try:
        with Pillow.open(file) as picture:
            return _to_array(picture, place)
    except Pillow.DecompressionBombError as error:
        most = f"the {MOST_PIXELS:,} that featcal reads"
        raise InputError(f"{place} has more pixels than {most}; make it smaller") from error
    except _UNREADABLE as error:
        raise InputError(f"{place} is not a readable picture") from error


def opens_as_picture(content: bytes) -> bool:
    """Say whether bytes begin as a picture that Pillow reads."""
    from PIL import Image as Pillow

    try:
        Pillow.open(io.BytesIO(content)).close()
    except Pillow.DecompressionBombError:
        return True
    except _UNREADABLE:
        return False
    return True


def note_clipping(file: Path) -> tuple[str, ...]:
    """Note that a picture, of several alike, has values beyond those of 8 bits; nothing if it cannot be read."""
    from PIL import Image as Pillow

    try:
        require_plain(file)
        with Pillow.open(file) as picture:
            deep = picture.mode.startswith(("I", "F")) and math.prod(picture.size) <= MOST_PIXELS
            most = np.asarray(picture).max() if deep else 0
    except (InputError, Pillow.DecompressionBombError, *_UNREADABLE):  # whoever draws it is told
        return ()
    if most > _WHITE:
        return (
            f"pictures with values beyond {_WHITE}, such as {file.name} with {most:.0f}, are clipped to white, as "
            "image processors of transformers do it; where the models were trained on scaled ones, save them so, with "
            "8 bits a channel",
        )
    return ()


def _to_array(picture: PillowImage, place: str) -> Image:
    if math.prod(picture.size) > MOST_PIXELS:
        raise InputError(
            f"{place} has {picture.width} by {picture.height} pixels, more than the {MOST_PIXELS:,} that featcal "
            "reads; make it smaller"
        )
    if picture.mode == "F" and 0 < np.asarray(picture).max() <= 1:
        raise InputError(
            f"{place} has numbers up to 1, which are read as black; save it with 8 bits a channel, 0 to 255"
        )
    # As `datasets` and transformers' image processors have it; `load_image` of transformers turns pictures, too, but
    # shows the colours under transparency.
    return np.asarray(_lay_over_white(_upright(picture)))


_ORIENTATION = 0x0112
"""EXIF's tag of a camera's orientation, 1 to 8."""


def _upright(picture: PillowImage) -> PillowImage:
    """Return the picture rotated and mirrored by its EXIF data."""
    from PIL.Image import Transpose

    picture.load()  # some formats turn the picture and take the tag away here
    steps = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    # Not Pillow's `exif_transpose`, which writes the data anew and fails if they are damaged.
    step = steps.get(picture.getexif().get(_ORIENTATION, 1))
    return picture if step is None else picture.transpose(step)


def _lay_over_white(picture: PillowImage) -> PillowImage:
    """Return a picture as RGB, with transparent parts on white."""
    from PIL import Image as Pillow

    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    return Pillow.alpha_composite(Pillow.new("RGBA", layer.size, "white"), layer).convert("RGB")
