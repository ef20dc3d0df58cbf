"""Weight errors by their effect on the experts' decisions (the option `decisions` of featcal's own recipes).

Eq. (15) weights an error of a map's output equally in every direction, but decisions depend on few of them: the
classifier of a task reads a few directions of a late block's output, different ones for every task, and tasks that
share a map need not agree in the other directions. With z the scores of expert i, the margin of a sample is its largest
score minus a rival's, and

    u_n = gradient of the margin of sample n by a shift of the map's output that all of its tokens share,
    S_i = (1 - delta) I + delta m U_i^T U_i / ||U_i||_F^2,

U_i `[n, m]` the rows u_n. For classes the rival is the second best class. For a vocabulary, whose second best token is
often no answer at all, the rivals are the first tokens of all experts' answers, one after the other, so that a task's
answers stay distinct from those of other tasks; of an answer's tokens every sample takes one, in turn over the samples.
The recipe's objective measures the loss of a task in the metric S_i instead of I,

    J(W) = sum_i omega_i / n_i ||S_i^(1/2) (W X_i - Y_i)||^2 + mu sum_i ||(W - W_0 - rho tau_i) K_i^(1/2)||^2
           + lam ||W - W_anc||^2,

whose minimiser solves sum_i omega_i S_i W G_i + W (mu sum_i K_i + (lam + eps) I) = right-hand side: one linear system
with m d unknowns. Conjugate gradients find the correction to the plain solution, which has I in place of every S_i. The
prior and the ridge stay as they are. Nothing is trained: one backward pass of every expert measures U_i. S_i is the
output side of a Kronecker-factored Gauss-Newton matrix (K-FAC, arXiv 1503.05671, whose sharing of weights over tokens
is that of "reduce" in arXiv 2311.00636); MaTS (arXiv 2312.04339) merges with such matrices by conjugate gradients. The
use of deployed inputs, targets and margins is new in featcal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from featcal.calibration.closed_form import divide_by_factor, left_factor
from featcal.calibration.gram import Gram
from featcal.calibration.precision import sum_dtype
from featcal.evaluation.evaluate import heads_of
from featcal.family.opening import Family
from featcal.formats.weights import all_finite
from featcal.models.adapter import Adapter, Batch, walking
from featcal.models.compute import cast, widen
from featcal.models.context import Run
from featcal.models.families.language import has_answers
from featcal.models.lane import ExpertPass
from featcal.models.model import Head, map_features
from featcal.models.whole_forward import (
    answer_features,
    batch_by_shape,
    batch_for_gradients,
    final,
    name_maps,
    samples_of,
    spread_samples,
)
from featcal.system.errors import InputError, NoScores, NumericalError

KEPT = 0.99
"""Share of the square of U that the kept principal directions hold: half of the directions, and half of the time."""
MOST_STEPS = 200
"""Steps of conjugate gradients after which a system counts as unsolvable."""
ENOUGH = 1e-2
"""Share of the plain solution's residual (with I for every S_i) at which the search stops; a smaller one changes no
score (docs/theory/recipes.md).
"""
ANSWERED = 16
"""Samples of a task whose answers serve as rivals of the other answers: all of them give no other ones on the embedded
suites, for the price of as many forwards again.
"""
NOISE = 1e-4
"""Largest norm of U, relative to that of the median map, that counts as rounding: a shift that all keys share
cancels in the softmax, and its remainder in float32 is below 1e-6.
"""


def add_directions(family: Family, run: Run, passes: Mapping[str, ExpertPass]) -> dict[str, ExpertPass]:
    """Return expert passes with the directions of every map's output that move a sample's margin.

    Needs the whole tower of one expert in memory, with the features for the gradients of a few samples
    (`whole_forward.samples_together`).

    Raises:
        InputError: a task has no head, the model is a mixture, or the call is made in several processes or in torch's
            inference mode.
        NumericalError: a gradient that is not finite.
    """
    adapter = family.adapter
    if any(block.mixtures for block in adapter.blocks()):
        raise InputError(
            f"decisions: a {adapter.family} model is a mixture, whose experts get only some of the tokens; set "
            "decisions to 0"
        )
    if run.ranks.several:
        raise InputError(
            "decisions: the sums of all tasks are solved together in one process; start a single process, or set "
            "decisions to 0"
        )
    if torch.is_inference_mode_enabled():
        raise InputError(
            "decisions: its gradients cannot be measured in torch.inference_mode; use torch.no_grad instead"
        )
    try:
        heads = heads_of(family, {task: one.weights for task, one in passes.items()}, "calibration")
    except NoScores as error:
        raise InputError(f"decisions: {error}; or set decisions to 0") from error
    with walking(adapter), run.seconds("decisions"):
        answers = find_answers(run, passes, heads)
        return {
            task: replace(one, directions=measure_margin_gradients(run, one, heads[task], answers))
            for task, one in passes.items()
        }


def find_answers(run: Run, passes: Mapping[str, ExpertPass], heads: Mapping[str, Head | None]) -> list[int]:
    """Return the first tokens of all experts' answers to `ANSWERED` of their own samples; none if all have heads."""
    tokens = [_find_first_tokens(run, one) for task, one in passes.items() if heads[task] is None]
    return sorted({*torch.cat(tokens).tolist()}) if tokens else []


