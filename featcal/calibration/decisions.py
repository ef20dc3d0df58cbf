"""Weigh errors by what they do to the experts' decisions (the option `decisions` of featcal's own recipes).

Eq. (15) counts an error of a map's output alike in every direction. A decision does not: of the outputs of a late block
a classifier reads a few directions per task, others for every task, and where tasks share a map they need not agree in
the rest. With z the scores of expert i, the margin of a sample is that of the largest score over a rival's, and

    u_n = gradient of the margin of sample n by a shift of the map's output that all of its tokens share,
    S_i = (1 - delta) I + delta m U_i^T U_i / ||U_i||_F^2,

U_i `[n, m]` the rows u_n. Of classes the rival is the second best. Of a vocabulary, whose second best token is often no
answer at all, it is a first token of any expert's answers, each in its turn: so a task keeps its answers apart from
those of the others. The recipe's objective measures what a task loses in S_i in place of I,

    J(W) = sum_i omega_i / n_i ||S_i^(1/2) (W X_i - Y_i)||^2 + mu sum_i ||(W - W_0 - rho tau_i) K_i^(1/2)||^2
           + lam ||W - W_anc||^2,

whose minimiser solves sum_i omega_i S_i W G_i + W (mu sum_i K_i + (lam + eps) I) = right-hand side: one linear system
with m d unknowns, which conjugate gradients solve. The prior and the ridge stay as they are. Nothing is trained: one
backward pass of every expert measures U_i. S_i is the output side of a Kronecker-factored Gauss-Newton matrix (K-FAC,
arXiv 1503.05671, whose sharing of weights over tokens is that of "reduce" in arXiv 2311.00636); MaTS (arXiv 2312.04339)
merges in such matrices by conjugate gradients. Deployed inputs, targets and margins are featcal's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from featcal.calibration.closed_form import left_factor
from featcal.evaluation.evaluate import heads_of
from featcal.family.opening import Family
from featcal.formats.weights import all_finite
from featcal.models.adapter import Adapter, Batch, walking
from featcal.models.compute import widen
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.model import Head, map_features
from featcal.models.whole_forward import batch_by_shape, final, samples_of
from featcal.system.errors import InputError, NoScores, NumericalError

KEPT = 0.99
"""Share of the square of U that its principal directions hold which count: half of them, which is half the time."""
MOST_STEPS = 2000
"""Steps of conjugate gradients after which a system counts as one that cannot be solved."""
SHARE = 1e-3
"""Share of a residual that is left where float32 begins anew: it holds no more than that of a large system."""
_LEFT = 1e-6
"""Norm of the residual beside the right-hand side at which a solution is good: sums of float32 products have no more
digits."""


def add_directions(family: Family, run: Run, passes: Mapping[str, ExpertPass]) -> dict[str, ExpertPass]:
    """Return expert passes that know in which directions of a map's output every sample's margin moves.

    The whole tower of one expert is in memory meanwhile, with what the gradient of `whole_forward.TOGETHER` samples
    needs.

    Raises:
        InputError: a task without a head, a mixture, several processes, a limit of memory, or torch's inference mode.
        NumericalError: a gradient that is not finite.
    """
    adapter = family.adapter
    if any(block.mixtures for block in adapter.blocks()):
        raise InputError(f"decisions: a {adapter.family} model is a mixture, whose maps see some tokens each; set it 0")
    if run.ranks.several or run.store.is_limited:
        limit = "--max-device-memory" if run.store.budget is None else "--max-memory"
        what = "several processes" if run.ranks.several else limit
        raise InputError(f"decisions: every expert runs whole, in one process; leave {what} out, or set it 0")
    if torch.is_inference_mode_enabled():
        raise InputError(
            "decisions: gradients are measured, which torch.inference_mode rules out; torch.no_grad does not"
        )
    try:
        heads = heads_of(family, {task: one.weights for task, one in passes.items()}, "calibration")
    except NoScores as error:
        raise InputError(f"decisions: {error}; or set it 0") from error
    with walking(adapter), run.seconds("decisions"):
        tokens = [_find_first_tokens(run, one) for task, one in passes.items() if heads[task] is None]
        answers = sorted({*torch.cat(tokens).tolist()}) if tokens else []
        return {task: replace(one, directions=measure(run, one, heads[task], answers)) for task, one in passes.items()}


@torch.no_grad()
def _find_first_tokens(run: Run, one: ExpertPass) -> Tensor:
    """Return the token that an expert's answer to each of its samples begins with, `[n]`."""
    tensors = run.compute.place(one.weights.read(run.adapter.tower))
    return torch.cat([_score(run, one, None, tensors, batch).argmax(1) for batch, _ in batch_by_shape(samples_of(one))])


