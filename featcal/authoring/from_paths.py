"""Make a suite from named models and samples, for `featcal suite init` and `featcal diagnose`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featcal.authoring.columns import Reads
from featcal.authoring.common import comments, samples_missing
from featcal.authoring.from_form import format_suite
from featcal.authoring.guess import guess
from featcal.formats.hub import hub_model
from featcal.formats.located_model import TEXT_CLASSES, is_classifier
from featcal.formats.lora import split_lora
from featcal.formats.open_clip_config import PREFIXES
from featcal.formats.peft import task_type
from featcal.formats.sentences import MODULES_FILE, SentenceText
from featcal.formats.tokenizers import has_chat_template
from featcal.models.families.encoder_facts import EncoderFacts
from featcal.models.families.registry import find_row
from featcal.models.families.vision_language_facts import VisionLanguageFacts
from featcal.suite.methods import is_merger
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, join_words
from featcal.system.json_files import read_json
from featcal.system.paths import from_folder, local_path, neighbours
from featcal.system.sandbox import require_links_inside

DEFAULT_MERGE = {"method": "task-arithmetic", "scale": 0.3}
"""Default merge recipe: the paper's."""


@dataclass(frozen=True)
class SuiteParts:
    """Models and samples of a suite from a command line; paths start from the working folder.

    Args:
        base: None if it is unknown and `merged` is a model.
        experts: task → reference of its expert.
        data: task → place of its samples, as `featcal.authoring.guess.guess` reads it.
        merged: reference of a merged model, or a method of merging; None is Task Arithmetic at 0.3.
        otherwise: source of texts that experts write, for tasks that are not in `data`; None asks for samples.
        options: more keys of the suite file.
    """

    base: str | None
    experts: Mapping[str, str]
    data: Mapping[str, str]
    merged: str | None = None
    otherwise: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Beginning:
    """Text of a suite file, with its assumptions and its gaps, a line each."""

    text: str
    assumed: tuple[str, ...]
    missing: tuple[str, ...]


def write_suite_text(parts: SuiteParts, out: Path) -> Beginning:
    """Return the text of the suite file `out`, without writing the file.

    Raises:
        InputError: missing models or samples, or samples of a task without an expert; the message lists all of them.
    """
    problems: list[str] = []
    assumed: list[str] = []
    missing: list[str] = []
    content: dict[str, Any] = {"name": out.stem, "base": None, "merged": {}, **parts.options, "tasks": {}}
    if not parts.experts:
        problems.append("no expert is given; name one for every task, as in --expert cars=./experts/cars")
    for task in parts.data.keys() - parts.experts.keys():
        hint = did_you_mean(task, parts.experts)
        problems.append(f"samples of '{task}', which has no expert; give --expert {task}=… or leave them out.{hint}")
    if parts.base is None:
        assumed.append("base: not known, so rho is 1, and what starts from a base is refused")
    else:
        with _collect_problems(problems):
            content["base"] = _model(parts.base, out.parent, "base")
    with _collect_problems(problems):
        content["merged"], more = _choose_merged(parts.merged, out.parent)
        assumed += more
    first = parts.base or next(iter(parts.experts.values()), "")
    reads = _reads(first, parts.experts.values())
    text, lines = _text_of(first) if reads == "likeness" else ({}, [])
    assumed += lines
    for task, expert in parts.experts.items():
        content["tasks"][task] = {}
        with _collect_problems(problems):
            content["tasks"][task] = {"expert": _model(expert, out.parent, f"expert '{task}'")}
        if task in parts.data:
            with _collect_problems(problems, f"task '{task}': "):
                found = guess(parts.data[task], out.parent, reads)
                classes = _classes(expert) if reads == "classes" else {}
                content["tasks"][task] |= {**classes, **text, **found.task}
                assumed += [f"task '{task}': classes are named as in the expert's config.json"] * bool(classes)
                assumed += (f"task '{task}': {line}" for line in found.assumed)
                missing += (f"task '{task}': {line}" for line in found.missing)
        elif parts.otherwise is not None:
            content["tasks"][task] |= {"calibration": parts.otherwise}
    if problems:
        raise InputError(*problems)
    without = [task for task in parts.experts if task not in parts.data]
    if without and parts.otherwise is not None:
        assumed.append(f"samples of {join_words(without)}: none were given, so their experts write texts")
    missing += samples_missing([] if parts.otherwise is not None else without)
    head = comments({"To be filled in:": missing, "Taken for granted:": assumed})
    return Beginning(head + format_suite(content), tuple(assumed), tuple(missing))


