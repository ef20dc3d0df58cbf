"""Guess sources of samples from a path: its kind, its splits, and which columns are text, answers, pictures and labels.
Every assumption is reported, and a fact that cannot be known is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from mimetypes import guess_type
from pathlib import Path
from typing import Any, TypeVar

from featcal.authoring.columns import LOOKED_AT, Reads, columns_of_table, open_hub, source_options
from featcal.samples.arrow import SPLIT_NAMES, read_parquet, splits_of_files
from featcal.samples.hub import refuse_saved_to_disk
from featcal.samples.pictures import are_classes, imagefolder
from featcal.samples.records import are_no_labels
from featcal.samples.table import ColumnTable, read_jsonl
from featcal.suite.other_files import refuse_other_files
from featcal.suite.schema import SPLITS, task_catalogue
from featcal.suite.source import ENDINGS, SOURCE_KINDS
from featcal.suite.template import template_fields
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, some
from featcal.system.paths import from_folder, local_path, neighbours
from featcal.system.sandbox import require_links_inside, require_no_hub
from featcal.system.yaml_files import parse_yaml

T = TypeVar("T")

_JSON = tuple(ending for ending, kind in ENDINGS.items() if kind == "jsonl")


@dataclass(frozen=True)
class Guess:
    """The guessed keys of a task for its samples.

    Args:
        task: keys of the task: a source for every split that was found, or `use` of the catalogue.
        assumed: assumptions, a line each.
        missing: facts that could not be found, a line each.
    """

    task: Mapping[str, Any]
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def guess(given: str, root: Path, reads: Reads = "answers") -> Guess:
    """Find the sources in a path, an id on the Hub, a name of the task catalogue, or YAML in braces.

    YAML is one source of a suite file without its split, `{jsonl: FILE, input: '{question}'}`, whose other options are
    guessed, or a source for every split, `{calibration: {…}, test: {…}}`, which stays unchanged.

    Args:
        root: folder of the suite file, from which the paths in it start. `given` starts from the working folder.
        reads: how the models answer texts.

    Raises:
        InputError: nothing is there, or it cannot be read.
    """
    if given.lstrip().startswith("{"):
        return _guess_explicit(given, root, reads)
    path = local_path(given, Path(), "samples")
    if path.exists():
        return _guess_path(path, root, {}, reads)
    catalogue = task_catalogue()
    if given in catalogue:
        return Guess({"use": given}, (f"samples of '{given}' in the catalogue of published benchmarks",))
    is_id = given.count("/") == 1 and not given.startswith((".", "/", "~"))
    if is_id and not Path(given).parent.is_dir():  # under a folder that is here, a path is meant
        return _guess_hub(given, {}, reads)
    raise InputError(
        f"no samples '{given}': neither a path here, nor an id OWNER/NAME on the Hub, nor a task of the catalogue; "
        "give a folder of pictures with one sub-folder per class, or a .jsonl, .parquet or .npz file."
        f"{did_you_mean(given, [*neighbours(given), *catalogue])}"
    )


def _guess_explicit(given: str, root: Path, reads: Reads) -> Guess:
    content = parse_yaml(given, "samples")
    if content.keys() <= set(SPLITS):
        return Guess({split: _anchor(source, root) for split, source in content.items()})
    kinds = [kind for kind in SOURCE_KINDS if kind in content]
    if len(kinds) != 1:
        raise InputError(
            f"samples: '{given}' names {some(kinds) or 'no kind of source'}; give one of {', '.join(SOURCE_KINDS)} and "
            f"its options, or a source for each of {', '.join(SPLITS)}"
        )
    kind = kinds[0]
    if kind == "embedded":
        return Guess({split: {**content, "split": split} for split in SPLITS})
    if "split" in content or kind == "tensors":
        return Guess({"calibration": _anchor(content, root)})
    options = {name: value for name, value in content.items() if name != kind}
    path = local_path(str(content[kind]), Path(), "samples")
    if kind == "hub" and not path.exists():
        return _guess_hub(str(content[kind]), options, reads)
    if not path.exists():
        raise InputError(f"samples: {path} does not exist; relative paths start from the current folder")
    return _guess_path(path, root, options, reads)


def _anchor(source: Any, root: Path) -> Any:
    """Return a source with its path, if that exists, rewritten relative to the suite file."""
    if not isinstance(source, dict):
        return source
    return {
        name: from_folder(path, root)
        if name in SOURCE_KINDS and name != "embedded" and (path := local_path(str(value), Path(), "samples")).exists()
        else value
        for name, value in source.items()
    }


# ------------------------------------------------------------------------------------------ files and folders


def _guess_path(path: Path, root: Path, given: Mapping[str, Any], reads: Reads) -> Guess:
    refuse_saved_to_disk(path)
    require_links_inside(path, "samples")
    if path.is_dir():
        return _guess_folder(path, root, given, reads)
    if path.name.endswith(".npz"):
        note = f"{path}: of its training samples every tenth is for validation, the others for calibration"
        return Guess({split: {"arrays": from_folder(path, root), **given} for split in SPLITS}, (note,))
    if path.name.endswith((*_JSON, ".json", ".json.gz", ".parquet")):  # many call JSON Lines .json
        kind, table = _table(path)
        return _guess_table({kind: from_folder(path, root)}, table, given, str(path), reads)
    refuse_other_files(path)
    raise InputError(
        f"samples: the name of {path} does not show the kind of source ({', '.join(ENDINGS)}, or a folder of "
        "pictures); "
        "write the source out, for example '{tensors: FILE, key: NAME}'"
    )


def _table(file: Path) -> tuple[str, ColumnTable]:
    return ("parquet", read_parquet(file, None)[0]) if file.suffix == ".parquet" else ("jsonl", read_jsonl(file))


def _guess_table(
    source: Mapping[str, Any], table: ColumnTable, given: Mapping[str, Any], where: str, reads: Reads
) -> Guess:
    """Guess from a file of rows: a column "split" names the split of each row, else all rows are for calibration."""
    options, assumed, missing = source_options(columns_of_table(table), given, where, reads)
    if "split" not in table.columns:
        return _with_warning({"calibration": {**source, **options}}, assumed, missing, where)
    names = table.column("split")
    odd = sorted({type(name).__name__ for name in names if isinstance(name, list | dict)})
    if odd:
        raise InputError(
            f"samples: {where}: the column 'split' holds {' and '.join(odd)}, not the name of a split in every row; "
            "rename it, and all rows are for calibration"
        )
    values = set(names)
    found = _find_splits(lambda name: name if name in values else None)
    task = {split: {**source, "split": name, **options} for split, name in found.items()}
    whole = _with_warning(task, (*_note_renamed(found, where), *assumed), missing, where)

    def labels(split: str, column: str) -> list[Any]:
        pairs = zip(names, _cells(table, column), strict=True)
        return [value for name, value in pairs if name == found[split]]

    return _leave_out_unlabelled(whole, labels, where)


def _guess_folder(folder: Path, root: Path, given: Mapping[str, Any], reads: Reads) -> Guess:
    """Guess from a folder: sub-folders or files are splits; without them its pictures are for calibration."""
    # A metadata.parquet lies beside pictures and describes them; it is not a data set itself.
    if any(folder.rglob("*.parquet")) and not (folder / "metadata.parquet").is_file():
        return _guess_parquet(folder, root, given, reads)
    found = _find_splits(lambda name: _find_below(folder, name))
    if not found or are_classes(folder, found.values()):
        if any(folder.glob("*.jsonl*")) and not (folder / "metadata.jsonl").is_file():
            called = ", ".join(SPLIT_NAMES["calibration"])
            raise InputError(f"samples: {folder} has .jsonl files, none of them called {called}; name one")
        _refuse_other_folder(folder)
        imagefolder(folder, given.get("label"))
        note = f"{folder}: a folder of pictures, one sub-folder per class"
        return _with_warning({"calibration": _pictures(folder, root, given)}, (note,), (), str(folder))
    assumed = _note_renamed({split: one.name for split, one in found.items()}, str(folder))
    missing: tuple[str, ...] = ()
    task: dict[str, Any] = {}
    tables: dict[str, ColumnTable] = {}
    options: Mapping[str, Any] | None = None
    for split, place in found.items():
        if place.is_dir():
            # Raises where the folder does not hold pictures; the result is not needed here.
            imagefolder(place, given.get("label"))
            task[split] = _pictures(place, root, given)
            continue
        kind, tables[split] = _table(place)
        # Columns are told by the first split; the others are files of the same data set.
        if options is None:
            options, more, missing = source_options(columns_of_table(tables[split]), given, str(place), reads)
            assumed += more
        task[split] = {kind: from_folder(place, root), **options}
    whole = _with_warning(task, assumed, missing, str(folder))

    def labels(split: str, column: str) -> list[Any]:
        return _cells(tables[split], column) if split in tables else []

    return _leave_out_unlabelled(whole, labels, str(folder))


def _pictures(folder: Path, root: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"imagefolder": from_folder(folder, root), **given}


def _refuse_other_folder(folder: Path) -> None:
    """Raise an InputError with the converting command of the first file if a folder has neither folders nor pictures,
    but files that no source reads."""
    files = sorted(folder.iterdir(), key=lambda file: (file.suffix == ".txt", file.name))  # a README.txt comes last
    if not any(file.is_dir() or (guess_type(file.name)[0] or "").startswith("image/") for file in files):
        for file in files:
            refuse_other_files(file)


def _find_below(folder: Path, name: str) -> Path | None:
    places = (folder / f"{name}{ending}" for ending in ("", *_JSON))
    return next((place for place in places if place.exists()), None)


def _guess_parquet(folder: Path, root: Path, given: Mapping[str, Any], reads: Reads) -> Guess:
    """Guess from a folder in the Hub's layout: files or their folders are named by split."""
    known = splits_of_files(folder)
    found = _find_splits(lambda name: name if name in known else None)
    table, _ = read_parquet(folder, next(iter(found.values()), None))
    source = {"parquet": from_folder(folder, root)}
    if not found:
        return _guess_table(source, table, given, str(folder), reads)
    options, assumed, missing = source_options(columns_of_table(table), given, str(folder), reads)
    task = {split: {**source, "split": name, **options} for split, name in found.items()}
    whole = _with_warning(task, (*_note_renamed(found, str(folder)), *assumed), missing, str(folder))

    def labels(split: str, column: str) -> list[Any]:
        return _cells(read_parquet(folder, found[split])[0], column)

    return _leave_out_unlabelled(whole, labels, str(folder))


