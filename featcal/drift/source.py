"""Measure the cost of fitting a module on another feature source than the deployed one (Prop. 8).

For each calibrated linear map the local objective is the one that Eq. (17) minimises, with its stabiliser, J(W) = sum_i
omega_i mean ||W u - y||^2 + lam ||W - W_anc||^2 + eps ||W||^2, with omega fixed to the deployed source. A source that
differs from the inputs in the finished model gives another minimiser; the excess is its loss under the deployed
objective, above the minimum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.calibration import closed_form
from featcal.calibration.anchor import read_merged_and_base
from featcal.calibration.block_statistics import linear_groups
from featcal.calibration.closed_form import SolveError
from featcal.calibration.config import calibrated_blocks, calibrated_maps, resolve_options, select_tasks
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.linear_statistics import TaskStatistics
from featcal.calibration.token_rows import TokenRows, lane_rows
from featcal.family.opening import Family, ensure_family
from featcal.formats.weights import Weights
from featcal.models.adapter import Block, Stage, walking
from featcal.models.compute import widen
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, require_same_compute
from featcal.models.walk import BlockwiseForward
from featcal.suite.calibration_options import PAPER, CalibrationConfig
from featcal.system.errors import InputError, NumericalError
from featcal.system.progress import Progress, silent

if TYPE_CHECKING:
    import pandas as pd

DEPLOYED = "prefix"
SOURCES = (DEPLOYED, "stale", "merged", "expert")
"""Sources of features. prefix: all earlier blocks are calibrated, as in Algorithm 1. stale: the previous block is not
calibrated yet. merged: no block is calibrated. expert: the expert's own features.
"""
INSIDE = "snapshot"
"""Source that the paper does not measure: the block's snapshot, compared with the inputs
that its own calibrated modules produce.
"""


@dataclass(frozen=True)
class SourceExcess:
    """One group of linear maps fitted on one source."""

    block: str
    """Name of the block in tables, such as `block 0`."""
    modules: str
    source: str
    excess: float
    """J_dep(W_src) - J_dep(W_dep) >= 0 (left side of Eq. 48)."""
    excess_norm: float
    """The excess computed as ||(W_src - W_dep) H^(1/2)||_F^2, H the deployed left matrix."""
    middle: float
    """[J_dep - J_src](W_src) + [J_src - J_dep](W_dep), an upper bound of the excess."""
    supremum: float
    """2 max |J_dep - J_src| over both minimisers, the bound of Eq. (48) with the supremum
    over just these two; loose.
    """
    coupling: float
    """Mean distance of the pairs (u, y) between the sources, token by token (the coupling of Eq. 49)."""
    minimum: float
    """The deployed minimum J_dep(W_dep); for `snapshot` the deployed objective differs from
    that of the other sources.
    """
    relative: float
    """Excess as a share of the deployed minimum."""


@dataclass(frozen=True)
class Objective:
    """The objective J(W) = tr(W G W^T) - 2 tr(W Y^T) + k + lam ||W - W_anc||^2 + eps ||W||^2, with sums over tasks
    taken."""

    gram: Float[Tensor, "d d"]
    target: Float[Tensor, "m d"]
    constant: float
    anchor: Float[Tensor, "m d"]
    lam: float
    eps: float

    def __call__(self, weight: Float[Tensor, "m d"]) -> float:
        fit = torch.sum(weight @ self.gram * weight) - 2 * torch.sum(weight * self.target) + self.constant
        return float(fit + self.lam * (weight - self.anchor).square().sum() + self.eps * weight.square().sum())

    def minimiser(self) -> Float[Tensor, "m d"]:
        return closed_form.linear_weight(self.gram, self.target, self.anchor, self.lam, self.eps)


def compare_sources(deployed: Objective, source: Objective) -> dict[str, float]:
    """Return both forms of the excess, and the bounds of Eq. (48)."""
    right, other = deployed.minimiser(), source.minimiser()
    eye = torch.eye(len(deployed.gram), dtype=deployed.gram.dtype, device=deployed.gram.device)
    apart = other - right
    gaps = [deployed(weight) - source(weight) for weight in (other, right)]
    minimum = deployed(right)
    excess = deployed(other) - minimum
    return {
        "excess": excess,
        "excess_norm": float(torch.sum(apart @ (deployed.gram + (deployed.lam + deployed.eps) * eye) * apart)),
        "middle": gaps[0] - gaps[1],
        "supremum": 2 * max(abs(gap) for gap in gaps),
        "minimum": minimum,
        "relative": excess / minimum if minimum > 0 else 0.0,
    }


def measure_sources(
    family: Family,
    calibrated: Weights,
    config: CalibrationConfig,
    passes: Mapping[str, ExpertPass],
    progress: Progress = silent,
) -> list[SourceExcess]:
    """Return the excess of every source for every calibrated group of linear maps, blocks in forward order.

    Args:
        calibrated: the result of Algorithm 1 with `config` on the samples of `passes`; their precision is that of the
            measurement.

    Raises:
        InputError: the passes have another device or precision than `config`, or its recipe is not the paper's, for
            which these objectives hold.
        NumericalError: an objective has no single minimiser; the message names the maps.
    """
    if config.recipe != PAPER:
        raise InputError(f"feature sources need the recipe '{PAPER}': '{config.recipe}' has other objectives")
    family = ensure_family(family, precision=config.precision)
    config = resolve_options(config, family.adapter, family.suite.tasks)
    passes = select_tasks(config, passes)
    require_same_compute(passes, family.compute)
    run, chosen = family.run(progress), calibrated_blocks(family.adapter, config)
    with walking(run.adapter):
        walk = BlockwiseForward(
            run, "comparing sources", passes, dict.fromkeys((DEPLOYED, "stale", "merged"), run.merged)
        )
        found: list[SourceExcess] = []
        for stage in run.adapter.stages:
            walk.enter(stage)
            rows = lane_rows(stage, walk.lanes[DEPLOYED], passes, config)
            for index, block in walk.blocks(stage):
                models = _block_of(run, block, run.merged), _block_of(run, block, calibrated)
                books: list[_Book] = []
                for task, own in walk.experts_at(block):
                    for position, (seen, outputs) in enumerate(_sources(walk, task, stage, block, own, models)):
                        books = books or _books(stage, index, seen[DEPLOYED], config, chosen)
                        for book in books:
                            book.update(seen, outputs, own, rows[task].batches[position][book.group.weighting])
                    for book in books:
                        book.end_task(own)
                anchors = read_merged_and_base(run, block, run.merged.read(block.names), config.rho)
                for book in books:
                    found += book.close(family.adapter.name_of(block), *anchors)
        walk.finish()
    return found


def _books(
    stage: Stage, index: int, given: Mapping[str, Tensor], config: CalibrationConfig, chosen: Collection[str]
) -> list[_Book]:
    """Return the moments of every calibrated group of linear maps of a block, given their inputs."""
    block = stage.blocks[index]
    fitted = calibrated_maps(stage, block, config) if block.name in chosen else {}
    # Without a mixture's experts: every source sends them other tokens.
    passed = {name: given[name] for name in fitted if name in block.linears}
    return [_Book(group, config) for group in linear_groups(stage, index, passed)]


def _block_of(run: Run, block: Block, model: Weights) -> dict[str, Tensor]:
    """Return a model's tensors of a block in the form of the forward pass, by name inside the block."""
    return block.local(run.compute.place(model.read(block.names)))


