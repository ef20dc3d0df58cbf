"""Fit a small adapter per task over one model: what a low rank allows of every linear map's way to the expert's.

With x what a map of the model is given on the samples of a task, in forward order after adapted maps, and
D = W_t - W the change to the task's expert,

    B A = argmin over rank r of tr((D - B A) (omega G + (lam + eps) I) (D - B A)^T),    G = mean of x x^T,

omega as in Eq. (14), lam and eps the defaults of the architecture (`calibration.low_rank`). Biases, norms and the rest
are the model's. Adapters hold for text that is generated as well, and a server can load them all over one model. Which
task a sample is of must be known when the model is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.calibration.config import resolve_recipe
from featcal.calibration.deployed_inputs import DeployedInputs
from featcal.calibration.low_rank import Limits
from featcal.calibration.repair import MapCut, cut_changes, left_out_share
from featcal.calibration.store import prefix_errors
from featcal.calibration.token_rows import lane_rows
from featcal.export.adapter_files import require_adaptable
from featcal.formats.low_rank import Adapted, Factors, add_low_rank
from featcal.formats.weights import Weights
from featcal.models.adapter import Block, walking
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.linear_maps import is_transposed
from featcal.models.model import Model, tasks_with_own_modules
from featcal.models.walk import BlockwiseForward
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.methods import MODULES, PROPOSED, SAMPLES, TASK, register_method
from featcal.suite.options import option
from featcal.system.errors import InputError
from featcal.system.formatting import some


@register_method(
    "adapters",
    "a small adapter per task over one model, in closed form: the best low-rank step of every map towards the "
    "expert's; nearly the experts' scores, in a LoRA file per task",
    needs=(SAMPLES, MODULES, TASK),
    compared=tuple(f"adapters@{one}" for one in ("merged", *PROPOSED)),
)
@dataclass(frozen=True)
class Adapters(Sampled):
    rank: int = option(16, "rank of every adapted map", least=1)
    on_another: ClassVar[bool] = True

    def make(self, given: FitInputs) -> Made:
        family = given.family
        # Not `config_for`: what the suite recommends for calibrations stands in no name of this method.
        config = resolve_recipe(family.adapter, family.suite.tasks, {"samples": self.samples, "seed": self.seed})
        return adapters(given.run, given.experts, family.merged, config, self)


def adapters(
    run: Run, experts: Mapping[str, ExpertPass], model: Weights, config: CalibrationConfig, options: Adapters
) -> tuple[Model, dict[str, Any]]:
    """Fit the adapters of all tasks; return the model with them, and the remaining share of the difference for each.

    One block of the model and of one expert is in memory at a time, with the factors of all tasks.

    Raises:
        InputError: an architecture without separate linear maps, or a model with maps or heads of its own.
        NumericalError: features that are not finite.
    """
    if own := tasks_with_own_modules(model):
        raise InputError(
            f"{options.kind}: {model.label} has maps, heads or adapters of its own for {some(sorted(own))}"
        )
    require_adaptable(run.adapter)
    adapted: dict[str, Weights] = {}
    left_out: dict[str, float] = {}
    with torch.no_grad(), run.seconds(options.kind):
        for task, one in experts.items():
            found, cuts = _fit(run, one, model, config, options)
            adapted[task] = Adapted(f"{model.label}, {task}", model, found, run.adapter.transposed_weights)
            left_out[task] = left_out_share(cuts)
    return Model(model, adapted=adapted), {"left_out": left_out}


def _fit(
    run: Run, one: ExpertPass, model: Weights, config: CalibrationConfig, options: Adapters
) -> tuple[dict[str, Factors], list[MapCut]]:
    """Return the products of one task by the name of the weight, and the remainders."""
    products: dict[str, Factors] = {}
    cuts: list[MapCut] = []
    passes = {one.task: one.copy_for_one_walk(model)}
    with walking(run.adapter):
        walk = BlockwiseForward(run, f"{options.kind}, {one.task}", passes, {})
        lane = walk.experts[one.task]
        for stage in run.adapter.stages:
            walk.enter(stage)
            rows = lane_rows(stage, walk.experts, passes, config)[one.task]
            for index, block in walk.blocks(stage):
                before, wanted = (_tensors(run, weights, block) for weights in (model, one.weights))
                inputs = DeployedInputs(stage, index, config)
                with prefix_errors(f"{run.adapter.name_of(block)}, task '{one.task}'"):
                    given = lane.inputs(block, run.compute.place(before), block.linears, whole=True)
                    inputs.count(given, rows)
                    own, cut = cut_changes(run.adapter.name_of(block), inputs, before, wanted, Limits(options.rank))
                lane.pass_block(stage, block, before | _add(block, before, own))
                products |= {f"{block.stored_name(name)}.weight": pair for name, pair in own.items()}
                cuts += cut
        walk.finish()
    return products, cuts


def _tensors(run: Run, weights: Weights, block: Block) -> dict[str, Tensor]:
    return block.local(run.compute.move(weights.read(block.names)))


def _add(block: Block, tensors: Mapping[str, Tensor], products: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Return the adapted weights of a block by name inside it."""
    return {
        f"{name}.weight": add_low_rank(tensors[f"{name}.weight"], pair, is_transposed(block.linears[name]))
        for name, pair in products.items()
    }
