"""Change parts of a written card, its scores and its licence, and leave every other line unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from featcal.formats.hub import CARD_FILE
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.formatting import escape_markdown, percent, points, printable

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard

SCORES, LICENCE, DRIFT = "scores", "licence", "final drift"
"""Names of the parts that can be rewritten."""
NOT_MEASURED = "Not measured."
_METRICS = {"spearman": "spearmanr"}
"""featcal's name of a metric → the Hub's, if they differ."""


@dataclass(frozen=True)
class CardScore:
    """One row of the table in a card: scores of the metric, 0-1 or, for a correlation, -1 to 1."""

    task: str
    metric: str
    """ "" for the average over tasks."""
    n: int
    after: float
    """The score of the card's model."""
    expert: float
    before: float | None = None
    """The score of the model before calibration; None for a merge, which was made from the experts."""
    low: float = 0.0
    """Lower end of the 95 % interval of `after` - `before`."""
    high: float = 0.0
    data: str = ""
    """Hub data set of the samples; empty for others."""


@dataclass(frozen=True)
class CardScores:
    """All scores of a card, on one split of a suite."""

    suite: str
    split: str
    model: str
    """Name of the model in the Hub's index."""
    before: str
    """Name of the model before calibration; "" if there is none."""
    rows: Sequence[CardScore]
    """One per task, the average last."""


def mark(part: str, content: str) -> str:
    """Enclose a part of a card in comments by which it can be found again."""
    return f"<!-- {part} -->\n\n{content}\n\n<!-- end of {part} -->"


def load_card(folder: Path) -> ModelCard:
    """Read the card of a folder.

    Raises:
        InputError: there is none, or its front matter cannot be read.
    """
    from huggingface_hub import ModelCard

    file = folder / CARD_FILE
    if not file.is_file():
        raise InputError(f"{folder} has no {CARD_FILE}; write the folder with featcal, or give it a card")
    try:
        return ModelCard.load(file)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{file}: its front matter cannot be read ({why}); correct it") from error


def save_card(folder: Path, text: str) -> None:
    """Write the card of a folder, whole or not at all; raise InputError if the disk is full or not writable."""
    file = folder / CARD_FILE
    try:
        put(file, text)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error


def with_scores(card: ModelCard, scores: CardScores, task_type: str) -> str:
    """Return a card with these scores in its table and in the Hub's index; other entries of the index stay.

    Args:
        task_type: the Hub's pipeline tag of the model.
    """
    from huggingface_hub import ModelCard

    changed = ModelCard(str(card))
    own = [_result(row, scores, task_type) for row in scores.rows if row.metric]
    others = [one for one in changed.data.eval_results or [] if not any(map(one.is_equal_except_value, own))]
    changed.data.eval_results = [*others, *own]
    changed.data.model_name = changed.data.model_name or _plain(scores.model)
    changed.text = _replace(changed.text, SCORES, _table(scores))
    return str(changed)


def with_final_drift(card: ModelCard, rows: Mapping[str, tuple[float, float, int]], split: str) -> str:
    """Return a card with other rows of `describe_final_drift`."""
    from huggingface_hub import ModelCard

    changed = ModelCard(str(card))
    changed.text = _replace(changed.text, DRIFT, describe_final_drift(rows, split))
    return str(changed)


def describe_final_drift(rows: Mapping[str, tuple[float, float, int]], split: str) -> str:
    """Describe the relative drift of final features.

    Args:
        rows: before and after calibration, and the number of samples, by task; empty if it was not measured.
        split: the one of the samples.
    """
    sentence = f"Final features, before and after calibration, on {split} samples"
    if not rows:
        return f"{sentence}: {NOT_MEASURED.lower()}"
    lines = [
        f"| {escape_markdown(task)} | {before:.4f} | {after:.4f} | {n} |" for task, (before, after, n) in rows.items()
    ]
    return "\n".join([f"{sentence}:", "", "| task | before | after | samples |", "|---|---:|---:|---:|", *lines])


def with_licence(card: ModelCard, licence: str, account: str) -> ModelCard:
    """Return a card with another licence in its front matter, and this description of it below."""
    from huggingface_hub import ModelCard

    changed = ModelCard(str(card))
    changed.data.license = licence
    if licence != "other":  # they name another licence than the one that is stated now
        for name in ("license_name", "license_link"):
            setattr(changed.data, name, None)
    changed.text = _replace(changed.text, LICENCE, account)
    return changed


def _replace(text: str, part: str, content: str) -> str:
    """Return a card's text with a rewritten part, at the end if its comments were removed."""
    first, last = f"<!-- {part} -->", f"<!-- end of {part} -->"
    start, end = text.find(first), text.find(last)
    if 0 <= start < end:
        return f"{text[:start]}{mark(part, content)}{text[end + len(last) :]}"
    return f"{text.rstrip()}\n\n## {part.capitalize()}\n\n{mark(part, content)}\n"


def _result(row: CardScore, scores: CardScores, task_type: str) -> EvalResult:
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type=task_type,
        dataset_type=row.data or _plain(f"{scores.suite}/{row.task}"),
        dataset_name=_plain(row.task),
        dataset_split=scores.split,
        metric_type=_METRICS.get(row.metric, row.metric),
        metric_name=row.metric.replace("_", " "),
        metric_value=row.after,
    )


def _plain(text: str) -> str:
    """Return a name from outside as one line that a terminal can show and YAML can hold."""
    return " ".join(printable(text).split())


def _table(scores: CardScores) -> str:
    """Return the table of scores, with an explanation of its numbers."""
    compared = bool(scores.before)
    name = escape_markdown(scores.before)
    columns = ["task", "metric", *([name] if compared else []), "this model"]
    columns += [*(["difference (95 % interval)"] if compared else []), "expert", "n"]
    lines = [f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}"]
    for row in scores.rows:
        cells = [escape_markdown(row.task), row.metric.replace("_", " "), percent(row.after), percent(row.expert)]
        if compared and row.before is not None:
            apart = f"{points(row.after - row.before)} ({points(row.low)} to {points(row.high)})"
            cells[2:3] = [percent(row.before), percent(row.after), apart]
        lines.append(f"| {' | '.join([*cells, str(row.n)])} |")
    about = f"Scores in % on the {scores.split} split of {escape_markdown(scores.suite)}."
    if compared:
        about += " Intervals are over samples that are drawn again (bootstrap), not over other calibration samples."
    return "\n".join([about, "", *lines])
