"""Write the model card of an exported checkpoint."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from featcal.export.card_parts import DRIFT, LICENCE, NOT_MEASURED, SCORES, describe_final_drift, mark
from featcal.export.drift_picture import PICTURE_FILE
from featcal.export.licences import (
    Licences,
    base_card,
    language_of,
    licence_fields,
    licence_warnings,
    main_licence,
)
from featcal.family.opening import Family
from featcal.formats.hub import RECIPE_FILE, HubModel, hub_model
from featcal.formats.located_model import is_classifier
from featcal.formats.model_files import models_on_hub
from featcal.suite.methods import is_method, method
from featcal.suite.name_grammar import model_name
from featcal.suite.recipe import DTYPE, MergeRecipe
from featcal.suite.schema import Suite
from featcal.suite.source import WRITTEN
from featcal.system.errors import InputError
from featcal.system.formatting import code_block, escape_markdown
from featcal.system.in_memory import is_held

CITATION = """```bibtex
@article{featcal,
  title = {FeatCal: Feature Calibration for Post-Merging Models},
  author = {Gu, Yanggan and Cai, Shuo and Wang, Zihao and Wang, Wenjun and Wang, Yuanyi and Wang, Pengkai and
            Huang, Sirui and Lu, Su and Wu, Jianmin and Yang, Hongxia},
  journal = {arXiv preprint arXiv:2605.13030},
  year = {2026}
}
```"""
Command = Callable[[str], str]
"""Function from the word for the suite to the command line that writes a folder. It does not know the folder's name, so
the same run writes the same bytes everywhere."""


@dataclass(frozen=True)
class CardProvenance:
    """Description of how a model was made, for its card."""

    title: str
    what: str
    """Paragraphs of Markdown."""
    settings: Mapping[str, Any]
    command: Command
    warnings: Sequence[str] = field(default=())
    pictured: bool = True
    """True if the card of a calibration has the picture `PICTURE_FILE` beside it."""


def model_card(family: Family, record: Mapping[str, Any], making: CardProvenance) -> str:
    """Write the card of a folder: front matter for the Hub, and a description in words.

    Only references that cannot be local folders are named as base models: their repositories in the front matter, which
    the Hub reads, and the references as given in the text. Values that were not measured are marked.

    Args:
        record: content of the folder's `featcal.json`: `suite_file` and `licences`, and of a calibration
            `relative_drift` and `final_drift`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    suite, base = family.suite, base_card(family)
    refs = [suite.base, *(task.expert for task in suite.tasks.values())]
    on_hub = list(dict.fromkeys(one for _, one in models_on_hub(filter(None, refs), suite.root)))
    repositories = list(dict.fromkeys(one.repo for one in on_hub))
    relation = {"base_model_relation": "merge"} if repositories else {}
    data = ModelCardData(
        **licence_fields(base),
        base_model=repositories or None,
        datasets=list(dict.fromkeys(data_on_hub(suite, "calibration").values())) or None,
        language=language_of(base),
        library_name="sentence-transformers" if family.adapter.embeds else family.adapter.library,
        pipeline_tag=pipeline_tag(family),
        tags=["merge", "featcal"],
        **relation,
    )
    known = {"models on the Hub": ", ".join(one.ref for one in on_hub)} if on_hub else {}
    settings = {name: escape_markdown(str(value)) for name, value in {**known, **making.settings}.items()}
    parts = [
        f"# {escape_markdown(making.title)}",
        making.what,
        *(f"**Warning:** {escape_markdown(one)}." for one in making.warnings),
        f"## Scores\n\n{mark(SCORES, _no_scores(record, suite))}",
        _drift(record, making.pictured),
        _how_it_was_made(family, record, making, settings),
        f"## Licence\n\n{mark(LICENCE, describe_licence(record['licences']))}",
        "Versions, hashes of all inputs and the samples that were used are in `featcal.json`, with what was measured.",
        CITATION,
    ]
    text = "\n\n".join(parts)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n{text}\n"))


def pipeline_tag(family: Family) -> str:
    """Return the Hub's pipeline tag for a written model; by its family, and by whether it includes head or text
    tower."""
    adapter, config = family.adapter, family.container.config
    if adapter.embeds:
        return "sentence-similarity"
    if adapter.generates:
        # The Hub lists models from text to text here too; what it called text2text-generation finds nothing any more.
        return "text-generation" if adapter.image_token is None else "image-text-to-text"
    if adapter.modality == "pixels":
        heads = {"zero-shot-image-classification": _has_text_tower(family), "image-classification": _labels(config)}
        return next((tag for tag, so in heads.items() if so), "image-feature-extraction")
    return "text-classification" if is_classifier(config) else "feature-extraction"


def _has_text_tower(family: Family) -> bool:
    return family.adapter.scores_with == "prompts" and (
        family.container.layout == "open_clip" or "text_config" in family.container.config
    )


def _labels(config: Mapping[str, Any]) -> bool:
    """Say whether a `config.json` belongs to a model with a classifier for pictures: transformers' or timm's."""
    named = str(next(iter(config.get("architectures") or ()), ""))
    return named.endswith("ForImageClassification") or bool(config.get("architecture") and config.get("num_classes"))


def suite_word(record: Mapping[str, Any]) -> str:
    """Return the word for the suite of a record in command lines: its name if it comes with featcal, else a file."""
    facts = record["suite_file"]
    return str(facts["shipped"] or facts.get("name") or re.sub(r"[^\w.-]+", "-", record["suite"]) + ".yaml")


