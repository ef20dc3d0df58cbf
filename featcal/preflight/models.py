"""Open the models of a suite as far as possible, so that problems do not hide each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from featcal.family.opening import WITHOUT_BASE, Family, classify, open_family, open_model
from featcal.formats.hub import hub_model
from featcal.formats.located_model import Located, explain_model_errors
from featcal.formats.tokenizers import text_folder
from featcal.formats.weights import FirstRows, TensorInfo, Weights
from featcal.models.adapter import Adapter
from featcal.models.families.registry import adapter_for
from featcal.models.generation import read_generation_config
from featcal.preflight.places import Places
from featcal.preflight.tokenizers import tokenizer_disagreement
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite, expert_role, references
from featcal.system.errors import InputError
from featcal.system.formatting import some

CPU = torch.device("cpu")


@dataclass
class CheckFindings:
    """Problems and notes of one model or one task."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def collect_problems(self) -> Iterator[None]:
        """Add the problems of an InputError inside the `with` to the report, instead of raising it."""
        try:
            yield
        except InputError as error:
            self.problems += error.problems


@dataclass
class Opened:
    """The models of a suite that could be opened, by role: "base", "merged" or "expert 'TASK'"."""

    adapter: Adapter | None
    located: dict[str, Located]
    weights: dict[str, Weights]
    """Models that fit the base's architecture; their values can be read if all their files are here."""
    reports: dict[str, CheckFindings]
    """One per role, in the order of the suite."""


def open_models(suite: Suite, places: Places) -> Opened:
    """Find and compare every model from its headers, on this machine or on the Hub; nothing is fetched."""
    opened = Opened(None, {}, {}, {role: CheckFindings() for role in references(suite)})
    for role, ref in references(suite).items():
        with opened.reports[role].collect_problems():
            found = places.locate(ref, role)
            if found is not None:
                opened.located[role] = found
    experts = {role: one for role, one in opened.located.items() if role not in ("base", "merged")}
    for role, found in opened.located.items():
        with opened.reports[role].collect_problems():
            # `references` begins with it, so its adapter is there when the others are opened.
            if role == suite.origin_role:
                with explain_model_errors(role, found.config_source):
                    own_text = suite.text_tower == "own"
                    opened.adapter = adapter_for(found.config, found.names, CPU, role, own_text, classify(experts))
                if opened.adapter.scores_with == "vocabulary":
                    read_generation_config(found.folder)
            if opened.adapter is not None:
                opened.weights[role] = open_model(found, opened.adapter, CPU, suite)
    return opened


def usable_family(suite: Suite, opened: Opened, places: Places) -> Family | None:
    """Return the suite without broken models and models that are not fetched: base, and the experts that fit it.

    Its `suite` is the whole one, so that samples of every task can be drawn.
    """
    here = [role for role, ref in references(suite).items() if role in opened.weights and places.is_local(ref)]
    tasks = {t: s for t, s in suite.tasks.items() if expert_role(t) in here}
    if suite.origin_role not in here or not tasks:
        return None
    experts = {task: spec.model_copy(update={"expert": places.local(spec.expert)}) for task, spec in tasks.items()}
    merged = suite.merged
    if not isinstance(merged, MergeRecipe):
        # A stand-in that can always be made: lineage and samples of the rest do not need the real merge.
        merged = places.local(merged) if "merged" in here else MergeRecipe(method="simple-averaging")
    base = suite.base and places.local(suite.base)
    part = suite.model_copy(update={"base": base, "merged": merged, "tasks": experts})
    return replace(open_family(part, device="cpu"), suite=suite)


def add_notes(suite: Suite, opened: Opened) -> None:
    """Add notes from headers and configurations: dtypes, tokenizers, declared bases, activations."""
    base = opened.located.get(suite.origin_role)
    tower = opened.adapter.tower if opened.adapter else ()
    for role, found in opened.located.items():
        report = opened.reports[role]
        if role in opened.weights:
            report.notes += _dtypes(role, opened.weights[role], tower)
        report.notes += found.notes()
        if base is not None and role != suite.origin_role:
            report.notes += _declared_base(suite, role, base, found, opened.weights.get(role))
            text = opened.adapter is not None and opened.adapter.modality != "pixels"
            disagreement = tokenizer_disagreement(base.folder, text_folder(found))
            if disagreement and role != "merged":
                unused = "" if text else "; pictures are not affected"
                sentence = f"{role}: {disagreement.sentence}; featcal reads text with the base's tokenizer{unused}"
                sentence = sentence.replace("the base", suite.origin_words)
                (report.problems if text and disagreement.changed else report.notes).append(sentence)
    if suite.base is None:
        opened.reports[suite.origin_role].notes.append(WITHOUT_BASE)
    if opened.adapter is not None:
        limits = [f"{suite.origin_role}: {opened.adapter.limits}"] if opened.adapter.limits else []
        opened.reports[suite.origin_role].notes += limits + _note_uncalibrated(
            opened.adapter, suite.calibration.explicit_options().get("routers", False)
        )
    stored = {role: _main_dtype(weights, tower) for role, weights in opened.weights.items()}
    if len(set(stored.values())) > 1:
        kinds = {kind: [role for role, own in stored.items() if own == kind] for kind in stored.values()}
        which = "; ".join(f"{kind}: {', '.join(roles)}" for kind, roles in kinds.items())
        opened.reports[suite.origin_role].notes.append(
            f"models are stored in different dtypes ({which}); the written model has those of the merged one"
        )


def _note_uncalibrated(adapter: Adapter, routers: bool) -> list[str]:
    """Add notes on tensors of the blocks that always stay as merged, with or without routers."""
    names = adapter.uncalibrated_names(routers)
    if not names:
        return []
    count = "one tensor" if len(names) == 1 else f"{len(names)} tensors"
    return [f"base: {count} inside the blocks belong to no linear map and no norm, and stay as merged: {some(names)}"]


def _main_dtype(weights: Weights, tower: tuple[str, ...]) -> str:
    return Counter(_name(weights.info[name]) for name in tower).most_common(1)[0][0]


def _dtypes(role: str, weights: Weights, tower: tuple[str, ...]) -> list[str]:
    counts = Counter(_name(weights.info[name]) for name in tower)
    if len(counts) == 1 or _base_attribute(weights, "declared_base") is not None:  # LoRA: what it changes is float32
        return []
    return [f"{role}: a mix of dtypes: " + ", ".join(f"{n} tensors {dtype}" for dtype, n in counts.most_common())]


def _name(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _base_attribute(weights: Weights | None, attribute: str) -> Any:
    return getattr(weights.under if isinstance(weights, FirstRows) else weights, attribute, None)


def _declared_base(suite: Suite, role: str, base: Located, found: Located, weights: Weights | None) -> list[str]:
    """Add notes on models that name another base than the suite's; local paths are ignored."""
    lora = _base_attribute(weights, "declared_base")
    declared = lora if lora is not None else found.config.get("_name_or_path")
    own = references(suite)[role]
    known = {_repo(one) for one in (suite.base, base.config.get("_name_or_path"), own)} - {None}
    repo = _repo(declared)
    if suite.base is None or repo is None or not known or repo in known:
        return []
    where = "adapter_config.json" if lora is not None else "config.json"
    return [
        f"{role}: its {where} names '{declared}' as its base, the suite's is '{suite.base}'; is that the right one?"
    ]


def _repo(ref: Any) -> str | None:
    """Return the Hub repository of a whole model; None for everything else, such as a folder in a repository."""
    model = hub_model(ref) if isinstance(ref, str) else None
    return None if model is None or model.folder else model.repo
