"""Find the columns of a data set that hold inputs, answers, pictures or labels."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any, Literal

from featcal.samples.records import opens_as_picture
from featcal.samples.table import ColumnTable
from featcal.suite.source import TURNS
from featcal.suite.template import template_fields
from featcal.system.errors import InputError
from featcal.system.extras import require_packages
from featcal.system.formatting import shorten, some

LOOKED_AT = 64
"""Number of rows that decide the kind of a column."""
INPUTS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("instruction", "input"),
    ("prompt",),
    ("instruction",),
    ("question",),
    ("text",),
    ("sentence",),
    ("input",),
    ("source",),
    ("content",),
    ("txt",),
)
"""Names of input columns; the first of these groups in which all columns hold text counts."""
CHOSEN = "chosen"
"""Column of the better of two answers, in data for preference training."""
ANSWERS = ("target", "answer", "completion", "response", "output", "label", CHOSEN)
PICTURES = ("image", "img", "picture")
LABELS = ("label", "labels", "fine_label", "class", "cls")
ALIKE = ("score", "similarity_score", "similarity", "label", "target")
"""Names of columns of numbers that rate the similarity of two texts."""
ASKED = (("prompt", "completion"), ("instruction", "output"), ("prompt", CHOSEN), ("question", CHOSEN))
"""Names of text columns for the user's words and the assistant's answer."""
_NO_INPUT = ("split", "id", "idx")


@dataclass(frozen=True)
class Column:
    """Kind of a column ("text", "number", "picture", "turns" of a conversation, or "other"), the classes that its
    numbers stand for, and whether these are whole."""

    kind: str
    names: tuple[str, ...] | None = None
    whole: bool = True


FoundOptions = tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]
"""Options of a source, lines on what was assumed, lines on what is missing."""
Reads = Literal["answers", "turns", "classes", "likeness"]
"""Kinds of answers to texts: in words, in words of a conversation that a chat template writes, a class of a head, or a
similarity of two texts."""


def columns_of_table(table: ColumnTable) -> dict[str, Column]:
    """Determine the kinds of columns by their first rows; a column that some of these rows lack is "other"."""
    wanted = range(min(LOOKED_AT, len(table)))
    found = {}
    for name in table.columns:
        try:
            values = [row[name] for row in table.rows(wanted, [name])]
        except InputError:
            values = []
        whole = not any(isinstance(value, float | Decimal) for value in values)
        found[name] = Column(_kind(values), table.class_names(name), whole)
    return found


@dataclass(frozen=True)
class HubSplits:
    """The splits of a data set on the Hub, which are read from their first rows on.

    Args:
        opened: the data set as `datasets` streams it.
        columns: those of the first split.
    """

    repo: str
    opened: Mapping[str, Any]
    columns: Mapping[str, Column]

    def first_values(self, split: str, column: str) -> list[Any]:
        """Return a column of the first rows of a split; nothing where the split has no such column.

        Raises:
            InputError: the Hub does not answer.
        """
        if column not in self.columns:
            return []
        with _explain_hub(self.repo):
            rows = self.opened[split].select_columns(column)  # so that no picture is decoded
            return [row[column] for row in islice(rows, LOOKED_AT)]


def open_hub(repo: str, config: str | None = None, revision: str | None = None) -> HubSplits:
    """Ask for the splits of a data set on the Hub, and for the columns of the first one.

    Raises:
        InputError: `datasets` is not installed, or the Hub does not answer; the message says what to write instead.
    """
    require_packages("datasets", label=f"data set '{repo}'")
    import datasets

    with _explain_hub(repo):
        # Streaming: one row tells the columns, and nothing is kept on the disk.
        opened = datasets.load_dataset(repo, name=config, revision=revision, streaming=True)
        first = next(iter(opened.values()))
        row = next(iter(first))
    features = first.features or {}
    return HubSplits(
        repo, opened, {name: Column(_kind([value]), _classes(features.get(name))) for name, value in row.items()}
    )


@contextmanager
def _explain_hub(repo: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the client, its transport and the format of the data: each has kinds of its own
        reason = shorten(" ".join(str(error).split()), 200)
        raise InputError(
            f"data set '{repo}' cannot be read ({type(error).__name__}: {reason}); write it out: "
            f'\'{{hub: {repo}, split: train, input: "{{question}}", target: "{{answer}}"}}\', or fetch it to a folder'
        ) from error


def _classes(feature: Any) -> tuple[str, ...] | None:
    names = getattr(feature, "names", None)
    return None if names is None else tuple(map(str, names))


def _kind(values: Collection[Any]) -> str:
    if values and all(isinstance(one, str) for one in values):
        return "text"
    if values and all(isinstance(one, int | float | Decimal) for one in values):
        return "number"
    if values and all(_is_picture(one) for one in values):
        stored = [one for one in values if isinstance(one, bytes)]
        # One is enough: the place of a damaged one is told when it is read.
        return "picture" if not stored or any(map(opens_as_picture, stored)) else "other"
    if values and all(_holds_turns(one) for one in values):
        return "turns"
    return "other"


def _holds_turns(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(turn, dict) and (turn.keys() >= {"role", "content"} or turn.keys() >= {"from", "value"})
        for turn in value or [None]
    )


def _is_picture(value: Any) -> bool:
    """Say whether a value is a picture as Parquet files hold one, or as `datasets` decodes one (with Pillow)."""
    stored = isinstance(value, bytes) or (isinstance(value, dict) and {"bytes", "path"} <= value.keys())
    return stored or type(value).__module__.startswith("PIL.")


def source_options(
    columns: Mapping[str, Column], given: Mapping[str, Any], where: str, reads: Reads = "answers"
) -> FoundOptions:
    """Complete the options of a source: those that are given, and the others guessed from its columns.

    >>> columns = {"text": Column("text"), "label": Column("number", ("no", "yes"))}
    >>> source_options(columns, {}, "a.parquet")[0]
    {'input': '{text}\\n', 'targets': ['no', 'yes']}
    >>> source_options(columns, {}, "a.parquet", "classes")[0]
    {'input': '{text}', 'label': 'label'}
    """
    if len(columns) == 1 and "input" not in given and re.search("[;\t]", joined := next(iter(columns))):
        raise InputError(
            f"samples: {where}: its only column is called {joined!r}, as of a table that was not split at its "
            "separators; convert it anew with them, or say the column as {…, input: '{COLUMN}'}"
        )
    pictures = [name for name, column in columns.items() if column.kind == "picture"]
    if "input" not in given and pictures:
        return _picture_options(columns, pictures, given, where)
    if reads in ("classes", "likeness") and not {"target", "targets"} & given.keys():
        return _classifier_options(columns, given, where, reads)
    turns = () if {"input", "conversation"} & given.keys() else _turn_columns(columns, reads)
    if turns:
        notes = (
            f"{where}: the conversation is in {some(turns)}, written by the base's chat template, and its last answer "
            "is the right one",
        )
        return {**given, "conversation": turns[0] if len(turns) == 1 else list(turns)}, notes, ()
    if "conversation" in given:
        return dict(given), (), ()
    return _text_options(columns, given, where)


def _turn_columns(columns: Mapping[str, Column], reads: Reads) -> tuple[str, ...]:
    """Choose the columns that form a conversation: turns, and texts if the base has a chat template."""
    kinds = {name: column.kind for name, column in columns.items()}
    held = [name for name, kind in kinds.items() if kind == "turns"]
    pairs = [pair for pair in ASKED if all(kinds.get(name) in ("turns", "text") for name in pair)]
    asked: tuple[str, ...] = next((pair for pair in pairs if reads == "turns" or pair[0] in held), ())
    usual = next((name for name in (*TURNS, CHOSEN) if name in held), held[0] if len(held) == 1 else None)
    if usual == CHOSEN and usual in asked and asked[0] not in held:
        asked = ()  # turns of a better answer begin with the prompt, if that has no turns of its own
    found: tuple[str, ...] = (usual,) if usual is not None and usual not in asked else asked
    if found == ("instruction", "output") and "input" in kinds:
        found = ("instruction", "input", "output")
    return ("system", *found) if found and "system" in kinds else found


def _picture_options(
    columns: Mapping[str, Column], pictures: list[str], given: Mapping[str, Any], where: str
) -> FoundOptions:
    image = next((name for name in PICTURES if name in pictures), pictures[0])
    known = [name for name in LABELS if name in columns and columns[name].kind in ("text", "number")]
    # Other numbers count no classes; named as labels, they would stop a calibration, which needs none.
    label = next((name for name in known if columns[name].whole), None)
    found = {"image": image, **({} if label is None else {"label": label})}
    notes = [f"{where}: pictures are in column '{found['image']}'"]
    notes += [f"{where}: labels are in column '{label}'" if label else f"{where}: no labels, so nothing is scored"]
    return {**found, **given}, tuple(notes), ()


def _text_options(columns: Mapping[str, Column], given: Mapping[str, Any], where: str) -> FoundOptions:
    found = dict(given)
    notes, missing = [], []
    texts = [name for name, column in columns.items() if column.kind == "text"]
    asked = (str(given["label"]),) if "label" in given else ANSWERS
    answer = next((name for name in asked if name in columns and columns[name].kind in ("text", "number")), None)
    if "input" not in given:
        read = _read(texts, answer)
        if read:
            words = " ".join(f"{{{name}}}" for name in read)
            # The line break keeps the last word of the question and the first of the answer apart.
            found["input"] = words if answer is None else f"{words}\n"
            notes.append(
                f"{where}: the input is '{words}'{'' if answer is None else ' and a line break'}; experts know the "
                "words of their own training best, which {…, input: '…', target: '…'} gives"
            )
        else:
            missing.append(
                f"{where}: which columns are the input (columns: {some(list(columns), 12)}); say it as "
                "{…, input: '{COLUMN}'}, or {…, conversation: COLUMN} if one holds the turns of a conversation"
                f"{_advise_renaming(texts)}"
            )
            return {**found, "input": "{COLUMN}"}, (), tuple(missing)
    if answer is not None and not {"target", "targets"} & given.keys():
        names = columns[answer].names
        if columns[answer].kind == "text":
            found["target"] = f"{{{answer}}}"
            notes.append(f"{where}: the answer is '{found['target']}'")
        elif names:
            found |= {"targets": list(names)} | ({} if answer == "label" else {"label": answer})
            notes.append(f"{where}: the answers are the names of classes in column '{answer}', {some(names)}")
        else:
            missing.append(
                f"{where}: the words that the numbers in column '{answer}' stand for; say them as {{…, targets: [no, "
                f"yes]}}, or write {{…, target: '{{{answer}}}'}} where the number is the answer"
            )
    return found, tuple(notes), tuple(missing)


def _classifier_options(
    columns: Mapping[str, Column], given: Mapping[str, Any], where: str, reads: Reads
) -> FoundOptions:
    """Find options for one or two texts with a class, or for two texts with a number."""
    classes, found, notes, missing = reads == "classes", dict(given), [], []
    kinds, asked = (("text", "number"), LABELS) if classes else (("number",), ALIKE)
    right = next((name for name in asked if name in columns and columns[name].kind in kinds), None)
    right = str(given["label"]) if classes and "label" in given else right
    texts = [name for name, column in columns.items() if column.kind == "text"]
    read = _read(texts, right)
    if "input" not in given and read and (classes or len(read) == 2):
        found |= {option: f"{{{name}}}" for option, name in zip(("input", "pair"), read, strict=False)}
        notes.append(f"{where}: the model reads {some(read)}")
    elif "input" not in given:
        found["input"] = "{COLUMN}"
        missing.append(
            f"{where}: which columns are the {'text or texts' if classes else 'two texts'} (columns: "
            f"{some(list(columns), 12)}); say it as {{…, input: '{{COLUMN}}', pair: '{{COLUMN}}'}}"
            f"{_advise_renaming(texts)}"
        )
    if right is None:
        found |= {"label": "COLUMN"} if classes else {}
        what = "class of every text; say it as {…, label: COLUMN}" if classes else (
            "number that says how alike the texts are; say it as {…, target: '{COLUMN}'}"
        )  # fmt: skip
        missing.append(f"{where}: which column holds the {what}")
    elif classes:
        found["label"] = right
        notes.append(f"{where}: classes are in column '{right}', counted as the experts' heads count them")
    else:
        found["target"] = f"{{{right}}}"
        notes.append(f"{where}: how alike two texts are is in column '{right}'")
    return found, tuple(notes), tuple(missing)


def _read(texts: list[str], answer: str | None) -> tuple[str, ...]:
    """Choose the columns of the input: known ones, else at most two text columns that are not the answer; none where
    one of these has a name that no template can hold."""
    free = [name for name in texts if name != answer and name not in _NO_INPUT]
    known = next((names for names in INPUTS if set(names) <= set(free)), None)
    return known or (tuple(free) if len(free) <= 2 and all(map(_fits_template, free)) else ())


def _fits_template(name: str) -> bool:
    try:
        return template_fields(f"{{{name}}}") == (name,)
    except ValueError:
        return False


def _advise_renaming(texts: list[str]) -> str:
    """Return the end of a question for columns, which names those that must be renamed first."""
    odd = [name for name in texts if not _fits_template(name)]
    return f". Rename {some(odd)} first: a template takes plain names, without . : ! [ ] {{ }}" if odd else ""
