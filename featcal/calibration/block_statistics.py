"""Collect sufficient statistics of one block: for every linear map and norm, per task and summed over tasks.

Features are dropped as soon as they are added to the sums, which have the size of one task, whatever the number of
experts.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from itertools import islice
from weakref import ref

import torch
from torch import nn

from featcal.calibration.config import calibrated_maps
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.norm_groups import NormGroup, check_norm
from featcal.calibration.precision import product_dtype
from featcal.calibration.prior import Prior, TaskVectors
from featcal.calibration.routed_group import routed_groups, router_groups, routing
from featcal.calibration.token_rows import Named, TaskRows, TokenRows
from featcal.formats.weights import Weights
from featcal.models.adapter import Block, Stage
from featcal.models.compute import DTYPES
from featcal.models.lane import BlockStep, ExpertPass
from featcal.models.linear_maps import KINDS, widths
from featcal.suite.calibration_options import NUMBERS, CalibrationConfig
from featcal.system.errors import InputError, NumericalError


class BlockStatistics:
    """The statistics of every calibrated module of one block, from one snapshot of features.

    Args:
        chosen: False for a block that stays as merged, which needs no statistics.
        only: the modules to collect, if others are collected separately.
        moved: the linear maps among these whose targets are shifted, and so are computed from the expert's outputs.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        config: CalibrationConfig,
        chosen: bool = True,
        only: Collection[str] | None = None,
        moved: Collection[str] = (),
    ) -> None:
        self.stage, self.block = stage, stage.blocks[index]
        self._index, self.config, self._moved = index, config, moved
        calibrated = {**calibrated_maps(stage, self.block, config), **_calibrated_norms(stage, self.block, config)}
        self._fitted: dict[str, nn.Module] = {
            name: module for name, module in calibrated.items() if chosen and (only is None or name in only)
        }
        self.routing = routing(stage, index, self._fitted)
        """Modules whose inputs show the routers' decisions about tokens; none if no map of
        an expert of a mixture is calibrated.
        """
        self.modules: dict[str, nn.Module] = {**self._fitted, **self.routing}
        """All modules whose inputs are needed: those with statistics, and those that decide the tokens' weights."""
        self._linears: list[LinearGroup] = []
        self._norms: list[NormGroup] = []

    @property
    def groups(self) -> tuple[LinearGroup | NormGroup, ...]:
        """Return the groups in the order of the solve: linear maps that share statistics, then norms."""
        return (*self._linears, *self._norms)

    @property
    def priors(self) -> list[Prior]:
        """Return the priors of all linear maps, group by group; empty without a prior."""
        return [prior for group in self._linears for prior in group.sums.priors]

    def take_priors(self, priors: Sequence[Prior]) -> None:
        """Share the priors of the same maps with other statistics; do not change them afterwards on either side."""
        rest = iter(priors)
        for group in self._linears:
            group.sums.priors = list(islice(rest, len(group.names)))

    @property
    def is_started(self) -> bool:
        """Say whether a batch was added already."""
        return bool(self.groups)

    @property
    def linears(self) -> tuple[LinearGroup, ...]:
        """Return the groups of linear maps."""
        return tuple(self._linears)

    def see(self, inputs: Named) -> None:
        """Find the linear maps that share their input, from the first inputs.

        Raises:
            InputError: the statistics of a module would be wrong; the message names it.
        """
        if self.is_started:
            return
        norms = {
            name: module
            for name, module in self._fitted.items()
            if not isinstance(module, KINDS) and name not in self.block.routers
        }
        passed = {name: inputs[name] for name in self._fitted if name in self.block.linears or name in norms}
        self._linears = linear_groups(self.stage, self._index, passed)
        for group in self._linears:
            group.moved = any(name in self._moved for name in group.names)
        self._linears += [
            *router_groups(self.stage, self._index, self._fitted),
            *routed_groups(self.stage, self._index, self._fitted),
        ]
        for name, norm in norms.items():
            weighting, device = self.stage.weighting(self._index, name), inputs[name].device
            check_norm(f"{self.block.name}.{name}", norm, self.stage.norm_offset)
            self._norms.append(NormGroup(name, weighting, norm, device, self.stage.norm_offset))

    def expert_modules(self, rows: TaskRows) -> tuple[list[str], list[str]]:
        """Return the names of the modules whose inputs, and of those whose outputs, form a task's targets."""
        asked = [group.expert_modules(rows.count(group.weighting)) for group in self._linears]
        inputs, outputs = (dict.fromkeys(name for one in asked for name in one[kind]) for kind in (0, 1))
        return [*inputs], [*outputs]

    def update(
        self,
        rows: TaskRows,
        position: int,
        inputs: Named,
        trace: BlockStep,
        expert: Named,
        weighed: Mapping[str, Sequence[TokenRows]] | None = None,
    ) -> None:
        """Add one batch of a task to the statistics.

        Args:
            rows: the task's tokens with non-zero weight.
            position: index of the batch in the task.
            inputs: the inputs of the student's modules.
            trace: the expert's block on the same batch.
            expert: its tensors of the block, by name inside it.
            weighed: the rows of every batch with other weights, by group of linear maps; the other groups use `rows`.
        """
        tokens, other = rows.batches[position], weighed or {}
        for group in self._linears:
            count, own = rows.count(group.weighting), other.get(str(group))
            changed = None if own is None else own[position]
            group.update(inputs, trace, expert, tokens[group.weighting], count, self.config, changed)
        for norm in self._norms:
            norm.update({name: self.stage.arrange_tokens(inputs[name]) for name in norm.names}, tokens[norm.weighting])

    def end_task(
        self,
        expert: Named,
        vectors: TaskVectors | None = None,
        only: Collection[int] | None = None,
        directions: Named | None = None,
    ) -> None:
        """Add the task's statistics to the sums over tasks.

        Args:
            vectors: task vectors for the prior (`LinearGroup.add_prior`); None without a prior.
            only: indices of the groups whose task ends on this rank; None for all.
            directions: margin gradients of the expert, by name of the map inside the block (`calibration.decisions`);
                None for the plain squared error.

        Raises:
            InputError: a part of the task's tokens was neither added nor merged.
            NumericalError: no token of the task has weight, or the sums are not finite; the message names the modules.
        """
        ended = [group for place, group in enumerate(self.groups) if only is None or place in only]
        for group in ended:
            if isinstance(group, LinearGroup):
                group.end_task(expert, self.config, directions)
            else:
                group.end_task(expert, self.config)
            if vectors is not None and isinstance(group, LinearGroup):
                with vectors.effort.measure():
                    group.add_prior(vectors)
        # One transfer for all groups: each check on its own would wait for the device.
        finite = torch.stack([group.finite() for group in ended]).tolist() if ended else []
        bad = [str(group) for group, fine in zip(ended, finite, strict=True) if not fine]
        if bad:
            raise NumericalError(f"{', '.join(bad)}: features are not finite")

    def with_config(self, config: CalibrationConfig) -> BlockStatistics:
        """Return the same finished statistics for a solve with other options, which leaves these unchanged.

        The two share their tensors: neither may be updated afterwards.
        """
        # Shallow: sums are shared, and a solve replaces the groups' references alone.
        same = copy(self)
        same.config = config
        same._linears, same._norms = [copy(group) for group in self._linears], [copy(norm) for norm in self._norms]
        return same

    @staticmethod
    def combine(counted: Sequence[BlockStatistics], config: CalibrationConfig) -> BlockStatistics:
        """Return finished statistics with the targets of `config`: they are affine in alpha and beta.

        Args:
            counted: statistics with the options of `corners`, on the same tokens; they are not changed.
        """
        # Barycentric coordinates: (alpha, beta) = (0, 0), (1, 0) and (1, 1) are the corners.
        shares = (1 - config.alpha, config.alpha - config.beta, config.beta)
        same = counted[0].with_config(config)
        for group, *corners in zip(same._linears, *(one._linears for one in counted), strict=True):
            group.combine(corners, shares[: len(corners)])
        return same