def describe_licence(licences: Licences, licence: str | None = None) -> str:
    """Describe a model's licence, with the questions to settle before publication.

    Args:
        licence: the licence that the publisher chose; None means the base's.
    """
    whose, base = main_licence(licences)
    if licence is not None:
        line = f"{escape_markdown(licence)}, as the publisher of this folder states."
    elif base is not None:
        line = f"{escape_markdown(base)}, which is {whose}'s."
    else:
        line = f"Unknown: {whose} states none."
    warnings = [f"- {escape_markdown(one)}." for one in licence_warnings(licences)]
    return "\n\n".join([line, *(["\n".join(warnings)] if warnings else [])])


def describe_merged(family: Family) -> str:
    """Describe in Markdown the model from which a model was made: its name, and the effect of its method."""
    merged, name = family.suite.merged, family.merged_name
    if name != "merged":
        return f"{escape_markdown(name)}{_explain_method(name)}"
    if not isinstance(merged, MergeRecipe):
        on_hub = not is_held(merged) and find_on_hub(merged, family.suite)
        return "a model in memory" if is_held(merged) else escape_markdown(on_hub.ref) if on_hub else "a checkpoint"
    by_task = [
        f"; {option}: {', '.join(f'{task} {value:g}' for task, value in values.items())}"
        for option, values in merged.options_by_task.items()
    ]
    dtype = f"; stored in {merged.settings[DTYPE]}" if merged.dtype is not None else ""
    recipe = f"{merged.options().name}{''.join(by_task)}{dtype}"
    return f"{escape_markdown(recipe)}{_explain_method(merged.method)}"


def _explain_method(name: str) -> str:
    """Return the effect of the method of a model's name, to follow the name; "" for names of other models."""
    try:
        kind = model_name(name).kind
    except InputError:
        return ""
    if not is_method(kind):
        return ""
    about = method(kind).about
    return f": {about.summary}{about.link and f' ({about.link})'}"


def find_on_hub(ref: str, suite: Suite) -> HubModel | None:
    """Return the model on the Hub that a reference names; None if it is, or may be, a local folder."""
    found = hub_model(ref)
    return None if found is None or (suite.root / ref).exists() else found


def data_on_hub(suite: Suite, split: str) -> dict[str, str]:
    """Return the Hub data sets of the samples of a split, by task."""
    sources = {task: one.source(split) for task, one in suite.tasks.items()}
    named = {task: source.hub for task, source in sources.items() if source is not None and source.hub is not None}
    return {task: hub for task, hub in named.items() if hub_model(hub) and not (suite.root / hub).exists()}


def _no_scores(record: Mapping[str, Any], suite: Suite) -> str:
    """Return the text of a card without scores."""
    if _why_not_again(record):
        return NOT_MEASURED
    if suite.has_written(suite.scored_split):
        return f"{NOT_MEASURED} {WRITTEN.capitalize()}."
    word, lines, sentence = suite_word(record), [], "This"
    if word == RECIPE_FILE:
        word = "suite.yaml"
        lines = [shlex.join(["featcal", "suite", "import", RECIPE_FILE, "--out", word])]
        sentence = f"Once the suite of {RECIPE_FILE} has what its head lists, it"
    lines.append(shlex.join(["featcal", "evaluate", word, "--card", "DIR"]))
    sentence += " scores the model, what it was made of and the experts, and writes the scores here:"
    return f"{NOT_MEASURED} {sentence}\n\n{code_block(chr(10).join(lines), 'bash')}"


def _why_not_again(record: Mapping[str, Any]) -> str:
    """Return why no command line makes a model again; "" if one does."""
    facts = record["suite_file"]
    if facts.get("in_memory"):
        return "Its models or samples were objects in memory, so no command line makes it again."
    if not facts["shipped"] and not facts.get("name"):
        return "Its suite has no file, so no command line makes it again."
    return ""


def _drift(record: Mapping[str, Any], pictured: bool) -> str:
    """Return the part about the drift measured in the calibration."""
    if "relative_drift" not in record:
        return f"## Drift\n\n{NOT_MEASURED}"
    picture = f"![Relative drift from the experts after every block, by task]({PICTURE_FILE})\n\n" if pictured else ""
    sentence = "Distance of the calibrated features from each expert's, over the norm of the expert's."
    measured = record.get("final_drift", {})
    rows = {task: (one["merged"], one["calibrated"], one["samples"]) for task, one in measured.items()}
    return f"## Drift\n\n{picture}{sentence}\n\n{mark(DRIFT, describe_final_drift(rows, 'calibration'))}"


def _how_it_was_made(
    family: Family, record: Mapping[str, Any], making: CardProvenance, settings: Mapping[str, str]
) -> str:
    """Return the part with suite, merged model, settings and command."""
    rows = {
        "suite": escape_markdown(family.suite.name),
        "tasks": ", ".join(map(escape_markdown, family.suite.tasks)),
        "merged model": describe_merged(family),
        **settings,
    }
    lines = (f"| {escape_markdown(name)} | {value} |" for name, value in rows.items())
    table = "\n".join(["| | |", "|---|---|", *lines])
    again, word = _why_not_again(record), suite_word(record)
    if not again:
        what = "the recipe beside this card" if word == RECIPE_FILE else "the suite's file"
        where = "" if record["suite_file"]["shipped"] else f", where {escape_markdown(word)} is {what}"
        again = f"What wrote this folder{where}:\n\n{code_block(making.command(word), 'bash')}"
    return f"## How it was made\n\n{table}\n\n{again}"
