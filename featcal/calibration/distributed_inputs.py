"""Distribute inputs and files among ranks: those with a task read its expert, and only rank 0 writes files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from featcal.calibration.config import select_tasks
from featcal.calibration.rounding import Rounding
from featcal.export.record_facts import read_draws
from featcal.family.opening import Family
from featcal.formats.output import OutputFolder
from featcal.formats.weights import Metered, Weights, WrappedWeights
from featcal.mergers.common.engine import RecipeWeights
from featcal.models.adapter import Block
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.distributed import Ranks
from featcal.system.progress import peak_rss_bytes


@dataclass(frozen=True)
class RoundRobinWeights(WrappedWeights):
    """A model that the ranks read together, in the same order: each reads some blocks and sends them to the others. Use
    it for a merge that is computed from all experts, so that every expert is read only once, for any number of ranks.
    """

    under: Weights
    ranks: Ranks
    _turns: dict[str, int] = field(default_factory=dict)
    """Rank that reads a block, by the name of its first tensor."""

    @property
    def label(self) -> str:
        return self.under.label

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = list(names)
        if not wanted:
            return {}
        # A block keeps its reader, which may have the merged tensors in files already.
        reader = self._turns.setdefault(wanted[0], len(self._turns) % self.ranks.size)
        return self.ranks.broadcast_tensors(self.under.read(wanted) if reader == self.ranks.rank else None, reader)


class SharedBlocks:
    """Solved blocks of all ranks, which rank 0 keeps in its folder; the others have none."""

    def __init__(self, ranks: Ranks, folder: OutputFolder | None) -> None:
        self._ranks, self._folder = ranks, folder

    def read_finished(self, block: Block) -> dict[str, Tensor] | None:
        """Return the tensors of a block that the folder has from an interrupted run, on every rank; None if it has
        none."""
        found = None if self._folder is None else self._folder.read_finished(block)
        return self._ranks.broadcast_tensors(found, 0) if self._ranks.broadcast_object(found is not None, 0) else None

    def facts(self, block: Block) -> Rounding:
        """Return the facts that the folder has about a finished block, on every rank."""
        return self._ranks.broadcast_object(None if self._folder is None else self._folder.facts(block), 0) or {}

    def put(self, block: Block, tensors: dict[str, Tensor], facts: Rounding) -> None:
        """Write a solved block to the folder."""
        if self._folder is not None:
            self._folder.put(block, tensors, facts)


def meter_reads(family: Family, ranks: Ranks) -> tuple[Family, dict[str, int]]:
    """Return the family with models that count the bytes read, and these counts by label; a single process gets the
    family unchanged."""
    read: dict[str, int] = {}
    if not ranks.several:
        return family, read
    experts = {task: Metered(expert, read) for task, expert in family.experts.items()}
    base = Metered(family.base, read) if family.is_base_known else family.base
    merged = family.merged
    counted: Weights = Metered(merged, read)
    if isinstance(merged, RecipeWeights):
        counted = replace(merged, base=base, experts=experts)
    return replace(family, base=base, merged=counted, experts=experts), read


def distribute_run(run: Run, ranks: Ranks) -> Run:
    """Return the run as one of several ranks takes part in it."""
    computed = ranks.several and isinstance(run.merged, RecipeWeights)
    return replace(run, ranks=ranks, merged=RoundRobinWeights(run.merged, ranks) if computed else run.merged)


def own_passes(
    family: Family, config: CalibrationConfig, ranks: Ranks
) -> tuple[dict[str, ExpertPass], dict[str, dict[str, Any]]]:
    """Draw the samples of this rank's tasks, or of its part of one task; return their expert passes, and the facts of
    the draws (`read_draws`) for all tasks of the run."""
    own, drawn, tasks = dict[str, ExpertPass](), dict[str, dict[str, Any]](), select_tasks(config, family.suite.tasks)
    for task in ranks.mine(tasks):
        samples = family.samples(task, "calibration", config.samples, config.seed, copies=config.augment)
        own[task] = family.expert_pass(samples, config.batch_size, in_order=False)
        drawn |= read_draws({task: own[task]})
        # Drawn whole by every rank that has a part: the hash in the record is of the whole task.
        part = ranks.part(task, len(samples))
        if len(samples.indices[part]) < len(samples):
            inputs = {name: tensor[part] for name, tensor in samples.inputs.items()}
            shared = replace(samples, inputs=inputs, indices=samples.indices[part])
            own[task] = family.expert_pass(shared, config.batch_size, in_order=False)
    found = ranks.union(ranks.select_led(drawn))
    return own, {task: found[task] for task in tasks}


def shares(run: Run, passes: Mapping[str, ExpertPass], read: Mapping[str, int]) -> dict[str, Any]:
    """Return the record of every rank: tasks, samples, bytes read of every model, bytes exchanged until all blocks
    were solved, seconds by stage, memory; empty for a single process.
    """
    ranks = run.ranks
    if not ranks.several:
        return {}
    own = {
        "tasks": {task: len(one.indices) for task, one in passes.items()},
        "read_bytes": dict(read),
        **{f"{way}_bytes": count for way, count in asdict(ranks.traffic).items()},
        "seconds": dict(run.seconds),
        "peak_rss_bytes": peak_rss_bytes(),
        "spilled_bytes": run.store.spilled,
    }
    return {"ranks": ranks.all_gather(own)}
