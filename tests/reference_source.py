"""Prop. 8 written a second time, for models of transformers: every local objective as a sum over tokens.

Nothing of featcal is used. A feature source is a model whose forward gives the inputs: the merged model with so many
of its blocks calibrated, or the expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from featcal.testing.reference import Options, Rows, Sample, every_token, inputs

Features = Mapping[str, Rows]
"""Inputs of one module by task."""


@torch.no_grad()
def excesses(
    models: Mapping[str, Any],
    experts: Mapping[str, Any],
    samples: Mapping[str, Sequence[Sample]],
    blocks: Sequence[str],
    calibrated: Mapping[str, Tensor],
    groups: Sequence[tuple[str, tuple[str, ...]]],
    options: Options,
) -> dict[tuple[str, str], dict[str, float]]:
    """Every number of Prop. 8 by group and source; all tokens count alike.

    Args:
        calibrated: every calibrated tensor by name.
        groups: for each a label and the full names of its linear maps, which share their input.
    """
    own = {task: inputs(expert, blocks, samples[task], every_token) for task, expert in experts.items()}
    by_depth = []  # with how many blocks calibrated, by task and module
    student = deepcopy(models["merged"])
    for depth in range(len(blocks) + 1):
        by_depth.append({task: inputs(student, blocks, samples[task], every_token) for task in experts})
        for name, tensor in calibrated.items():
            if depth < len(blocks) and name.startswith(f"{blocks[depth]}."):
                student.get_parameter(name).copy_(tensor)
    found = {}
    for label, names in groups:
        (depth,) = (i for i, block in enumerate(blocks) if names[0].startswith(f"{block}."))
        weights = {which: stacked(model, names) for which, model in {**models, **experts}.items()}
        sources = {
            "prefix": by_depth[depth],
            "stale": by_depth[max(depth - 1, 0)],
            "merged": by_depth[0],
            "expert": own,
            "snapshot": by_depth[depth + 1],
        }
        seen = {source: {task: rows[names[0]] for task, rows in of.items()} for source, of in sources.items()}
        for source in sources:
            deployed, fitted = ("snapshot", "prefix") if source == "snapshot" else ("prefix", source)
            numbers = compare(seen[deployed], seen[fitted], seen["expert"], weights, options)
            found[label, source] = numbers | {"coupling": coupling(seen["prefix"], seen[source], weights, options)}
    return found


def stacked(model: Any, names: Sequence[str]) -> Tensor:
    return torch.cat([model.get_parameter(f"{name}.weight") for name in names])


def compare(
    deployed: Features, fitted: Features, expert: Features, weights: Mapping[str, Tensor], o: Options
) -> dict[str, float]:
    """Eq. (48), its left side in both forms and both of its bounds."""
    anchor = o.rho * weights["merged"] + (1 - o.rho) * weights["base"]
    omega = {task: 1 / float((x.T @ (w[:, None] * x)).norm()) for task, (x, w) in deployed.items()}

    def target(task: str, source: Features) -> Tensor:
        return (o.alpha * expert[task][0] + (1 - o.alpha) * source[task][0]) @ weights[task].T

    def objective(source: Features, weight: Tensor) -> float:
        errors = (omega[t] * w @ (x @ weight.T - target(t, source)).square().sum(1) for t, (x, w) in source.items())
        return float(sum(errors) + o.lam * (weight - anchor).square().sum())

    def minimiser(source: Features) -> Tensor:
        left, right = o.lam * torch.eye(anchor.shape[1], dtype=anchor.dtype), o.lam * anchor
        for task, (x, w) in source.items():
            left = left + omega[task] * x.T @ (w[:, None] * x)
            right = right + omega[task] * target(task, source).T @ (w[:, None] * x)
        return torch.linalg.solve(left.T, right.T).T

    right, other = minimiser(deployed), minimiser(fitted)
    gaps = [objective(deployed, weight) - objective(fitted, weight) for weight in (other, right)]
    excess = objective(deployed, other) - objective(deployed, right)
    return {
        "excess": excess,
        "excess_norm": excess,
        "middle": gaps[0] - gaps[1],
        "supremum": 2 * max(map(abs, gaps)),
        "relative": excess / objective(deployed, right),
    }


def coupling(deployed: Features, source: Features, weights: Mapping[str, Tensor], o: Options) -> float:
    """Mean distance of a token's input and target, taken together, between two sources."""
    apart = []
    for task, (x, _) in deployed.items():
        moved = source[task][0] - x
        apart.append(torch.cat([moved, (1 - o.alpha) * moved @ weights[task].T], dim=1).norm(dim=1))
    return float(torch.cat(apart).mean())