# ---------------------------------------------------------------------------------------------------- the Hub


def _guess_hub(name: str, given: Mapping[str, Any], reads: Reads) -> Guess:
    """Guess from a data set on the Hub: only names of splits and columns are requested, and first rows.

    Raises:
        InputError: `datasets` is not installed, or the Hub does not answer or may not be asked (a shared server).
    """
    require_no_hub("samples")
    repo, _, revision = name.partition("@")
    source = {"hub": repo, **({"revision": revision} if revision else {})}
    place = {option: given[option] for option in ("config", "revision") if option in given}
    hub = open_hub(repo, **{"revision": revision or None, **place})
    found = _find_splits(lambda one: one if one in hub.opened else None)
    rest = {option: value for option, value in given.items() if option not in place}
    options, assumed, missing = source_options(hub.columns, rest, name, reads)
    task = {split: {**source, **place, "split": own, **options} for split, own in found.items()}
    whole = _with_warning(task, (*_note_renamed(found, name), *assumed), missing, name)

    def labels(split: str, column: str) -> list[Any]:
        return hub.first_values(found[split], column)

    return _leave_out_unlabelled(whole, labels, name, f"its first {LOOKED_AT} rows")


# ----------------------------------------------------------------------------------------- splits without labels


def _leave_out_unlabelled(
    whole: Guess, labels: Callable[[str, str], list[Any]], where: str, rows: str = "all of its rows"
) -> Guess:
    """Leave out validation and test splits without a single label, as many test splits of the Hub are: nothing could
    be scored on them.

    Args:
        labels: returns a column of a split, None for rows that lack it.
        rows: those of which `labels` returns the column.
    """
    without = {
        split: column for split, source in whole.task.items() if (column := _empty_column(split, source, labels))
    }
    notes = tuple(
        f"{where}: the {split} split is left out, for column '{column}' is -1, null or missing in {rows}, so that "
        "nothing can be scored on it"
        for split, column in without.items()
    )
    kept = {split: source for split, source in whole.task.items() if split not in without}
    return replace(whole, task=kept, assumed=(*whole.assumed, *notes))


