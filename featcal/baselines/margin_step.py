"""Take one closed-form Gauss-Newton step that moves a model's margins to the experts'.

Of sample n of task i, s_n is the margin of the model between the class that the expert decides for and the best other
one, s_n* the expert's own margin, c_i the mean of |s_n*| over the task, and r_n = (s_n* - s_n) / c_i. The rival is the
model's, so that what the step moves apart are the classes that the model takes for one another; of a vocabulary it is
among the first tokens of the experts' answers. With x_nt the input of a linear map at token t and g_nt the gradient of
s_n by its output, the change dW of the map moves the margin by sum_t g_nt^T dW x_nt to first order. The step is the
smallest change of all maps together, each measured by what it does to the inputs that the map is given,

    minimise  sum_l tr(dW_l A_l dW_l^T)  with  J vec(dW) = r  up to the ridge,

which is kernel ridge regression with the model's own tangent kernel,

    K_nm = sum_l sum_tt' (g_nt . g_mt') (x_nt^T A_l^-1 x_mt') / (c_n c_m),
    a = (K + ridge mean(diag K) I)^-1 r,    dW_l = sum_n a_n / c_n sum_t g_nt x_nt^T A_l^-1,

with A_l the second moments of the inputs, each task's of norm 1 and the mean of the diagonal 1, plus `FLOOR` I. Whether
samples that were not fitted would gain is known without any: the error of sample n, had it been left out, is
a_n / [(K + ridge)^-1]_nn, and R2 = 1 - sum e^2 / sum r^2. The ridge with the largest R2 is taken, and no step where R2
is not above `guard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.calibration.closed_form import divide_by_factor
from featcal.calibration.decisions import find_answers
from featcal.evaluation.evaluate import heads_of
from featcal.formats.weights import Overlay, Weights, all_finite
from featcal.models.adapter import Batch, walking
from featcal.models.compute import widen
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.linear_maps import orient_weight
from featcal.models.model import Head, map_features
from featcal.models.whole_forward import (
    Sample,
    batch_by_shape,
    batch_for_gradients,
    final,
    name_maps,
    spread_samples,
)
from featcal.suite.methods import PROPOSED, SAMPLES, register_method
from featcal.suite.options import option
from featcal.system.errors import InputError, NoScores, NumericalError
from featcal.system.fingerprints import seed_from_text

RIDGES = (0.03, 0.1, 0.3, 1.0)
"""Ridges to try, relative to the mean of the kernel's diagonal."""
FLOOR = 0.03
"""Multiple of the identity in the metric of a map, whose diagonal has the mean 1 without it."""
SKETCHED = 32
"""Number of random directions, of a map's inputs and of its outputs, that estimate the kernel; 0 computes it
exactly."""


@register_method(
    "margin-step",
    "one closed Gauss-Newton step of all linear maps together that moves the margins to the experts'; taken only if a "
    "leave-one-out error predicts a gain on other samples, which `featcal merge` prints",
    needs=(SAMPLES,),
    compared=(f"margin-step@{PROPOSED[-1]}",),
)
@dataclass(frozen=True)
class MarginStep(Sampled):
    rows: int = option(
        512, "samples of all tasks together that the step is fitted to; its time grows with them", least=1
    )
    guard: float = option(0.15, "leave-one-out R2 that a step needs", below=1)
    on_another: ClassVar[bool] = True
    calibrations: ClassVar[float] = 2.0

    def make(self, given: FitInputs) -> Made:
        return take_step(given, self)


@dataclass(frozen=True)
class SampleWithScores(Sample):
    """A sample with its task's expert's scores."""

    wanted: Float[Tensor, " c"]


@dataclass(frozen=True)
class Scorer:
    """Heads by which models score the samples of each task."""

    run: Run
    heads: Mapping[str, Head | None]
    """Heads by task; None for the model's own vocabulary."""
    answers: Sequence[int]
    """Scored tokens of the vocabulary: the first tokens of the experts' answers."""

    def score(self, model: Weights, tensors: Mapping[str, Tensor], task: str, batch: Batch) -> Float[Tensor, "b c"]:
        """Return a tower's scores of one batch, with the graph of their gradient if gradients are enabled."""
        features, head = map_features(model, task, final(self.run, tensors, batch)), self.heads[task]
        return self.run.adapter.output(tensors, features)[:, self.answers] if head is None else head.scores(features)


@dataclass(frozen=True)
class Batched:
    """Samples of one shape and task that run through the model together."""

    places: Sequence[int]
    """Indices of the samples among all."""
    short: Float[Tensor, " b"]
    """Shortfall of every sample's margin, s_n* - s_n."""
    margins: Float[Tensor, " b"]
    """The experts' margins s_n*, sample by sample."""
    inputs: Mapping[str, Float[Tensor, "b t d"]]
    slopes: Mapping[str, Float[Tensor, "b t m"]]
    """g_nt, by map; maps that do not affect a margin are left out."""