def corners(config: CalibrationConfig) -> list[CalibrationConfig]:
    """Return the same options with alpha 0 and 1 and, if the recipe uses beta, with alpha and beta 1: the inputs of
    `BlockStatistics.combine`."""
    found = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)][: 3 if "beta" in NUMBERS[config.recipe] else 2]
    # lam 0 asks for products in float64 (`product_dtype`), which are good for any lam of the preview.
    return [replace(config, lam=0.0, alpha=alpha, beta=beta) for alpha, beta in found]


class FirstBlock:
    """Cache of the first block's statistics for runs on the same models and samples.

    The student's input to the first block is the merged model's for all options; only the solve uses lam and rho.
    """

    def __init__(self) -> None:
        self._kept: tuple[Weights, list[ref[ExpertPass]], Mapping[str, object], BlockStatistics] | None = None

    def take(
        self, merged: Weights, experts: Mapping[str, ExpertPass], config: CalibrationConfig
    ) -> BlockStatistics | None:
        """Return the statistics if the last run used these very objects, and options with
        the same effect on statistics; else None.
        """
        if self._kept is None:
            return None
        of, passes, counted, statistics = self._kept
        same = len(passes) == len(experts) and all(map(_refers, passes, experts.values()))
        if of is merged and same and counted == _counting_options(config):
            return statistics.with_config(config)
        self._kept = None  # of no use to this run, and it is about to need memory
        return None

    def keep(
        self, merged: Weights, experts: Mapping[str, ExpertPass], config: CalibrationConfig, statistics: BlockStatistics
    ) -> None:
        """Replace the cached statistics with those of a finished run; the expert passes themselves are not kept."""
        self._kept = (
            merged,
            [ref(one) for one in experts.values()],
            _counting_options(config),
            statistics.with_config(config),
        )


