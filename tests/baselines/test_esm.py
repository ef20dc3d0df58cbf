"""Essential Subspace Merging against transformers, hooks and NumPy alone, and what its definition implies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from lanes import rows
from library_references import Reference, inputs_of, linears_of, reference_of
from torch import Tensor

from featcal import evaluate
from featcal.baselines.common.fit import fit
from featcal.baselines.esm import Esm, directions, merge_directions, polarise, scale_layers
from featcal.family.opening import Family
from featcal.system.errors import InputError, NumericalError


@pytest.fixture(
    scope="module",
    params=rows(["clip", "t5-gated", "llama-plain"], quick=("clip",), slow=("t5-gated", "llama-plain")),
)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_suite_file: Path, tiny64: Family
) -> tuple[Reference, Sequence[str]]:
    return reference_of(request.param, tmp_path_factory.mktemp(request.param), tiny_suite_file.parent, tiny64)


def scaled(sizes: Sequence[float]) -> np.ndarray:
    return (np.array(sizes) / np.mean(sizes)) ** 2


def whitened(matrix: np.ndarray) -> np.ndarray:
    u, _, vh = np.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def merged_map(rows: Sequence[np.ndarray], changes: Sequence[np.ndarray]) -> np.ndarray:
    """One map before layers are scaled, its directions out of the shift itself.

    Args:
        rows: the map's inputs in every expert, `[n, d]`.
        changes: `[m, d]`.
    """
    k = max(1, len(changes[0]) // len(changes))
    left, right = [], []
    for x, change in zip(rows, changes, strict=True):
        principal = np.linalg.svd(x @ change.T, full_matrices=False)[2][:k].T
        left.append(principal)
        right.append(principal.T @ change)
    by_task = scaled([np.linalg.norm(own) for own in right])
    stacked = np.concatenate([factor * own for factor, own in zip(by_task, right, strict=True)])
    norms = np.linalg.norm(stacked, axis=1)
    whole = whitened(np.concatenate(left, 1)) @ np.diag(norms) @ whitened(np.diag(1 / norms) @ stacked)
    return whole @ np.diag(scaled(np.linalg.norm(stacked, axis=0)))


@torch.no_grad()
def expected(reference: Reference, blocks: Sequence[str], scale: float) -> dict[str, Tensor]:
    """Every tensor of the merged model by its name."""
    base = dict(reference.models["base"].named_parameters())
    moved = [
        {name: parameter - base[name] for name, parameter in expert.named_parameters()}
        for expert in reference.experts.values()
    ]
    merged = {name: torch.stack([own[name] for own in moved]).mean(0) for name in base}
    places: dict[tuple[str, str], list[str]] = {}
    for block in blocks:
        linears = [*linears_of(reference.models["base"], block)]
        given = [
            inputs_of(expert, reference.samples["calibration"][task], linears)
            for task, expert in reference.experts.items()
        ]
        for name in linears:
            weight = f"{name}.weight"
            found = merged_map([own[name].numpy() for own in given], [own[weight].numpy() for own in moved])
            merged[weight] = torch.from_numpy(found)
            places.setdefault((block.rpartition(".")[0], name.removeprefix(block)), []).append(weight)
    for names in places.values():
        factors = scaled([float(merged[name].norm()) for name in names])
        merged |= {name: factor * merged[name] for name, factor in zip(names, factors, strict=True)}
    return {name: base[name] + scale * merged[name] for name in base}


def test_every_tensor(reference: tuple[Reference, Sequence[str]]) -> None:
    """Padding counts for nothing: the reference has none. Layers of both stacks of a T5 are scaled apart."""
    models, blocks = reference
    ours = fit(models.exact, Esm(samples=12, scale=0.7)).weights.read(models.exact.adapter.tower)
    theirs = expected(models, blocks, 0.7)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found_of(changes: Sequence[Tensor], rows: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [directions(d, x.mT @ x, len(changes)) for d, x in zip(changes, rows, strict=True)]


@pytest.mark.parametrize("tasks", [2, 3, 7])
def test_the_shift_loses_the_discarded_eigenvalues(tasks: int) -> None:
    change, x = drawn(6, 9), drawn(40, 9, seed=1)
    shift = x @ change.mT
    principal, coordinates = directions(change, x.mT @ x, tasks)
    kept = principal.shape[1]
    assert kept == max(1, 6 // tasks)
    torch.testing.assert_close(principal.mT @ principal, torch.eye(kept).double())
    lost = (shift - shift @ principal @ principal.mT).square().sum()
    torch.testing.assert_close(lost, torch.linalg.eigvalsh(shift.mT @ shift)[: 6 - kept].sum())
    torch.testing.assert_close(lost, (shift - x @ (principal @ coordinates).mT).square().sum())
    other = torch.linalg.qr(drawn(6, kept, seed=2)).Q
    assert lost < (shift - shift @ other @ other.mT).square().sum()


def test_directions_without_a_shift_are_none() -> None:
    change, few = drawn(6, 9), drawn(2, 9, seed=1)
    assert directions(change, few.mT @ few, 1)[0].shape == (6, 2)
    assert directions(torch.zeros_like(change), few.mT @ few, 1)[0].shape == (6, 0)
    nothing = found_of([torch.zeros_like(change)] * 2, [few, few])
    assert merge_directions(nothing).equal(torch.zeros_like(change))


@pytest.mark.parametrize("shape", [(5, 8), (8, 8)])
def test_one_expert_that_reads_all_alike_is_itself(shape: tuple[int, int]) -> None:
    """With inputs of equal energy the rows of A are orthogonal, so that whitening changes nothing; columns are scaled
    by their norms, which of a multiple of an orthogonal matrix are equal."""
    m, d = shape
    change = drawn(m, d)
    ours = merge_directions([directions(change, torch.eye(d).double(), 1)])
    torch.testing.assert_close(ours, change * polarise(change.norm(dim=0)))
    level = 0.3 * torch.linalg.qr(drawn(d, d)).Q
    torch.testing.assert_close(merge_directions([directions(level, torch.eye(d).double(), 1)]), level)


def test_tasks_that_share_nothing_keep_their_principal_parts() -> None:
    """Each in its own outputs and inputs: the sum of what is kept of them, with the scales."""
    outputs, inputs = torch.linalg.qr(drawn(6, 6)).Q, torch.linalg.qr(drawn(8, 8, seed=1)).Q
    parts = [outputs[:, 3 * i : 3 * i + 3] * (1.0 + i + torch.arange(3)) @ inputs[3 * i : 3 * i + 3] for i in range(2)]
    found = merge_directions([directions(part, torch.eye(8).double(), 2) for part in parts])
    factors = polarise(torch.stack([part.norm() for part in parts]))
    total = factors[0] * parts[0] + factors[1] * parts[1]
    torch.testing.assert_close(found, total * polarise(total.norm(dim=0)))


def test_scales() -> None:
    sizes = torch.tensor([1.0, 2.0, 3.0]).double()
    assert polarise(sizes).tolist() == [0.25, 1.0, 2.25]
    assert polarise(7 * sizes).tolist() == [0.25, 1.0, 2.25]
    assert polarise(0 * sizes).tolist() == [0.0, 0.0, 0.0]
    one = torch.ones(2, 2).double()
    found = scale_layers([{"a": one, "b": one}, {"a": 3 * one, "b": one}, {"b": 0 * one}])
    assert [{name: float(matrix[0, 0]) for name, matrix in own.items()} for own in found] == [
        {"a": 0.25, "b": pytest.approx(2.25)},
        {"a": 6.75, "b": pytest.approx(2.25)},
        {"b": 0.0},
    ]


def test_a_unit_of_inputs_and_of_experts_does_not_matter() -> None:
    changes, rows = [drawn(6, 9, seed=i) for i in range(3)], [drawn(30, 9, seed=10 + i) for i in range(3)]
    found = merge_directions(found_of(changes, rows))
    torch.testing.assert_close(merge_directions(found_of(changes[::-1], rows[::-1])), found)
    torch.testing.assert_close(merge_directions(found_of(changes, [5 * rows[0], *rows[1:]])), found)
    torch.testing.assert_close(merge_directions(found_of([3 * one for one in changes], rows)), 3 * found)
    turn = torch.linalg.qr(drawn(6, 6, seed=9)).Q
    torch.testing.assert_close(merge_directions(found_of([turn @ one for one in changes], rows)), turn @ found)


def test_options(tiny: Family) -> None:
    with pytest.raises(InputError, match="scale is inf; it is finite"):
        evaluate(tiny, "esm:scale=inf")
    with pytest.raises(InputError, match="no option 'alpha'; it takes samples, seed, scale"):
        evaluate(tiny, "esm:alpha=1")
    still = fit(tiny, Esm(samples=4, scale=0.0)).weights.read(tiny.adapter.tower)
    assert all(still[name].equal(tensor) for name, tensor in tiny.base.read(tiny.adapter.tower).items())


def test_a_decomposition_that_fails_names_its_map(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr("featcal.baselines.esm.merge_directions", fails)
    with pytest.raises(NumericalError, match=r"block 0: self_attn\.k_proj: no decomposition \(no convergence\)"):
        fit(tiny, Esm(samples=4))
