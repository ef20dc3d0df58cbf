"""Every data-free merger against identities that its definition implies, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import merge, merge_matrix
from torch import Tensor

from featcal.formats.weights import InMemory
from featcal.mergers import ace, breadcrumbs, dare, ties
from featcal.mergers.common import engine
from featcal.mergers.common.engine import RecipeWeights
from featcal.mergers.swudi import swudi
from featcal.mergers.wudi import normal_equations
from featcal.mergers.wudi_optimum import wudi_optimum
from featcal.suite.methods import method
from featcal.suite.recipe import MergeRecipe
from featcal.system.errors import NumericalError

SHAPES = {"a": (6, 8), "b": (7,), "c": (2, 3, 2), "d": (9, 4)}
ENTRIES = 6 * 8 + 7 + 12 + 36
SPREAD = {"a": 1.0, "b": 0.05, "c": 3.0, "d": 0.3}
"""Tensors change by different amounts, so that ties them together is not ties each."""


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


@pytest.fixture(autouse=True)
def short_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that settle 9 bits: those of 21 count 2**21 magnitudes, however few there are, and have a test of their
    own."""
    monkeypatch.setattr(ties, "_DIGIT", 9)


EXACT_FOR_ONE: dict[str, dict[str, object]] = {
    "ties": {"scale": 1.0, "density": 1.0},
    "dare": {"scale": 1.0, "drop": 0.0},
    "dare-ties": {"scale": 1.0, "drop": 0.0, "density": 1.0},
    "breadcrumbs": {"scale": 1.0, "beta": 0.0, "gamma": 1.0},
    "model-stock": {},
    "tsv-m": {},
    "swudi": {},
    "wudi": {"steps": 5},
    "wudi-optimum": {},
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
    "tsv-m": {},
    "iso-c": {},
    "iso-cts": {"common": 0.5},
    "ace": {},
    "swudi": {"share": 0.5},
    "wudi": {"steps": 5},
    "wudi-optimum": {},
}


@pytest.mark.parametrize("method", IN_ANY_ORDER)
def test_the_order_of_experts_does_not_matter(method: str) -> None:
    turned = dict(reversed(EXPERTS.items()))
    options = IN_ANY_ORDER[method]
    close(vector(merged(method, EXPERTS, **options)), vector(merged(method, turned, **options)), 1e-11)


