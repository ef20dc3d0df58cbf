"""Proposition 1: the identity, its parts against a plain computation, and what the document says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from tiny_clip import BLOCKS, TASKS
from torch import Tensor

from featcal.drift.decomposition import decompose, measure_total_drift
from featcal.drift.ledger import FeatureDrift, Features, TaskDrift, TaskFeatures
from featcal.drift.task_vectors import measure_weight_changes, task_vector_cosines
from featcal.family.opening import Family, open_family
from featcal.models.lane import ExpertPass
from featcal.session.api import measure_drift
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError


def passes(family: Family, batch_size: int = 5) -> dict[str, ExpertPass]:
    drawn = {task: family.samples(task, "validation", 12, 0) for task in family.experts}
    return {task: family.expert_pass(samples, batch_size) for task, samples in drawn.items()}


def measured(family: Family, batch_size: int = 5) -> dict[str, TaskDrift]:
    return decompose(family.run(), family.merged, passes(family, batch_size))


def states(family: Family, model: str, task: str) -> list[Tensor]:
    """Token states after every layer by the library's own forward with all weights in place."""
    from transformers import CLIPVisionModelWithProjection

    weights = {"merged": family.merged, **family.experts}[model]
    network = CLIPVisionModelWithProjection(family.adapter.model.config).double().eval()  # type: ignore[attr-defined]
    tensors = {**weights.read(family.adapter.tower), **family.base.read(family.adapter.head)}
    network.load_state_dict(tensors, strict=True)
    pixels = family.samples(task, "validation", 12, 0).inputs["pixel_values"].double()
    with torch.no_grad():
        output = network(pixel_values=pixels, output_hidden_states=True)
    return [*output.hidden_states, output.image_embeds]


def test_identity_holds_to_rounding(tiny64: Family) -> None:
    for task in measured(tiny64).values():
        assert task.identity_residual <= 1e-12


def test_features_followed_are_those_taken_apart(tiny: Family) -> None:
    """The walk that leaves mismatch out gives the very same drift, norms and final features."""
    followed = measure_total_drift(tiny.run(), tiny.merged, passes(tiny))
    for name, task in measured(tiny).items():
        for one, whole in zip(followed[name].layers, task.layers, strict=True):
            assert one.layer == whole.layer
            torch.testing.assert_close(one.drift, whole.drift, rtol=0, atol=0)
            torch.testing.assert_close(one.expert_norm, whole.expert_norm, rtol=0, atol=0)
        assert followed[name].expert_features.equal(task.expert_features)
        assert followed[name].model_features.equal(task.model_features)
        assert followed[name].indices == task.indices


def test_drift_is_the_difference_of_two_whole_forwards(tiny64: Family) -> None:
    """Replay equals the model's own forward: layer by layer, head included."""
    for name, task in measured(tiny64).items():
        ours, own = states(tiny64, "merged", name), states(tiny64, name, name)
        assert len(task.layers) == len(own) == BLOCKS + 2
        for layer, h_model, h_expert in zip(task.layers, ours, own, strict=True):
            torch.testing.assert_close(layer.drift, (h_model - h_expert).flatten(1).norm(dim=1), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(layer.expert_norm, h_expert.flatten(1).norm(dim=1), rtol=1e-10, atol=1e-12)


def test_mismatch_and_propagation_against_single_layers_of_the_library(tiny64: Family) -> None:
    """m and p from the library's own blocks, run one at a time on the states of two whole forwards."""
    from transformers import CLIPVisionModelWithProjection

    network = CLIPVisionModelWithProjection(tiny64.adapter.model.config).double().eval()  # type: ignore[attr-defined]
    network.load_state_dict({**tiny64.merged.read(tiny64.adapter.tower), **tiny64.base.read(tiny64.adapter.head)})
    for name, task in measured(tiny64).items():
        ours, own = states(tiny64, "merged", name), states(tiny64, name, name)
        for index, block in enumerate(network.vision_model.encoder.layers):
            with torch.no_grad():
                on_expert = block(own[index], None)
            layer = task.layers[index + 1]
            mismatch = (on_expert - own[index + 1]).flatten(1).norm(dim=1)
            propagation = (ours[index + 1] - on_expert).flatten(1).norm(dim=1)
            torch.testing.assert_close(layer.mismatch, mismatch, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(layer.propagation, propagation, rtol=1e-10, atol=1e-12)


def test_relative_drift_is_the_mean_drift_over_the_mean_norm() -> None:
    """The mean of the samples' own ratios would be 0.7: a sample with small features would count as much as any."""
    layer = FeatureDrift("block 0", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0]))
    assert layer.relative_drift == 0.5