@torch.no_grad()
def _find_first_tokens(run: Run, one: ExpertPass) -> Tensor:
    """Return the first token of an expert's answer to each of `ANSWERED` samples, `[n]`."""
    tensors = run.compute.place(one.weights.read(run.adapter.tower))
    features = (final(run, tensors, batch) for batch, _ in batch_by_shape(spread_samples(one, ANSWERED)))
    return torch.cat(
        [run.adapter.output(tensors, map_features(one.weights, one.task, own)).argmax(1) for own in features]
    )


def _score(
    run: Run,
    one: ExpertPass,
    head: Head | None,
    tensors: Mapping[str, Tensor],
    batch: Batch,
    turns: Sequence[int],
) -> Float[Tensor, "b c"]:
    """Return the scores of one batch, of classes or of the vocabulary.

    Args:
        turns: by sample, which of the positions that decide an answer in text is scored, counted round.
    """
    if head is None and has_answers(batch):
        positions = zip(answer_features(run, tensors, batch), turns, strict=True)
        chosen = torch.stack([own[turn % len(own)] for own, turn in positions])
    else:
        chosen = final(run, tensors, batch)
    features = map_features(one.weights, one.task, chosen)
    return run.adapter.output(tensors, features) if head is None else head.scores(features)


def measure_margin_gradients(
    run: Run, one: ExpertPass, head: Head | None, answers: Sequence[int]
) -> dict[str, Float[Tensor, "r m"]]:
    """Measure U of one expert on its samples, by the name of a map in files, and keep its principal directions
    (`principal_rows`); call it inside `walking`.

    Maps that do not affect a margin are left out: an attention's keys without rotary positions, and maps of a single
    token's attention to itself.

    Args:
        head: of `heads_of`; None for the model's own vocabulary.
        answers: tokens of the vocabulary that serve as rivals.

    Raises:
        NumericalError: a gradient is not finite; the message names the task.
    """
    adapter, tensors = run.adapter, run.compute.place(one.weights.read(run.adapter.tower))
    found: dict[str, list[Tensor]] = {}
    places = {index: place for place, index in enumerate(sorted(one.indices))}  # in the draw, whatever the batches
    for batch, some in batch_for_gradients(adapter, samples_of(one)):
        with torch.enable_grad(), _sum_gradients(adapter, len(some)) as (sums, starts):
            turns = [places[one.indices[sample.number]] for sample in some]
            scores = _score(run, one, head, tensors, batch, turns)
            best, second = scores.topk(2, dim=1).indices.unbind(1)
            rivals = second if head is not None else _choose_rivals(best, second, answers, turns)
            margins = scores.gather(1, best[:, None]) - scores.gather(1, rivals[:, None])
            torch.autograd.grad(margins.sum(), starts, allow_unused=True)
        for name, gradient in sums.items():
            found.setdefault(name, []).append(cast(gradient, sum_dtype(gradient.dtype)))
    rows = {name: torch.cat(parts) for name, parts in found.items()}
    if not all(all_finite(own) for own in rows.values()):
        raise NumericalError(f"decisions: the gradient of the margins of expert '{one.task}' is not finite")
    sizes = {name: float(own.norm()) for name, own in rows.items()}
    least = max(NOISE, 8 * torch.finfo(run.compute.dtype).eps) * median(sizes.values())
    return {name: principal_rows(own) for name, own in rows.items() if sizes[name] > least}


def _choose_rivals(best: Tensor, second: Tensor, answers: Sequence[int], turns: Sequence[int]) -> Tensor:
    """Choose the rival token `[n]` of each sample's best token: the other answers, one after the other; the second
    best token if there is no other answer.
    """
    found = []
    for first, next_best, turn in zip(best.tolist(), second.tolist(), turns, strict=True):
        others = [answer for answer in answers if answer != first] or [next_best]
        found.append(others[turn % len(others)])
    return torch.tensor(found, device=best.device)