@pytest.mark.parametrize("at_once", [1, 20, 2**24])
def test_ties_cuts_the_whole_task_vector(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 1, written with one vector per model and torch.topk over all of it."""
    monkeypatch.setattr(engine, "VALUES_AT_ONCE", at_once)
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
    assert ties.elect(zero, [up, down], [0.0, 0.0]).tolist() == [0, 1]


@pytest.mark.parametrize("digit", [9, ties._DIGIT])
@settings(max_examples=15)  # 2**21 counts per part take their time
@given(
    st.lists(st.floats(-1e300, 1e300) | st.sampled_from([0.0, -1.5, 1.5]), min_size=1, max_size=40),
    st.integers(0, 39),
    st.integers(1, 7),
)
def test_the_kth_largest_magnitude_is_exact(digit: int, values: list[float], place: int, size: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    k = place % len(values) + 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ties, "_DIGIT", digit)
        found = ties.largest(lambda: whole.split(size), k)
    assert found == float(whole.abs().topk(k).values[-1])


def thinned(seed: int, drop: float = 0.5, task: str = "task") -> Tensor:
    vector = torch.arange(1.0, 2001.0, dtype=torch.float64)
    return dare.thin(vector, {"a": 1500, "b": 500}, drop, f"{seed}:{task}")


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


def test_what_lies_outside_of_what_is_merged_is_the_bases() -> None:
    asked = MergeRecipe.model_validate({"method": "task-arithmetic", "scale": 1.0, "dtype": "float32"})
    outside = InMemory("base", {**BASE.tensors, "scale": torch.tensor(0.5).double(), "places": torch.arange(3)})
    model = RecipeWeights(asked, outside, EXPERTS, list(SHAPES))
    read = model.read(model.info)
    assert {name: (tuple(t.shape), t.dtype) for name, t in read.items()} == {
        name: (one.shape, one.dtype) for name, one in model.info.items()
    }
    assert (float(read["scale"]), read["places"].tolist()) == (0.5, [0, 1, 2])


def test_dare_without_dropping_is_what_it_precedes() -> None:
    close(vector(merged("dare", EXPERTS, drop=0.0)), vector(merged("task-arithmetic", EXPERTS, scale=0.3)))
    close(vector(merged("dare-ties", EXPERTS, drop=0.0)), vector(merged("ties", EXPERTS)))


def test_breadcrumbs_masks_both_ends_of_every_tensor() -> None:
    part = torch.arange(1.0, 101.0, dtype=torch.float64) * torch.tensor([1.0, -1.0]).double().repeat(50)
    kept = breadcrumbs.mask(part[torch.randperm(100)], 0.85, 0.97)
    assert sorted(kept.abs()[kept != 0].tolist()) == [*range(86, 98)]
    both = torch.cat([part, 1e3 * part])
    zero = torch.zeros_like(both)
    apart = merge("breadcrumbs", zero, [both], [100, 100], scale=2.0, beta=0.85, gamma=0.97)
    assert apart.count_nonzero() == 24
    close(apart[100:], 1e3 * apart[:100])
    # Both ranks are the ninth: of few entries one stays.
    assert breadcrumbs.mask(torch.arange(1.0, 11.0), 0.9, 0.99).nonzero().flatten().tolist() == [9]
    close(vector(merged("breadcrumbs", EXPERTS, beta=0.0, gamma=1.0)), vector(merged("task-arithmetic", EXPERTS)))


def test_model_stock_is_the_point_of_its_angle() -> None:
    """Two task vectors at 60 degrees: t = 2/3; of any number, the formula with the mean over all pairs."""
    zero = torch.zeros(2, dtype=torch.float64)
    one, two = torch.tensor([[1.0, 0.0], [1.5, 3 * 0.75**0.5]], dtype=torch.float64)
    close(merge("model-stock", zero, [one, two]), 2 / 3 * (one + two) / 2)
    taus = [BASE.tensors["a"] + (i + 1) * EXPERTS[f"task {i}"].tensors["a"] for i in range(3)]
    pairs = [torch.cosine_similarity(taus[i].flatten(), taus[j].flatten(), 0) for i, j in ((0, 1), (0, 2), (1, 2))]
    cosine = float(sum(pairs)) / 3
    t = 3 * cosine / (1 + 2 * cosine)
    close(merge("model-stock", torch.zeros_like(taus[0]), taus), t * (taus[0] + taus[1] + taus[2]) / 3)


def test_model_stock_between_base_and_average() -> None:
    same = {f"task {i}": EXPERTS["task 0"] for i in range(4)}
    close(vector(merged("model-stock", same)), vector(EXPERTS["task 0"]))
    base = torch.ones(2, dtype=torch.float64)
    right, up, left = (base + torch.tensor(step).double() for step in ([1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]))
    close(merge("model-stock", base, [right, up]), base)  # orthogonal
    close(merge("model-stock", base, [right, left]), base)  # obtuse
    close(merge("model-stock", base, [base, base]), base)  # nothing moved
    # Of three pairs one has the cosine 1, and those with the expert that did not move have 0.
    t = 3 * (1 / 3) / (1 + 2 / 3)
    close(merge("model-stock", base, [right, right, base]), base + t * 2 / 3 * (right - base))
    joined = merge("model-stock", torch.cat([base, base]), [torch.cat([right, up]), torch.cat([right, left])], [2, 2])
    close(joined, torch.cat([right, merge("model-stock", base, [up, left])]))


def matrices(count: int, m: int = 12, d: int = 9, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(i + 1) * torch.randn(m, d, generator=generator, dtype=torch.float64) for i in range(count)]


def apart(ranks: list[int], m: int = 12, d: int = 9) -> list[Tensor]:
    """Matrices of these ranks whose rows, and whose columns, are orthogonal to those of all others."""
    left, right = (torch.linalg.qr(one).Q for one in matrices(1, m, m) + matrices(1, d, d))
    found, start = [], 0
    for i, rank in enumerate(ranks):
        part = slice(start, start + rank)
        found.append(left[:, part] * (1.0 + i + torch.arange(rank)) @ right[:, part].T)
        start += rank
    return found


def test_tsv_m_of_tasks_that_share_no_direction_is_their_sum() -> None:
    tasks = apart([3, 2, 3])
    close(merge_matrix("tsv-m", tasks), sum(tasks, torch.zeros(12, 9).double()))
    nothing = torch.zeros(12, 9, dtype=torch.float64)
    close(
        merge_matrix("tsv-m", [nothing, tasks[0], nothing]), tasks[0]
    )  # of low rank, beside tasks that changed nothing
    close(merge_matrix("tsv-m", [nothing, nothing]), nothing)
    close(merge_matrix("tsv-m", matrices(1)), matrices(1)[0])


def test_tsv_m_keeps_the_singular_values_of_every_task() -> None:
    tasks = matrices(3)
    kept = torch.cat([torch.linalg.svdvals(one)[:3] for one in tasks]).sort(descending=True).values
    close(torch.linalg.svdvals(merge_matrix("tsv-m", tasks)), kept)
    u, s, vh = torch.linalg.svd(tasks[0])
    close(
        merge_matrix("tsv-m", [tasks[0]] * 3), u[:, :3] * s[:3] @ vh[:3]
    )  # of the same three times: its strongest third


def test_tsv_m_is_the_published_construction() -> None:
    """Blocks of U, S and V of all tasks in a row; whitening by the SVD of each."""
    tasks, k = matrices(3), 3
    parts = [torch.linalg.svd(one, full_matrices=False) for one in tasks]
    u, v = torch.cat([one[0][:, :k] for one in parts], 1), torch.cat([one[2][:k] for one in parts])
    whitened = [p @ q for p, _, q in (torch.linalg.svd(one, full_matrices=False) for one in (u, v))]
    close(
        merge_matrix("tsv-m", tasks), whitened[0] @ torch.diag(torch.cat([one[1][:k] for one in parts])) @ whitened[1]
    )


def test_iso_c_has_one_singular_value() -> None:
    tasks = matrices(3)
    total = tasks[0] + tasks[1] + tasks[2]
    merged_matrix = merge_matrix("iso-c", tasks)
    mean = torch.linalg.svdvals(total).mean()
    close(torch.linalg.svdvals(merged_matrix), mean.expand(9))
    polar = merged_matrix.T @ total  # mean V U^T U S V^T: symmetric, with the singular values of the sum
    close(polar, polar.T, 1e-10)
    close(torch.linalg.eigvalsh(polar), mean * torch.linalg.svdvals(total).flip(0), 1e-10)
    low = apart([4])[0]
    close(torch.linalg.svdvals(merge_matrix("iso-c", [low])), torch.tensor([2.5] * 4 + [0.0] * 5, dtype=torch.float64))
    close(merge_matrix("iso-c", [torch.zeros(3, 2).double()]), torch.zeros(3, 2).double())


def test_iso_cts_is_the_published_construction() -> None:
    tasks, total = matrices(2), matrices(2)[0] + matrices(2)[1]
    u, s, vh = (one[..., :5] if i < 2 else one[:5] for i, one in enumerate(torch.linalg.svd(total)))
    parts = [(u, s, vh)]  # common 0.6 of 9: int(5.4) = 5, and 2 of each task
    for task in tasks:
        own = torch.linalg.svd(task - u @ u.T @ task)
        parts.append((own[0][:, :2], own[1][:2], own[2][:2]))
    sides = torch.cat([one[0] for one in parts], 1), torch.cat([one[2] for one in parts])
    left, right = (p @ q for p, _, q in (torch.linalg.svd(one, full_matrices=False) for one in sides))
    expected = torch.cat([one[1] for one in parts]).mean() * left @ right
    close(merge_matrix("iso-cts", tasks, common=0.6), expected)
    close(torch.linalg.svdvals(expected), torch.linalg.svdvals(expected).mean().expand(9))
    close(merge_matrix("iso-cts", tasks, common=1.0), merge_matrix("iso-c", tasks))


def loss(t: Tensor, tasks: list[Tensor]) -> Tensor:
    """The objective as the paper writes it."""
    terms = [((t - one) @ one.T).square().sum() / one.square().sum() for one in tasks]
    return torch.stack(terms).sum()


def gradient(t: Tensor, tasks: list[Tensor]) -> Tensor:
    leaf = t.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, tasks), leaf)[0]


def test_wudis_minimiser_has_no_gradient() -> None:
    for tasks in (matrices(3), matrices(2, 3, 12), apart([3, 2])):  # the last two leave directions free
        best = wudi_optimum(tasks)
        close(gradient(best, tasks), torch.zeros_like(best), 1e-11)
        start = sum(tasks[1:], tasks[0])
        assert float(gradient(start + 0.1 * tasks[0], tasks).abs().max()) > 1e-2
        read = torch.linalg.svd(torch.cat(tasks))
        unread = read.Vh[int((read.S > 1e-9).sum()) :]
        close((best - start) @ unread.T, torch.zeros(len(best), len(unread)).double())  # there the sum stays


def test_wudi_is_adam_on_its_loss() -> None:
    """The published loop, with autograd on the published loss."""
    tasks = [1e-3 * one for one in matrices(3)]
    t = (tasks[0] + tasks[1] + tasks[2]).requires_grad_()
    adam = torch.optim.Adam([t], lr=1e-5)
    for _ in range(40):
        adam.zero_grad()
        loss(t, tasks).backward()
        adam.step()
    close(merge_matrix("wudi", tasks, steps=40), t.detach(), 1e-13)


def test_wudi_goes_from_the_sum_towards_the_minimiser() -> None:
    tasks = [1e-3 * one for one in matrices(3)]
    way = [float(loss(merge_matrix("wudi", tasks, steps=steps), tasks)) for steps in (0, 100, 300, 3000)]
    assert way == sorted(way, reverse=True)
    best = float(loss(wudi_optimum(tasks), tasks))
    assert best < way[2] < 0.9 * way[0]
    assert way[3] == pytest.approx(best, rel=1e-3)
    close(merge_matrix("wudi", tasks, steps=0), tasks[0] + tasks[1] + tasks[2])


def test_wudi_of_tasks_that_read_different_directions_is_their_sum() -> None:
    tasks = apart([3, 2, 3])
    total = tasks[0] + tasks[1] + tasks[2]
    close(wudi_optimum(tasks), total)
    close(merge_matrix("wudi", tasks, steps=20), total, 1e-4)  # Adam normalises even a gradient of rounding errors
    nothing = torch.zeros_like(total)
    close(wudi_optimum([nothing, nothing]), nothing)


@pytest.mark.slow
def test_the_filter_of_swudi_is_the_flow_of_the_gradient() -> None:
    """dt/ds = B - t A by the exponential of A, which no decomposition of ours takes part in; s = 2 rate steps of plain
    gradient descent; from the sum at s = 0 to the minimiser."""
    for tasks in (matrices(3), matrices(2, 3, 12), apart([3, 2])):
        a, b = normal_equations(tasks)
        start = sum(tasks[1:], tasks[0])
        end = torch.linalg.lstsq(a.T, (b - start @ a).T, driver="gelsd").solution.T + start
        for time in (0.0, 0.3, 5.0, 60.0):
            close(swudi(tasks, time=time, share=1.0), end + (start - end) @ torch.matrix_exp(-time * a), 1e-9)
        close(swudi(tasks, time=0.0, share=1.0), start)
        close(swudi(tasks, time=1e12, share=1.0), wudi_optimum(tasks), 1e-9)
        close(wudi_optimum(tasks), end, 1e-9)
        t, rate = start.clone(), 1e-4
        for _ in range(2000):
            t -= rate * gradient(t, tasks)
        close(swudi(tasks, time=2 * rate * 2000, share=1.0), t, 1e-3)


def test_swudi_goes_down_and_follows_the_strongest_directions() -> None:
    tasks = matrices(3)
    start = tasks[0] + tasks[1] + tasks[2]
    way = [float(loss(swudi(tasks, time=time, share=1.0), tasks)) for time in (0, 1, 10, 100, 1000)]
    assert way == sorted(way, reverse=True)
    assert way[-1] < 0.5 * way[0]
    strongest = torch.linalg.eigh(normal_equations(tasks)[0]).eigenvectors[:, -3:]  # of 9
    moved = swudi(tasks, time=7.0, share=1 / 3) - start
    close(moved, moved @ strongest @ strongest.T)
    close(moved, (swudi(tasks, time=7.0, share=1.0) - start) @ strongest @ strongest.T)
    close(swudi(tasks, time=7.0, share=0.0), start)
    close(swudi([100 * one for one in tasks], time=7.0, share=1.0), 100 * swudi(tasks, time=7.0, share=1.0), 1e-9)
    nothing = torch.zeros_like(start)
    close(swudi([nothing, nothing], time=256.0, share=1.0), nothing)


LIKE, UNLIKE = [0.5, 0.6, 0.7], [0.1, 1.0, 20.0]
"""Norms of task matrices on either side of ACE's threshold: Eq. 7 gives 0.07 and 88."""


def of_norms(norms: list[float], m: int = 12, d: int = 9) -> list[Tensor]:
    return [norm * one / one.norm() for norm, one in zip(norms, matrices(len(norms), m, d), strict=True)]


def ace_by_equations(tasks: list[Tensor], eps: float) -> Tensor:
    """Eqs. 5 to 19 as they stand, in NumPy."""
    deltas = [one.numpy() for one in tasks]
    m, d = deltas[0].shape
    squares = np.array([(one**2).sum() for one in deltas])
    apart = np.log(squares).var() / np.log(squares).mean() ** 2 > 0.3
    s, regular = [], []
    for delta in deltas:
        centred = delta - np.ones((m, 1)) @ (delta.T @ np.ones((m, 1)) / m).T
        own = centred.T @ centred
        trace = np.trace(own) if apart else 1.0
        s.append(own / trace)
        regular.append(own / trace + eps / trace * np.eye(d))
    prior = np.ones((d, 1)) @ (np.ones((1, d)) @ sum(s) / d)
    prior = prior / squares.mean() if apart else prior
    pre = sum(x @ r for x, r in zip(deltas, regular, strict=True)) @ np.linalg.inv(sum(regular) + prior)
    if not apart:
        return torch.from_numpy(pre)
    mean = sum(regular) / len(regular)
    residual = sum(x @ (one - mean) for x, one in zip(deltas, s, strict=True))
    u, values, vh = np.linalg.svd(pre + residual, full_matrices=False)
    k = int(0.3 * min(m, d))
    return torch.from_numpy(pre + values[:k].mean() * u[:, :k] @ vh[:k])


@pytest.mark.parametrize("shape", [(12, 9), (5, 14)])
@pytest.mark.parametrize("norms", [LIKE, UNLIKE])
def test_ace_is_the_published_construction(norms: list[float], shape: tuple[int, int]) -> None:
    tasks = of_norms(norms, *shape)
    assert ace.unlike(tasks) == (norms is UNLIKE)
    for eps in (1e-3, 0.1):
        close(merge_matrix("ace", tasks, eps=eps), ace_by_equations(tasks, eps), 1e-9)
        close(merge_matrix("ace", tasks[::-1], eps=eps), merge_matrix("ace", tasks, eps=eps), 1e-9)


@pytest.mark.parametrize("norms", [LIKE, UNLIKE])
def test_ace_follows_a_basis_of_outputs_that_keeps_their_mean(norms: list[float]) -> None:
    """The mean of all rows is what is taken off, so a rotation may move all but that."""
    tasks = of_norms(norms)
    whole = torch.linalg.qr(torch.cat([torch.ones(12, 1).double(), matrices(1, 12, 11)[0]], 1)).Q
    turn = torch.block_diag(torch.ones(1, 1).double(), torch.linalg.qr(matrices(1, 11, 11, seed=6)[0]).Q)
    rotation = whole @ turn @ whole.T
    close(rotation.sum(0), torch.ones(12).double())
    close(merge_matrix("ace", [rotation @ one for one in tasks]), rotation @ merge_matrix("ace", tasks), 1e-8)


def test_ace_minimises_but_for_its_prior() -> None:
    """By autograd the gradient of sum tr((W - tau) R (W - tau)^T) is -2 W P: 0 in outputs that have no prior."""
    tasks, eps = of_norms(LIKE), 1e-2
    w = merge_matrix("ace", tasks, eps=eps).requires_grad_()
    centred = [one - one.mean(0) for one in tasks]
    terms = [((w - t) @ c.T).square().sum() + eps * (w - t).square().sum() for t, c in zip(tasks, centred, strict=True)]
    found = torch.autograd.grad(torch.stack(terms).sum(), w)[0]
    prior = torch.ones(9, 1).double() @ sum((c.T @ c for c in centred), torch.zeros(9, 9).double()).mean(0)[None]
    close(found, -2 * w.detach() @ prior, 1e-10)
    assert float(found.abs().max()) > 1e-3


def test_ace_of_experts_that_agree_is_that_of_one() -> None:
    """Whose rows the prior shortens along equal inputs: tau less (tau 1) times a row; with sums of 0, tau itself."""
    one, eps = matrices(1)[0], 1e-3
    close(merge_matrix("ace", [one] * 4, eps=eps), merge_matrix("ace", [one], eps=eps), 1e-10)
    covariance = (one - one.mean(0)).T @ (one - one.mean(0))
    row = torch.linalg.solve(covariance + eps * torch.eye(9).double(), covariance.mean(0))
    sums = one.sum(1, keepdim=True)
    close(merge_matrix("ace", [one], eps=eps), one - sums * row / (1 + row.sum()), 1e-10)
    level = one - one.mean(1, keepdim=True)
    close(merge_matrix("ace", [level, level], eps=eps), level, 1e-10)


def test_ace_leaves_out_what_did_not_change() -> None:
    for norms in (LIKE, UNLIKE):
        tasks = of_norms(norms)
        nothing = torch.zeros_like(tasks[0])
        close(merge_matrix("ace", [nothing, *tasks, nothing]), merge_matrix("ace", tasks))
        assert merge_matrix("ace", [nothing, nothing]).equal(nothing)


def test_ace_of_rows_that_are_all_the_same() -> None:
    """No covariance: eps alone, the mean of those experts; beside others, nothing to be divided by."""
    rows = [norm * matrices(1, 1, 9, seed)[0] for norm, seed in ((1.0, 3), (2.0, 4))]
    close(merge_matrix("ace", rows), (rows[0] + rows[1]) / 2)
    tasks = of_norms([0.1, 1.0])
    level = 20 * torch.ones(12, 1).double() @ rows[0]
    assert ace.unlike([*tasks, level])
    found = merge_matrix("ace", [*tasks, level], eps=1e-2)
    assert float(found.norm()) < 0.5 * float(level.norm())  # which it is where its trace is taken for one
    close(merge_matrix("ace", [*tasks, level * (1 + 1e-15)], eps=1e-2), found, 1e-9)


def test_ace_says_that_eps_is_too_small() -> None:
    tasks = of_norms(LIKE, 4, 20)
    message = r"ace: no decomposition of tensor 'a' \(eps of 1e-20 is lost in rounding.*raise it"
    held = {str(i): InMemory(str(i), {"a": one}) for i, one in enumerate(tasks)}
    zero = InMemory("base", {"a": torch.zeros_like(tasks[0])})
    asked = RecipeWeights(MergeRecipe(method="ace", eps=1e-20), zero, held, ["a"])
    with pytest.raises(NumericalError, match=message):
        asked.read(["a"])


def test_what_is_no_matrix_is_averaged() -> None:
    for name in ("tsv-m", "iso-c", "iso-cts", "ace"):
        found = merged(name, EXPERTS, scale=0.7)
        for tensor in ("b", "c"):
            changes = [expert.tensors[tensor] - BASE.tensors[tensor] for expert in EXPERTS.values()]
            close(found[tensor], BASE.tensors[tensor] + 0.7 * (changes[0] + changes[1] + changes[2]) / 3)
    asked = RecipeWeights(MergeRecipe(method="iso-c"), BASE, EXPERTS, list(SHAPES), tables=["a"])
    read = asked.read(["a", "d"])
    close(read["a"], sum((expert.tensors["a"] for expert in EXPERTS.values()), torch.zeros(6, 8).double()) / 3)
    values = torch.linalg.svdvals(read["d"] - BASE.tensors["d"])
    close(values, values.mean().expand(4))


def test_matrices_are_merged_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(method("iso-c"), "merge_matrix", lambda _, changes: calls.append(1) or changes[0])
    weights = RecipeWeights(MergeRecipe(method="iso-c"), BASE, EXPERTS, list(SHAPES))
    first, again = weights.read(["a", "b"]), weights.read(["d", "b", "a"])
    assert list(again) == ["d", "b", "a"]
    assert len(calls) == 2
    assert all(first[name].equal(again[name]) for name in first)
