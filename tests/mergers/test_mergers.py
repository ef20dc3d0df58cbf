"""Mergers against their formulas and against mergekit's numbers; recipes: what is read, how often, in which dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from merging import is_of_matrices, merge, merge_matrix
from pydantic import ValidationError
from torch import Tensor

from featcal.formats.weights import InMemory, TensorInfo
from featcal.mergers import dare, ties, ties_per_tensor
from featcal.mergers.common import engine
from featcal.mergers.common.engine import RecipeWeights
from featcal.suite.methods import merger_names
from featcal.suite.methods import method as find_method
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import suite_from_dict
from featcal.system.errors import InputError

SHAPES = {"a": (3, 4), "b": (7,), "c": (2, 3, 2)}
TASKS = ("one", "two", "three")
METHODS = [*merger_names()]


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(autouse=True)
def short_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that settle 9 bits: those of 21 count 2**21 magnitudes, however few there are, and have a test of their
    own."""
    monkeypatch.setattr(ties, "_DIGIT", 9)


BASE = tensor([1, -2, 0.5, 3], [0, 4, -1, 2])
EXPERTS = [
    BASE + tensor([4, -1, 2, -3], [0.5, 6, -7, 0.25]),
    BASE + tensor([-2, 3, 1, -5], [0.5, -4, -6, 7]),
    BASE + tensor([1, -2, 8, 3], [-4, 5, 0.5, 6]),
]
WEIGHTS, DENSITIES = [0.5, 0.25, 0.4], [0.3, 0.5, 0.77]


@pytest.mark.parametrize(
    ("merged", "mergekit"),
    [
        (
            lambda: merge("linear", BASE, EXPERTS, weights=WEIGHTS),
            [
                2.652173913,
                -2.4782608696,
                4.3695652174,
                1.652173913,
                -1.0652173913,
                7.4782608696,
                -5.1739130435,
                5.7173913043,
            ],
        ),
        (
            lambda: merge("linear", BASE, EXPERTS, weights=WEIGHTS, normalize=False),
            [3.05, -2.85, 5.025, 1.9, -1.225, 8.6, -5.95, 6.575],
        ),
        (
            lambda: merge("task-arithmetic", BASE, EXPERTS, scale=0.8, weights=WEIGHTS),
            [2.52, -2.44, 4.06, 1.76, -0.98, 7.2, -4.84, 5.42],
        ),
        (
            lambda: merge("task-arithmetic", BASE, EXPERTS, scale=1.0, weights=WEIGHTS, normalize=True),
            [
                2.652173913,
                -2.4782608696,
                4.3695652174,
                1.652173913,
                -1.0652173913,
                7.4782608696,
                -5.1739130435,
                5.7173913043,
            ],
        ),
        (
            lambda: merge("ties-per-tensor", BASE, EXPERTS, scale=1.3, weights=WEIGHTS, density=DENSITIES),
            [1.0, -4.6, 10.9, -3.5, -5.2, 11.2222222222, -9.6666666667, 10.3],
        ),
        (
            lambda: merge("ties-per-tensor", BASE, EXPERTS, weights=WEIGHTS, density=DENSITIES, normalize=False),
            [1.0, -2.8, 3.7, 1.75, -1.6, 9.0, -6.0, 6.15],
        ),
        (
            lambda: merge("ties-per-tensor", BASE, EXPERTS, weights=[0.5, -0.25, 0.4], density=DENSITIES),
            [1.0, -4.0, 8.5, 19.3333333333, -4.0, 13.2307692308, -8.0, 8.0],
        ),
    ],
    ids=[
        "linear",
        "linear raw",
        "task arithmetic",
        "task arithmetic normalized",
        "ties",
        "ties raw",
        "ties mixed signs",
    ],
)
def test_numbers_of_mergekit(merged: Callable[[], Tensor], mergekit: list[float]) -> None:
    """What `mergekit.merge_methods.merge_tensors` of version 0.1.5 gives in float64."""
    torch.testing.assert_close(merged(), tensor(*mergekit).view(2, 4), rtol=0, atol=1e-9)


