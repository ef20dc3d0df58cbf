"""Compute Algorithm 1 of the paper, and featcal's own recipes, a second time, for models of transformers: whole models,
forward hooks, float64.

No other code of featcal is used. Every sample runs alone and without padding, so there is no mask to get wrong; and the
whole model runs again for every block, so no states are carried along. Equations are those of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Sample = Mapping[str, Tensor]
"""Keyword inputs of the model for one sample: batch size 1, no padding."""
Rows = tuple[Tensor, Tensor]
"""Inputs of one module for all tokens of a task `[n, d]`, and the tokens' weights `[n]`, which sum to 1."""
TokenWeights = Callable[[Sample, str, int], Tensor]
"""Weights `[tokens]` of a sample's tokens in the module of that name."""


@dataclass(frozen=True)
class ReferenceOptions:
    """Hyper-parameters of Algorithm 1; `norms` are the classes of norms to calibrate.

    A norm other than LayerNorm multiplies by `norm_offset` + weight. Where norms act on each head's part of a token,
    `head_axis` is the axis of the heads, 0 or 1, in the norm's input for one sample.
    """

    lam: float
    rho: float
    alpha: float
    eps: float = 1e-8
    norms: tuple[type[nn.Module], ...] = ()
    beta: float = 0.0
    mu: float = 0.0
    norm_offset: float = 0.0
    head_axis: int = 1
    weigh_tokens: bool = False
    routers: tuple[str, ...] = ()
    """Names of modules that are linear maps with one parameter, `weight`, but of a class of their own."""


def every_token(sample: Sample, module: str, tokens: int) -> Tensor:
    """Return equal weights for all tokens, `[tokens]`."""
    return torch.ones(tokens, dtype=torch.float64)


Piece = tuple[Sequence[str], str | None]
"""Modules (with all inside them) or parameters that are solved together, and the module that receives the residual
stream into which they write; None for those that do not write into it.
"""
STACKED = ("gate_up_proj", "down_proj")
"""Parameters that hold all experts of a mixture, `[experts, outputs, inputs]` each."""


@torch.no_grad()
def refine(
    models: Mapping[str, Any],
    experts: Mapping[str, Any],
    samples: Mapping[str, Sequence[Sample]],
    pieces: Sequence[Piece],
    options: ReferenceOptions,
    token_weights: TokenWeights = every_token,
) -> dict[str, Tensor]:
    """Return every calibrated tensor by name, solved piece by piece; the whole model runs again for every piece."""
    # A copy: its tensors are replaced piece by piece, and later pieces see what earlier ones became.
    student, done = deepcopy(models["merged"]), dict[str, Tensor]()
    everything = [name for names, _ in pieces for name in names] + [stream for _, stream in pieces if stream]
    axis = options.head_axis
    # Once for all pieces: experts do not change.
    own = {task: inputs(expert, everything, samples[task], token_weights, axis) for task, expert in experts.items()}
    for names, stream in pieces:
        watched = [*names, *([stream] if stream else [])]
        deployed = {task: inputs(student, watched, samples[task], token_weights, axis) for task in experts}
        gaps = {task: own[task][stream][0] - deployed[task][stream][0] for task in experts} if stream else {}
        new: dict[str, Tensor] = {}
        for name, module, kinds in (found for top in names for found in modules_inside(student, top)):
            if name not in next(iter(own.values())):
                continue
            features = {task: (deployed[task][name], own[task][name]) for task in experts}
            if {*STACKED} & {*kinds}:
                sent = {task: routes(student, name, samples[task]) for task in experts}
                new |= {f"{name}.{kind}": solve_stacked(name, kind, features, sent, (student, models, experts), options)
                        for kind in STACKED if kind in kinds}  # fmt: skip
            elif isinstance(module, nn.Linear | Conv1D) or name in options.routers:
                if options.weigh_tokens:
                    features = weigh_features(name, names, (student, models["base"], experts), (deployed, own))
                new |= solve_linear(name, features, models, experts, options, gaps)
            elif isinstance(module, options.norms):
                new |= norm(name, features, models, experts, options)
        for name, tensor in new.items():
            student.get_parameter(name).copy_(tensor)
        done |= new
    return done


