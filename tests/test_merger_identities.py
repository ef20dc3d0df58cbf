"""Every data-free merger against identities that its definition implies, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from featcal.formats.weights import InMemory
from featcal.mergers import recipe, selection, ties
from featcal.mergers.recipe import RecipeWeights
from featcal.schema.recipe import MergeRecipe

SHAPES = {"a": (6, 8), "b": (7,), "c": (2, 3, 2), "d": (9, 4)}
ENTRIES = 6 * 8 + 7 + 12 + 36
SPREAD = {"a": 1.0, "b": 0.05, "c": 3.0, "d": 0.3}
"""Tensors change by different amounts, so that trimming them together is not trimming each."""


def model(name: str, seed: int, base: InMemory | None = None) -> InMemory:
    generator = torch.Generator().manual_seed(seed)
    drawn = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in SHAPES.items()}
    if base is None:
        return InMemory(name, drawn)
    return InMemory(name, {n: base.tensors[n] + SPREAD[n] * values for n, values in drawn.items()})


BASE = model("base", 0)
EXPERTS = {f"task {i}": model(f"expert {i}", i + 1, BASE) for i in range(3)}


def merged(method: str, experts: dict[str, InMemory], **options: object) -> dict[str, Tensor]:
    asked = MergeRecipe.model_validate({"method": method, **options})
    return RecipeWeights(asked, BASE, experts, list(SHAPES)).read(SHAPES)


def vector(tensors: dict[str, Tensor] | InMemory) -> Tensor:
    held = tensors.tensors if isinstance(tensors, InMemory) else tensors
    return torch.cat([held[name].flatten() for name in SHAPES])


def task_vectors(experts: dict[str, InMemory]) -> list[Tensor]:
    return [vector(expert) - vector(BASE) for expert in experts.values()]


def close(one: Tensor, other: Tensor, within: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=within)


EXACT_FOR_ONE: dict[str, dict[str, object]] = {
    "ties": {"density": 1.0},
}
"""Methods that give one expert back at scale 1, with the options that leave nothing out."""


@pytest.mark.parametrize("method", EXACT_FOR_ONE)
def test_one_expert_is_itself(method: str) -> None:
    one = dict(list(EXPERTS.items())[:1])
    close(vector(merged(method, one, scale=1.0, **EXACT_FOR_ONE[method])), vector(EXPERTS["task 0"]))


IN_ANY_ORDER: dict[str, dict[str, object]] = {"ties": {}}


@pytest.mark.parametrize("method", IN_ANY_ORDER)
def test_the_order_of_experts_does_not_matter(method: str) -> None:
    turned = dict(reversed(EXPERTS.items()))
    options = IN_ANY_ORDER[method]
    close(vector(merged(method, EXPERTS, **options)), vector(merged(method, turned, **options)))


@pytest.mark.parametrize("at_once", [1, 20, 2**24])
def test_ties_cuts_the_whole_task_vector(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 1, written with one vector per model and torch.topk over all of it."""
    monkeypatch.setattr(recipe, "VALUES_AT_ONCE", at_once)
    trimmed = []
    for tau in task_vectors(EXPERTS):
        kept = tau.abs().topk(int(0.3 * ENTRIES)).indices
        trimmed.append(torch.zeros_like(tau).index_copy(0, kept, tau[kept]))
    held = torch.stack(trimmed)
    agreeing = held * (held.sign() == held.sum(0).sign())
    mean = agreeing.sum(0) / agreeing.count_nonzero(0).clamp(min=1)
    close(vector(merged("ties", EXPERTS, density=0.3, scale=0.7)), vector(BASE) + 0.7 * mean)
    apart = merged("ties-per-tensor", EXPERTS, density=0.3, scale=0.7)
    assert float((vector(apart) - vector(merged("ties", EXPERTS, density=0.3, scale=0.7))).abs().max()) > 0.1


def test_ties_of_equal_experts_is_one_of_them_trimmed() -> None:
    same = {f"task {i}": EXPERTS["task 0"] for i in range(4)}
    one = {"task 0": EXPERTS["task 0"]}
    close(vector(merged("ties", same)), vector(merged("ties", one)))


def test_entries_that_cancel_have_no_sign() -> None:
    """sgn(0) = 0 of Algorithm 1; mergekit's rule takes plus."""
    zero = torch.zeros(2, dtype=torch.float64)
    up, down = torch.tensor([2.0, 1.0]).double(), torch.tensor([-2.0, 1.0]).double()
    assert ties.merge(zero, [up, down], [0.0, 0.0]).tolist() == [0, 1]


@settings(max_examples=25, deadline=None)  # 2**21 counts per part take their time
@given(
    st.lists(st.floats(-1e300, 1e300) | st.sampled_from([0.0, -1.5, 1.5]), min_size=1, max_size=40),
    st.integers(0, 39),
    st.integers(1, 7),
)
def test_the_kth_largest_magnitude_is_exact(values: list[float], place: int, size: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    k = place % len(values) + 1
    found = selection.largest(lambda: whole.split(size), k)
    assert found == float(whole.abs().topk(k).values[-1])