@contextmanager
def _sum_gradients(adapter: Adapter, samples: int) -> Iterator[tuple[dict[str, Tensor], list[Tensor]]]:
    """Let a backward pass sum the gradients by the output of every linear map that runs inside the `with` over the
    tokens of a sample.

    Yields the sums `[n, m]` by the name of the map in files, filled while the gradient passes, and the outputs from
    which the gradient has to be asked for: those of maps that no other map comes before.
    """
    sums: dict[str, Tensor] = {}
    starts: list[Tensor] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.ndim != 3 or len(output) != samples:
                raise InputError(
                    f"decisions: {name} returns {list(output.shape)} of {samples} samples, not [samples, tokens, "
                    "width]; set decisions to 0"
                )
            if not output.requires_grad:
                starts.append(output.requires_grad_())
            output.register_hook(lambda gradient: sums.update({name: gradient.sum(1)}))  # type: ignore[no-untyped-call]

        return hook

    handles = [linear.register_forward_hook(watch(name)) for name, linear in name_maps(adapter).items()]
    try:
        yield sums, starts
    finally:
        for handle in handles:
            handle.remove()


def principal_rows(rows: Float[Tensor, "n m"]) -> Float[Tensor, "r m"]:
    """Return the fewest principal directions of U that hold `KEPT` of its square; each has the length of U along it."""
    # In float64, whatever the products are in: of a matrix with many zero rows, which samples without a margin have,
    # float32 finds no eigenvectors with some libraries.
    sizes, turn = torch.linalg.eigh(widen(rows @ rows.mT))
    sizes, turn = sizes.flip(0).clamp_min(0), turn.flip(1).to(rows)
    count = int((sizes.cumsum(0) < KEPT * sizes.sum()).sum()) + 1
    kept: Tensor = turn[:, :count].mT @ rows
    return kept


@dataclass(frozen=True)
class OutputMetric:
    """The metric S of one task for one map, (1 - share) I + V V^T."""

    share: float
    """Weight delta of the part of the metric that depends on decisions."""
    factor: Float[Tensor, "m r"]
    """V, whose columns are directions of U, scaled so that the trace of S is m."""

    @classmethod
    def from_rows(cls, rows: Float[Tensor, "r m"], share: float) -> OutputMetric:
        """Make S from the principal directions of U."""
        # The mean of their squares first: squares of small gradients would be below what float32 holds.
        rows = rows / torch.linalg.matrix_norm(rows)
        return cls(share, rows.mT * (share * rows.shape[1]) ** 0.5)

    def dense(self) -> Float[Tensor, "m m"]:
        m = len(self.factor)
        return (1 - self.share) * torch.eye(m).to(self.factor) + self.factor @ self.factor.mT


@dataclass(frozen=True)
class TaskShare:
    """The share of one task in the sums of one map, with the directions of its decisions."""

    metric: OutputMetric
    gram: Gram
    """The task's share omega_i G_i of the left matrix."""
    target: Float[Tensor, "m d"]
    """The task's share omega_i W_i C_i of the right-hand side."""


def weigh_by_decisions(
    tasks: Sequence[TaskShare],
    plain: Float[Tensor, "m d"],
    factor: Float[Tensor, "d d"],
    left: Callable[[], Float[Tensor, "d d"]],
    ridge: float,
) -> Float[Tensor, "m d"]:
    """Return the minimiser of J for one map: the plain solution W_1 plus the change by the metrics.

    With R the matrix of the plain system, the change D solves, in the dtype of the tasks' sums,

        D (R - delta sum_i omega_i G_i) + sum_i V_i V_i^T D omega_i G_i = sum_i (S_i - I) omega_i (W_i C_i - W_1 G_i).

    Output directions outside of all V share one matrix and are solved directly; those inside, as many as all V have
    columns together, are found by conjugate gradients.

    Args:
        tasks: shares of all tasks with a metric, all with the same delta.
        plain: W_1 `[m, d]`.
        factor: L, lower triangular, of the plain system, L L^T = sum_i omega_i G_i + mu sum_i K_i + (lam + eps) I.
        left: makes the matrix of that system without its ridge, as `Gram.lower` has it.
        ridge: lam + eps.

    Raises:
        NumericalError: conjugate gradients do not converge.
        SolveError: a left matrix is not positive definite.
    """
    share, like = tasks[0].metric.share, tasks[0].target
    start, grams = plain.to(like), [one.gram for one in tasks]
    factors = [one.metric.factor for one in tasks]
    every = Gram.zeros(like.shape[1], like.device, like.dtype)
    for gram in grams:
        every.merge(gram)
    # (S_i - I) E_i is -delta E_i + V_i V_i^T E_i; the first is summed over tasks, the second of few rows each.
    errors = torch.stack([one.target for one in tasks]).sum(0) - every.multiply(start)
    right = errors.mul_(-share)
    for own, one in zip(factors, tasks, strict=True):
        right.addmm_(own, own.mT @ one.target - one.gram.multiply(own.mT @ start))

    def loosen() -> Tensor:
        matrix = left()
        every.add_to(matrix, -share)
        return matrix.to(like)

    reached, _ = torch.linalg.qr(torch.cat(factors, dim=1))
    wanted = reached.mT @ right
    loose = left_factor(loosen, ridge, 0.0)
    beside = divide_by_factor(right - reached @ wanted, loose)
    inside = [reached.mT @ own for own in factors]
    lower = loosen().tril_()
    lower.diagonal().add_(ridge).mul_(0.5)
    mean = (1 - share) * torch.eye(len(wanted)).to(like) + torch.stack([own @ own.mT for own in inside]).mean(0)
    system = _System(inside, grams, lower + lower.mT, torch.linalg.inv(mean), factor.to(like))
    weight: Tensor = plain + (beside + reached @ system.solve(wanted)).to(plain)
    return weight