def _reads(base: str, experts: Iterable[str]) -> Reads:
    """Determine from files of local models how they answer texts: encoders of text, and decoders whose experts all have
    a classifier, with classes; folders of sentence-transformers with similarities; models with a chat template in
    conversations."""
    with suppress(InputError):  # whoever opens the base says what is wrong
        folder = local_path(split_lora(base, Path.cwd())[0], Path.cwd(), "base")
        if (folder / MODULES_FILE).is_file():
            return "likeness"
        kind = read_json(folder / "config.json").get("model_type")
        row = find_row(kind)
        if isinstance(row, EncoderFacts):
            return "classes" if row.modality == "text" else "answers"
        if row is not None and not isinstance(row, VisionLanguageFacts) and all(map(_classifies, experts)):
            return "classes"
        if has_chat_template(folder):
            return "turns"
    return "answers"


def _text_of(base: str) -> tuple[dict[str, int], list[str]]:
    """Return the length at which a sentence-transformers folder cuts texts, as a key of a
    task, and notes on how it changes texts.
    """
    folder = local_path(split_lora(base, Path.cwd())[0], Path.cwd(), "base")
    found, lines = SentenceText.from_folder(folder), []
    if found.max_seq_length is not None:
        lines.append(f"max_length: texts are cut at {found.max_seq_length} tokens, as the base's own files say")
    if found.prompt:
        lines.append(f"every text has the base's default prompt in front of it, {found.prompt!r}")
    return ({} if found.max_seq_length is None else {"max_length": found.max_seq_length}), lines


def _classifies(expert: str) -> bool:
    """Say whether an expert has a text classifier by its files; False for one on the Hub."""
    with suppress(InputError):
        base, adapter = split_lora(expert, Path.cwd())
        if adapter is not None:
            return task_type(local_path(adapter, Path.cwd(), "expert")) == TEXT_CLASSES
        return is_classifier(read_json(local_path(base, Path.cwd(), "expert") / "config.json"))
    return False


def _classes(expert: str) -> dict[str, list[str]]:
    """Return the class names in an expert's own files, as a key of its task; nothing for an expert on the Hub."""
    from featcal.family.opening import named_classes

    with suppress(InputError):
        base, adapter = split_lora(expert, Path.cwd())
        names = named_classes(read_json(local_path(adapter or base, Path.cwd(), "expert") / "config.json"))
        return {"classes": [*names]} if names else {}
    return {}


def _choose_merged(given: str | None, root: Path) -> tuple[str | dict[str, Any], list[str]]:
    if given is None:
        return dict(DEFAULT_MERGE), ["merged: Task Arithmetic at scale 0.3, since no merged model was given (--merged)"]
    if is_merger(given) and not Path(given).is_dir():
        return {"method": given}, []
    return _model(given, root, "merged"), []


def _model(given: str, root: Path, label: str) -> str:
    """Return a model reference relative to a suite file in `root`.

    Raises:
        InputError: a folder that does not exist; a Hub id stays unchanged.
    """
    if given.startswith(PREFIXES):
        kind, _, place = given.rpartition(":")
        path = local_path(place, Path.cwd(), label)
        if kind.endswith(".json"):  # the architecture is a file, too
            prefix, _, config = kind.partition(":")
            kind = f"{prefix}:{from_folder(local_path(config, Path.cwd(), label), root)}"
        return f"{kind}:{from_folder(path, root)}" if path.exists() else given
    parts = [part for part in split_lora(given, Path.cwd()) if part is not None]
    return "+".join(_folder_or_id(part, root, label) for part in parts)


def _folder_or_id(given: str, root: Path, label: str) -> str:
    path = local_path(given, Path.cwd(), label)
    if path.is_dir():
        require_links_inside(path, label)
        return from_folder(path, root)
    within = Path(given).parts[0] if given else ""
    if given.startswith((".", "/", "~")) or hub_model(given) is None or Path(within).is_dir():
        raise InputError(
            f"{label}: no folder {path}; give the folder of a model, or an id such as 'owner/name' on the Hub."
            f"{did_you_mean(given, neighbours(given))}"
        )
    return given


@contextmanager
def _collect_problems(problems: list[str], label: str = "") -> Iterator[None]:
    """Collect the problems of an InputError inside the `with` in the list, instead of raising it."""
    try:
        yield
    except InputError as error:
        problems += (label + one for one in error.problems)