def _score(
    run: Run, one: ExpertPass, head: Head | None, tensors: Mapping[str, Tensor], batch: Batch
) -> Float[Tensor, "b c"]:
    """Return the scores of one batch, of classes or of the vocabulary."""
    features = map_features(one.weights, one.task, final(run, tensors, batch))
    return run.adapter.output(tensors, features) if head is None else head.scores(features)


def measure(run: Run, one: ExpertPass, head: Head | None, answers: Sequence[int]) -> dict[str, Float[Tensor, "n m"]]:
    """Measure U of one expert on its samples, by the name that files give to a map; to be called inside `walking`.

    Maps that no margin depends on are left out.

    Args:
        head: of `heads_of`; None for the model's own vocabulary.
        answers: tokens of the vocabulary that are rivals.

    Raises:
        NumericalError: a gradient that is not finite; names the task.
    """
    adapter, tensors = run.adapter, run.compute.place(one.weights.read(run.adapter.tower))
    found: dict[str, list[Tensor]] = {}
    places = {index: place for place, index in enumerate(sorted(one.indices))}  # in the draw, whatever the batches
    for batch, some in batch_by_shape(samples_of(one)):
        with torch.enable_grad(), _shift_outputs(adapter, len(some)) as shifts:
            scores = _score(run, one, head, tensors, batch)
            best, second = scores.topk(2, dim=1).indices.unbind(1)
            turns = [places[one.indices[sample.number]] for sample in some]
            rivals = second if head is not None else _choose_rivals(best, second, answers, turns)
            margins = scores.gather(1, best[:, None]) - scores.gather(1, rivals[:, None])
            gradients = torch.autograd.grad(margins.sum(), [*shifts.values()], allow_unused=True)
        for name, gradient in zip(shifts, gradients, strict=True):
            if gradient is not None:
                found.setdefault(name, []).append(widen(gradient[:, 0]))
    rows = {name: torch.cat(parts) for name, parts in found.items()}
    if not all(all_finite(own) for own in rows.values()):
        raise NumericalError(f"decisions: the gradient of the margins of expert '{one.task}' is not finite")
    return {name: own for name, own in rows.items() if bool(own.any())}


def _choose_rivals(best: Tensor, second: Tensor, answers: Sequence[int], turns: Sequence[int]) -> Tensor:
    """Return the token `[n]` that each sample's best one is held against: the other answers, each in its turn; the
    second best where there is no other."""
    found = []
    for first, next_best, turn in zip(best.tolist(), second.tolist(), turns, strict=True):
        others = [answer for answer in answers if answer != first] or [next_best]
        found.append(others[turn % len(others)])
    return torch.tensor(found, device=best.device)