@dataclass(frozen=True)
class _System:
    """The system for the output directions inside some V, `[k, d]`: X -> X left + sum_i V_i V_i^T X G_i."""

    factors: list[Tensor]
    """V_i, `[k, r]` with as many columns as its task has directions."""
    grams: list[Gram]
    left: Float[Tensor, "d d"]
    before: Float[Tensor, "k k"]
    """Inverse of the mean of the metrics."""
    factor: Float[Tensor, "d d"]
    """L of the plain system."""

    def apply(self, values: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        stacked = torch.cat(self.factors, dim=1)
        parts = torch.split(stacked.mT @ values, [own.shape[1] for own in self.factors])
        return values @ self.left + stacked @ torch.cat([g.multiply(p) for p, g in zip(parts, self.grams, strict=True)])

    def divide(self, values: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """Approximate the inverse of `apply` (the preconditioner)."""
        return divide_by_factor(self.before @ values, self.factor)

    def solve(self, right: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
        """Run conjugate gradients from 0 until `ENOUGH` of the right-hand side is left.

        Raises:
            NumericalError: it takes more than `MOST_STEPS`.
        """
        size, found, residual = float(right.norm()), torch.zeros_like(right), right
        ahead = near = self.divide(residual)
        power = (residual * near).sum()
        for _ in range(MOST_STEPS):
            if float(residual.norm()) <= size * ENOUGH:
                return found
            turned = self.apply(ahead)
            length = power / (ahead * turned).sum()
            found = found + length * ahead
            residual = residual - length * turned
            near = self.divide(residual)
            before, power = power, (residual * near).sum()
            ahead = near + power / before * ahead
        raise NumericalError(
            f"decisions: {MOST_STEPS} steps of conjugate gradients leave a residual of {float(residual.norm()):.1e} "
            f"beside {size:.1e}; lower decisions, or raise lam"
        )


def bias_in_metrics(
    metrics: Sequence[OutputMetric | None],
    omegas: Sequence[Float[Tensor, ""]],
    errors: Sequence[Float[Tensor, " m"]],
    anchor: Float[Tensor, " m"],
    lam: float,
) -> Float[Tensor, " m"]:
    """Return the bias of Eq. (55) with S_i in place of I.

    Args:
        metrics: by task; None for I.
        omegas, errors: by task: omega_i, and omega_i (W_i mu_i^tgt + b_i - W mu_i), with W the weight as solved.
    """
    right, diagonal, columns = lam * anchor, torch.full_like(omegas[0], lam), list[Tensor]()
    for one, omega, error in zip(metrics, omegas, errors, strict=True):
        share = 0.0 if one is None else one.share
        right, diagonal = right + (1 - share) * error, diagonal + (1 - share) * omega
        if one is not None:
            own = one.factor.to(anchor)
            right = right + own @ (own.mT @ error)
            columns.append(omega.sqrt() * own)
    if not columns:
        return right / diagonal
    # (c I + V V^T)^-1, of which V has few columns, by the matrix inversion lemma.
    stacked = torch.cat(columns, dim=1)
    small = diagonal * torch.eye(stacked.shape[1]).to(anchor) + stacked.mT @ stacked
    solved: Tensor = (right - stacked @ torch.linalg.solve(small, stacked.mT @ right)) / diagonal
    return solved
