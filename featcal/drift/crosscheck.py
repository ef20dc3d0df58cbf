"""Compute one sample of every task a second time and in another way, to check the numbers of the first run.

e = m + p holds for any three tensors, so it cannot show that they are right. A wrong state or mask, active dropout or a
state that was not passed on shows only if the layers run again in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from featcal.drift.streams import LayerPlace, LayerTransition
from featcal.formats.weights import Weights
from featcal.models.adapter import LAST_LAYER, Batch, Block, Call, Stage
from featcal.models.compute import Compute, widest_float
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, run_block
from featcal.models.model import map_features
from featcal.system.errors import InputError


@dataclass(frozen=True)
class SecondStates:
    """The states of one sample around one layer in float64, `[1, tokens, width]`, or `[1, k]` after the last layer."""

    row: int
    """Row of the sample in the first batch."""
    before: tuple[Tensor, Tensor] | None
    """The expert's and the model's states before the layer; None in the first one."""
    expert: Tensor
    on_expert: Tensor
    """Output of the model's layer on the expert's state; for the first layer, which takes
    no state, the model's own state after it.
    """
    model: Tensor


class SecondRun:
    """A second run of one sample of every task through expert and model, layer by layer along with the first run. The
    sample is alone in its batch, so that masks and positions are captured again; its padding has other tokens; tensors,
    states and calls are float64, or float32 on a device without it; both models start from the inputs and run
    independently.

    Args:
        sublayers: whether attention and MLP of every block are layers of their own.
    """

    def __init__(self, run: Run, model: Weights, experts: Mapping[str, ExpertPass], sublayers: bool = False) -> None:
        self._adapter, self._sublayers = run.adapter, sublayers
        self._models = {task: (one.weights, model) for task, one in experts.items()}
        self._compute = Compute(run.compute.device, widest_float(run.compute.device))
        self._head = self._compute.place(run.head)
        self._samples = {task: _pick_sample(expert.batches[0], self._compute.dtype) for task, expert in experts.items()}
        self._calls: dict[str, tuple[Call, Call]] = {}
        self._waiting: dict[str, list[SecondStates]] = {}
        self._model: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = {}, {}
        """The model's block as it is stored, shared by all tasks, and a copy in float64."""

    def states(self, crossing: LayerTransition) -> SecondStates:
        """Return a sample's states as the first run should have computed them; call it layer after layer.

        Needs memory for the expert's and the model's tensors of one layer in float64.
        """
        task, place = crossing.task, crossing.place
        if place.block is None:
            return self._close(task, place) if crossing.layer == LAST_LAYER else self._enter(task, place)
        if not self._waiting.get(task):
            self._waiting[task] = self._run_block(task, place.stage, place.block, place)
        return self._waiting[task].pop(0)

    def _enter(self, task: str, place: LayerPlace) -> SecondStates:
        stage, (row, inputs) = place.stage, self._samples[task]
        own, theirs = (self._outer(tensors) for tensors in place.tensors)
        ended = self._calls.get(task)

        def enter(outer: Mapping[str, Tensor], upstream: Call | None) -> Call:
            return _widen_call(stage.first_call(outer, inputs, upstream), self._compute.dtype)

        if ended is None:
            expert, model = enter(own, None), enter(theirs, None)
            before, on_expert = None, model
        else:
            upper = self._adapter.stages[self._adapter.stages.index(stage) - 1]
            expert, on_expert, model = enter(own, ended[0]), enter(theirs, ended[0]), enter(theirs, ended[1])
            before = upper.state(ended[0], inputs), upper.state(ended[1], inputs)
        self._calls[task] = expert, model
        return SecondStates(row, before, *(stage.state(call, inputs) for call in (expert, on_expert, model)))

    def _run_block(self, task: str, stage: Stage, block: Block, place: LayerPlace) -> list[SecondStates]:
        """Return the states before and after the block, or each of its sublayers, and move both streams after it."""
        (row, inputs), (expert, model) = self._samples[task], self._calls[task]
        stored, read = place.tensors
        # Converted once for all tasks: the model's block is the same for each.
        if self._model[0] is not read:
            self._model = read, self._compute.place(read)
        own, theirs = self._compute.place(stored), self._model[1]

        def run(tensors: Mapping[str, Tensor], call: Call) -> Call:
            try:
                return _widen_call(run_block(stage, block, tensors, call), self._compute.dtype)
            except RuntimeError as error:
                if self._adapter.has_facts or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise InputError(
                    f"{block.name}: drift is computed a second time, in {self._compute.dtype}, to check it, and "
                    f"the library's code for this architecture, which featcal has no row of facts for, does not run "
                    f"in it ({error}); calibrate and evaluate work without"
                ) from error

        before = stage.state(expert, inputs), stage.state(model, inputs)
        self._calls[task] = following = run(own, expert), run(theirs, model)
        if not self._sublayers:
            calls = following[0], run(theirs, stage.with_state(model, before[0])), following[1]
            return [SecondStates(row, before, *(stage.state(call, inputs) for call in calls))]
        of_expert, of_model = stage.sublayers(block, own), stage.sublayers(block, theirs)
        found: list[SecondStates] = []
        for name, part in of_model.items():
            passed = ((of_expert[name], expert, before[0]), (part, model, before[0]), (part, model, before[1]))
            reached = (run(stage.with_state(call, state)) for run, call, state in passed)
            found.append(SecondStates(row, before, *(stage.state(call, inputs) for call in reached)))
            before = found[-1].expert, found[-1].model
        return found

    def _close(self, task: str, place: LayerPlace) -> SecondStates:
        stage, (row, inputs), (expert, model) = place.stage, self._samples[task], self._calls[task]
        own, theirs = (self._compute.place(tensors) | self._head for tensors in place.tensors)
        before = stage.state(expert, inputs), stage.state(model, inputs)
        passed = (own, expert), (theirs, stage.with_state(model, before[0])), (theirs, model)
        models = self._models[task][0], *self._models[task][1:] * 2
        final = (self._adapter.final(tensors, call, inputs) for tensors, call in passed)
        reached = [map_features(one, task, features) for one, features in zip(models, final, strict=True)]
        return SecondStates(row, before, *reached)

    def _outer(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors before a stage in float64, except rows of embeddings, which float32 holds exactly."""
        # Nothing says of a class without a row that it adds more to these rows before it norms them (BLOOM does not).
        kept = self._adapter.vocabulary if self._adapter.has_facts else ()
        looked_up = {name: tensor for name, tensor in tensors.items() if name in kept}
        rest = {name: tensor for name, tensor in tensors.items() if name not in looked_up}
        as_read = {n: t.to(self._compute.device, torch.promote_types(t.dtype, torch.float32))
                   for n, t in looked_up.items()}  # fmt: skip
        return self._compute.place(rest) | as_read


def _pick_sample(batch: Batch, dtype: torch.dtype) -> tuple[int, Batch]:
    """Return the row of the sample with the most padding, and its inputs in a dtype, with
    other tokens in the padding.
    """
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    row = 0 if mask is None else int(mask.sum(1).argmin())
    one = {name: t[row : row + 1].to(dtype) if t.is_floating_point() else t[row : row + 1] for name, t in batch.items()}
    if mask is not None and ids is not None:
        # Whatever lies under padding must not change a feature; a mask that lets it through shows here.
        one["input_ids"] = torch.where(one["attention_mask"] == 0, one["input_ids"][:, :1], one["input_ids"])
    return row, one


def _widen_call(call: Call, dtype: torch.dtype) -> Call:
    """Return the call with every floating tensor in a dtype: states, additive masks, positions."""

    widened: dict[int, Tensor] = {}  # tensors that blocks share stay one object

    def convert(leaf: object) -> object:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        return widened.setdefault(id(leaf), leaf.to(dtype))

    return Call(*tree_map(convert, call.tree()))
