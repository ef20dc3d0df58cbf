"""Every data-free merger against identities that its definition implies, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from featcal.formats.weights import InMemory
from featcal.mergers import breadcrumbs, dare, model_stock, recipe, selection, ties
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
    "ties": {"scale": 1.0, "density": 1.0},
    "dare": {"scale": 1.0, "drop": 0.0},
    "dare-ties": {"scale": 1.0, "drop": 0.0, "density": 1.0},
    "breadcrumbs": {"scale": 1.0, "beta": 0.0, "gamma": 1.0},
    "model-stock": {},
}
"""Methods that give one expert back at scale 1, with the options that leave nothing out."""


@pytest.mark.parametrize("method", EXACT_FOR_ONE)
def test_one_expert_is_itself(method: str) -> None:
    one = dict(list(EXPERTS.items())[:1])
    close(vector(merged(method, one, **EXACT_FOR_ONE[method])), vector(EXPERTS["task 0"]))


IN_ANY_ORDER: dict[str, dict[str, object]] = {
    "ties": {},
    "dare": {"seed": 3},
    "dare-ties": {"seed": 3},
    "breadcrumbs": {"beta": 0.3, "gamma": 0.8},
    "model-stock": {},
}


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


def thinned(seed: int, drop: float = 0.5, task: str = "task") -> Tensor:
    vector = torch.arange(1.0, 2001.0, dtype=torch.float64)
    return dare.thin(vector, drop, [dare.stream(seed, task, "a"), dare.stream(seed, task, "b")], [1500, 500])


def test_dare_drops_a_share_and_keeps_the_expectation() -> None:
    vector = torch.arange(1.0, 2001.0, dtype=torch.float64)
    for drop in (0.2, 0.9):
        one = thinned(0, drop)
        kept = one != 0
        close(one[kept], vector[kept] / (1 - drop), 1e-9)
        assert float(kept.double().mean()) == pytest.approx(1 - drop, abs=4 * (drop * (1 - drop) / 2000) ** 0.5)
        mean = torch.stack([thinned(seed, drop) for seed in range(400)]).mean(0) / vector
        deviation = (drop / (1 - drop) / 400) ** 0.5  # of an entry's mean over 400 draws
        assert float(mean.mean()) == pytest.approx(1.0, abs=5 * deviation / 2000**0.5)
        assert float((mean - 1).abs().max()) < 6 * deviation


def test_dare_depends_on_seed_task_and_tensor_alone() -> None:
    assert thinned(1).equal(thinned(1))
    for other in (thinned(2), thinned(1, task="another")):
        assert 0.3 < float(((other == 0) == (thinned(1) == 0)).double().mean()) < 0.7
    together = merged("dare", EXPERTS, seed=1)
    asked = MergeRecipe(method="dare", seed=1)
    alone = RecipeWeights(asked, BASE, EXPERTS, list(SHAPES)).read(["c"])["c"]
    assert together["c"].equal(alone)
    assert not merged("dare", EXPERTS, seed=2)["c"].equal(alone)


def test_dare_without_dropping_is_what_it_precedes() -> None:
    close(vector(merged("dare", EXPERTS, drop=0.0)), vector(merged("task-arithmetic", EXPERTS, scale=0.3)))
    close(vector(merged("dare-ties", EXPERTS, drop=0.0)), vector(merged("ties", EXPERTS)))


def test_breadcrumbs_masks_both_ends_of_every_tensor() -> None:
    part = torch.arange(1.0, 101.0, dtype=torch.float64) * torch.tensor([1.0, -1.0]).double().repeat(50)
    kept = breadcrumbs.mask(part[torch.randperm(100)], 0.85, 0.97)
    assert sorted(kept.abs()[kept != 0].tolist()) == [*range(86, 98)]
    both = torch.cat([part, 1e3 * part])
    zero = torch.zeros_like(both)
    apart = breadcrumbs.merge(zero, [both], 2.0, 0.85, 0.97, [100, 100])
    assert apart.count_nonzero() == 24
    close(apart[100:], 1e3 * apart[:100])
    close(vector(merged("breadcrumbs", EXPERTS, beta=0.0, gamma=1.0)), vector(merged("task-arithmetic", EXPERTS)))


def test_model_stock_is_the_point_of_its_angle() -> None:
    """Two task vectors at 60 degrees: t = 2/3; of any number, the formula with the mean over all pairs."""
    zero = torch.zeros(2, dtype=torch.float64)
    one, two = torch.tensor([[1.0, 0.0], [1.5, 3 * 0.75**0.5]], dtype=torch.float64)
    close(model_stock.merge(zero, [one, two]), 2 / 3 * (one + two) / 2)
    taus = [BASE.tensors["a"] + (i + 1) * EXPERTS[f"task {i}"].tensors["a"] for i in range(3)]
    pairs = [torch.cosine_similarity(taus[i].flatten(), taus[j].flatten(), 0) for i, j in ((0, 1), (0, 2), (1, 2))]
    cosine = float(sum(pairs)) / 3
    t = 3 * cosine / (1 + 2 * cosine)
    close(model_stock.merge(torch.zeros_like(taus[0]), taus), t * (taus[0] + taus[1] + taus[2]) / 3)


def test_model_stock_between_base_and_average() -> None:
    same = {f"task {i}": EXPERTS["task 0"] for i in range(4)}
    close(vector(merged("model-stock", same)), vector(EXPERTS["task 0"]))
    base = torch.ones(2, dtype=torch.float64)
    right, up, left = (base + torch.tensor(step).double() for step in ([1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]))
    close(model_stock.merge(base, [right, up]), base)  # orthogonal
    close(model_stock.merge(base, [right, left]), base)  # obtuse
    close(model_stock.merge(base, [base, base]), base)  # nothing moved
    joined = model_stock.merge(torch.cat([base, base]), [torch.cat([right, up]), torch.cat([right, left])], [2, 2])
    close(joined, torch.cat([right, model_stock.merge(base, [up, left])]))
