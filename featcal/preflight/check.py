"""Find all problems of a suite at once, with notes and the estimated cost of a calibration, without downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from featcal.calibration.config import config_of_suite, resolve_recipe
from featcal.family.ancestry import Lineages, judge_distances, measure_lineage
from featcal.family.opening import Family
from featcal.family.outside_tower import note_left_out
from featcal.formats.hub import cached_commit
from featcal.formats.model_files import model_commits, unpinned_models
from featcal.formats.weights import TensorInfo, Weights
from featcal.mergers.common.engine import RecipeWeights
from featcal.models.adapter import Adapter
from featcal.models.compute import compute_for
from featcal.preflight.estimates import Estimates, estimate, note_slow_precision, probe_seconds
from featcal.preflight.models import CheckFindings, Opened, add_notes, open_models, usable_family
from featcal.preflight.places import Places
from featcal.preflight.probe import PROBE_SAMPLES, Diagonal, measure_diagonal
from featcal.preflight.remote import Download, needed_on_disks
from featcal.preflight.samples import DrawSize, check_samples
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import SPLITS, Suite, expert_role, references
from featcal.system.errors import FeatcalError, InputError, NoScores
from featcal.system.extras import say_missing
from featcal.system.formatting import readable, some
from featcal.system.versions import all_versions

ASSUMED_TOKENS = 128.0
"""Assumed tokens of a text sample whose data set is not fetched yet."""
PROBE_LIMIT = 15.0
"""Most seconds for the search for swapped experts, unless it is requested."""


@dataclass(frozen=True)
class Preflight:
    """Result of a check: problems, notes, and the cost of a calibration."""

    suite: str
    problems: tuple[str, ...]
    """Problems to correct, by model and then by task: what is wrong, where, and what to do."""
    family: Family | None
    """The opened suite; None if something is wrong or still on the Hub."""
    notes: tuple[str, ...] = ()
    """Facts that may be intended but are worth knowing."""
    downloads: tuple[Download, ...] = ()
    """Files that a run would download first."""
    estimates: Estimates | None = None
    lineage: Lineages | None = None
    """Distance of every model from the base, layer by layer."""
    diagonal: Diagonal | None = None
    """Scores of every expert on every task, if that was requested or cheap."""
    description: Mapping[str, Any] | None = None

    @property
    def download_bytes(self) -> int:
        return sum(one.bytes for one in self.downloads)

    @property
    def prepared_bytes(self) -> int:
        """Return the bytes of downloads that are written a second time: rows of data sets, converted pickles."""
        return sum(one.copied_bytes + one.pickled_bytes for one in self.downloads)

    def to_json(self) -> dict[str, Any]:
        """Return the document of `featcal check --json`."""
        document: dict[str, Any] = {
            "suite": self.suite,
            "ok": not self.problems,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "downloads": [one.to_json() for one in self.downloads],
            "estimates": None if self.estimates is None else self.estimates.to_json(),
            "lineage": None if self.lineage is None else self.lineage.to_json(),
            "diagonal": None if self.diagonal is None else dict(self.diagonal.accuracy),
            "probe": None if self.diagonal is None else self.diagonal.to_json(),
        }
        return document | dict(self.description or {}) | {"versions": all_versions()}


def check_suite(suite: Suite, probe: bool | None = None) -> Preflight:
    """Compare all models, open all sources, and estimate a calibration; collect all problems and notes.

    Models and data sets that are only on the Hub are judged by their description there (shapes, dtypes, sizes); no
    weights are fetched. Weights of local models are read for the distance to the base, one layer at a time.

    Args:
        probe: score every expert on every task, to find swapped ones; None does it if it takes less than `PROBE_LIMIT`
            seconds.
    """
    places = Places(suite.root)
    sources = [source for task in suite.tasks.values() for split in SPLITS if (source := task.source(split))]
    places.ask_ahead(references(suite).values(), sources)
    opened = open_models(suite, places)
    add_notes(suite, opened)
    family = usable_family(suite, opened, places)
    config, general = _config(suite, opened.adapter)
    lineage = _lineage(family, opened)
    _note_left_out(suite, family, opened)
    if isinstance(suite.merged, MergeRecipe):
        general.notes += suite.merged.notes
    tasks, drawn = check_samples(suite, family, places, config)
    estimates = None
    if opened.adapter is not None and suite.origin_role in opened.weights:
        # Estimates are given even where samples are still on the Hub, from sizes that are assumed.
        sizes = {task: drawn.get(task) or _assume_draw(opened.adapter, config) for task in suite.tasks}
        merged = opened.weights.get("merged", opened.weights[suite.origin_role]).info
        estimates = estimate(opened.adapter, merged, sizes, config, 2 + 2 * len(sizes), Path.cwd())
        general.notes += [*_scarce(estimates, places), *note_slow_precision(config, compute_for("auto").device)]
    diagonal = _probe(_sound(family, opened), drawn, config.seed, probe, general)
    if diagonal is None:
        general.notes.append(_unread(lineage) + ("" if probe or len(suite.tasks) < 2 else _HOW_TO_READ))
    general.notes += _note_pickles(places.downloads.values())
    general.problems += _unreachable_problems(places)
    general.notes += _note_unpinned(suite)
    reports = [*opened.reports.values(), *tasks.values(), general]
    # What is wrong with every model or task alike, a missing package, is said once.
    problems = tuple(dict.fromkeys(problem for report in reports for problem in report.problems))
    # `usable_family` leaves out what is broken or missing, so a family alone does not mean that all is well.
    whole = family is not None and not problems and not places.downloads
    return Preflight(
        suite.name,
        problems,
        family if whole else None,
        tuple(note for report in reports for note in report.notes),
        tuple(places.downloads.values()),
        estimates,
        lineage,
        diagonal,
        None if problems else _description(suite, opened),
    )


def _note_unpinned(suite: Suite) -> list[str]:
    """Note the Hub models and data sets without a revision, with their commits on this machine."""
    named = references(suite).values()
    models, commits = unpinned_models(named, suite.root), dict(model_commits(named, suite.root))
    data = {one: commit for one in suite.unpinned_data() if (commit := cached_commit(one, None, "dataset"))}
    found = [
        ("models", models, commits, "write OWNER/NAME@COMMIT"),
        ("data sets", suite.unpinned_data(), data, "set 'revision'"),
    ]
    return [
        f"{what} without a revision may change under the suite: "
        f"{', '.join(f'{one} (here {here[one]})' if one in here else one for one in ids)}; {remedy}"
        for what, ids, here, remedy in found
        if ids
    ]


def _description(suite: Suite, opened: Opened) -> dict[str, Any] | None:
    merged = opened.weights.get("merged", opened.weights.get(suite.origin_role))
    if opened.adapter is None or merged is None:
        return None
    return _sizes(opened.adapter, merged.info, len(suite.tasks))


def _sizes(adapter: Adapter, info: Mapping[str, TensorInfo], tasks: int) -> dict[str, Any]:
    """Return the size of the models and the estimated memory and output of a calibration, from headers only."""
    tower = [info[name] for name in adapter.tower]
    blocks = adapter.blocks()
    largest = max(sum(_count(info[name].shape) for name in block.names) for block in blocks)
    return {
        "family": adapter.family,
        "blocks": len(blocks),
        "parameters": sum(_count(one.shape) for one in tower),
        "dtypes": sorted({str(one.dtype).removeprefix("torch.") for one in tower}),
        "tasks": tasks,
        "bytes_written": sum(one.nbytes for one in info.values()),
        "bytes_of_weights_in_memory": 3 * 4 * largest,
    }


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _config(suite: Suite, adapter: Adapter | None) -> tuple[CalibrationConfig, CheckFindings]:
    """Return the options of a calibration; if the suite's are out of range the paper's, with the problem."""
    try:
        return config_of_suite(suite, adapter), CheckFindings()
    except InputError as error:
        paper = CalibrationConfig() if adapter is None else resolve_recipe(adapter, suite.tasks, {})
        return paper, CheckFindings([*error.problems])


def _lineage(family: Family | None, opened: Opened) -> Lineages | None:
    """Measure distances to the base, and add the findings to the reports."""
    if family is None:
        return None
    models: dict[str, Weights] = {expert_role(task): weights for task, weights in family.experts.items()}
    # A merge that is made on the fly is a sum of the experts, which are measured already.
    if "merged" in opened.weights and not isinstance(family.merged, RecipeWeights):
        models = {"merged": family.merged, **models}
    try:
        lineage, damaged = measure_lineage(family, models)
    # Problems of an expert are returned beside the lineage; here nothing can be compared at all.
    except InputError as error:  # the base itself
        opened.reports[family.suite.origin_role].problems += error.problems
        return None
    problems, notes = judge_distances(lineage)
    for role in models:
        opened.reports[role].problems += [*damaged.get(role, ()), *problems.get(role, ())]
        opened.reports[role].notes += notes.get(role, ())
    return lineage


def _note_left_out(suite: Suite, family: Family | None, opened: Opened) -> None:
    """Add notes on parts of experts that a merge recipe leaves out, if their values can be read."""
    sound = _sound(family, opened)
    if sound is not None and isinstance(suite.merged, MergeRecipe):
        for task, note in note_left_out(sound).items():
            opened.reports[expert_role(task)].notes.append(note)


def _sound(family: Family | None, opened: Opened) -> Family | None:
    """Return the family without experts whose values are damaged or unrelated to the base."""
    if family is None:
        return None
    # What a damaged expert scores or leaves out says nothing new: its report has the cause.
    sound = {task: one for task, one in family.experts.items() if not opened.reports[expert_role(task)].problems}
    return replace(family, experts=sound)


def _probe(
    family: Family | None, drawn: Mapping[str, DrawSize], seed: int, wanted: bool | None, general: CheckFindings
) -> Diagonal | None:
    """Score every expert on every task, if requested or cheap, and add the findings to the report."""
    if family is None or len(family.experts) < 2 or wanted is False:
        return None
    seconds = probe_seconds(family.adapter, drawn, PROBE_SAMPLES)
    if wanted is None and seconds > PROBE_LIMIT:
        general.notes.append(
            f"swapped experts were not looked for: scoring every expert on every task takes about {seconds / 60:.0f} "
            "min; ask for it with --probe"
        )
        return None
    try:
        diagonal = measure_diagonal(family, seed)
    except NoScores as error:
        general.notes.append(f"swapped experts were not looked for: {error}")
        return None
    except FeatcalError as error:
        causes = error.problems if isinstance(error, InputError) else (str(error),)
        general.problems += [f"experts cannot be scored: {one}" for one in causes]
        return None
    if diagonal is None and wanted:
        general.notes.append(
            "swapped experts were not looked for: fewer than two tasks have samples with right answers"
        )
    if diagonal is not None:
        problems, notes = diagonal.findings()
        general.problems += problems
        general.notes += notes
    return diagonal


_HOW_TO_READ = " (--probe runs every expert)"


def _unread(lineage: Lineages | None) -> str:
    """Return a note on weights that were not read, so that a check without problems is not overrated."""
    if lineage is None:
        return "no weights were read; values that are NaN or infinite do not show here"
    what = "the matrices of blocks and embeddings were" if lineage.whole else "one matrix of each layer was"
    return f"of weights, only {what} read; values elsewhere that are NaN or infinite do not show here"


def _assume_draw(adapter: Adapter, config: CalibrationConfig) -> DrawSize:
    """Assume the draw of a task whose samples are not here: pictures of known size, texts of usual length."""
    if adapter.modality != "pixels":
        return DrawSize(config.samples, ASSUMED_TOKENS, 16.0 * ASSUMED_TOKENS)
    inputs = adapter.probe()
    return DrawSize.measure(adapter, inputs, len(next(iter(inputs.values()))), config.samples)


def _scarce(estimates: Estimates, places: Places) -> list[str]:
    """Return notes on resources of this machine that are below the estimate."""
    notes = []
    available = estimates.memory_available_bytes
    if available is not None and estimates.memory_bytes > available:
        notes.append(
            f"about {readable(estimates.memory_bytes)} of memory are needed, {readable(available)} are free; "
            "--max-memory keeps token states in files, fewer samples make them smaller"
        )
    if estimates.disk_bytes > estimates.disk_free_bytes:
        notes.append(
            f"about {readable(estimates.disk_bytes)} will be written, {readable(estimates.disk_free_bytes)} are free "
            "on the disk of the working folder"
        )
    return notes + [
        f"{readable(wanted)} would be fetched from the Hub or written to read it, {readable(free)} are free on the "
        f"disk of {name}"
        for name, wanted, free in needed_on_disks(places.downloads.values())
        if wanted > free
    ]


def _note_pickles(downloads: Iterable[Download]) -> list[str]:
    """Return a note on models that will be converted after the download, and on the space for that."""
    pickled = {one.ref: one.pickled_bytes for one in downloads if one.pickled_bytes}
    if not pickled:
        return []
    return [
        f"weights of {some(list(pickled))} are pickles, of which tensors alone are read; converted once, they take "
        f"{readable(sum(pickled.values()))} more in featcal's cache folder"
    ]


def _unreachable_problems(places: Places) -> list[str]:
    """Return one problem for all models and one for all data sets that cannot be described."""
    problems = []
    for trouble in dict.fromkeys(places.troubles.values()):
        of = [ref for ref, one in places.troubles.items() if one == trouble]
        ids = "; ".join(f"'{ref}' ({_name_labels(places.unreachable[ref], places.parts_here)})" for ref in of)
        problems.append(f"the Hub {trouble.why}: {ids}; {trouble.remedy}")
    if places.without_package:
        names = ", ".join(f"'{name}'" for name in sorted(places.without_package))
        problems.append(say_missing("datasets", f"data sets {names}"))
    return problems


def _name_labels(labels: Sequence[str], parts_here: Mapping[str, str]) -> str:
    own = list(dict.fromkeys(labels))
    first = own[0] + parts_here.get(own[0], "")
    return first if len(own) == 1 else f"{first} and {len(own) - 1} more"
