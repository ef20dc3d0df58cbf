"""Sufficient statistics of one block: of every linear map and norm, per task and summed over tasks.

Features are dropped as soon as they are counted. The sums over tasks have the size of one task, so memory
does not grow with the number of experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import replace

from torch import nn

from featcal.calibration.config import CalibrationConfig
from featcal.calibration.linear_group import FLOAT64_BELOW, LinearGroup
from featcal.calibration.norm_groups import NormGroup, RmsGroup, check_norm
from featcal.calibration.token_rows import Named, TaskRows
from featcal.errors import InputError
from featcal.formats.weights import Weights
from featcal.models.adapter import Block, Stage
from featcal.models.lane import ExpertPass, Step


class BlockMoments:
    """The statistics of every calibrated module of one block, from one snapshot of features."""

    def __init__(self, stage: Stage, index: int, config: CalibrationConfig) -> None:
        self.stage, self.block = stage, stage.blocks[index]
        self._index, self.config = index, config
        self.modules: dict[str, nn.Module] = {**self.block.linears, **_calibrated_norms(stage, self.block, config)}
        """Modules whose inputs are counted."""
        self._linears: list[LinearGroup] = []
        self._norms: list[NormGroup | RmsGroup] = []

    @property
    def groups(self) -> list[LinearGroup | NormGroup | RmsGroup]:
        """Everything that is solved: linear maps, then norms."""
        return [*self._linears, *self._norms]

    @property
    def started(self) -> bool:
        """Whether a batch was seen already."""
        return bool(self._linears)

    def see(self, inputs: Named) -> None:
        """Find out from the first inputs which linear maps share theirs.

        Raises:
            InputError: a module whose statistics would be wrong; names it.
        """
        if self.started:
            return
        self._linears = linear_groups(self.stage, self._index, inputs)
        for name, norm in _calibrated_norms(self.stage, self.block, self.config).items():
            weighting, device = self.stage.weighting(self._index, name), inputs[name].device
            check_norm(f"{self.block.name}.{name}", norm)
            if isinstance(norm, nn.LayerNorm):
                self._norms.append(NormGroup(name, weighting, norm, device))
            else:
                self._norms.append(RmsGroup(name, weighting, norm))

    def asked_of_expert(self, rows: TaskRows) -> tuple[list[str], list[str]]:
        """Names of the linear maps whose inputs, and of those whose outputs, a task's targets are made of."""
        inputs: list[str] = []
        outputs: list[str] = []
        for group in self._linears:
            if group.route(rows.count(group.weighting)) == "inputs":
                inputs.append(group.names[0])
            else:
                outputs += group.names
        return inputs, outputs

    def update(self, rows: TaskRows, position: int, inputs: Named, trace: Step, expert: Named) -> None:
        """Count one batch of a task.

        Args:
            rows: which tokens of the task count.
            position: of the batch among the task's.
            inputs: what the student's modules were given.
            trace: the expert's block on the same batch.
            expert: its tensors of the block, by name inside it.
        """
        tokens = rows.batches[position]
        for group in self._linears:
            count = rows.count(group.weighting)
            group.update(inputs, trace, expert, tokens[group.weighting], count, self.config)
        for norm in self._norms:
            norm.update(inputs, tokens[norm.weighting])

    def end_task(self, expert: Named) -> None:
        """Fold the task's statistics into the sums over tasks."""
        for group in self._linears:
            group.end_task(expert, self.config)
        for norm in self._norms:
            norm.end_task(expert, self.config)

    def again(self, config: CalibrationConfig) -> BlockMoments:
        """The same finished statistics, to be solved with other options; the solve leaves these as they are."""
        same = copy(self)
        same.config = config
        same._linears, same._norms = [copy(group) for group in self._linears], [copy(norm) for norm in self._norms]
        return same


class FirstBlock:
    """Keeps the statistics of the first block between runs on the same models and samples.

    The student enters it as the merged model, whatever the options; lam and rho come in with the solve.
    """

    def __init__(self) -> None:
        self._kept: tuple[Weights, Mapping[str, ExpertPass], Hashable, BlockMoments] | None = None

    def take(
        self, merged: Weights, experts: Mapping[str, ExpertPass], config: CalibrationConfig
    ) -> BlockMoments | None:
        """The statistics, if the last run was of these very objects and counted alike."""
        if self._kept is None:
            return None
        of, passes, counted, moments = self._kept
        if of is merged and passes is experts and counted == _counted(config):
            return moments.again(config)
        self._kept = None  # of no use to this run, and it is about to need memory
        return None

    def keep(
        self, merged: Weights, experts: Mapping[str, ExpertPass], config: CalibrationConfig, moments: BlockMoments
    ) -> None:
        """Hold the finished statistics of a run in place of those before."""
        self._kept = merged, experts, _counted(config), moments.again(config)


def _counted(config: CalibrationConfig) -> Hashable:
    """What of the options decides what is counted, and in which dtype; what biases need is counted either way."""
    return replace(config, lam=0.0, rho=0.0, biases=True), config.lam < FLOAT64_BELOW


def linear_groups(stage: Stage, index: int, inputs: Named) -> list[LinearGroup]:
    """Linear maps of a block that share a statistic: the same captured input under the same token weighting.

    Maps with a bias and maps without are apart: their targets differ.

    Raises:
        InputError: as `check_inputs`.
    """
    check_inputs(stage.blocks[index], inputs)
    modules = stage.blocks[index].linears
    shared: dict[tuple[int, str, bool], list[str]] = {}
    for name, module in modules.items():
        key = id(inputs[name]), stage.weighting(index, name), module.bias is not None
        shared.setdefault(key, []).append(name)
    return [LinearGroup(names, weighting, modules) for (_, weighting, _), names in shared.items()]


def check_inputs(block: Block, inputs: Named) -> None:
    """Every counted module must be given one row per token: `[batch, tokens, width]`.

    Raises:
        InputError: one that is not, such as a norm over each head's part of a query; its rows are not the tokens that
            the weights are made for.
    """
    for name, given in inputs.items():
        if given.ndim != 3:
            raise InputError(
                f"{block.name}.{name}: its input has shape {list(given.shape)}, not [batch, tokens, width]; featcal "
                "cannot calibrate this module"
            )


def _calibrated_norms(stage: Stage, block: Block, config: CalibrationConfig) -> dict[str, nn.Module]:
    """LayerNorms and scale-only norms of a block that the options ask for."""
    shifted = block.layernorms if config.layernorms else {}
    return {**shifted, **(block.modules_of(stage.norm) if config.rmsnorms and stage.norm else {})}