def _sources(
    walk: BlockwiseForward,
    task: str,
    stage: Stage,
    block: Block,
    own: Mapping[str, Tensor],
    models: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
) -> Iterator[tuple[dict[str, Mapping[str, Tensor]], Mapping[str, Tensor]]]:
    """Yield the inputs of all linear maps from every source, and the expert's outputs, batch by batch; all streams move
    after the block.

    Args:
        own: the expert's tensors of the block.
        models: the merged model's and the calibrated one's tensors, on the device.
    """
    merged, new = models
    linears = tuple(block.linears)
    prefix, stale, untouched = (walk.lanes[source][task] for source in (DEPLOYED, "stale", "merged"))
    steps = zip(
        walk.experts[task].walk(stage, block, own, linears, linears),
        prefix.walk(stage, block, merged, linears, move=False),
        stale.walk(stage, block, merged, linears, move=False),
        untouched.walk(stage, block, merged, linears),
        prefix.walk(stage, block, new, linears),
        strict=True,
    )
    for position, (expert, deployed, before, unchanged, inside) in enumerate(steps):
        # The uncalibrated block on calibrated inputs: after it the stream is stale by exactly one block.
        stale.calls.put(position, deployed.after)
        yield (
            {
                DEPLOYED: deployed.inputs,
                "stale": before.inputs,
                "merged": unchanged.inputs,
                "expert": expert.inputs,
                INSIDE: inside.inputs,
            },
            expert.outputs,
        )


