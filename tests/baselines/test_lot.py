"""LOT Merging against transformers and hooks alone, and what its definition implies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import rows
from library_references import Reference, inputs_of, linears_of, reference_of
from tiny_clip import TASKS
from torch import Tensor

from featcal import evaluate
from featcal.baselines.common.fit import fit
from featcal.baselines.lot import Lot, task_matrix
from featcal.family.opening import Family
from featcal.system.errors import InputError

EPS = torch.finfo(torch.float64).eps


@pytest.fixture(
    scope="module",
    params=rows(["clip", "t5-gated", "llama-plain"], quick=("clip",), slow=("t5-gated", "llama-plain")),
)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_suite_file: Path, tiny64: Family
) -> tuple[Reference, Sequence[str]]:
    return reference_of(request.param, tmp_path_factory.mktemp(request.param), tiny_suite_file.parent, tiny64)


def norms_of(model: Any, block: str) -> list[str]:
    """Names of modules that have a scale, in a block of the library's model."""
    found = model.get_submodule(block).named_modules()
    return [f"{block}.{name}" for name, one in found if "Norm" in type(one).__name__]


def z_of(norm: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True) if hasattr(norm, "bias") else x
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt()


@torch.no_grad()
def expected(reference: Reference, blocks: Sequence[str], scale: float) -> dict[str, Tensor]:
    """Every tensor of the merged model by its name: minimisers by lstsq over all rows of all tasks."""
    base = dict(reference.models["base"].named_parameters())
    moved = {
        task: {name: parameter - base[name] for name, parameter in expert.named_parameters()}
        for task, expert in reference.experts.items()
    }
    merged = {name: torch.stack([own[name] for own in moved.values()]).mean(0) for name in base}
    for block in blocks:
        linears, norms = list(linears_of(reference.models["base"], block)), norms_of(reference.models["base"], block)
        given = {
            task: inputs_of(expert, reference.samples["calibration"][task], [*linears, *norms])
            for task, expert in reference.experts.items()
        }
        for name in linears:
            x = torch.cat([own[name] for own in given.values()])
            y = torch.cat([own[name] @ moved[task][f"{name}.weight"].mT for task, own in given.items()])
            merged[f"{name}.weight"] = torch.linalg.lstsq(x, y, driver="gelsd").solution.mT
        for name in norms:
            module = reference.models["base"].get_submodule(name)
            squares = {task: z_of(module, own[name]).square().sum(0) for task, own in given.items()}
            weighed = [square * moved[task][f"{name}.weight"] for task, square in squares.items()]
            merged[f"{name}.weight"] = torch.stack(weighed).sum(0) / torch.stack([*squares.values()]).sum(0)
    return {name: base[name] + scale * merged[name] for name in base}


def test_every_tensor(reference: tuple[Reference, Sequence[str]]) -> None:
    """Padding counts for nothing: the reference has none."""
    models, blocks = reference
    ours = fit(models.exact, Lot(samples=12, scale=1.2)).weights.read(models.exact.adapter.tower)
    theirs = expected(models, blocks, 1.2)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def one_task(family: Family, copies: int) -> Family:
    """A suite whose tasks are all the first one."""
    spec, expert = family.suite.tasks[TASKS[0]], family.experts[TASKS[0]]
    names = [f"copy {i}" for i in range(copies)]
    suite = family.suite.model_copy(update={"tasks": dict.fromkeys(names, spec)})
    return replace(family, suite=suite, experts=dict.fromkeys(names, expert))


@pytest.mark.parametrize("copies", [1, 3])
def test_experts_that_agree_are_returned(tiny64: Family, copies: int) -> None:
    family = one_task(tiny64, copies)
    found = fit(family, Lot(samples=12)).weights.read(family.adapter.tower)
    for name, tensor in tiny64.experts[TASKS[0]].read(family.adapter.tower).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-7)


def solved(rows: Mapping[int, Tensor], vectors: Mapping[int, Tensor]) -> Tensor:
    grams = {k: x.mT @ x for k, x in rows.items()}
    moved = torch.stack([vectors[k] @ gram for k, gram in grams.items()]).sum(0)
    return task_matrix(torch.stack([*grams.values()]).sum(0), moved, EPS)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_tasks_that_read_other_directions_do_not_drift() -> None:
    """The paper's ideal case: T is the sum of what every task vector does to its own features."""
    basis = torch.linalg.qr(drawn(8, 8, seed=0)).Q
    rows = {k: drawn(20, 3, seed=k + 1) @ basis[3 * k : 3 * k + 3] for k in range(2)}
    vectors = {k: drawn(5, 8, seed=k + 10) for k in range(2)}
    found = solved(rows, vectors)
    for k, x in rows.items():
        torch.testing.assert_close(x @ found.mT, x @ vectors[k].mT)
    unread = basis[6:]
    torch.testing.assert_close(found @ unread.mT, torch.zeros(5, 2).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [3, 30])
def test_it_is_a_minimum(count: int) -> None:
    """The gradient of sum ||X_k T^T - X_k T_k^T||^2 is 0, with fewer rows than columns too."""
    rows = {k: drawn(count, 8, seed=k) for k in range(2)}
    vectors = {k: drawn(5, 8, seed=k + 10) for k in range(2)}
    t = solved(rows, vectors).requires_grad_()
    terms = [(x @ (t - vectors[k]).mT).square().sum() for k, x in rows.items()]
    assert float(torch.autograd.grad(torch.stack(terms).sum(), t)[0].abs().max()) < 1e-11


def test_options(tiny: Family) -> None:
    with pytest.raises(InputError, match="scale is inf; it is finite"):
        evaluate(tiny, "lot:scale=inf")
    still = fit(tiny, Lot(samples=4, scale=0.0)).weights.read(tiny.adapter.tower)
    assert all(still[name].equal(tensor) for name, tensor in tiny.base.read(tiny.adapter.tower).items())
