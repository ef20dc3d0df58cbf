"""Collect statistics of linear maps that share their input (Eq. 13), weight the tasks (Eq.
14), and solve the maps (Eqs. 17 and 55).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from featcal.calibration import closed_form
from featcal.calibration.closed_form import SolveError
from featcal.calibration.column_rounding import Rounder
from featcal.calibration.decisions import OutputMetric, TaskShare, bias_in_metrics, weigh_by_decisions
from featcal.calibration.linear_statistics import CurrentTask, LinearSums, TaskStatistics
from featcal.calibration.precision import product_dtype, solve_dtype, sum_dtype
from featcal.calibration.prior import Prior, TaskVectors, spanning_rows
from featcal.calibration.token_rows import Named, TokenRows, uncounted_error
from featcal.calibration.weighed_tokens import TaskVectorEffect
from featcal.formats.weights import all_finite
from featcal.models.compute import cast, widen
from featcal.models.lane import BlockStep
from featcal.models.linear_maps import LinearMap, orient_weight, widths
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError, NumericalError


class LinearGroup:
    """Linear maps with the same input and the same token weighting: one Gram matrix, one Cholesky factor.

    All of them have biases, or none. Their m output rows are stacked. The target T_i = W_i C_i of a task (Eqs. 10 and
    13) is computed in one of three ways, equal up to rounding (`costs`).
    """

    def __init__(self, names: Sequence[str], weighting: str, modules: Mapping[str, LinearMap]) -> None:
        self.names = tuple(names)
        self.weighting = weighting
        biased = {name for name in names if getattr(modules[name], "bias", None) is not None}
        if biased and len(biased) < len(names):
            raise InputError(
                f"{', '.join(names)}: maps with and without bias in one group; featcal solves them separately"
            )
        self._biased = bool(biased)
        self._modules = {name: modules[name] for name in names}
        self._rows = [widths(modules[name])[1] for name in names]
        self.inputs = widths(modules[names[0]])[0]
        self.outputs = sum(self._rows)
        self.moved = False
        """True if the experts' outputs are shifted, so that targets must be computed from outputs."""
        self._products = torch.float32
        self._task: CurrentTask | None = None
        self._sums: LinearSums | None = None

    def costs(self, tokens: int) -> dict[str, int]:
        """Return the number of multiplications for the target of a task with the given number of tokens, by route.

        - "inputs": W_i (sum of x_mix x^T) with x_mix = alpha x_exp + (1 - alpha) x.
        - "outputs": alpha (sum of y_exp x^T) + (1 - alpha) W_i G_i, from the expert's own outputs.
        - "mixed": sum of (alpha y_exp + (1 - alpha) W_i x) x^T, token by token.
        """
        n, d, m = tokens, self.inputs, self.outputs
        return {"inputs": d * (n + m) * d, "outputs": m * (n + d) * d, "mixed": 2 * n * m * d}

    def route(self, tokens: int) -> str:
        """Choose the route with the fewest multiplications for the target of a task with the given number of tokens."""
        costs = self.costs(tokens)
        # The route "inputs" never sees the outputs, to which a gap may have been added.
        return min(costs, key=lambda name: (self.moved and name == "inputs", costs[name]))

    def expected_tokens(self, tokens: int) -> int:
        """Estimate how many of a task's tokens pass these maps."""
        return tokens

    def expert_modules(self, tokens: int) -> tuple[list[str], list[str]]:
        """Return the expert's modules whose inputs, and those whose outputs, form the
        target of a task with the given number of tokens.
        """
        return ([self.names[0]], []) if self.route(tokens) == "inputs" else ([], [*self.names])

    def features(self, inputs: Named, tokens: TokenRows) -> Float[Tensor, "n d"]:
        """Return the group's input, one row per token with non-zero weight."""
        return tokens.take(inputs[self.names[0]])

    def expert_outputs(self, outputs: Named, expert: Named, tokens: TokenRows) -> Float[Tensor, "n m"]:
        """Return W_i x_exp: the expert's own outputs minus their biases; `expert` holds its tensors of the block."""
        own = [tokens.take(outputs[name]) for name in self.names]
        stacked = own[0] if len(own) == 1 else torch.cat(own, dim=1)
        # The bias comes back with the mean of the target (Eq. 55).
        return stacked - self.stack(expert, "bias", stacked.dtype) if self._biased else stacked

    def expert_inputs(self, inputs: Named, theirs: Named, tokens: TokenRows, expert: Named) -> tuple[Tensor, TokenRows]:
        """Return an expert's inputs of these maps at the tokens with non-zero weight, and the rows of these tokens.

        Args:
            inputs: of the student's modules; a mixture needs those of its router.
            theirs: of the expert's.
        """
        return self.features(theirs, tokens), tokens

    def begin_acting(self, vectors: TaskVectors, dtype: torch.dtype) -> TaskVectorEffect:
        """Begin to measure, with products in `dtype`, how strongly a task's vectors act on its tokens."""
        base = self.stack(vectors.base, "weight", dtype)
        rows = [spanning_rows(vectors.map_vector(name, self._modules[name], dtype))[0].to(base) for name in self.names]
        return TaskVectorEffect(torch.cat(rows), base)

    def update(
        self,
        inputs: Named,
        trace: BlockStep,
        expert: Named,
        tokens: TokenRows,
        count: int,
        config: CalibrationConfig,
        weighed: TokenRows | None = None,
    ) -> None:
        """Add one batch of the current task: x_cal, and the inputs of the target on the task's route.

        Args:
            inputs: of the student's modules by name.
            trace: the expert's inputs and outputs of the modules that `expert_modules` names.
            expert: its tensors of the block.
            tokens: the batch's tokens with non-zero weight.
            count: number of such tokens in the whole task, which decides the route.
            weighed: the rows of `expert_inputs` with other weights; None to keep their own.
        """
        x, alpha = self.features(inputs, tokens), config.alpha
        if self._task is None:
            self._products = product_dtype(x.dtype, config)
        route = self.route(count) if self._task is None else self._task.route
        dtype = self._products
        x = cast(x, dtype)
        if route == "inputs":  # x_tgt (Eq. 10)
            r = torch.lerp(x, cast(self.features(trace.inputs, tokens), dtype), alpha)
        else:  # W_i x_exp, of which `_form_target` makes W_i x_tgt
            r = cast(self.expert_outputs(trace.outputs, expert, tokens), dtype)
        if route == "mixed" and alpha < 1:  # W_i x_tgt
            r = torch.addmm(r, x, self.stack(expert, "weight", dtype).mT, beta=alpha, alpha=1 - alpha)
        self._count(x, r, weighed or tokens, route, count)

    def _count(
        self, x: Float[Tensor, "n d"], r: Float[Tensor, "n r"], tokens: TokenRows, route: str, count: int
    ) -> None:
        """Add rows to the current task; the first rows start it."""
        if self._task is None:
            self._task = CurrentTask(self.new_task(r.shape[1], x.device, sum_dtype(x.dtype)), route, count)
        self._task.statistics.update(x, r, tokens)
        self._task.counted += tokens.count

    def new_task(self, rows: int, device: torch.device, dtype: torch.dtype) -> TaskStatistics:
        return TaskStatistics.zeros(rows, self.inputs, device, dtype)

    def end_task(self, expert: Named, config: CalibrationConfig, directions: Named | None = None) -> None:
        """Add the current task to the sums, weighted by omega_i (Eq. 14) of the whole task.

        Args:
            expert: tensors of the expert's block by name inside it.
            directions: its margin gradients, by name of the map inside the block; None for the plain squared error.

        Raises:
            InputError: a part of the task's tokens was neither added nor merged.
            NumericalError: no token of the task has weight.
        """
        current, self._task = self.current, None
        self._require_whole(current)
        target, target_mean = self._form_target(current, expert, config.alpha)
        if self._sums is None:
            self._sums = LinearSums.zeros(target, solve_dtype(self._products))
        if current.counted:
            task = current.statistics
            # Eq. (14) on the mean G_i of all samples: parts of a task must be merged before.
            omega = closed_form.task_weight(task.gram.norm() / task.weight, config.eps)
            self._sums.add(current.share * omega, task, target, target_mean)
            if directions is not None:
                own = LinearSums.zeros(target, self._exact_products)
                own.add(omega, task, target, target_mean)
                self._sums.apart.append((own, [directions.get(name) for name in self.names]))
            self._sums.tokens += current.counted
        self._sums.share += current.share
        self._sums.tasks += 1

    def _form_target(
        self, current: CurrentTask, expert: Named, alpha: float
    ) -> tuple[Float[Tensor, "m d"], Float[Tensor, " m"]]:
        """Return n W_i C_i and n (W_i mu_i^tgt + b_i) of a task from the sums of its route (Eqs. 10 and 13)."""
        task, weight = current.statistics, self.stack(expert, "weight", self._products)
        dtype = task.cross.dtype
        if current.route == "mixed":
            target, target_mean = task.cross, task.r_sum
        elif current.route == "inputs":
            target = (weight @ task.cross.to(weight.dtype)).to(dtype)
            target_mean = weight.to(dtype) @ task.r_sum
        else:
            target = task.replay_targets(weight, alpha)
            target_mean = alpha * task.r_sum + (1 - alpha) * (weight.to(dtype) @ task.x_sum)
        if self._biased:
            target_mean = widen(target_mean) + task.weight * self.stack(expert, "bias")
        return target, target_mean

    def add_prior(self, vectors: TaskVectors) -> None:
        """Add the vectors of a finished task to the prior of every map (the recipe "informed").

        Raises:
            NumericalError: a task vector is not finite; the message names the map.
        """
        sums = self.sums
        if not sums.priors:
            like = sums.target
            sums.priors = [Prior.zeros(rows, self.inputs, like.device, like.dtype) for rows in self._rows]
        for name, prior in zip(self.names, sums.priors, strict=True):
            try:
                module, dtype = self._modules[name], self._exact_products
                prior.add(vectors.map_vector(name, module, dtype), vectors.base_map(name, module, dtype))
            except NumericalError as error:
                raise NumericalError(f"{name}: {error}") from error

    @property
    def _exact_products(self) -> torch.dtype:
        """Return the dtype of products of weights, float32 at least."""
        # A prior is added once per task, not averaged over tokens: bfloat16 would show in the solution.
        return torch.promote_types(self._products, torch.float32)

    def _require_whole(self, current: CurrentTask) -> None:
        """Check that all tokens of a task were added, and that at least one of them has weight."""
        if not current.statistics.weight > 0:
            raise uncounted_error(self)
        if current.counted != current.tokens:
            raise InputError(
                f"{self}: {current.counted} of a task's {current.tokens} tokens were counted; every token counts once"
            )

    @property
    def is_starved(self) -> bool:
        """Say whether the finished tasks have too few tokens for a solve; the maps then stay as merged."""
        return False

    def finite(self) -> Bool[Tensor, ""]:
        """Say whether the sums over the finished tasks are finite, judged by the smallest
        sums, as a tensor on their device.
        """
        return torch.isfinite(self.sums.omega + self.sums.target_mean.sum())

    def merge_part(self, part: CurrentTask) -> None:
        """Add other samples of the current task; InputError if shapes or dtypes differ."""
        self.current.merge(part)

    def __str__(self) -> str:
        return ", ".join(self.names)

    def solve(
        self, merged: Named, base: Named, config: CalibrationConfig, rounder: Rounder | None = None
    ) -> dict[str, Tensor]:
        """Solve the weights of all maps and, if requested, their biases; the sums of this group are released.

        Args:
            merged, base: tensors of the block for the anchor, by name inside it.
            rounder: rounds every weight as soon as it is solved; biases are fitted to the rounded ones.

        Returns:
            W* `[m, d]` and b* `[m]` of every map in the precision of the solve, by name inside the block.

        Raises:
            NumericalError: features are not finite, or the system cannot be solved; the message names the maps.
        """
        # Given up before the solve, which is where memory is largest.
        sums, self._sums = self.sums, None
        if not (all_finite(sums.gram.norm()) and all_finite(sums.target)):
            raise NumericalError(f"{self}: features are not finite")
        dtype, weights = solve_dtype(self._products), list[Tensor]()
        metrics = self._find_metrics(sums, config.decisions)
        lam, eps = sums.scale * config.lam, sums.scale * config.eps
        old, start = (self.stack(one, "weight", dtype).to(sums.target) for one in (merged, base))
        anchor = closed_form.anchor(old, start, config.rho)
        try:
            for names, left, target, pulled in self._find_systems(sums, anchor, start, config):
                factor = closed_form.left_factor(left, lam, eps)
                weight = closed_form.weight_by_factor(factor, target, pulled, lam)
                if sums.apart:
                    weight = self._weigh_by_decisions(sums, names, metrics, weight, factor, left, lam + eps)
                weights += [weight] if rounder is None else self._round_rows(names, weight, factor, merged, rounder)
        except SolveError as error:
            unit = "" if sums.scale == 1 else f" (lam, eps and mu are {sums.scale:.3g} times the options here)"
            raise NumericalError(f"{self}: {error}{unit}; raise lam or use more samples") from error
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        solved = self.split(weight, "weight")
        if self._biased and config.biases:
            anchor = closed_form.anchor(self.stack(merged, "bias"), self.stack(base, "bias"), config.rho)
            bias = closed_form.linear_bias(sums.target_mean, sums.mean, weight, anchor, sums.omega, config.lam)
            if sums.apart:
                bias = self._weigh_bias(sums, metrics, weight, anchor, config.lam)
            solved |= self.split(bias, "bias")
        return solved

    def _find_systems(
        self, sums: LinearSums, anchor: Float[Tensor, "m d"], base: Float[Tensor, "m d"], config: CalibrationConfig
    ) -> Iterator[tuple[tuple[str, ...], Callable[[], Tensor], Tensor, Tensor]]:
        """Find the systems of Eq. (17): one for all maps, or one per map if each has a prior of its own
        (`calibration.prior`), whose W_0 is `base`.

        Yields:
            Names of maps, a function that returns their left matrix without its ridge, their stacked targets and
                anchors.
        """
        dtype = anchor.dtype
        if not (sums.priors or sums.apart):  # they share the left matrix, and their rows do not see each other
            yield self.names, partial(sums.gram.lower, dtype), sums.target, anchor
            return
        mu = sums.scale * config.mu
        targets, anchors, starts = (torch.split(one, self._rows) for one in (sums.target, anchor, base))
        if not sums.priors:
            for name, target, pulled in zip(self.names, targets, anchors, strict=True):
                yield (name,), partial(sums.gram.lower, dtype), target, pulled
        for place, prior in enumerate(sums.priors):
            pull = prior.target(starts[place].to(self._exact_products), config.rho)
            # In place: both would be in memory while the system is solved, which is when most is.
            target = torch.add(targets[place], pull, alpha=mu, out=pull)
            yield (self.names[place],), partial(sums.left_matrix, place, dtype, mu), target, anchors[place]

    def _find_metrics(self, sums: LinearSums, share: float) -> dict[str, list[OutputMetric | None]]:
        """Return S_i of every task by map, in the dtype of the tasks' own sums; None for I."""

        def find(own: LinearSums, rows: Tensor | None) -> OutputMetric | None:
            return None if rows is None else OutputMetric.from_rows(rows.to(own.target), share)

        return {
            name: [find(own, directions[place]) for own, directions in sums.apart]
            for place, name in enumerate(self.names)
        }

    def _weigh_by_decisions(
        self,
        sums: LinearSums,
        names: Sequence[str],
        metrics: Mapping[str, Sequence[OutputMetric | None]],
        plain: Float[Tensor, "m d"],
        factor: Float[Tensor, "d d"],
        left: Callable[[], Tensor],
        ridge: float,
    ) -> Float[Tensor, "m d"]:
        """Return the weight of one map with errors weighted by the experts' decisions, from the plain solution."""
        (name,) = names
        place = self.names.index(name)
        tasks = [
            TaskShare(metric, own.gram, torch.split(own.target, self._rows)[place])
            for (own, _), metric in zip(sums.apart, metrics[name], strict=True)
            if metric is not None
        ]
        try:
            return weigh_by_decisions(tasks, plain, factor, left, ridge) if tasks else plain
        except NumericalError as error:
            raise NumericalError(f"{name}: {error}") from error

    def _weigh_bias(
        self,
        sums: LinearSums,
        metrics: Mapping[str, Sequence[OutputMetric | None]],
        weight: Float[Tensor, "m d"],
        anchor: Float[Tensor, " m"],
        lam: float,
    ) -> Float[Tensor, " m"]:
        """Return the biases of all maps with errors weighted by the experts' decisions."""
        errors = [torch.split(own.target_mean - weight.to(own.mean) @ own.mean, self._rows) for own, _ in sums.apart]
        omegas, pulls = [own.omega for own, _ in sums.apart], torch.split(anchor, self._rows)
        return torch.cat([
            bias_in_metrics(metrics[name], omegas, [one[place] for one in errors], pulls[place], lam)
            for place, name in enumerate(self.names)
        ])  # fmt: skip

    def _round_rows(
        self, names: Sequence[str], stacked: Tensor, factor: Tensor, merged: Named, rounder: Rounder
    ) -> list[Tensor]:
        """Return the weights of maps, whose rows are stacked, as `rounder` rounds them."""
        parts = torch.split(stacked, [self._rows[self.names.index(name)] for name in names])
        return [
            rounder.round(f"{name}.weight", part, factor, merged[f"{name}.weight"])
            for name, part in zip(names, parts, strict=True)
        ]

    def systems(self, config: CalibrationConfig) -> Iterator[tuple[str, Float[Tensor, "d d"]]]:
        """Yield the left matrix of every system to solve, without its ridge, as `Gram.lower` has it in float64, with
        its maps: all at once, or one by one if each has a prior of its own."""
        sums, mu = self.sums, self.sums.scale * config.mu
        if not sums.priors:
            yield str(self), sums.gram.lower(torch.float64)
        for place in range(len(sums.priors)):
            yield self.names[place], sums.left_matrix(place, torch.float64, mu)

    @property
    def sums(self) -> LinearSums:
        """Return the sums over all finished tasks, until they are solved.

        Raises:
            NumericalError: there are none.
        """
        if self._sums is None:
            raise NumericalError(f"no task was counted for {self}")
        return self._sums

    @property
    def current(self) -> CurrentTask:
        """Return the current task.

        Raises:
            NumericalError: no token was added.
        """
        if self._task is None:
            raise uncounted_error(self)
        return self._task

    def let_go(self) -> None:
        """Release all statistics, after another group has taken them over."""
        self._task = self._sums = None

    def combine(self, others: Sequence[LinearGroup], shares: Sequence[float]) -> None:
        """Combine the targets of several groups of the same maps and tokens, with these coefficients."""
        self._sums = LinearSums.combine([one.sums for one in others], shares)

    def stack(self, tensors: Named, kind: str, dtype: torch.dtype = torch.float64) -> Tensor:
        """Stack the rows of the group's weights or biases, one row per output."""
        parts = [self._turn(name, kind, cast(tensors[f"{name}.{kind}"], dtype)) for name in self.names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, stacked: Tensor, kind: str) -> dict[str, Tensor]:
        """Split stacked rows again, by name inside the block."""
        parts = zip(self.names, torch.split(stacked, self._rows), strict=True)
        return {f"{name}.{kind}": self._turn(name, kind, part) for name, part in parts}

    def orient(self, name: str, weight: Tensor) -> Float[Tensor, "m d"]:
        """Return the stored weight of one of the maps as a matrix `[outputs, inputs]`."""
        return orient_weight(self._modules[name], weight)

    def _turn(self, name: str, kind: str, tensor: Tensor) -> Tensor:
        return orient_weight(self._modules[name], tensor).contiguous() if kind == "weight" else tensor
