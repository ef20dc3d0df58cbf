"""Calibrate the merged model of a suite."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.calibration.account import account_of, describe_text
from featcal.calibration.algorithm1 import Account, ForwardOrder, InMemoryBlocks
from featcal.calibration.baseline_drift import warnings_of
from featcal.calibration.block_statistics import FirstBlock
from featcal.calibration.column_rounding import calibrated_weights, require_packable
from featcal.calibration.config import (
    config_of_suite,
    options_without_base,
    require_base,
    resolve_options,
    resolve_recipe,
    select_tasks,
)
from featcal.calibration.decisions import add_directions
from featcal.calibration.distributed_inputs import SharedBlocks, distribute_run, meter_reads, own_passes, shares
from featcal.calibration.memory import MemoryLimits, block_bytes, device_budget, gradient_bytes, state_budget
from featcal.calibration.rounding import QuantizationError, summarise_storing
from featcal.calibration.routed_group import note_starved
from featcal.calibration.store import Watch, watch_nothing
from featcal.evaluation.generation_check import canary_warnings, compare_generation, note_unchecked
from featcal.export.card import model_card
from featcal.export.drift_picture import PICTURE_FILE, write_drift_picture
from featcal.export.kept_work import UNCHECKED, keep_work, require_checked
from featcal.export.licences import licence_conflicts, read_licences
from featcal.export.record_facts import identify_model, input_files, input_hashes, read_draws
from featcal.export.to_model import to_library_model
from featcal.export.write import can_reload, plain_card, require_weights_alone, write_model
from featcal.family.ancestry import check_lineage
from featcal.family.opening import WITHOUT_BASE, Family, ensure_family
from featcal.family.outside_tower import note_left_out
from featcal.formats.output import OutputFolder, require_absent
from featcal.formats.processor import image_processor_settings
from featcal.formats.weights import Weights
from featcal.models.activations import ActivationStore
from featcal.models.adapter import Adapter
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, WalkCache, require_same_compute
from featcal.suite.calibration_options import ASKED, CAUTIOUS, IDLE, OWN, PAPER, CalibrationConfig
from featcal.suite.facts import suite_facts
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite
from featcal.system.distributed import ALONE, Ranks, current_ranks
from featcal.system.drawing import Drawable
from featcal.system.environment import machine_facts
from featcal.system.errors import InputError
from featcal.system.fingerprints import FileStamp, stamps
from featcal.system.formatting import did_you_mean
from featcal.system.in_memory import is_held
from featcal.system.progress import Progress, peak_rss_bytes, silent
from featcal.system.versions import all_versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def config_for(family: Family, **asked: Any) -> CalibrationConfig:
    """Return the options of a run: those given (None means not given), else the suite's, else the recipe's for the
    architecture.

    A suite's options for one recipe (`OWN`) are ignored for other recipes, and `cautious` overrides them.

    Args:
        asked: fields of `CalibrationConfig` and `SHORTHANDS`, by name.

    Raises:
        InputError: there is no such option, a value is outside its range, or an option has no effect for the
            architecture.
    """
    problems = [f"no option '{name}'.{did_you_mean(name, ASKED)}" for name in asked if name not in ASKED]
    if problems:
        raise InputError(*problems)
    given = {name: value for name, value in asked.items() if value is not None}
    recommended = family.suite.calibration.explicit_options()
    if given.get("recipe", recommended.get("recipe", PAPER)) != recommended.get("recipe", PAPER):
        recommended = {name: value for name, value in recommended.items() if name not in OWN}
    if given.get("cautious"):
        recommended = {name: value for name, value in recommended.items() if name not in CAUTIOUS}
    return resolve_recipe(family.adapter, family.suite.tasks, options_without_base(family.suite) | recommended | given)


@dataclass(frozen=True, repr=False)
class CalibrationResult(Drawable):
    """A calibrated model and the record of its calibration.

    >>> import featcal
    >>> calibrated = featcal.calibrate(featcal.load_suite("lm-mini"), featcal.CalibrationConfig(samples=8))
    >>> {task: one["tokens"] for task, one in calibrated.record["tasks"].items()}
    {'sentiment': 188, 'entailment': 238, 'correct': 172, 'rewrite': 211}
    >>> {task: round(one["calibrated"], 2) for task, one in calibrated.record["final_drift"].items()}
    {'sentiment': 0.46, 'entailment': 0.4, 'correct': 0.08, 'rewrite': 0.17}
    """

    family: Family
    config: CalibrationConfig
    weights: Weights
    """The merged model with its calibrated blocks; every function that takes a model accepts it."""
    record: Mapping[str, Any]
    """command, suite, model, config, tasks (samples, tokens, truncated, indices, hash), seconds by stage, relative
    drift by block (named as in tables) and of the final features, warnings where the latter rose, the rounding error if
    solutions are stored in half precision (`storing`, see `QuantizationError`), the processor that prepared the
    samples, versions, machine, and the process's peak memory when the calibration ended; a saved record has the peak
    after writing.
    """

    def save(self, out: str | Path) -> list[str]:
        """Write a folder that `from_pretrained` loads, with card and `featcal.json`; returns the file names.

        Raises:
            InputError: `out` exists or cannot be written.
            NumericalError: the folder does not load back to the same model.
            UncheckedError: it is written, but a check could not run.
        """
        origin = _origin(self.family)
        with OutputFolder(out) as folder:
            content = _write(folder, self, origin, lambda: self.record["seconds"])
        written: list[str] = require_checked({"out": str(folder.out), **content})["written"]
        return written

    def to_model(self) -> PreTrainedModel:
        """Return the calibrated model as the library's own class, in eval mode: bit for bit what `from_pretrained`
        loads from the folder that `save` writes. It shares no memory with the result.

        Raises:
            InputError: a model of another library than transformers.
        """
        return to_library_model(self.family, self.family.container, self.weights)


def calibrate_family(
    suite: Suite | Family,
    config: CalibrationConfig | None = None,
    *,
    experts: Mapping[str, ExpertPass] | None = None,
    first: FirstBlock | None = None,
    watch: Watch = watch_nothing,
    device: str = "auto",
    progress: Progress = silent,
) -> CalibrationResult:
    """Calibrate in memory: Algorithm 1.

    Args:
        config: by default the options that the suite recommends, else the paper's for the architecture.
        experts: expert passes to reuse, from `expert_passes` with the same samples and precision; passes of excluded
            tasks are not used.
        first: cache for the statistics of the first block, for the next run with the same `experts`.
        watch: called with the complete statistics of every block, or piece, before its solve.

    Raises:
        InputError: the suite, its models or its samples are not usable.
        NumericalError: the closed form has no trustworthy solution with these options.
    """
    opened = ensure_family(suite, device)
    config = _resolve(config, opened)
    family = ensure_family(opened, device, config.precision)
    started, busy, again = time.perf_counter(), time.process_time(), experts is not None
    passes = expert_passes(family, config) if experts is None else select_tasks(config, experts)
    require_same_compute(passes, family.compute)
    loaded = time.perf_counter() - started
    run, blocks, drawn = family.run(progress), InMemoryBlocks(), read_draws(passes)
    passes = add_directions(family, run, passes) if config.decisions else passes
    account = ForwardOrder(run, passes, config, blocks, first if again else None, watch).calibrate()
    seconds = {**_seconds_since(started, busy), "samples": loaded, **run.seconds}
    record = {**_record(family, config, drawn, account, run), "seconds": seconds}
    return CalibrationResult(family, config, calibrated_weights(family.merged, config, blocks.tensors), record)


def _seconds_since(started: float, busy: float) -> dict[str, float]:
    """Return the seconds of the clock and of all the process's processors since both were read."""
    return {"total": time.perf_counter() - started, "processor": time.process_time() - busy}


