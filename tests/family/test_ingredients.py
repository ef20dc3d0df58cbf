"""What a merged model is made of by its weights, against least squares in numpy and merges whose makeup is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mergekit_methods import model_stock, slerp
from tiny_text import TASKS, write_text_suite
from torch import Tensor

from featcal.family.ingredients import FAR, Makeup, take_contents
from featcal.family.opening import Family, open_family
from featcal.formats.weights import Overlay, UnknownBase, Weights
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import load_suite


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_family(load_suite(write_text_suite(tmp_path_factory.mktemp("llama"), "llama", 0.1)), "cpu")


def vectors(family: Family, model: Weights, names: list[str]) -> np.ndarray:
    base, own = family.base.read(names), model.read(names)
    return np.concatenate([(own[name].double() - base[name].double()).flatten().numpy() for name in names])


def merge(family: Family, **options: object) -> Weights:
    return family.merge(MergeRecipe(method="task-arithmetic", scale=1.0, **options))


def test_coefficients_are_those_of_the_merge_in_every_layer(family: Family) -> None:
    weights = {"left": 0.7, "right": -0.2}
    found = take_contents(family, merge(family, weights=weights))
    assert [one.layer for one in found.layers] == ["embeddings", "block 0", "block 1", "block 2", "head"]
    for layer in found.layers:
        assert layer.coefficients == pytest.approx(weights, abs=1e-5)
        assert layer.explained == pytest.approx(layer.moved, rel=1e-6)
    assert found.rest < 1e-3
    assert not found.find_absent() + found.zero_layers + found.zero_tensors
    assert not found.far_layers


def test_a_model_that_is_no_merge_has_the_coefficients_of_least_squares(family: Family) -> None:
    generator = torch.Generator().manual_seed(0)
    names = list(family.adapter.tower)
    noise = {n: t + 0.01 * torch.randn(t.shape, generator=generator) for n, t in merge(family).read(names).items()}
    model = Overlay("noisy", family.base, noise)
    found = take_contents(family, model)
    block = list(family.adapter.blocks()[1].names)
    columns = np.stack([vectors(family, family.experts[task], block) for task in TASKS], axis=1)
    own = vectors(family, model, block)
    expected, *_ = np.linalg.lstsq(columns, own, rcond=None)
    layer = found.layers[2]
    assert [layer.coefficients[task] for task in TASKS] == pytest.approx(expected, rel=1e-8)
    assert layer.explained == pytest.approx(np.linalg.norm(columns @ expected), rel=1e-8)
    assert layer.summed == pytest.approx(np.linalg.norm(columns.sum(1)), rel=1e-8)
    assert (layer.moved, layer.explained < layer.moved) == (pytest.approx(np.linalg.norm(own), rel=1e-8), True)


def test_what_is_planted_in_one_layer_is_found_there_and_changes_nothing_else(family: Family) -> None:
    model = merge(family, weights={"left": 0.5, "right": 0.25})
    names = list(family.adapter.blocks()[1].names)
    kept = model.read(names)
    zeros = take_contents(family, Overlay("zeros", model, {n: torch.zeros_like(t) for n, t in kept.items()}))
    assert (zeros.zero_layers, zeros.zero_tensors, zeros.far_layers) == (("block 1",), (), {})
    base = family.base.read(names)
    far = take_contents(family, Overlay("far", model, {n: base[n] + 20 * (t - base[n]) for n, t in kept.items()}))
    assert list(far.far_layers) == ["block 1"]
    # Layers of weights 0.5 and 0.25 differ a little in the length of their way, as the noise of experts does.
    assert far.far_layers["block 1"] == pytest.approx(20, rel=0.1)
    assert far.far_layers["block 1"] > FAR
    one = take_contents(family, Overlay("one", model, {names[0]: torch.zeros_like(kept[names[0]])}))
    assert (one.zero_layers, one.zero_tensors) == ((), (names[0],))
    for found in (zeros, far, one):
        assert found.coefficients == pytest.approx({"left": 0.5, "right": 0.25}, abs=1e-5)


def test_experts_that_are_missing_and_experts_that_are_alike(family: Family) -> None:
    left = take_contents(family, family.experts["left"])
    assert (left.coefficients, left.find_absent()) == (pytest.approx({"left": 1.0, "right": 0.0}, abs=1e-6), ("right",))
    base = take_contents(family, family.base)
    assert (base.is_base, base.find_absent(), base.rest) == (True, TASKS, 0.0)
    twins = replace(family, experts=dict.fromkeys(TASKS, family.experts["left"]))
    halves = take_contents(twins, family.experts["left"])
    assert halves.coefficients == pytest.approx(dict.fromkeys(TASKS, 0.5), abs=1e-6)
    assert isinstance(halves, Makeup)
    assert halves.scale == pytest.approx(0.5)
    # Nearly alike: their difference must not be made to carry what rounding puts into its direction.
    names, generator = list(family.adapter.tower), torch.Generator().manual_seed(0)
    read = family.experts["left"].read(names)
    near, noisy = (
        Overlay(name, family.base, {n: t + size * torch.randn(t.shape, generator=generator) for n, t in read.items()})
        for name, size in (("near", 1e-5), ("noisy", 1e-4))
    )
    close = replace(family, experts={"left": family.experts["left"], "right": near})
    found = take_contents(close, noisy)
    assert found.coefficients == pytest.approx(dict.fromkeys(TASKS, 0.5), abs=0.01)
    assert not found.find_absent()


@pytest.mark.parametrize("t", [0.3, 0.05, 0.001])
def test_a_short_way_to_an_expert_is_a_way(family: Family, t: float) -> None:
    """As slerp and nearswap go it with a small t, also where it starts at an expert."""
    near = take_contents(family, merge(family, weights={"left": t, "right": 0.0}))
    assert (near.coefficients["left"], near.find_absent()) == (pytest.approx(t, rel=1e-3), ("right",))
    both = take_contents(family, merge(family, weights={"left": t, "right": t}))
    assert both.find_absent() == ()
    unknown = replace(family, base=UnknownBase(family.base))
    start = take_contents(unknown, merge(family, weights={"left": 1 - t, "right": t}))
    assert (start.coefficients["right"], start.find_absent()) == (pytest.approx(t, rel=1e-2), ())


def test_of_a_model_that_went_elsewhere_nothing_is_an_experts(family: Family) -> None:
    generator = torch.Generator().manual_seed(0)
    base = family.base.read(family.adapter.tower)
    noise = {n: b + 0.01 * torch.randn(b.shape, generator=generator) for n, b in base.items()}
    assert take_contents(family, Overlay("other", family.base, noise)).find_absent() == TASKS


def test_pieces_do_not_change_the_numbers(family: Family, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = merge(family)
    whole = take_contents(family, model)
    monkeypatch.setattr("featcal.family.ingredients.PIECE", 7)
    for a, b in zip(whole.layers, take_contents(family, model).layers, strict=True):
        assert a.coefficients == pytest.approx(b.coefficients, rel=1e-9)
        assert (a.moved, a.base) == (pytest.approx(b.moved, rel=1e-12), pytest.approx(b.base, rel=1e-12))


def by_tensor(family: Family, method: Callable[[Tensor, list[Tensor]], Tensor]) -> Weights:
    """A merge of float64 tensors, one by one, by a method of mergekit."""
    experts = [family.experts[task].read(family.adapter.tower) for task in TASKS]
    base = family.base.read(family.adapter.tower)
    merged = {n: method(t.double(), [one[n].double() for one in experts]) for n, t in base.items()}
    return Overlay("merged", family.base, merged)


def test_model_stock_goes_as_far_as_its_rule_says(family: Family) -> None:
    """Random task vectors are nearly at right angles, and then nothing of the experts is left."""
    found = take_contents(family, by_tensor(family, model_stock))
    assert abs(found.stock) < 0.1
    assert found.is_as_stocked
    for layer in found.layers:
        # By least squares on all of a layer's tensors, whose shares differ.
        assert sum(layer.coefficients.values()) == pytest.approx(layer.stock, abs=0.02)
    assert not take_contents(family, merge(family)).is_as_stocked
    twin = replace(family, experts=dict.fromkeys(TASKS, family.experts["left"]))
    alike = take_contents(twin, by_tensor(twin, model_stock))
    assert alike.stock == pytest.approx(1, abs=1e-6)  # at no angle at all, the mean
    assert not alike.is_as_stocked


def test_layers_are_held_against_what_model_stock_gives_them(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are alike in one block alone: there it goes all the way, and elsewhere hardly at all."""
    names = list(family.adapter.blocks()[1].names)
    right = Overlay("right", family.experts["right"], family.experts["left"].read(names))
    near = replace(family, experts={"left": family.experts["left"], "right": right})
    model = by_tensor(near, model_stock)
    monkeypatch.setattr("featcal.family.ingredients.FAR", 2.5)
    found = take_contents(near, model)
    assert list(found.far_layers) == ["block 1"]
    assert found.far_from_stock == {}
    for layer in found.layers:
        assert layer.stocked == pytest.approx(layer.moved, rel=1e-6)
    names = list(family.adapter.blocks()[2].names)
    base, own = family.base.read(names), model.read(names)
    far = take_contents(near, Overlay("far", model, {n: base[n] + 20 * (t - base[n]) for n, t in own.items()}))
    assert far.far_from_stock == {"block 2": pytest.approx(20, rel=0.05)}