def inputs(
    model: Any, blocks: Sequence[str], samples: Sequence[Sample], token_weights: TokenWeights, head_axis: int = 1
) -> dict[str, Rows]:
    """Return the inputs of every module inside the blocks, from runs of the whole model on every sample; for a norm
    over heads, every head's part is a row with the weight of its token.
    """
    rows: dict[str, list[Tensor]] = {}
    found_inside = {name: module for block in blocks for name, module, kinds in modules_inside(model, block) if kinds}
    handles = [
        module.register_forward_pre_hook(
            # The default binds each hook to its own name; without it all would write under the last one.
            lambda _, args, name=name: rows.setdefault(name, []).append(_single_sample(args[0]))
        )
        for name, module in found_inside.items()
    ]
    for sample in samples:
        model(**sample)
    for handle in handles:
        handle.remove()
    found = {}
    for name, parts in rows.items():
        by_token = [part.movedim(head_axis, 1) if part.ndim == 3 else part[:, None] for part in parts]
        counted = [token_weights(s, name, len(part)) for s, part in zip(samples, by_token, strict=True)]
        weights = torch.cat(counted).repeat_interleave(by_token[0].shape[1])
        found[name] = torch.cat([part.flatten(0, 1) for part in by_token]), weights / weights.sum()
    return found


def modules_inside(model: Any, top: str) -> list[tuple[str, Any, list[str]]]:
    """Return the modules in the one called `top`, that one included, by name, with the parameters of each; if `top` is
    itself a parameter, the module that has it, with that alone."""
    where, _, own = top.rpartition(".")
    above = model.get_submodule(where)
    if own in dict(above.named_parameters(recurse=False)):
        return [(where, above, [own])]
    below = model.get_submodule(top).named_modules(prefix=top)
    return [(name, module, [n for n, _ in module.named_parameters(recurse=False)]) for name, module in below]


def _single_sample(given: Tensor) -> Tensor:
    """Return a module's input for the only sample of the batch; the input may lack a batch axis."""
    # A vision tower may have all its patches in one row; token ids `[1, tokens]` are no such row.
    return given if given.ndim == 2 and given.is_floating_point() else given[0]


def weigh_features(
    name: str, tops: Sequence[str], models: tuple[Any, Any, Mapping[str, Any]], rows: tuple[Any, Any]
) -> dict[str, tuple[Rows, Rows]]:
    """Return features of a linear map, with tokens weighted by how strongly the expert's task vectors act on them. The
    task vectors are those of all maps of the piece that read the same tokens with the same weights, and that, like this
    map, have a bias or have none.

    Args:
        models: student, base, and experts by task.
        rows: inputs by task and module, the student's and the expert's.
    """
    (student, base, experts), (deployed, own), module = models, rows, models[0].get_submodule(name)
    some = next(iter(deployed.values()))
    shared = [
        other
        for top in tops
        for other, one, _ in modules_inside(student, top)
        if (other == name or isinstance(one, nn.Linear | Conv1D))
        and (getattr(one, "bias", None) is None) == (getattr(module, "bias", None) is None)
        and all(a.shape == b.shape and a.equal(b) for a, b in zip(some[other], some[name], strict=True))
    ]
    before = torch.cat([weight_matrix(base.get_submodule(other)) for other in shared])
    found = {}
    for task, expert in experts.items():
        change = torch.cat([weight_matrix(expert.get_submodule(other)) for other in shared]) - before
        (x, weights), (x_expert, unweighed) = deployed[task][name], own[task][name]
        found[task] = (x, weights * action_weights(change, before, x_expert, weights)), (x_expert, unweighed)
    return found