def test_mergers_agree_where_they_must() -> None:
    base, one, two = torch.randn(3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(merge("task-arithmetic", base, [one, two], scale=0.0), base)
    torch.testing.assert_close(merge("task-arithmetic", base, [one], scale=1.0), one)
    average = merge("simple-averaging", base, [one, two])
    torch.testing.assert_close(average, (one + two) / 2)
    torch.testing.assert_close(merge("task-arithmetic", base, [one, two], scale=0.5), average)
    torch.testing.assert_close(merge("linear", base, [one, two], weights=[3.0, 3.0]), average)
    torch.testing.assert_close(
        merge("task-arithmetic", base, [one, two], scale=1.0, weights=[2.0, 2.0], normalize=True), average
    )
    torch.testing.assert_close(merge("ties-per-tensor", base, [one], density=1.0), one)


@given(st.lists(st.lists(st.integers(-9, 9), min_size=5, max_size=5), min_size=1, max_size=4), st.booleans())
def test_ties_is_the_disjoint_mean_of_what_agrees_in_sign(changes: list[list[int]], normalize: bool) -> None:
    vectors = [tensor(*change) for change in changes]
    merged = merge("ties-per-tensor", torch.zeros(5).double(), vectors, density=1.0, normalize=normalize)
    for entry, value in enumerate(merged.tolist()):
        values = [change[entry] for change in changes]
        sign = 1 if sum(values) >= 0 else -1
        agreeing = [one for one in values if one * sign > 0]
        expected = sum(agreeing) / (max(1, len(agreeing)) if normalize else 1)
        assert value == pytest.approx(expected, abs=1e-12)


def test_trimming_keeps_the_largest_of_every_part() -> None:
    vector = tensor(1, -9, 3, -2, 0.1, 0.3, -0.2)
    assert ties_per_tensor.trim_tensor(vector, 0.5).tolist() == [0, -9, 3, -2, 0, 0, 0]
    assert ties_per_tensor.trim_tensor(vector, 0.5, [4, 3]).tolist() == [0, -9, 3, 0, 0, 0.3, 0]
    assert ties_per_tensor.trim_tensor(vector, 1.0).equal(vector)
    assert ties_per_tensor.trim_tensor(vector, 1e-9).count_nonzero() == 1
    # Of equal magnitudes those stay that come first when torch sorts them, by which mergekit 0.1.5 chooses.
    equal = torch.tensor([1.0, -1.0] * 500)
    first = torch.argsort(equal.abs(), descending=True)[:300]
    assert ties_per_tensor.trim_tensor(equal, 0.3).nonzero()[:, 0].equal(first.sort().values)
    matrix = tensor([1, 2], [-4, 3])
    assert ties_per_tensor.trim_tensor(matrix.T, 0.5).equal(tensor([0, -4], [0, 3]))


def test_trimming_tensor_by_tensor_is_another_merge_than_trimming_the_whole() -> None:
    small, large = tensor(1.0, 2.0), tensor(10.0, 20.0)
    joined = torch.cat([small, large])
    base = torch.zeros_like(joined)
    assert merge("ties-per-tensor", base, [joined], density=0.5).tolist() == [0, 0, 10, 20]
    assert merge("ties-per-tensor", base, [joined], [2, 2], density=0.5).tolist() == [0, 2, 0, 20]


def test_too_few_weights_are_an_error_and_not_a_lost_expert() -> None:
    for method in ("linear", "ties-per-tensor", "task-arithmetic"):
        with pytest.raises(KeyError):
            merge(method, BASE, EXPERTS, weights=[1.0])


def models(count: int, dtype: torch.dtype = torch.float32) -> list[InMemory]:
    generator = torch.Generator().manual_seed(3)
    return [
        InMemory(f"model {i}", {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in SHAPES.items()})
        for i in range(count)
    ]


BY_TASK = {task: WEIGHTS[i] for i, task in reversed(list(enumerate(TASKS)))}
"""In another order than the experts': names count, not places."""
RECIPES: dict[str, dict[str, Any]] = {
    "simple-averaging": {},
    "linear": {"weights": BY_TASK},
    "task-arithmetic": {"scale": 0.7, "weights": BY_TASK, "normalize": True},
    "ties": {"scale": 1.3, "density": 0.4},
    "dare": {"scale": 0.4, "drop": 0.3, "seed": 5},
    "dare-ties": {"scale": 0.9, "density": 0.6, "drop": 0.3},
    "breadcrumbs": {"beta": 0.2, "gamma": 0.9},
    "model-stock": {},
    "tsv-m": {"scale": 0.9},
    "iso-c": {},
    "iso-cts": {"common": 0.5},
    "ace": {"scale": 0.9, "eps": 1e-3},
    "swudi": {"time": 3.0, "share": 0.5},
    "wudi": {"steps": 3},
    "wudi-optimum": {},
    "ties-per-tensor": {"scale": 1.3, "density": dict(zip(TASKS, DENSITIES, strict=True)), "normalize": False},
}


def expected(method: str, held: list[InMemory], name: str) -> Tensor:
    """A tensor of the merged model, by the merger's own function."""
    base, *experts = (model.tensors[name].double() for model in held)
    options = dict(RECIPES[method])
    for option in ("weights", "density"):
        if isinstance(options.get(option), dict):
            options[option] = [options[option][task] for task in TASKS]
    if is_of_matrices(method):
        changed = [expert - base for expert in experts]
        if base.dim() != 2:
            return base + options.get("scale", 1.0) * torch.stack(changed).mean(0)
        return base + merge_matrix(method, changed, **options)
    if method not in ("dare", "ties", "dare-ties"):
        return merge(method, base, experts, **options)
    changes = {n: [thinned(method, held, i, n) for i in range(len(TASKS))] for n in SHAPES}
    if method == "dare":
        return base + 0.4 * sum(changes[name], torch.zeros_like(base))
    scale, density = {"ties": (1.3, 0.4), "dare-ties": (0.9, 0.6)}[method]
    vectors = [torch.cat([changes[n][i].flatten() for n in SHAPES]) for i in range(len(TASKS))]
    cuts = [float(vector.abs().topk(int(density * len(vector))).values[-1]) for vector in vectors]
    return base + scale * ties.elect(base, changes[name], cuts)


def thinned(method: str, held: list[InMemory], i: int, name: str) -> Tensor:
    """The change of one tensor by one expert, after DARE where that is part of the method."""
    change = held[i + 1].tensors[name].double() - held[0].tensors[name].double()
    if not method.startswith("dare"):
        return change
    stream = f"{5 if method == 'dare' else 42}:{TASKS[i]}"
    return dare.thin(change.flatten(), {name: change.numel()}, 0.3, stream).view_as(change)


def open_recipe(
    method: str, stored: torch.dtype = torch.float32, **options: Any
) -> tuple[RecipeWeights, list[InMemory]]:
    held = models(4, stored)
    given_recipe = MergeRecipe.model_validate({"method": method, **RECIPES[method], **options})
    return RecipeWeights(given_recipe, held[0], dict(zip(TASKS, held[1:], strict=True)), [*SHAPES]), held


@pytest.mark.parametrize("at_once", [1, 15, 2**24])
@pytest.mark.parametrize("method", METHODS)
def test_recipes_merge_every_tensor_on_its_own(method: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "VALUES_AT_ONCE", at_once)
    merged, held = open_recipe(method)
    read = merged.read(["c", "a", "b"])
    assert list(read) == ["c", "a", "b"]
    for name in SHAPES:
        assert read[name].dtype is torch.float32
        torch.testing.assert_close(read[name], expected(method, held, name).float(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_large_tensor_merged_in_pieces_has_the_same_bits(
    method: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_recipe(method, stored)[0].read(SHAPES)
    monkeypatch.setattr(engine, "VALUES_AT_ONCE", 1)
    monkeypatch.setattr(engine, "ENTRIES_AT_ONCE", 5)
    pieces = open_recipe(method, stored)[0].read(SHAPES)
    for name, tensor in whole.items():
        assert pieces[name].dtype is stored
        assert pieces[name].equal(tensor), name


def test_a_merge_of_its_own_is_not_taken_to_be_entrywise() -> None:
    """`dare-ties` drops entries by their place in the whole tensor, `ties` takes each by itself."""
    kinds: dict[str, Any] = {name: find_method(name) for name in METHODS}
    entrywise = {name for name, kind in kinds.items() if kind.entrywise and not is_of_matrices(name)}
    assert entrywise == {"task-arithmetic", "linear", "simple-averaging", "ties"}


@pytest.mark.parametrize("method", METHODS)
def test_the_result_has_the_bases_dtype_or_the_recipes(method: str) -> None:
    own, _ = open_recipe(method, torch.bfloat16)
    asked, _ = open_recipe(method, torch.bfloat16, dtype="float32")
    assert own.info["a"] == TensorInfo((3, 4), torch.bfloat16)
    assert asked.info["a"] == TensorInfo((3, 4), torch.float32)
    assert own.read(["a"])["a"].equal(asked.read(["a"])["a"].bfloat16())


def test_nothing_is_written_into_the_models() -> None:
    for method in METHODS:
        merged, held = open_recipe(method, torch.float64)
        before = [{name: one.clone() for name, one in model.tensors.items()} for model in held]
        read = merged.read(SHAPES)
        for tensors in read.values():
            tensors.add_(1)
        assert all(model.tensors[n].equal(copy[n]) for model, copy in zip(held, before, strict=True) for n in SHAPES)


class Watched:
    """A model that makes its tensors when they are read, and counts how many readings are alive at once."""

    alive = 0
    most = 0

    def __init__(self, seed: int) -> None:
        self.label = f"model {seed}"
        self.reads = 0

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(shape, torch.float32) for name, shape in SHAPES.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        self.reads += 1
        tensors = {name: torch.randn(SHAPES[name]) for name in names}
        Watched.alive += 1
        Watched.most = max(Watched.most, Watched.alive)
        weakref.finalize(next(iter(tensors.values())), self._gone)
        return tensors

    @staticmethod
    def _gone() -> None:
        Watched.alive -= 1


@pytest.fixture
def watched() -> Iterator[type[Watched]]:
    Watched.alive = Watched.most = 0
    yield Watched
    assert Watched.alive == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 20])
def test_one_expert_is_held_at_a_time_and_read_once_for_all_names(
    method: str, count: int, watched: type[Watched]
) -> None:
    experts = {str(i): watched(i) for i in range(count)}
    RecipeWeights(MergeRecipe(method=method), InMemory("base", models(1)[0].tensors), experts, [*SHAPES]).read(SHAPES)
    assert watched.most == 1 or is_of_matrices(method)
    digits = 63 // ties._DIGIT  # of a magnitude
    passes = digits if method in ("ties", "dare-ties") else 0  # for the cut, before the first tensor is merged
    apart = 1 if is_of_matrices(method) else 0  # what is no matrix
    assert [expert.reads for expert in experts.values()] == [1 + passes + apart] * count


@pytest.mark.parametrize("method", [*filter(is_of_matrices, METHODS)])
def test_what_is_no_matrix_is_read_from_one_expert_at_a_time(method: str, watched: type[Watched]) -> None:
    """A table of a vocabulary, which may be larger than a block, and vectors."""
    experts = {str(i): watched(i) for i in range(20)}
    base = InMemory("base", models(1)[0].tensors)
    RecipeWeights(MergeRecipe(method=method), base, experts, [*SHAPES], tables=["a"]).read(SHAPES)
    assert watched.most == 1


def test_what_does_not_fit_the_dtype_is_an_error() -> None:
    merged, _ = open_recipe("task-arithmetic", dtype="float16", scale=1e30)
    with pytest.raises(
        InputError,
        match=r"task-arithmetic 1e\+30\): tensor 'a' in torch.float16.*NaN or infinite; merge with a smaller scale",
    ):
        merged.read(["a"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"method": "simple-averaging", "scale": 1}, "'scale' is not an option of simple-averaging"),
        (
            {"method": "linear", "density": 0.5},
            "'density' is not an option of linear, which takes weights, normalize, dtype",
        ),
        ({"method": "task-arithmetic", "density": 0.5}, "'density' is not an option of task-arithmetic"),
        ({"method": "ties-per-tensor", "density": 0}, r"density is 0; it lies in \(0, 1\]"),
        ({"method": "ties-per-tensor", "density": {"a": 1.5}}, r"density is 1.5; it lies in \(0, 1\]"),
        ({"method": "linear", "weights": {"a": 1, "b": -1}}, "sum to 0"),
        ({"method": "ties", "weights": {"a": 1}, "normalize": True}, "are not options of ties.*it is ties-per-tensor"),
        ({"method": "ties", "drop": 0.5}, "'drop' is not an option of ties"),
        (
            {"method": "dare", "density": 0.5},
            "'density' is not an option of dare, which takes scale, drop, seed, dtype",
        ),
        ({"method": "dare", "drop": 1.0}, r"drop is 1; it lies in \[0, 1\)"),
        ({"method": "dare", "seed": -1}, "seed is -1; it is at least 0"),
        ({"method": "breadcrumbs", "beta": 0.5, "gamma": 0.5}, "nothing lies between"),
        ({"method": "breadcrumbs", "gamma": 0.0}, "nothing lies between"),
        ({"method": "wudi", "scale": 1.0}, "'scale' is not an option of wudi, which takes steps, dtype"),
        ({"method": "iso-c", "common": 0.5}, "'common' is not an option of iso-c"),
        ({"method": "iso-cts", "common": 1.5}, r"common is 1.5; it lies in \[0, 1\]"),
        ({"method": "ace", "eps": 0.0}, "eps is 0; it is above 0"),
        ({"method": "tsv-m", "eps": 0.1}, "'eps' is not an option of tsv-m, which takes scale, dtype"),
        ({"method": "model-stock", "scale": 0.5}, "'scale' is not an option of model-stock, which takes dtype"),
        ({"method": "task-arithmetic", "weights": {"a": 0.1, "b": -0.1}, "normalize": True}, "sum to 0"),
        ({"method": "ties-per-tensor", "dtype": "int8"}, "'float32', 'bfloat16' or 'float16'"),
        ({"method": "ties-per-tensor", "scale": float("inf")}, "finite"),
    ],
)
def test_recipes_that_mean_nothing(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MergeRecipe.model_validate(content)


def test_an_option_that_is_left_out_leaves_what_a_suite_says() -> None:
    """As it was before there was an eps: the history and shipped measurements of a suite go by that."""
    assert "eps" not in MergeRecipe(method="ace").model_dump()
    assert MergeRecipe(method="ace", eps=0.1).model_dump(exclude_none=True) == {"method": "ace", "eps": 0.1}


def test_a_name_with_two_meanings_is_explained() -> None:
    assert [method for method in METHODS if MergeRecipe(method=method).notes] == ["ties"]
    assert "as mergekit does it, it is ties-per-tensor" in MergeRecipe(method="ties").notes[0]


def test_weights_that_cancel_are_fine_where_nothing_is_divided() -> None:
    for content in (
        {"method": "linear", "normalize": False},
        {"method": "task-arithmetic"},
        {"method": "ties-per-tensor"},
    ):
        MergeRecipe.model_validate({**content, "weights": {"a": 1, "b": -1}})


def test_weights_and_densities_name_every_task_and_no_other() -> None:
    merged = {
        "method": "ties-per-tensor",
        "weights": {"pets": 1.0},
        "density": {"pets": 0.5, "signs": 0.5, "cars": 0.5},
    }
    tasks = {task: {"expert": task, "calibration": {"imagefolder": task}} for task in ("pets", "signs")}
    with pytest.raises(InputError) as caught:
        suite_from_dict({"name": "s", "base": "b", "merged": merged, "tasks": tasks}, Path())
    assert "merged.weights: give one for every task; missing 'signs'" in str(caught.value)
    assert "merged.density: no task 'cars'; there are pets, signs" in str(caught.value)