def test_an_expert_of_one_layer_is_in_that_layer(family: Family) -> None:
    names = list(family.adapter.blocks()[2].names)
    model = Overlay("one", family.experts["left"], family.experts["right"].read(names))
    found = take_contents(family, model)
    assert found.find_absent() == ("right",)
    assert (found.is_in_a_layer("right"), found.is_in_a_layer("left")) == (True, True)
    assert not take_contents(family, family.experts["left"]).is_in_a_layer("right")


def test_rounding_is_that_of_the_dtype_in_which_it_was_merged(family: Family) -> None:
    names = list(family.adapter.tower)
    exact = merge(family, weights={"left": 0.5, "right": 0.25}).read(names)
    rounded = Overlay("rounded", family.base, {n: t.bfloat16().to(t.dtype) for n, t in exact.items()})
    found = take_contents(family, rounded, "bfloat16")
    assert found.rest == pytest.approx(found.rounding, rel=0.5)
    assert found.computed == "bfloat16"
    plain = take_contents(family, rounded)
    assert plain.rest > 10 * plain.rounding
    for same in ("", "float64", "float32", "auto"):
        assert take_contents(family, rounded, same) == plain


def test_without_a_base_coefficients_are_shares_of_whole_models(family: Family) -> None:
    unknown = replace(family, base=UnknownBase(family.base))
    found = take_contents(unknown, merge(family, weights={"left": 0.7, "right": 0.3}))
    assert found.coefficients == pytest.approx({"left": 0.7, "right": 0.3}, abs=1e-5)
    assert (found.start, found.rest < 1e-3) == ("the expert 'left'", True)
    other = replace(unknown, experts={task: family.experts[task] for task in reversed(TASKS)})
    model = by_tensor(family, lambda _, experts: slerp(*experts, 0.4))
    shares = [take_contents(one, model) for one in (unknown, other)]
    assert shares[0].coefficients == pytest.approx(shares[1].coefficients, abs=1e-9)
    assert shares[0].coefficients == pytest.approx({"left": 0.6, "right": 0.4}, abs=0.02)
    assert take_contents(unknown, family.experts["left"]).is_base
    spliced = Overlay("spliced", family.experts["left"], family.experts["right"].read(family.adapter.blocks()[2].names))
    assert take_contents(unknown, spliced).layers_by_owner == {"left": 4, "right": 1}