def action_weights(change: Tensor, before: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Return relative weights `[n]` of tokens: the more the task vector of a map changes its output for a token,
    relative to the old output, the larger the weight; weights over several maps are averaged.
    """

    def mean(values: Tensor) -> Tensor:
        return weights @ values / weights.sum()

    of_change, of_map = ((x @ one.T).square().sum(1) for one in (change, before))
    ratio = of_change / (of_map + 1e-6 * mean(of_map))
    # No token is changed at all: they count alike instead of being divided by 0.
    if not mean(ratio) > 0:
        return torch.ones_like(ratio)
    root = (ratio / mean(ratio)).clamp(0.01, 100).sqrt()
    return root / mean(root)


def solve_linear(
    name: str,
    features: Mapping[str, tuple[Rows, Rows]],
    models: Any,
    experts: Mapping[str, Any],
    o: ReferenceOptions,
    gaps: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Solve Eqs. (10) to (17), then Eq. (55) where there is a bias; `beta` of the gaps is added to the targets."""
    merged, base = (models[which].get_submodule(name) for which in ("merged", "base"))
    left = (o.lam + o.eps) * torch.eye(weight_matrix(merged).shape[1], dtype=torch.float64)
    right = o.lam * (o.rho * weight_matrix(merged) + (1 - o.rho) * weight_matrix(base))
    shifts = []
    for task, ((x, w), (x_expert, _)) in features.items():
        expert = experts[task].get_submodule(name)
        target = o.alpha * x_expert + (1 - o.alpha) * x
        gram, cross = x.T @ torch.diag(w) @ x, target.T @ torch.diag(w) @ x
        # Eq. (14).
        omega = 1 / max(float(torch.linalg.matrix_norm(gram)), o.eps)
        more = (
            o.beta * gaps[task]
            if task in gaps
            else torch.zeros(len(x), len(weight_matrix(merged)), dtype=torch.float64)
        )
        left, right = left + omega * gram, right + omega * (weight_matrix(expert) @ cross + more.T @ torch.diag(w) @ x)
        shifts.append((omega, w @ x, w @ (target @ weight_matrix(expert).T + more), expert))
    known, pull = prior(
        weight_matrix(base), [weight_matrix(expert.get_submodule(name)) for expert in experts.values()], o.rho
    )
    weight = torch.linalg.solve((left + o.mu * known).T, (right + o.mu * pull).T).T
    # Conv1D keeps its weight as [inputs, outputs].
    stored = weight.T if isinstance(merged, Conv1D) else weight
    if getattr(merged, "bias", None) is None:
        return {f"{name}.weight": stored}
    top = o.lam * (o.rho * merged.bias + (1 - o.rho) * base.bias)
    for omega, mean, target_mean, expert in shifts:
        top = top + omega * (expert.bias + target_mean - weight @ mean)
    return {f"{name}.weight": stored, f"{name}.bias": top / (sum(omega for omega, *_ in shifts) + o.lam)}


def prior(base: Tensor, experts: Sequence[Tensor], rho: float) -> tuple[Tensor, Tensor]:
    """Return what the recipe "informed" adds, mu times, to the left and to the right matrix of one map: the sums over
    tasks of K = tau^T tau / ||tau^T tau||_F and of (W_0 + rho tau) K, with tau the expert's weight less the base's."""
    known, pull = torch.zeros(base.shape[1], base.shape[1], dtype=base.dtype), torch.zeros_like(base)
    for tau in (expert - base for expert in experts):
        own = tau.T @ tau
        if own.any():
            own = own / torch.linalg.matrix_norm(own)
            known, pull = known + own, pull + (base + rho * tau) @ own
    return known, pull


def weight_matrix(module: Any) -> Tensor:
    """Return the weight of a linear map, `[outputs, inputs]`."""
    weight: Tensor = module.weight
    return weight.T if isinstance(module, Conv1D) else weight


def routes(model: Any, name: str, samples: Sequence[Sample]) -> Rows:
    """Return, for each token of a task, the experts of a mixture that its router chooses,
    and their shares: `[n, k]`.
    """
    seen: list[Rows] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append((args[1], args[2])))
    for sample in samples:
        model(**sample)
    handle.remove()
    return torch.cat([chosen for chosen, _ in seen]), torch.cat([shares.double() for _, shares in seen])