def test_every_task_counts_alike_in_the_macro_cosine() -> None:
    """However many samples it has: one that agrees with its expert, three that are at right angles to theirs."""
    along, across = torch.eye(2)

    def task(name: str, own: Tensor, count: int) -> TaskFeatures:
        return TaskFeatures(name, (), along.expand(count, 2), own.expand(count, 2), tuple(range(count)))

    tasks = {"pets": task("pets", along, 1), "signs": task("signs", across, 3)}
    assert Features("suite", "merged", "test", tasks).macro_cosine == 0.5


def test_rows_of_samples_measure_final_features_of_norm_1() -> None:
    """At right angles they are the root of 2 apart, whatever their own norms."""
    expert, model = torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 5.0], [2.0, 0.0]])
    first, last = (FeatureDrift(name, torch.tensor([at, 4.0]), torch.ones(2)) for name, at in (("a", 1.0), ("b", 6.0)))
    rows = TaskFeatures("pets", (first, last), expert, model, (7, 9)).sample_rows()
    assert rows == [
        {"index": 7, "drift": 6.0, "cosine": 0.0, "distance": pytest.approx(2**0.5)},
        {"index": 9, "drift": 4.0, "cosine": 1.0, "distance": 0.0},
    ]


def test_first_layer_has_no_propagation(tiny: Family) -> None:
    for task in measured(tiny).values():
        assert torch.equal(task.layers[0].propagation, torch.zeros(12, dtype=torch.float64))
        assert torch.equal(task.layers[0].drift, task.layers[0].mismatch)


def test_an_expert_does_not_drift_from_itself(tiny: Family) -> None:
    own = replace(tiny, merged=tiny.experts["pets"])
    task = measured(own)["pets"]
    assert all(float(layer.drift.max()) == 0.0 for layer in task.layers)
    torch.testing.assert_close(task.cosine, torch.ones(12))


def test_a_block_that_is_the_experts_has_no_mismatch(tiny: Family) -> None:
    """Only block 1 differs: mismatch appears there alone, and everything after it is propagation."""
    from featcal.formats.weights import Overlay

    expert = tiny.experts["pets"]
    block = tiny.adapter.blocks()[1]
    other = tiny.experts["signs"].read(block.names)
    mixed = replace(tiny, merged=Overlay("mixed", expert, other))
    layers = {layer.layer: layer for layer in measured(mixed)["pets"].layers}
    assert float(layers["block 0"].drift.max()) == 0.0
    assert float(layers["block 1"].mismatch.min()) > 0.01
    assert float(layers["block 1"].propagation.max()) == 0.0
    for name in ("block 2", "head"):
        assert float(layers[name].mismatch.max()) == 0.0
        assert float(layers[name].propagation.min()) > 0.01


def test_triangle_inequality_and_alignment(tiny64: Family) -> None:
    for task in measured(tiny64).values():
        for layer in task.layers:
            assert bool((layer.drift <= layer.mismatch + layer.propagation + 1e-12).all())
            expected = layer.mismatch**2 + layer.propagation**2
            expected += 2 * layer.alignment * layer.mismatch * layer.propagation
            torch.testing.assert_close(layer.drift**2, expected, rtol=1e-9, atol=1e-12)


def test_batch_split_changes_nothing(tiny64: Family) -> None:
    small, large = measured(tiny64, 5), measured(tiny64, 12)
    for name in TASKS:
        for one, other in zip(small[name].layers, large[name].layers, strict=True):
            torch.testing.assert_close(one.drift, other.drift, rtol=1e-10, atol=1e-12)


