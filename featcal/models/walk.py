"""Run experts and other models side by side through all blocks, on the samples of every task. A *lane* is one model on
the batches of one task (`ModelStream`). Every user of a walk loops over stages and blocks, runs the lanes that it needs
through each block, and reads what they captured. Calibration, drift, feature sources and final features are such users.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from featcal.formats.weights import Weights, is_in_memory
from featcal.models.adapter import Block, Stage
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, ModelStream, StageEntrance, StageInput
from featcal.models.replay import check_first_batch
from featcal.system.errors import InputError


@dataclass(frozen=True)
class StageInputs:
    """One batch of one task before the blocks of a stage, on every lane."""

    task: str
    position: int
    """Position of the batch among the batches of the task."""
    front: StageEntrance
    """Embeddings and first norm of the task's expert."""
    expert: StageInput
    fronts: Mapping[str, StageEntrance]
    """Embeddings and first norms of the other models, by their names in the walk."""
    models: Mapping[str, StageInput]
    """Inputs of the batch on the lanes of the other models, by model."""


class BlockwiseForward:
    """Lanes of every task's expert and of other models; use it inside `walking`.

    Args:
        label: name of the work in progress messages.
        experts: their batches are the samples.
        models: weights of the other models by name.
    """

    def __init__(self, run: Run, label: str, experts: Mapping[str, ExpertPass], models: Mapping[str, Weights]) -> None:
        self._run, self._label, self._passes, self._models = run, label, experts, models
        self.experts: dict[str, ModelStream] = {task: one.lane(run.store) for task, one in experts.items()}
        """Lanes of the experts by task."""
        self.lanes: dict[str, dict[str, ModelStream]] = {
            name: {task: one.lane(run.store, model) for task, one in experts.items()} for name, model in models.items()
        }
        """Lanes of the other models by model, then by task."""
        self._done, self._total = 0, len(run.adapter.blocks())
        for task, one in experts.items():
            self._check(task, one)

    def _check(self, task: str, one: ExpertPass) -> None:
        """Compare the first batch of a task with the library's own forward, once for all walks on these samples."""
        adapter = self._run.adapter
        needed = {name for stage in adapter.stages for name in stage.spent}
        if not one.batches or not needed <= one.batches[0].keys():
            raise InputError("expert passes without `kept` can be used only once; make them again, or with `kept`")
        if one.kept is None or task not in one.kept.checked:
            check_first_batch(adapter, one.batches[0])
            if one.kept is not None:
                one.kept.checked.add(task)

    def entering(self, stage: Stage) -> Iterator[StageInputs]:
        """Yield the first calls of a stage on every lane, batch by batch; consume it to the end."""
        compute = self._run.compute
        fronts = {name: StageEntrance.from_model(stage, model, compute) for name, model in self._models.items()}
        for task, one in self._passes.items():
            front = StageEntrance.from_model(stage, one.weights, compute)
            others = [self.lanes[name][task].enter(fronts[name]) for name in fronts]
            for position, (own, *entries) in enumerate(zip(self.experts[task].enter(front), *others, strict=True)):
                models = dict(zip(fronts, entries, strict=True))
                yield StageInputs(task, position, front, own, fronts, models)
            one.spend(stage)

    def enter(self, stage: Stage) -> Mapping[str, StageEntrance]:
        """Make the first calls of a stage on every lane; return the `StageEntrance` of every model but the experts."""
        fronts: Mapping[str, StageEntrance] = {}
        for entering in self.entering(stage):
            fronts = entering.fronts
        return fronts

    def blocks(self, stage: Stage) -> Iterator[tuple[int, Block]]:
        """Yield the blocks of a stage with their index; move every lane through a block before asking for the next."""
        for index, block in enumerate(stage.blocks):
            self._run.progress(self._label, self._done, self._total)
            yield index, block
            self._done += 1
            self._run.store.settle()

    def experts_at(
        self, block: Block, modules: Collection[str] | None = None
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield every task with its expert's tensors of a block, placed as stored, by name inside the block.

        Args:
            modules: names inside the block of those that are enough; None for all of it.
        """
        seconds = self._run.seconds
        # Tensors in memory are looked up: a thread for that would only take turns with this one.
        if all(is_in_memory(lane.weights, block.names) for lane in self.experts.values()):
            yield from ((task, lane.tensors(block, modules)) for task, lane in self.experts.items())
            return
        # Reading the next expert ahead needs memory for a second one.
        ahead = not self._run.store.is_limited
        with ThreadPoolExecutor(1) as reader:
            reading: Future[dict[str, Tensor]] | None = None
            for task, following in zip_longest(self.experts, list(self.experts)[1:]):
                with seconds("load"):
                    tensors = self.experts[task].tensors(block, modules) if reading is None else reading.result()
                lane = self.experts[following] if ahead and following else None
                reading = None if lane is None else reader.submit(lane.tensors, block, modules)
                yield task, tensors
                # Or this expert's tensors would stay until the next one's are there.
                del tensors

    def pass_experts(self, stage: Stage, block: Block) -> None:
        """Run every expert through a block without capturing anything."""
        for task, tensors in self.experts_at(block):
            self.experts[task].pass_block(stage, block, tensors)

    def deploy_block(self, stage: Stage, block: Block, stored: Mapping[str, Tensor]) -> None:
        """Run all experts' lanes through a block with other tensors than their own.

        Args:
            stored: the tensors as they are stored, by canonical name.
        """
        placed = block.local(self._run.compute.place(stored))
        for lane in self.experts.values():
            lane.pass_block(stage, block, placed)

    def finish(self) -> None:
        """Drop the contents of all lanes, when all blocks are done."""
        for lane in (*self.experts.values(), *(lane for lanes in self.lanes.values() for lane in lanes.values())):
            lane.calls.clear()
        self._run.progress(self._label, self._total, self._total)