@contextmanager
def _shift_outputs(adapter: Adapter, samples: int) -> Iterator[dict[str, Tensor]]:
    """Add to the output of every linear map of the blocks a shift of 0 per sample, which gradients are taken by; fill
    the shifts `[n, 1, m]` of maps that run inside the `with`, by the name that files give to a map."""
    shifts: dict[str, Tensor] = {}

    def shift(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            if output.ndim != 3 or len(output) != samples:
                raise InputError(
                    f"decisions: {name} puts out {list(output.shape)} of {samples} samples, not [samples, tokens, "
                    "width]; set it 0"
                )
            shifts[name] = output.new_zeros(samples, 1, output.shape[-1]).requires_grad_()
            return output + shifts[name]

        return hook

    maps = {block.stored_name(name): linear for block in adapter.blocks() for name, linear in block.linears.items()}
    handles = [linear.register_forward_hook(shift(name)) for name, linear in maps.items()]
    try:
        yield shifts
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Metric:
    """S of one task for one map, (1 - share) I + V V^T; I where no decision depends on the map."""

    share: float
    """delta, or 0 where S is I."""
    factor: Float[Tensor, "m k"]
    """V, whose columns are the k largest principal directions of U, so scaled that the trace of S is m."""

    @classmethod
    def from_rows(cls, rows: Float[Tensor, "n m"] | None, share: float, like: Float[Tensor, "m d"]) -> Metric:
        """Make S of U, in the dtype and place of a tensor with as many rows as the map has outputs.

        Of U the fewest principal directions count that hold `KEPT` of its square.
        """
        if rows is None:
            return cls(0.0, like.new_zeros(len(like), 0))
        sizes, turn = torch.linalg.eigh(rows @ rows.mT)
        sizes, turn = sizes.flip(0).clamp_min(0), turn.flip(1)
        count = int((sizes.cumsum(0) < KEPT * sizes.sum()).sum()) + 1
        kept = rows.mT @ turn[:, :count]
        return cls(share, (kept * (share * len(like) / sizes[:count].sum()).sqrt()).to(like))

    def __matmul__(self, values: Tensor) -> Tensor:
        """Return S times values, whose rows are the map's outputs."""
        return (1 - self.share) * values + self.factor @ (self.factor.mT @ values)

    def dense(self) -> Float[Tensor, "m m"]:
        return self @ torch.eye(len(self.factor)).to(self.factor)


def weight_in_metrics(
    metrics: Sequence[Metric],
    grams: Sequence[Float[Tensor, "d d"]],
    targets: Sequence[Float[Tensor, "m d"]],
    factor: Float[Tensor, "d d"],
    right: Float[Tensor, "m d"],
) -> Float[Tensor, "m d"]:
    """Return the minimiser of J for one map.

    Outputs that no task's V reaches are a system of one matrix, which is solved directly; those that one reaches, as
    many as all V have columns together, are found by conjugate gradients.

    Args:
        metrics, grams, targets: by task: S_i, omega_i G_i and omega_i W_i C_i.
        factor: L, lower triangular, of the system with I in the place of every S_i,
            L L^T = sum_i omega_i G_i + mu sum_i K_i + (lam + eps) I.
        right: the right-hand side of that system.

    Raises:
        NumericalError: conjugate gradients do not come to an end.
        SolveError: a left matrix is not positive definite.
    """
    # What S_i changes of the plain system, so that prior and ridge need not be told apart here.
    right, left = right.clone(), factor @ factor.mT
    # One task at a time: what all of them change would be gigabytes.
    for one, gram, target in zip(metrics, grams, targets, strict=True):
        right += one @ target - target
        left.sub_(gram, alpha=one.share)
    reached, _ = torch.linalg.qr(torch.cat([one.factor for one in metrics], dim=1))
    wanted = reached.mT @ right
    beside = torch.cholesky_solve((right - reached @ wanted).mT, left_factor(left.clone, 0.0, 0.0)).mT
    inside = [reached.mT @ one.factor for one in metrics]
    share = 1 - sum(one.share for one in metrics) / len(metrics)
    mean = share * torch.eye(len(wanted)).to(left) + torch.stack([own @ own.mT for own in inside]).mean(0)
    system = _System(inside, [*grams], left, torch.linalg.inv(mean), torch.cholesky_inverse(factor))
    solution: Tensor = beside + reached @ _solve(system, wanted)
    return solution


@dataclass(frozen=True)
class _System:
    """The system of the outputs that some V reaches, `[k, d]`: X -> X left + sum_i V_i V_i^T X G_i."""

    factors: list[Tensor]
    """V_i, `[k, r]` with as many columns as its task has directions."""
    grams: list[Float[Tensor, "d d"]]
    left: Float[Tensor, "d d"]
    before: Float[Tensor, "k k"]
    """Inverse of the mean of the metrics."""
    behind: Float[Tensor, "d d"]
    """Inverse of the plain system."""

    def apply(self, values: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        stacked = torch.cat(self.factors, dim=1)
        parts = torch.split(stacked.mT @ values, [own.shape[1] for own in self.factors])
        return values @ self.left + stacked @ torch.cat([p @ g for p, g in zip(parts, self.grams, strict=True)])

    def divide(self, values: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """Return nearly what `apply` gives these values for."""
        return self.before @ values @ self.behind

    def convert(self, dtype: torch.dtype) -> _System:
        """Return the system in another dtype."""
        factors, grams = ([one.to(dtype) for one in several] for several in (self.factors, self.grams))
        return _System(factors, grams, *(one.to(dtype) for one in (self.left, self.before, self.behind)))

    def improve(self, right: Float[Tensor, "k d"], share: float, steps: int) -> tuple[Float[Tensor, "k d"], int]:
        """Take steps of conjugate gradients from 0 until so much of the right-hand side is left; return where they
        lead, and how many they were."""
        enough, found, residual = share * float(right.norm()), torch.zeros_like(right), right
        ahead = near = self.divide(residual)
        power = (residual * near).sum()
        for step in range(steps):
            if float(residual.norm()) <= enough:
                return found, step
            turned = self.apply(ahead)
            length = power / (ahead * turned).sum()
            found = found + length * ahead
            residual = residual - length * turned
            near = self.divide(residual)
            before, power = power, (residual * near).sum()
            ahead = near + power / before * ahead
        return found, steps


def _solve(system: _System, right: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
    """Solve a system by conjugate gradients in float32, from which residuals in the system's own dtype begin anew."""
    quick, found, residual, taken = system.convert(torch.float32), torch.zeros_like(right), right, 0
    size = float(right.norm())
    # Not `>`: what is not a number must not pass for a solution.
    while not float(residual.norm()) <= size * max(_LEFT, 100 * torch.finfo(right.dtype).eps):
        more, steps = quick.improve(residual.float(), SHARE, MOST_STEPS - taken)
        found = found + more.to(right)
        residual, taken = right - system.apply(found), taken + steps
        if taken >= MOST_STEPS or not bool(torch.isfinite(residual.norm())):
            raise NumericalError(
                f"decisions: {taken} steps of conjugate gradients leave a residual of {float(residual.norm()):.1e} "
                f"beside {size:.1e}; lower decisions, or raise lam"
            )
    return found


def bias_in_metrics(
    metrics: Sequence[Metric],
    omegas: Sequence[Float[Tensor, ""]],
    errors: Sequence[Float[Tensor, " m"]],
    anchor: Float[Tensor, " m"],
    lam: float,
) -> Float[Tensor, " m"]:
    """Return the bias of Eq. (55) with S_i in place of I.

    Args:
        omegas, errors: by task: omega_i, and omega_i (W_i mu_i^tgt + b_i - W mu_i), with W the weight as solved.
    """
    weighed = [omega * one.dense() for one, omega in zip(metrics, omegas, strict=True)]
    left = torch.stack(weighed).sum(0) + lam * torch.eye(len(anchor)).to(anchor)
    right = torch.stack([one @ error for one, error in zip(metrics, errors, strict=True)]).sum(0) + lam * anchor
    solved: Tensor = torch.linalg.solve(left, right)
    return solved
