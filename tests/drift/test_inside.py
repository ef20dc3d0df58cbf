"""The mismatch of linear maps inside a block, against the library's own modules watched by hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_clip import in_float64
from tiny_text import library, write_text_suite
from torch import Tensor, nn

from featcal.drift.inside import MapMismatch
from featcal.family.opening import Family, open_family
from featcal.formats.weights import Weights
from featcal.session.session import Session
from featcal.suite.schema import load_suite
from featcal.suite.views import EvaluationSamples

ON = EvaluationSamples(6, "validation", 0)


def clip(family: Family, model: Weights) -> nn.Module:
    from transformers import CLIPVisionModelWithProjection

    network = CLIPVisionModelWithProjection(family.adapter.model.config).double().eval()  # type: ignore[attr-defined]
    network.load_state_dict({**model.read(family.adapter.tower), **family.base.read(family.adapter.head)})
    return network


def seen(network: nn.Module, name: str, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output of one module in the library's own forward."""
    found: list[tuple[Tensor, Tensor]] = []
    handle = network.get_submodule(name).register_forward_hook(lambda _, args, out: found.append((args[0], out)))
    with torch.no_grad():
        network(**inputs)
    handle.remove()
    return found[0]


def test_mismatch_is_that_of_the_librarys_own_maps(tiny64: Family) -> None:
    session = Session(tiny64)
    measured = session.measure.maps("merged", ON)
    for task in tiny64.experts:
        expert, merged = clip(tiny64, tiny64.experts[task]), clip(tiny64, tiny64.merged)
        pixels = session.samples(ON)[task].inputs["pixel_values"].double()
        blocks = [block.name for block in tiny64.adapter.blocks()]
        assert [(one.layer, one.map) for one in measured[task]][:6] == [
            ("block 0", f"{part}_proj") for part in ("self_attn.k", "self_attn.v", "self_attn.q", "self_attn.out")
        ] + [("block 0", "mlp.fc1"), ("block 0", "mlp.fc2")]
        assert len(measured[task]) == 6 * len(blocks)
        for one in measured[task]:
            name = f"{blocks[int(one.layer.split()[1])]}.{one.map}"
            given, returned = seen(expert, name, pixel_values=pixels)
            own = merged.get_submodule(name)
            apart = given @ own.weight.mT + own.bias - returned
            torch.testing.assert_close(one.mismatch, apart.flatten(1).norm(dim=1).detach(), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(one.expert_norm, returned.flatten(1).norm(dim=1).detach(), rtol=1e-10, atol=0)


def test_relative_mismatch_is_the_mean_mismatch_over_the_mean_norm() -> None:
    """The mean of the samples' own ratios would be 0.7, as for the drift of a layer."""
    one = MapMismatch("block 0", "mlp.fc1", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0]), None)
    assert one.to_json()["relative_mismatch"] == 0.5


def test_padding_counts_nowhere(tmp_path: Path) -> None:
    """Every sentence alone in the library, cut at its length; keys of cross-attention read the encoder's tokens."""
    family = in_float64(open_family(load_suite(write_text_suite(tmp_path / "s", "t5")), "cpu"))
    session, on = Session(family), EvaluationSamples(3, "test", 0)
    task = next(iter(family.experts))
    measured = {(one.layer, one.map): one for one in session.measure.maps("merged", on)[task]}
    inputs = session.samples(on)[task].inputs
    expert, merged = library(family, family.experts[task]).double(), library(family, family.merged).double()
    names = {
        ("encoder block 0", "layer.0.SelfAttention.q"): "encoder.block.0.layer.0.SelfAttention.q",
        ("decoder block 1", "layer.1.EncDecAttention.k"): "decoder.block.1.layer.1.EncDecAttention.k",
        ("decoder block 1", "layer.2.DenseReluDense.wo"): "decoder.block.1.layer.2.DenseReluDense.wo",
    }
    for key, name in names.items():
        alone = []
        for ids, mask, labels in zip(inputs["input_ids"], inputs["attention_mask"], inputs["labels"], strict=True):
            sample = {"input_ids": ids[mask.bool()][None], "labels": labels[labels >= 0][None]}
            given, returned = seen(expert, name, **sample)
            alone.append(((given @ merged.get_submodule(name).weight.mT - returned).norm(), returned.norm()))
        for found, again in zip(
            (measured[key].mismatch, measured[key].expert_norm), zip(*alone, strict=True), strict=True
        ):
            torch.testing.assert_close(found, torch.stack(again).detach(), rtol=1e-9, atol=1e-12)


def test_shares_are_those_of_the_change_and_sum_to_one(tiny: Family) -> None:
    """Shares sum to one in every block of a calibrated model; the merged one did not change, and has none."""
    session = Session(tiny)
    for plain in ("merged", "ties", "base"):
        assert {one.changed for one in session.measure.maps(plain, ON)["pets"]} == {None}
    name = "calibrated:lam=0.1,rho=1.5,samples=6"
    found, weights = session.measure.maps(name, ON)["pets"], session.fit.weights(name)
    for index, block in enumerate(tiny.adapter.blocks()):
        rows = [one for one in found if one.layer == f"block {index}"]
        squares = []
        for one in rows:
            tensors = [f"{block.name}.{one.map}.{kind}" for kind in ("weight", "bias")]
            before, after = tiny.merged.read(tensors), weights.read(tensors)
            squares.append(sum(float((after[n] - before[n]).double().norm() ** 2) for n in tensors))
        assert [one.changed for one in rows] == pytest.approx([one / sum(squares) for one in squares], rel=1e-5)
        assert sum(one.changed or 0 for one in rows) == pytest.approx(1, abs=1e-12)
    assert sum(float(one.mismatch.mean()) for one in found) < sum(
        float(one.mismatch.mean()) for one in session.measure.maps("merged", ON)["pets"]
    )


def test_shares_of_a_written_repair_are_those_from_its_own_start(tiny: Family, tmp_path: Path) -> None:
    """Its record says from which merge it was calibrated."""
    session, name = Session(tiny), "calibrated:lam=0.1,rho=1.5,samples=6@ties"
    session.fit.calibrate(name).save(tmp_path / "out")
    found, expected = (session.measure.maps(one, ON)["pets"] for one in (str(tmp_path / "out"), name))
    assert [one.changed for one in found] == pytest.approx([one.changed for one in expected], rel=1e-6)