def take_step(given: FitInputs, options: MarginStep) -> Made:
    """Take the step, if it generalises; return the model, and the leave-one-out R2.

    The whole tower of one model is in memory at a time, with the features for the gradients of a few samples.

    Raises:
        InputError: a task without margins, a mixture, or a module whose output is not one row per token.
        NumericalError: margins or gradients that are not finite.
    """
    run, model, adapter = given.run, given.family.merged, given.run.adapter
    if any(block.mixtures for block in adapter.blocks()):
        raise InputError(
            f"margin-step: a {adapter.family} model is a mixture, whose experts get only some of the tokens"
        )
    try:
        heads = heads_of(given.family, {task: one.weights for task, one in given.experts.items()}, "calibration")
    except NoScores as error:
        raise InputError(f"margin-step: {error}") from error
    with walking(adapter), run.seconds(options.kind):
        scoring = Scorer(run, heads, find_answers(run, given.experts, heads))
        samples = _aim(scoring, given.experts, options.rows)
        tensors = run.compute.place(model.read(adapter.tower))
        step = _Step(scoring, model, tensors, samples)
        solved = solve_kernel(step.kernel(), step.short / step.scales)
        record = {"rows": len(samples), "leave_one_out_r2": solved.r2, "ridge": solved.ridge}
        if solved.r2 <= options.guard:
            return model, record | {"taken": False}
        changes = step.changes(solved.coefficients / step.scales)
    stored, maps = model.read(f"{name}.weight" for name in changes), name_maps(adapter)
    moved = {}
    for name, change in changes.items():
        weight = stored[f"{name}.weight"]
        moved[f"{name}.weight"] = (weight.to(change) + orient_weight(maps[name], change)).to(weight)
    return Overlay(f"{model.label}, {options.kind}", model, moved), record | {"taken": True}


