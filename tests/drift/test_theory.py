"""Propositions 2 to 7 and their corollaries, measured: identities to rounding, bounds never violated."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_clip import BLOCKS, TASKS
from torch import Tensor

from featcal.drift.decomposition import decompose
from featcal.drift.growth import certified_run, layer_growth
from featcal.drift.ledger import LayerDrift, TaskDrift
from featcal.drift.output import OutputDrift, gauss_legendre, mean_loss_gradient, output_drift
from featcal.drift.propagation import NODES, Layer, pull_back
from featcal.drift.streams import cross
from featcal.evaluation.heads import CosineHead
from featcal.family.opening import Family
from featcal.formats.weights import Overlay
from featcal.models.adapter import walking
from featcal.models.lane import ExpertPass, WalkCache
from featcal.session.api import measure_drift

SEEDS = st.integers(0, 2**31)


def attributed(family: Family, batch_size: int = 5) -> dict[str, TaskDrift]:
    passes = {task: family.expert_pass(family.samples(task, "validation", 8, 0), batch_size) for task in TASKS}
    return decompose(family.run(), family.merged, passes, attribution=True)


def push(layer: Layer, h: Tensor, e: Tensor, c: Tensor, nodes: int = NODES) -> Tensor:
    """A_k c by Jacobian-vector products, written down once more: Eq. (19) with the secant correction."""
    averaged = [
        weight * torch.stack([torch.func.jvp(layer, (h + t * e,), (one,))[1] for one in (c, e)])
        for t, weight in gauss_legendre(nodes)
    ]
    moved, drift = torch.stack(averaged).sum(0)
    share = (c * e).flatten(1).sum(1) / e.square().flatten(1).sum(1)
    return moved + share.reshape(-1, *[1] * (moved.ndim - 1)) * (layer(h + e) - layer(h) - drift)


def inner(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).flatten(1).sum(1)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def smooth_layer(seed: int, width: int = 6) -> tuple[Tensor, Tensor]:
    return random(seed, width, width), random(seed + 1, width, width)


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_what_is_pulled_back_is_the_transpose_of_what_is_pushed_forward(nodes: int) -> None:
    first, second = smooth_layer(0)

    def layer(h: Tensor) -> Tensor:
        return h + torch.tanh(h @ first) @ second

    h, e, c, v = (random(2 + i, 3, 4, 6) for i in range(4))
    p = layer(h + e) - layer(h)
    pulled, missed = pull_back(layer, h, e, p, v, nodes)
    torch.testing.assert_close(inner(pulled, c), inner(push(layer, h, e, c, nodes), v), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inner(pulled, e), inner(p, v), rtol=1e-12, atol=1e-12)  # for any number of nodes
    assert bool((missed > 0).all())


def test_quadrature_converges_to_the_path_average() -> None:
    first, second = smooth_layer(1)

    def layer(h: Tensor) -> Tensor:
        return torch.tanh(h @ first) @ second

    h, e, v = random(5, 3, 4, 6), 0.5 * random(6, 3, 4, 6), random(7, 3, 4, 6)
    p = layer(h + e) - layer(h)
    misses = [float(pull_back(layer, h, e, p, v, nodes)[1].max()) for nodes in (1, 2, 4, 8, 16)]
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] < 1e-6


def test_linear_layers_need_no_quadrature() -> None:
    matrix, _ = smooth_layer(2)
    h, e, v = random(7, 3, 4, 6), random(8, 3, 4, 6), random(9, 3, 4, 6)
    pulled, missed = pull_back(lambda x: x @ matrix, h, e, e @ matrix, v, 1)
    torch.testing.assert_close(pulled, v @ matrix.mT, rtol=1e-10, atol=1e-10)
    assert float(missed.max()) < 1e-13


def test_drift_that_vanishes_or_has_no_weight_is_booked_to_nobody() -> None:
    first, _ = smooth_layer(3)
    h, e = random(7, 2, 4, 6), random(8, 2, 4, 6) * torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None, None]
    p = torch.tanh((h + e) @ first) - torch.tanh(h @ first)
    pulled, missed = pull_back(lambda x: torch.tanh(x @ first), h, e, p, 0 * e)
    assert not bool(pulled.any())
    assert missed.tolist() == [0, 0]


@pytest.mark.parametrize("sublayers", [False, True])
def test_contributions_are_mismatches_pushed_through_all_later_layers(tiny64: Family, sublayers: bool) -> None:
    """Forward, one layer after the other, as Prop. 2 is written."""
    task, family = TASKS[0], tiny64

    def experts() -> dict[str, ExpertPass]:
        return {task: family.expert_pass(family.samples(task, "validation", 4, 0), 4)}

    found = decompose(family.run(), family.merged, experts(), attribution=True, sublayers=sublayers)[task]
    parts: list[Tensor] = []
    with walking(family.adapter):
        for one in cross(family.run(), family.merged, experts(), sublayers):
            (expert, model), on_expert = one.after, one.run_on_expert()
            if one.run is not None and one.before is not None:
                h, e = one.before[0], one.before[1] - one.before[0]
                parts = [push(one.run, h, e, c) for c in parts]
                parts.append(on_expert - expert)
            else:
                parts.append(model - expert)
    assert found.attribution is not None
    booked = torch.stack([inner(c, model - expert) for c in parts])
    torch.testing.assert_close(found.attribution.inner, booked, rtol=1e-9, atol=1e-12)


def test_contributions_of_a_real_model_add_up(tiny64: Family) -> None:
    for task in attributed(tiny64).values():
        booked = task.attribution
        assert booked is not None
        e = (task.model_features - task.expert_features).double()
        torch.testing.assert_close(booked.inner.sum(0), e.square().sum(1), rtol=1e-10, atol=1e-12)
        assert float(booked.shares.sum()) == pytest.approx(1.0, abs=1e-8)
        assert booked.inner.shape == (BLOCKS + 2, 8)
        assert booked.quality.shape == (BLOCKS + 1, 8)
        assert 0 < float(booked.quality.max()) < 0.2


def test_attribution_does_not_depend_on_batches(tiny64: Family) -> None:
    for one, other in zip(attributed(tiny64, 3).values(), attributed(tiny64, 8).values(), strict=True):
        assert one.attribution is not None
        assert other.attribution is not None
        torch.testing.assert_close(one.attribution.inner, other.attribution.inner, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("faulty", range(BLOCKS))
def test_an_injected_fault_is_found(tiny: Family, faulty: int) -> None:
    """Noise in one block of an otherwise nearly perfect model: the ledger books the drift to that block."""
    generator = torch.Generator().manual_seed(faulty)
    expert = tiny.experts["pets"]
    names = tiny.adapter.tower
    block = tiny.adapter.blocks()[faulty]
    noisy = {}
    for name, tensor in expert.read(names).items():
        noise = torch.randn(tensor.shape, generator=generator)
        size = 0.2 if name in block.names else 0.002
        noisy[name] = tensor + size * noise * tensor.norm() / noise.norm()
    broken = replace(tiny, merged=Overlay("broken", expert, noisy))
    task = attributed(broken)["pets"]
    assert task.attribution is not None
    assert task.layers[int(task.attribution.shares.argmax())].layer == f"block {faulty}"
    assert float(task.attribution.shares.max()) > 0.8


def test_residual_identity(tiny64: Family) -> None:
    for task in attributed(tiny64).values():
        with_skip = [layer for layer in task.layers if layer.skip_residual is not None]
        assert [layer.layer for layer in with_skip] == [f"block {i}" for i in range(BLOCKS)]
        for layer in with_skip:
            assert layer.skip_residual is not None
            assert float(layer.skip_residual.max()) <= 1e-12


def test_growth_bounds_hold_on_models(tiny64: Family) -> None:
    for task in attributed(tiny64).values():
        grown = task.growth()
        for layer in grown.values():
            assert bool((layer.ratio >= layer.bound - 1e-9).all())
            assert bool((layer.ratio[layer.is_certified] > 1).all())
        assert any(bool(layer.is_certified.any()) for layer in grown.values())  # or the line above says nothing


def test_corollary_1_on_chains_that_grow() -> None:
    """Layers that stretch by more than they add: the certified product is below the growth over the run."""
    e = [random(0, 30, 5)]
    layers = []
    for step in range(4):
        stretch = 1.5 if step != 1 else 0.9  # the second layer shrinks, so every run starts after it
        p, m = stretch * e[-1], 0.1 * random(step + 1, 30, 5)
        m = m * (e[-1].norm(dim=1) / m.norm(dim=1) * 0.2)[:, None]
        e.append(p + m)
        layers.append(layer_growth(*(v.norm(dim=1) for v in (e[-2], e[-1], m, p))))
    assert [bool(layer.is_certified.all()) for layer in layers] == [True, False, True, True]
    product, whole = certified_run(layers), e[4].norm(dim=1) / e[2].norm(dim=1)
    torch.testing.assert_close(product, torch.full_like(product, 1.3**2))
    assert bool((product <= whole * (1 + 1e-9)).all())


def layer_of(name: str, drift: float, response: Tensor | None = None) -> LayerDrift:
    """A layer of one sample, whose drift is all propagation."""
    norm, nothing = torch.tensor([drift], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    return LayerDrift(name, norm, norm, nothing, norm, nothing, nothing, response, None)


def test_the_document_certifies_the_run_that_ends_at_the_last_block() -> None:
    """Block 0 halves the drift and block 1 trebles it: the run that ends at block 0 would certify nothing."""
    skip, features = torch.zeros(1, dtype=torch.float64), torch.ones(1, 2)
    blocks = layer_of("block 0", 1, skip), layer_of("block 1", 3, skip)
    layers = layer_of("embeddings", 2), *blocks, layer_of("head", 3)
    assert TaskDrift("pets", layers, features, features, (0,)).to_json()["certified_growth"] == 3.0


def test_the_documents_tightness_is_the_mean_of_the_samples_own() -> None:
    """Of scores that moved by 1 and 4 where 2 and 5 are the bounds; the ratio of the means would be 0.71."""
    still, ones = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    output = OutputDrift(
        expert_scores=still, model_scores=torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)),
        feature_drift=torch.tensor([2.0, 5.0], dtype=torch.float64), lipschitz=ones, head_mismatch=still[0],
        loss_change=ones, gradient_norm=ones, labels=torch.tensor([0, 1]),
    )  # fmt: skip
    task = TaskDrift("pets", (layer_of("head", 1),), torch.ones(2, 2), torch.ones(2, 2), (0, 1), output=output)
    assert task.to_json()["output"]["tightness"] == pytest.approx(0.65, rel=1e-12)


@given(seed=SEEDS, size=st.floats(0.01, 10))
@settings(max_examples=50)
def test_growth_bound_on_random_vectors(seed: int, size: float) -> None:
    before, p, m = random(seed, 20, 5), random(seed + 1, 20, 5) * 2, random(seed + 2, 20, 5) * size
    layer = layer_growth(before.norm(dim=1), (m + p).norm(dim=1), m.norm(dim=1), p.norm(dim=1))
    assert bool((layer.ratio >= layer.bound - 1e-9).all())
    assert bool((layer.ratio[layer.is_certified] > 1).all())


def test_a_layer_without_incoming_drift_is_null_in_the_document(tiny: Family) -> None:
    """Embeddings as the expert's: block 0 has nothing to stretch, and JSON has no NaN."""
    import json

    expert = tiny.experts["pets"]
    same = {name: t for name, t in expert.read(tiny.adapter.tower).items() if "encoder" not in name}
    mixed = replace(tiny, merged=Overlay("mixed", tiny.merged, same))
    document = attributed(mixed)["pets"].to_json()
    first = document["layers"][1]
    assert (first["layer"], first["gamma"], first["response"]) == ("block 0", None, None)
    assert document["layers"][2]["gamma"] is not None
    json.dumps(document, allow_nan=False)