def test_document_and_frame(tiny: Family) -> None:
    ledger = measure_drift(tiny, samples=6)
    document = ledger.to_json()
    assert (document["suite"], document["model"], document["split"]) == ("tiny", "merged", "validation")
    assert list(document["tasks"]) == list(TASKS)
    entry = document["tasks"]["pets"]
    assert entry["samples"] == 6
    names = ["embeddings", *(f"block {i}" for i in range(BLOCKS)), "head"]
    assert [layer["layer"] for layer in entry["layers"]] == names
    contract = {"layer", "drift", "relative_drift", "mismatch", "propagation", "share"}
    assert all(contract <= set(layer) for layer in entry["layers"])
    assert entry["layers"][0]["share"] is None
    assert entry["identity_residual"] <= 1e-5
    assert -1 <= entry["final"]["cosine"] <= 1
    frame = ledger.to_frame()
    assert len(frame) == len(TASKS) * (BLOCKS + 2)
    assert frame["drift"].iloc[0] == pytest.approx(entry["layers"][0]["drift"])


def test_unknown_model_is_refused(tiny: Family) -> None:
    with pytest.raises(InputError, match=r"model 'nowhere'.*no folder"):
        measure_drift(tiny, "nowhere")


def test_task_vector_cosines(tiny: Family) -> None:
    assert task_vector_cosines(tiny, tiny.experts["pets"])["pets"] == pytest.approx(1.0, abs=1e-12)
    assert task_vector_cosines(tiny, tiny.base) == {"pets": 0.0, "signs": 0.0}
    base = tiny.base.read(tiny.adapter.tower)
    flat = {
        name: torch.cat([(w.read([n])[n] - base[n]).flatten() for n in tiny.adapter.tower]).double()
        for name, w in {"merged": tiny.merged, "signs": tiny.experts["signs"]}.items()
    }
    expected = torch.nn.functional.cosine_similarity(flat["merged"], flat["signs"], dim=0)
    assert task_vector_cosines(tiny, tiny.merged)["signs"] == pytest.approx(float(expected), abs=1e-6)


def test_changes_of_weights_are_those_of_the_tensors_of_every_layer(tiny: Family) -> None:
    """Norms and cosine by layer, of tensors found by their names alone; together they are those of the whole."""
    base, merged, expert = (w.read(tiny.adapter.tower) for w in (tiny.base, tiny.merged, tiny.experts["signs"]))
    found = measure_weight_changes(tiny, tiny.merged)["signs"]
    assert [one.layer for one in found] == ["embeddings", *(f"block {i}" for i in range(BLOCKS)), "head"]
    places = {"embeddings": r"embeddings\.|pre_layrnorm", "head": "post_layernorm"}
    total = 0
    for one in found:
        pattern = places.get(one.layer, rf"layers\.{one.layer.removeprefix('block ')}\.")
        names = [name for name in tiny.adapter.tower if re.search(pattern, name)]
        total += len(names)
        a, m, e = (torch.cat([tensors[n].flatten().double() for n in names]) for tensors in (base, merged, expert))
        row = one.to_json()
        wanted = [float(v.norm()) for v in (a, m - a, e - a)]
        assert [row[name] for name in ("base_norm", "model_change", "expert_change")] == pytest.approx(wanted, rel=1e-9)
        assert row["cosine"] == pytest.approx(float(torch.cosine_similarity(m - a, e - a, dim=0)), abs=1e-9)
    assert total == len(tiny.adapter.tower)


@pytest.mark.parametrize("suite", ["t5-mini", "lm-mini"])
def test_every_tensor_is_in_one_layer(suite: str) -> None:
    """The squares of all layers add up to that of all tensors, and layers are those of drift, in its order."""
    family = open_family(load_suite(suite))
    task = next(iter(family.experts))
    found = measure_weight_changes(family, family.merged)[task]
    assert [one.layer for one in found] == family.adapter.layers()
    expert, base = family.experts[task].read(family.adapter.tower), family.base.read(family.adapter.tower)
    for total, tensors in (
        (sum(one.base_square for one in found), base.values()),
        (sum(one.expert_square for one in found), [expert[name].double() - base[name] for name in base]),
    ):
        assert total == pytest.approx(sum(float(one.double().square().sum()) for one in tensors), rel=1e-9)