def excess_frame(found: Sequence[SourceExcess]) -> pd.DataFrame:
    """Return one row per block, group and source."""
    import pandas as pd

    return pd.DataFrame([asdict(one) for one in found])


class _Book:
    """The moments of one group of linear maps for every feature source, summed over tasks."""

    def __init__(self, group: LinearGroup, config: CalibrationConfig) -> None:
        self.group, self._config = group, config
        self._task: dict[str, TaskStatistics] = {}
        self._square = 0.0
        self._distance: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._sums: dict[tuple[str, str], list[Any]] = {}

    def update(
        self,
        seen: Mapping[str, Mapping[str, Tensor]],
        outputs: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        tokens: TokenRows,
    ) -> None:
        group = self.group
        expert = widen(group.expert_outputs(outputs, own, tokens))
        # The excess is a small difference of large objectives, which float32 would not resolve.
        features = {source: widen(group.features(inputs, tokens)) for source, inputs in seen.items()}
        weight = group.stack(own, "weight")
        for source, rows in features.items():
            if source not in self._task:
                self._task[source] = group.new_task(group.outputs, rows.device, rows.dtype)
            self._task[source].update(rows, expert, tokens)
            apart = rows - features[DEPLOYED]
            moved = (1 - self._config.alpha) * apart @ weight.mT
            distance = (apart.square().sum(1) + moved.square().sum(1)).sqrt()
            self._distance[source][0] += float(tokens.sum(distance[:, None]))
            self._distance[source][1] += tokens.total
        self._square += float(tokens.sum(expert.square().sum(1, keepdim=True)))

    def end_task(self, own: Mapping[str, Tensor]) -> None:
        """Add one task, once for each deployed source, whose omega weights the task."""
        weight = self.group.stack(own, "weight")
        parts = {source: self._terms(moments, weight) for source, moments in self._task.items()}
        for deployed in (DEPLOYED, INSIDE):
            omega = float(closed_form.task_weight(torch.linalg.matrix_norm(parts[deployed][0]), self._config.eps))
            for source, terms in parts.items():
                scaled = [omega * term for term in terms]
                sums = self._sums.get((deployed, source))
                self._sums[deployed, source] = [a + b for a, b in zip(sums, scaled, strict=True)] if sums else scaled
        self._task, self._square = {}, 0.0

    def _terms(self, moments: TaskStatistics, weight: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return (G, Y, k) of the objective; k, the mean squared target, differs between sources through alpha."""
        alpha = self._config.alpha
        target = moments.replay_targets(weight, alpha) / moments.weight
        gram = moments.gram.full(weight.dtype) / moments.weight
        mixed = 2 * alpha * (1 - alpha) * float(torch.sum(weight * moments.cross)) / moments.weight
        replayed = (1 - alpha) ** 2 * float(torch.sum(weight @ gram * weight))
        return gram, target, alpha**2 * self._square / moments.weight + mixed + replayed

    def close(self, block: str, merged: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Iterator[SourceExcess]:
        """Yield the excess of every source after the last task."""
        stack, names = self.group.stack, ", ".join(self.group.names)
        anchor = closed_form.anchor(stack(merged, "weight"), stack(base, "weight"), self._config.rho)
        pairs = [(source, DEPLOYED, source) for source in SOURCES] + [(INSIDE, INSIDE, DEPLOYED)]
        for label, deployed, source in pairs:
            right, other = (self._objective(deployed, which, anchor) for which in (deployed, source))
            total, weight = self._distance[label]
            try:
                compared = compare_sources(right, other)
            except SolveError as error:
                raise NumericalError(
                    f"{block}: {names}, source '{label}': {error}; raise lam or use more samples"
                ) from error
            yield SourceExcess(block, names, label, coupling=total / weight, **compared)

    def _objective(self, deployed: str, source: str, anchor: Tensor) -> Objective:
        gram, target, constant = self._sums[deployed, source]
        return Objective(gram, target, constant, anchor, self._config.lam, self._config.eps)