def test_no_incoming_drift_certifies_nothing() -> None:
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    layer = layer_growth(zero, one, one, zero)
    assert bool(layer.gamma.isnan().all())
    assert not bool(layer.is_certified.any())
    assert certified_run([layer]).tolist() == [1.0, 1.0, 1.0]


@given(seed=SEEDS, spread=st.floats(0.01, 5), classes=st.integers(2, 8), scale=st.floats(1, 100))
@settings(max_examples=60)
def test_output_bounds_are_never_violated(seed: int, spread: float, classes: int, scale: float) -> None:
    expert = random(seed, 30, 6)
    model = expert + spread * random(seed + 1, 30, 6)
    prompts = torch.nn.functional.normalize(random(seed + 2, classes, 6), dim=1)
    labels = torch.randint(0, classes, (30,), generator=torch.Generator().manual_seed(seed))
    head = CosineHead(prompts, scale, ())
    found = output_drift(expert, model, head, head, labels)
    assert bool((found.score_drift <= found.bound * (1 + 1e-9)).all())
    assert bool((found.tightness <= 1 + 1e-9).all())
    change = torch.nn.functional.cross_entropy(found.model_scores, labels, reduction="none")
    change = change - torch.nn.functional.cross_entropy(found.expert_scores, labels, reduction="none")
    assert bool((change.abs() <= sqrt(2) * found.bound * (1 + 1e-9)).all())
    assert bool((found.loss_change.abs() <= found.gradient_norm * found.score_drift * (1 + 1e-9) + 1e-12).all())
    assert bool(found.agrees[found.is_certified].all())
    assert float(found.gradient_norm.max()) <= sqrt(2) + 1e-9


