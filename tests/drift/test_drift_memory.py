"""A measurement within a limit of memory: the same numbers, in parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lanes import rows
from tiny_clip import TASKS
from tiny_text import TASKS as TEXTS
from tiny_text import write_text_suite
from torch import Tensor

from featcal import InputError, load_suite, open_family
from featcal.drift import propagation
from featcal.drift.decomposition import decompose, measure_total_drift
from featcal.drift.ledger import TaskDrift
from featcal.drift.memory import SampleChunks, measuring_store
from featcal.family.opening import Family
from featcal.models.activations import ActivationStore
from featcal.models.lane import ExpertPass


def passes(
    family: Family, split: str, tasks: tuple[str, ...], samples: int = 7, batch: int = 5
) -> dict[str, ExpertPass]:
    return {task: family.expert_pass(family.samples(task, split, samples, 0), batch) for task in tasks}


Measured = tuple[Family, str, tuple[str, ...]]


@pytest.fixture(scope="module", params=rows(["clip", "t5"], quick=("clip",), slow=("t5",)))
def measured(request: pytest.FixtureRequest, tiny64: Family, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    if request.param == "clip":
        return tiny64, "validation", TASKS
    suite = write_text_suite(tmp_path_factory.mktemp("room") / "suite", "t5")
    return open_family(load_suite(suite), "cpu").resident(), "test", TEXTS


@pytest.fixture(scope="module")
def whole(measured: Measured) -> dict[str, TaskDrift]:
    """Everything at once, as the parts have to give it: three samples per task, in batches of two."""
    family, split, tasks = measured
    return decompose(family.run(), family.merged, passes(family, split, tasks, 3, 2), attribution=True)


def numbers(task: TaskDrift) -> Iterator[Tensor]:
    for layer in task.layers:
        yield from (layer.drift, layer.mismatch, layer.propagation, layer.expert_norm)
    assert task.attribution is not None
    yield from vars(task.attribution).values()
    yield from (task.expert_features, task.model_features)


@pytest.mark.parametrize("budget", [0, 300_000])
def test_parts_give_the_numbers_of_the_whole(
    measured: Measured, whole: dict[str, TaskDrift], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, split, tasks = measured
    beside: list[int] = []
    pull_back = propagation.pull_back

    def counted(layer: propagation.Layer, expert: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        beside.append(len(expert))
        return pull_back(layer, expert, *more)

    monkeypatch.setattr(propagation, "pull_back", counted)
    store = ActivationStore(budget)
    parts = decompose(family.run(store=store), family.merged, passes(family, split, tasks, 3, 2), attribution=True)
    exact = family.compute.dtype is torch.float64
    for task in tasks:
        assert parts[task].indices == whole[task].indices
        for one, other in zip(numbers(parts[task]), numbers(whole[task]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10 if exact else 1e-4, atol=1e-10 if exact else 1e-5)
    assert (store.spilled > 0) == (budget == 0)
    assert max(beside) == 1 if budget == 0 else max(beside) > 1


def test_states_beyond_the_budget_change_no_bit(measured: Measured) -> None:
    family, split, tasks = measured
    free = measure_total_drift(family.run(), family.merged, passes(family, split, tasks))
    store = ActivationStore(0)
    bound = measure_total_drift(family.run(store=store), family.merged, passes(family, split, tasks))
    assert store.spilled > 0
    for task in tasks:
        assert bound[task].model_features.equal(free[task].model_features)
        for one, other in zip(bound[task].layers, free[task].layers, strict=True):
            assert one.drift.equal(other.drift)


def test_parts_hold_every_sample_once_in_order(tiny: Family) -> None:
    experts = passes(tiny, "validation", TASKS)
    whole = {task: torch.cat([batch["pixel_values"] for batch in experts[task].batches]) for task in TASKS}
    assert list(SampleChunks().parts(experts)) == [experts]
    parts = list(SampleChunks(batch=2, together=3).parts(experts))
    for task in TASKS:
        cut = [batch["pixel_values"] for part in parts if task in part for batch in part[task].batches]
        assert torch.equal(torch.cat(cut), whole[task])
        assert not experts[task].batches  # given up for the parts
        assert all(len(one) <= 2 for one in cut)
    sizes = [sum(len(b["pixel_values"]) for one in part.values() for b in one.batches) for part in parts]
    assert max(sizes) <= 3
    assert sum(sizes) == 14


def test_without_a_limit_everything_is_walked_together(tiny: Family) -> None:
    assert SampleChunks.plan(tiny.run(), passes(tiny, "validation", TASKS), 5, attribution=True) == SampleChunks()


def test_a_limit_below_one_block_says_what_is_needed(tiny: Family) -> None:
    with pytest.raises(InputError, match=r"--max-memory: one block of expert and model needs about .* GiB"):
        measuring_store(tiny.adapter, tiny.merged, 10**6)
    store = measuring_store(tiny.adapter, tiny.merged, 2**50)
    assert store.budget is not None
    assert 2**46 < store.budget < 2**48