def solve_stacked(
    name: str,
    kind: str,
    features: Mapping[str, tuple[Rows, Rows]],
    sent: Mapping[str, Rows],
    all_models: tuple[Any, Mapping[str, Any], Mapping[str, Any]],
    o: ReferenceOptions,
) -> Tensor:
    """Solve every expert of a mixture by Eqs. (10) to (17), on the tokens that the student's router sends to it. The
    weight of a token is its share squared, and the task's expert computes the same tokens with its own maps. The weight
    of a task is its share of these weights, scaled so that the tasks' weights sum to the number of tasks. With fewer
    tokens of all tasks than the wider of width and inner width an expert of the mixture stays as merged, unless there
    is a prior. Its first two maps are stored in one parameter, but each has a prior of its own.

    Args:
        features: inputs of the mixture, the student's and the task's expert's.
        sent: by task, the student's `routes`.
        all_models: the student, base and merged model, the experts of the tasks.
    """
    student, models, experts = all_models
    merged, base = (getattr(models[which].get_submodule(name), kind) for which in ("merged", "base"))
    found, widest = merged.clone(), max(models["merged"].get_submodule(name).down_proj.shape[1:])
    for place in range(len(merged)):
        shares = {task: (own * (chosen == place)).sum(1) for task, (chosen, own) in sent.items()}
        if not o.mu and sum(int((g > 0).sum()) for g in shares.values()) < widest:
            continue
        left = (o.lam + o.eps) * torch.eye(merged.shape[2], dtype=torch.float64)
        right = o.lam * (o.rho * merged[place] + (1 - o.rho) * base[place])
        counts = {t: w @ shares[t] ** 2 / (w[:, None] * sent[t][1] ** 2).sum() for t, ((_, w), _) in features.items()}
        for task, ((x, w), (x_expert, _)) in features.items():
            own, kept = experts[task].get_submodule(name), shares[task] > 0
            if not kept.any():
                continue
            weight = w[kept] * shares[task][kept] ** 2
            given, given_expert = x[kept], x_expert[kept]
            if kind == STACKED[1]:
                given = _gate(student.get_submodule(name), place, given)
                given_expert = _gate(own, place, given_expert)
            target = o.alpha * given_expert + (1 - o.alpha) * given
            if o.weigh_tokens:
                before = getattr(models["base"].get_submodule(name), kind)[place]
                weight = weight * action_weights(getattr(own, kind)[place] - before, before, given_expert, weight)
            scaled = torch.diag(weight / weight.sum())
            gram, cross = given.T @ scaled @ given, target.T @ scaled @ given
            omega = counts[task] / torch.stack([*counts.values()]).mean() / torch.linalg.matrix_norm(gram)
            left, right = left + omega * gram, right + omega * getattr(own, kind)[place] @ cross
        halves = 1 if kind == STACKED[1] else 2
        rows = [
            torch.linalg.solve((left + o.mu * known).T, (part + o.mu * pull).T).T
            for half, part in enumerate(right.chunk(halves))
            for known, pull in [prior(*_halves(name, kind, place, (half, halves), models, experts), o.rho)]
        ]
        found[place] = torch.cat(rows)
    gathered: Tensor = found
    return gathered


def _halves(
    name: str, kind: str, place: int, half: tuple[int, int], models: Mapping[str, Any], experts: Mapping[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Return one map of an expert of a mixture, of the base and of every task's expert; the
    stored parameter stacks `half[1]` maps.
    """
    every = [getattr(model.get_submodule(name), kind)[place] for model in (models["base"], *experts.values())]
    base, *others = (weight.chunk(half[1])[half[0]] for weight in every)
    return base, others


def _gate(experts: Any, place: int, x: Tensor) -> Tensor:
    """Return the input of the last map of an expert of a mixture."""
    gate, up = (x @ half.T for half in experts.gate_up_proj[place].chunk(2))
    made: Tensor = experts.act_fn(gate) * up
    return made


def norm(
    name: str, features: Mapping[str, tuple[Rows, Rows]], models: Any, experts: Mapping[str, Any], o: ReferenceOptions
) -> dict[str, Tensor]:
    """Solve Eq. (59): for each coordinate, a ridge regression of scale and, if there is one, shift."""
    merged, base = (models[which].get_submodule(name) for which in ("merged", "base"))
    anchor = o.rho * affine(merged, o) + (1 - o.rho) * affine(base, o)
    left, right = o.lam * torch.eye(anchor.shape[1], dtype=torch.float64), o.lam * anchor
    for task, ((x, w), _) in features.items():
        z = normalise(x, merged)
        # Eqs. (57), (58): moments of the student's own z alone, without omega.
        second = torch.einsum("n,ndk,ndl->dkl", w, z, z)
        left, right = left + second, right + (second @ affine(experts[task].get_submodule(name), o)[..., None])[..., 0]
    solved = torch.linalg.solve(left, right)
    if not isinstance(merged, nn.LayerNorm):
        solved = solved - o.norm_offset
    return {f"{name}.{kind}": column for kind, column in zip(("weight", "bias"), solved.T, strict=False)}


def affine(module: Any, o: ReferenceOptions) -> Tensor:
    """Return scale and, if there is one, shift of a norm, `[d, 1 or 2]`."""
    if not isinstance(module, nn.LayerNorm):
        scale: Tensor = o.norm_offset + module.weight
        return scale[:, None]
    return torch.stack([p for p in (module.weight, module.bias) if p is not None], dim=1)


def normalise(x: Tensor, module: Any) -> Tensor:
    """Return the factors of a norm's scale and, if there is one, of its shift: `[n, d, 1 or 2]`."""
    if isinstance(module, nn.LayerNorm):
        z = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + module.eps).sqrt()
        return z[..., None] if module.bias is None else torch.stack([z, torch.ones_like(z)], dim=2)
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    scaled: Tensor = x / (x.square().mean(1, keepdim=True) + eps).sqrt()
    return scaled[..., None]