@torch.no_grad()
def _aim(scoring: Scorer, experts: Mapping[str, ExpertPass], rows: int) -> list[SampleWithScores]:
    """Return samples of all tasks, `rows` in total, with their experts' scores."""
    run, found = scoring.run, list[SampleWithScores]()
    for task, one in experts.items():
        tensors = run.compute.place(one.weights.read(run.adapter.tower))
        for batch, some in batch_by_shape(spread_samples(one, max(1, rows // len(experts)))):
            scores = scoring.score(one.weights, tensors, task, batch)
            found += [
                SampleWithScores(task, own.inputs, own.number, row) for own, row in zip(some, scores, strict=True)
            ]
    return found


class _Step:
    """The linearised margins of one model on samples; every pass over them is a forward and a backward pass."""

    def __init__(
        self, scoring: Scorer, model: Weights, tensors: Mapping[str, Tensor], samples: Sequence[SampleWithScores]
    ) -> None:
        self._scoring, self._model, self._tensors, self._samples = scoring, model, tensors, samples
        moments: dict[str, dict[str, Tensor]] = {}
        short, margins = torch.zeros(2, len(samples), dtype=torch.float64)
        for task, batched in self._batches():
            short[batched.places], margins[batched.places] = widen(batched.short), widen(batched.margins)
            for name, x in batched.inputs.items():
                seen = x[batched.slopes[name].ne(0).any(-1)]  # neither padding, nor tokens that no decision sees
                own = moments.setdefault(name, {})
                own[task] = own.get(task, 0) + seen.mT @ seen
        self.short = short
        """`[n]`, s_n* - s_n."""
        tasks = [one.task for one in samples]
        means = {task: margins[[own == task for own in tasks]].abs().mean() for task in dict.fromkeys(tasks)}
        self.scales = torch.stack([means[task] for task in tasks])
        """`[n]`, c_i of the sample's task."""
        if not (all_finite(short) and all_finite(1 / self.scales)):
            raise NumericalError("margin-step: margins are not finite, or all 0 in a task")
        self._factors = {name: factor_metric([*own.values()]) for name, own in moments.items()}

    def kernel(self) -> Float[Tensor, "n n"]:
        """Return K in float64, estimated from `SKETCHED` directions of every map's inputs and outputs."""
        parts: dict[str, Tensor] = {}
        for _, batched in self._batches():
            for name, slopes in batched.slopes.items():
                inputs = self._divide(name, batched.inputs[name])
                if SKETCHED:
                    inputs, slopes = inputs @ _directions(name, inputs), slopes @ _directions(f"{name} out", slopes)
                tangents = (slopes.mT @ inputs).flatten(1) / self.scales[batched.places].to(slopes)[:, None]
                own = parts.setdefault(name, tangents.new_zeros(len(self._samples), tangents.shape[1]))
                own[batched.places] = tangents
        kernel = torch.zeros(len(self._samples), len(self._samples), dtype=torch.float64)
        for one in parts.values():
            kernel += (one @ one.mT).to(kernel)
        return kernel

    def changes(self, coefficients: Float[Tensor, " n"]) -> dict[str, Float[Tensor, "m d"]]:
        """Return dW of every map that affects a margin.

        Args:
            coefficients: a_n / c_n.
        """
        found: dict[str, Tensor] = {}
        for _, batched in self._batches():
            for name, slopes in batched.slopes.items():
                weighed = slopes * coefficients[batched.places].to(slopes)[:, None, None]
                change = weighed.flatten(0, 1).mT @ batched.inputs[name].flatten(0, 1)
                found[name] = found[name] + change if name in found else change
        return {name: divide_by_factor(change, self._factors[name]) for name, change in found.items()}

    def _divide(self, name: str, inputs: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return x L^-T, whose products are x^T A^-1 x'."""
        flat = torch.linalg.solve_triangular(self._factors[name].mT, inputs.flatten(0, 1), upper=True, left=False)
        found: Tensor = flat.unflatten(0, inputs.shape[:2])
        return found

    def _batches(self) -> Iterator[tuple[str, Batched]]:
        """Yield all samples, by task, with their margins and the gradients of these."""
        adapter, place = self._scoring.run.adapter, {id(one): place for place, one in enumerate(self._samples)}
        for task in dict.fromkeys(one.task for one in self._samples):
            own = [one for one in self._samples if one.task == task]
            for batch, some in batch_for_gradients(adapter, own):
                wanted = torch.stack([one.wanted for one in some])
                with torch.enable_grad(), watch_outputs(name_maps(adapter)) as (inputs, shifts):
                    scores = self._scoring.score(self._model, self._tensors, task, batch)
                    best = wanted.argmax(1, keepdim=True)
                    rival = scores.detach().scatter(1, best, -torch.inf).argmax(1, keepdim=True)
                    margins = (scores.gather(1, best) - scores.gather(1, rival))[:, 0]
                    slopes = torch.autograd.grad(margins.sum(), [*shifts.values()], allow_unused=True)
                theirs = (wanted.gather(1, best) - wanted.gather(1, rival))[:, 0]
                known = {name: own for name, own in zip(shifts, slopes, strict=True) if own is not None}
                given = {name: inputs[name] for name in known}
                short = theirs - margins.detach()
                yield task, Batched([place[id(one)] for one in some], short, theirs, given, known)


@contextmanager
def watch_outputs(maps: Mapping[str, nn.Module]) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Store the inputs of maps that run inside the `with`, and add a zero shift to every row of their outputs, to take
    gradients by; yield both by name."""
    inputs: dict[str, Tensor] = {}
    shifts: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if output.ndim != 3:
                raise InputError(f"margin-step: {name} returns {list(output.shape)}, not [samples, tokens, width]")
            inputs[name] = given[0].detach()
            shifts[name] = torch.zeros_like(output).requires_grad_()
            return output + shifts[name]

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in maps.items()]
    try:
        yield inputs, shifts
    finally:
        for handle in handles:
            handle.remove()


def factor_metric(moments: Sequence[Float[Tensor, "d d"]]) -> Float[Tensor, "d d"]:
    """Return the lower Cholesky factor of A_l, given the second moments of the inputs by task; a task of zeros is
    ignored."""
    shares = [one / size for one in moments if bool((size := torch.linalg.matrix_norm(one)) > 0)]
    if not shares:
        return torch.eye(len(moments[0])).to(moments[0])
    total = torch.stack(shares).sum(0)
    total = total * (len(total) / total.trace())
    total.diagonal().add_(FLOOR)
    factor: Tensor = torch.linalg.cholesky(total)
    return factor


@dataclass(frozen=True)
class KernelSolution:
    """The solution of the kernel's system."""

    coefficients: Float[Tensor, " n"]
    """a."""
    ridge: float
    r2: float
    """Leave-one-out R2 of the margins."""


def solve_kernel(kernel: Float[Tensor, "n n"], wanted: Float[Tensor, " n"]) -> KernelSolution:
    """Solve (K + ridge mean(diag K) I) a = r with the ridge of `RIDGES` that has the largest R2.

    Raises:
        NumericalError: the kernel is 0, or not finite.
    """
    mean, eye, total = kernel.diagonal().mean(), torch.eye(len(kernel)).to(kernel), wanted.square().sum()
    if not (bool(mean > 0) and all_finite(kernel)):
        raise NumericalError("margin-step: no margin depends on a map, or gradients are not finite")

    def solve(ridge: float) -> KernelSolution:
        inverse = torch.linalg.inv(kernel + ridge * mean * eye)
        coefficients = inverse @ wanted
        errors = coefficients / inverse.diagonal()
        # Where every margin is already the expert's, there is nothing to explain.
        return KernelSolution(coefficients, ridge, 1 - float(errors.square().sum() / total) if total > 0 else 0.0)

    return max(map(solve, RIDGES), key=lambda one: one.r2)


def _directions(name: str, like: Float[Tensor, "b t w"]) -> Float[Tensor, "w s"]:
    """Return random directions whose products estimate those of rows, always the same for a name."""
    generator = torch.Generator().manual_seed(seed_from_text(name))
    drawn = torch.randn(like.shape[-1], SKETCHED, generator=generator) / SKETCHED**0.5
    found: Tensor = drawn.to(like)
    return found