def test_loss_change_is_the_path_integral() -> None:
    expert, prompts = random(0, 40, 6), torch.nn.functional.normalize(random(1, 5, 6), dim=1)
    model = expert + 0.7 * random(2, 40, 6)
    labels = torch.arange(40) % 5
    head = CosineHead(prompts, 30.0, ())
    found = output_drift(expert, model, head, head, labels)
    change = torch.nn.functional.cross_entropy(found.model_scores, labels, reduction="none")
    change = change - torch.nn.functional.cross_entropy(found.expert_scores, labels, reduction="none")
    torch.testing.assert_close(found.loss_change, change, rtol=0, atol=1e-4)


def test_softmax_bridge() -> None:
    """Probabilities move within the simplex, and a common shift of all scores changes neither them nor the loss."""
    before, labels = random(3, 10, 4), torch.arange(10) % 4
    shifted = before + 5.0
    assert float((torch.softmax(shifted, 1) - torch.softmax(before, 1)).abs().max()) < 1e-12
    gradient = mean_loss_gradient(before, shifted, labels, 8)
    torch.testing.assert_close(gradient.sum(1), torch.zeros(10, dtype=torch.float64), rtol=0, atol=1e-12)


def test_gauss_legendre_is_exact_for_polynomials() -> None:
    for degree in range(8):
        integral = sum(weight * t**degree for t, weight in gauss_legendre(4))
        assert integral == pytest.approx(1 / (degree + 1), abs=1e-14)