def calibrate_to_folder(
    suite: Suite | Family,
    config: CalibrationConfig,
    out: str | Path,
    *,
    resume: bool = False,
    max_memory: int | MemoryLimits | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Calibrate directly to a folder: every finished block goes to disk, so that an interrupted run can be resumed.

    Args:
        max_memory: bytes of resident memory to stay within, or limits of process and device; token states beyond it go
            to files, and a written model that does not fit is verified block by block. With several ranks
            (`distributed.join_process_group`) each rank makes the same call; the ranks with a task read its expert, and
            rank 0 writes.

    Returns:
        The document of `featcal calibrate --json`; without `out` it is also the content of `featcal.json`. Empty on
        ranks other than 0.

    Raises:
        InputError: suite, models, samples or folder are not usable.
        NumericalError: there is no trustworthy solution, or the folder does not load back to the same model.
        UncheckedError: the folder is written, but a check could not run; the error has the document.

    >>> import featcal, tempfile
    >>> suite, config = featcal.load_suite("lm-mini"), featcal.CalibrationConfig(samples=2, blocks=("block 0",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = featcal.calibrate_to_folder(suite, config, f"{folder}/calibrated")
    >>> "model.safetensors" in report["written"]
    True
    """
    started, busy = time.perf_counter(), time.process_time()
    family, read = meter_reads(ensure_family(suite, device, config.precision), current_ranks())
    config = _resolve(config, family)
    _require_writable(family, config, out)
    ranks = current_ranks().sharing(select_tasks(config, family.suite.tasks))
    before, origin = _input_stamps(family), _origin(family, ranks)  # a model of another base is to cost no work
    passes, drawn = own_passes(family, config, ranks)
    limits = max_memory if isinstance(max_memory, MemoryLimits) else MemoryLimits(max_memory)
    run = distribute_run(family.run(progress, _store(family, config, passes, limits, Path(out))), ranks)
    loaded = time.perf_counter() - started
    passes = add_directions(family, run, passes) if config.decisions else passes
    with _folder(out, _identity(family, config, drawn, origin["inputs"]), resume, ranks) as folder:
        blocks = folder if folder is not None and not ranks.several else SharedBlocks(ranks, folder)
        account = ForwardOrder(run, passes, config, blocks).calibrate()
        record = _record(family, config, drawn, account, run) | shares(run, passes, read)
        if folder is None:
            return {}
        _require_unchanged(family, before, folder)
        del passes  # their samples would be in the way of what is written and verified
        seconds = partial(_seconds_of_run, (started, busy), {"samples": loaded, **run.seconds}, time.perf_counter())
        done = folder.finished_tensors(family.adapter.blocks())
        made = CalibrationResult(family, config, calibrated_weights(family.merged, config, done), record)
        content = _write(folder, made, origin, seconds, whole=can_reload(family.merged.info, limits.process))
    return require_checked({"out": str(folder.out), **content})


def _require_unchanged(family: Family, before: set[FileStamp], folder: OutputFolder) -> None:
    """Raise InputError, and give up the finished blocks, if a file changed while it was read."""
    if changed := sorted({file for file, *_ in _input_stamps(family) ^ before}):
        folder.forget()
        raise InputError(*(f"{file}: changed while it was read; run again" for file in changed))


def _seconds_of_run(began: tuple[float, float], stages: Mapping[str, float], solved: float) -> dict[str, float]:
    """Return the seconds of clock and processor since a run began, with those of its stages and of writing."""
    return {**_seconds_since(*began), **stages, "writing": time.perf_counter() - solved}


def _folder(
    out: str | Path, identity: Mapping[str, Any], resume: bool, ranks: Ranks
) -> AbstractContextManager[OutputFolder | None]:
    """Open the output folder on rank 0; do nothing on the others."""
    return nullcontext() if ranks.rank else OutputFolder(out, identity, resume)


def expert_passes(
    family: Family, config: CalibrationConfig, kept: WalkCache | None = None, split: str = "calibration"
) -> dict[str, ExpertPass]:
    """Draw the samples of every task that takes part, with its expert; texts of unequal lengths are sorted by length.

    They depend on tasks, samples, copies, seed, batch size and precision of `config`, not on lam, rho or alpha.

    Args:
        kept: cache of `Family.expert_pass` for the next walk.
        split: split of the samples, another one than "calibration" for methods that are defined on it.
    """

    def one(task: str) -> ExpertPass:
        drawn = family.samples(task, split, config.samples, config.seed, copies=config.augment)
        return family.expert_pass(drawn, config.batch_size, kept, in_order=False)

    return {task: one(task) for task in select_tasks(config, family.suite.tasks)}


def _resolve(config: CalibrationConfig | None, family: Family) -> CalibrationConfig:
    """Return the complete options of a run; by default those that the suite recommends.

    Raises:
        InputError: as `resolve` and `require_base`, also for a suite's own options that the run does not use, because
            the card names both.
    """
    config_of_suite(family.suite, family.adapter)
    found = resolve_options(config or config_for(family), family.adapter, family.suite.tasks)
    require_base(found, family.suite)
    return found


def _input_stamps(family: Family) -> set[FileStamp]:
    """Return the state of every weight file now."""
    return {stamp for own in input_files(family).values() for file in own for stamp in stamps(file)}


def _require_writable(family: Family, config: CalibrationConfig, out: str | Path) -> None:
    """Refuse before any work what could not be written after it.

    Raises:
        InputError: `out` exists, the model is more than weights, cannot be packed, or has settings of pictures that
            cannot be read.
    """
    require_absent(out)
    require_weights_alone(family.merged)
    require_packable(family, config)
    image_processor_settings(family.container.folder)


def _store(
    family: Family,
    config: CalibrationConfig,
    passes: Mapping[str, ExpertPass],
    limits: MemoryLimits,
    out: Path,
) -> ActivationStore:
    """Make the store of token states between two blocks, within limits of the process and of the device; the rest goes
    to files beside `out`.

    Raises:
        InputError: a limit is below the need of one block, or is a device limit without a device.
    """
    folder = out.expanduser().absolute().parent
    if limits == MemoryLimits():
        return ActivationStore(None, folder)
    stages, batches = family.adapter.stages, [batch for one in passes.values() for batch in one.batches]
    tokens = [family.adapter.tokens(batch) for batch in batches]
    working = block_bytes(stages, family.merged, config, max(tokens), len(passes))
    if config.decisions:
        samples = [len(next(iter(batch.values()))) for batch in batches]
        longest = max(-(-whole // count) for whole, count in zip(tokens, samples, strict=True))
        working = max(working, gradient_bytes(stages, longest, max(len(one.indices) for one in passes.values())))
    return ActivationStore(
        None if limits.process is None else state_budget(working, limits.process),
        folder,
        None if limits.device is None else device_budget(family.compute.device, working, limits.device),
    )


def _identity(
    family: Family,
    config: CalibrationConfig,
    drawn: Mapping[str, Mapping[str, Any]],
    hashes: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Return the facts that identify a run to a folder: an interrupted run can be resumed
    only if all of them are equal.
    """
    return {
        "config": {name: value for name, value in asdict(config).items() if name not in IDLE},
        "suite": family.suite.model_dump(mode="json"),
        "of": identify_model(family),
        "configurations": [dict(one.config) for one in (family.origin, family.container)],
        "inputs": hashes,
        "samples": {task: one["sha256"] for task, one in drawn.items()},
        "versions": all_versions(),
    }


def _record(
    family: Family,
    config: CalibrationConfig,
    drawn: Mapping[str, Mapping[str, Any]],
    account: Account,
    run: Run,
) -> dict[str, Any]:
    """Return the record of a finished calibration, except the entries that its caller adds."""
    merged, layers = family.suite.merged, family.adapter.block_names()
    file = "a model in memory" if is_held(merged) else "checkpoint"
    own = merged.model_dump() if isinstance(merged, MergeRecipe) else file
    return {
        "command": "calibrate",
        "suite": family.suite.name,
        "suite_file": suite_facts(family.suite),
        "model": family.merged_name,
        "merged": own if family.merged_name == "merged" else family.merged_name,
        "config": asdict(config),
        "tasks": {
            task: {
                "samples": one["samples"],
                "tokens": account.tokens[task],
                **one,
                **describe_text(family.suite, task),
            }
            for task, one in drawn.items()
        },
        "seconds": dict(run.seconds),
        "peak_rss_bytes": peak_rss_bytes(),
        "spilled_bytes": run.store.spilled,
        "relative_drift": {layers[block]: drift for block, drift in account.drift.items()},
        **({"starved": account.starved} if account.starved else {}),
        **({"storing": asdict(stored)} if (stored := summarise_storing(account.rounding)) else {}),
        "final_drift": {task: asdict(one) for task, one in account.final.items()},
        "warnings": warnings_of(account.final),
        "preparation": family.preparation(),
        "versions": all_versions(),
        "machine": machine_facts(family.compute.device),
    }


def _origin(family: Family, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Return the entries of a saved record about the models that were read: `of`, `inputs`, `licences` and `notes`.

    Raises:
        InputError: a model that does not come from the base.
    """
    licences = read_licences(family)
    notes = [*_notes(family, ranks), *licence_conflicts(licences)]
    return {
        "of": identify_model(family), "inputs": input_hashes(family, ranks), "licences": licences, "notes": notes,
    }  # fmt: skip


def _write(
    folder: OutputFolder,
    made: CalibrationResult,
    origin: Mapping[str, Any],
    seconds: Callable[[], Mapping[str, float]],
    whole: bool = True,
) -> dict[str, Any]:
    """Write a calibrated model with its card and record; return the content of `featcal.json`."""
    family, record = made.family, {**made.record, **origin}
    record.pop("out", None)  # of a job, whose own folder is another one
    card = plain_card(family.container.layout)
    failed: list[str] = []
    with keep_work(failed, "whether it still generates was not checked"):
        record |= _generation(made, whole)
    pictured = False
    with keep_work(failed, "the picture of the drift was not drawn"):
        write_drift_picture(record["relative_drift"], folder.model / PICTURE_FILE)
        pictured = True
    record["warnings"] = [*made.record["warnings"], *canary_warnings(record), *failed]
    left = note_unchecked(family) if "canary" in record else []
    record["notes"] = [*origin["notes"], *notes_of(family.adapter, made.record), *left]
    with keep_work(failed, "the card was not written"):
        account = account_of(family, made.config, config_for(family), record["warnings"])
        card = model_card(family, record, replace(account, pictured=pictured))
    record |= {UNCHECKED: failed} if failed else {}

    def finished_record() -> dict[str, Any]:
        # Asked for when all is verified: time and memory of the writing are in them.
        return {**record, "seconds": seconds(), "peak_rss_bytes": peak_rss_bytes()}

    return write_model(folder, family.adapter, family.container, made.weights, finished_record, card, whole=whole)


def _generation(made: CalibrationResult, whole: bool) -> dict[str, Any]:
    """Check that a generating model still generates (`evaluation.generation_check`); return the record's entry. Empty
    for other models, and if the memory limit excludes loading the whole model.
    """
    family = made.family
    if not family.adapter.generates or not whole:
        return {}
    # Another seed: prompts that were calibrated on would flatter the model.
    return {"canary": compare_generation(family, made.weights, seed=made.config.seed + 1).to_json()}


def notes_of(adapter: Adapter, record: Mapping[str, Any]) -> list[str]:
    """Return notes on a calibration's record: experts that keep the merged weights, and the cost of rounding."""
    layers = adapter.block_names()
    found = note_starved(layers, record.get("starved", {}))
    if "storing" in record:
        stored = QuantizationError(**record["storing"])
        found.append(stored.describe(layers[stored.block]))
    return found


def _notes(family: Family, ranks: Ranks) -> list[str]:
    """Return notes on the models: doubts about their origin, and tensors of experts that a recipe left out.

    Raises:
        InputError: a model that does not come from the base.
    """
    merged = family.suite.merged
    if family.merged_name != "merged":
        # An expert that is calibrated in the place of the merge is looked at once, and not taken for a copy of itself.
        given = None if any(family.merged is one for one in family.experts.values()) else family.merged
        return [*check_lineage(family, given, ranks), *note_left_out(family, ranks).values()]
    if not isinstance(merged, MergeRecipe):
        unknown = [] if family.is_base_known else [WITHOUT_BASE]
        return [*unknown, *check_lineage(family, family.merged, ranks)]
    return [*merged.notes, *check_lineage(family, ranks=ranks), *note_left_out(family, ranks).values()]