def _refers(reference: ref[ExpertPass], one: ExpertPass) -> bool:
    return reference() is one


def _counting_options(config: CalibrationConfig) -> dict[str, object]:
    """Return the options on which the content and dtype of the statistics depend; those of
    biases are always collected.
    """
    options = {name: value for name, value in asdict(config).items() if name not in ("lam", "rho", "biases")}
    return {**options, "products": product_dtype(DTYPES[config.precision], config)}


def linear_groups(stage: Stage, index: int, inputs: Named) -> list[LinearGroup]:
    """Group the linear maps of a block among `inputs` that share a statistic: the same captured input under the same
    token weighting.

    Maps with a bias and maps without are in separate groups, since their targets differ.

    Raises:
        InputError: a map does not get one row per token; the message names it.
    """
    check_inputs(stage, index, inputs)
    # By identity: equal values of two tensors would not be the same statistic on the next batch.
    return _group_maps(stage, index, {name: id(given) for name, given in inputs.items()})


def likely_groups(stage: Stage, index: int, routers: bool = False) -> list[LinearGroup]:
    """Predict the groups that `linear_groups` will find in a block that has not run yet, for estimates.

    Unless the stage knows which maps share their input (`Stage.sharing`), maps of one module with equally wide inputs
    count as sharing. Maps of the experts of a mixture come last.

    Args:
        routers: whether those of mixtures are calibrated.
    """
    block = stage.blocks[index]
    choosing = router_groups(stage, index, block.routers) if routers else []
    return [*_dense_groups(stage, index), *choosing, *routed_groups(stage, index, block.maps)]


def _dense_groups(stage: Stage, index: int) -> list[LinearGroup]:
    """Return the likely groups of the maps that all tokens pass."""
    known = stage.sharing(index)
    if known is not None:
        return _group_maps(stage, index, {name: names for names in known for name in names})
    fed: dict[str, Hashable] = {}
    sharing: dict[tuple[str, int], list[str]] = {}
    for name, module in stage.blocks[index].linears.items():
        sharing.setdefault((name.rpartition(".")[0], widths(module)[0]), []).append(name)
    for key, names in sharing.items():
        # The last of four or more is the output map of an attention, whose input is as wide as its queries.
        fed |= {name: (key, len(names) > 3 and name == names[-1]) for name in names}
    return _group_maps(stage, index, fed)


def _group_maps(stage: Stage, index: int, fed: Mapping[str, Hashable]) -> list[LinearGroup]:
    """Group linear maps by their input, by the weighting of tokens, and by whether they have biases."""
    modules = stage.blocks[index].linears
    shared: dict[tuple[Hashable, str, bool], list[str]] = {}
    for name, module in modules.items():
        if name in fed:
            key = fed[name], stage.weighting(index, name), module.bias is not None
            shared.setdefault(key, []).append(name)
    return [LinearGroup(names, weighting, modules) for (_, weighting, _), names in shared.items()]


def check_inputs(stage: Stage, index: int, inputs: Named) -> None:
    """Check that every calibrated map gets one row per token, `[batch, tokens, width]`; a norm may get one row for
    every head of a token, if the stage knows the axis of the heads.

    Raises:
        InputError: a module has another kind of input, so that its rows do not match the tokens' weights.
    """
    block = stage.blocks[index]
    for name, given in ((name, stage.arrange_tokens(given)) for name, given in inputs.items()):
        of_heads = given.ndim == 4 and stage.head_axis is not None and name not in block.linears
        if given.ndim != 3 and not of_heads:
            remedy = ", give --no-layernorms" if name in block.layernorms else ""
            raise InputError(
                f"{block.name}.{name}: its input has shape {list(given.shape)}, not [batch, tokens, width]; featcal "
                f"cannot calibrate this module{remedy}"
            )


def _calibrated_norms(stage: Stage, block: Block, config: CalibrationConfig) -> dict[str, nn.Module]:
    """Return the LayerNorms and scale-only norms of a block to calibrate, by name inside it."""
    shifted = block.layernorms if config.layernorms else {}
    return {**shifted, **(block.modules_of(stage.norm) if config.rmsnorms and stage.norm else {})}