def test_margins_certify_no_wrong_decision_on_a_model(tiny: Family) -> None:
    ledger = measure_drift(tiny, split="test", samples=12, output=True)
    for task in ledger.tasks.values():
        assert task.output is not None
        assert bool(task.output.agrees[task.output.is_certified].all())
        entry = task.to_json()["output"]
        assert 0 <= entry["certified"] <= entry["agreement"] <= 1
        assert 0 < entry["tightness"] <= 1


def test_sublayers_are_the_block_in_two_steps(tiny64: Family) -> None:
    """Attention and MLP after each other give the block: same drift at its end, same final drift, same identities."""
    passes = {task: tiny64.expert_pass(tiny64.samples(task, "validation", 8, 0), 5, WalkCache(2**24)) for task in TASKS}

    def walk(sublayers: bool) -> dict[str, TaskDrift]:
        return decompose(tiny64.run(), tiny64.merged, passes, sublayers=sublayers, attribution=True)

    whole, halves = walk(False), walk(True)
    for name in TASKS:
        fine = {layer.layer: layer for layer in halves[name].layers}
        assert len(fine) == 2 * BLOCKS + 2
        for index in range(BLOCKS):
            end = whole[name].layers[1 + index]
            torch.testing.assert_close(fine[f"block {index} mlp"].drift, end.drift, rtol=1e-9, atol=1e-12)
        for layer in halves[name].layers:
            assert float(layer.residual.max()) <= 1e-12
            assert layer.skip_residual is None or float(layer.skip_residual.max()) <= 1e-12
        booked = halves[name].attribution
        assert booked is not None
        assert float(booked.shares.sum()) == pytest.approx(1.0, abs=1e-8)


def test_class_token_norms_are_smaller(tiny: Family) -> None:
    every, one = (measure_drift(tiny, samples=6, tokens=tokens).tasks["pets"].layers for tokens in ("all", "class"))
    for whole, part in zip(every[:-1], one[:-1], strict=True):
        assert bool((part.drift < whole.drift).all())
    torch.testing.assert_close(every[-1].drift, one[-1].drift)