def _empty_column(split: str, source: Mapping[str, Any], labels: Callable[[str, str], list[Any]]) -> str | None:
    """Return the column of right answers of a split if none is there; None otherwise, and for calibration samples,
    which need none."""
    if split == "calibration":
        return None
    target, label = source.get("target"), source.get("label", "label" if "targets" in source else None)
    try:
        columns = template_fields(target) if isinstance(target, str) else (str(label),) if label is not None else ()
    except ValueError:  # a template of the user, which the suite refuses in its own words
        return None
    cells = ((column, labels(split, column)) for column in columns)
    return next((column for column, values in cells if values and are_no_labels(values)), None)


def _cells(table: ColumnTable, column: str) -> list[Any]:
    """Return every value of a column, None for rows that lack it."""
    if column not in table.columns:
        return [None] * len(table)
    return [row.get(column) for row in table.rows(range(len(table)), (), (column,))]


# ------------------------------------------------------------------------------------------------- what is said


def _find_splits(find: Callable[[str], T | None]) -> dict[str, T]:
    """Return, for every split that exists, the result of `find` for the first of its names."""
    places = {
        split: next((one for name in names if (one := find(name)) is not None), None)
        for split, names in SPLIT_NAMES.items()
    }
    return {split: one for split, one in places.items() if one is not None}


def _note_renamed(found: Mapping[str, str], where: str) -> tuple[str, ...]:
    return tuple(
        f"{where}: '{name}' is the suite's {split} split" for split, name in found.items() if not name.startswith(split)
    )


def _with_warning(task: Mapping[str, Any], assumed: tuple[str, ...], missing: tuple[str, ...], where: str) -> Guess:
    """Return a guess, with a line about splits that were not found."""
    if "calibration" not in task:
        called = ", ".join(SPLIT_NAMES["calibration"])
        missing = (*missing, f"{where}: which samples are for calibration; no split is called {called}")
    elif len(task) == 1:
        assumed = (*assumed, f"{where}: all of it is for calibration; there is no validation and no test split")
    return Guess(task, assumed, missing)
