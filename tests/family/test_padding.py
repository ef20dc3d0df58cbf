"""Texts of unlike lengths stand together by length where their order does not count, and sums over them stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_clip import in_float64
from tiny_text import write_text_suite
from torch import Tensor

from featcal import calibrate_to_folder, load_suite, open_family
from featcal.calibration.calibrate import calibrate_family, config_for, expert_passes
from featcal.family import opening
from featcal.family.opening import Family
from featcal.models.features import final_features
from featcal.suite.calibration_options import RECIPES

COUNT = 40


def unlike_samples(kind: str, seed: int) -> dict[str, Tensor]:
    """Token ids of 2 to 24 tokens, most of them few; the first is the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (COUNT,), generator=generator)
    lengths[:4] = torch.tensor([24, 3, 20, 15])
    mask = (torch.arange(24) < lengths[:, None]).long()
    found = {"ids": torch.randint(5, 32, (COUNT, 24), generator=generator) * mask, "mask": mask}
    return found | ({"labels": torch.randint(3, 5, (COUNT, 1), generator=generator)} if kind == "t5" else {})


@pytest.fixture(scope="module", params=["t5", "llama"])
def unlike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    root: Path = tmp_path_factory.mktemp("unlike") / "suite"
    file = write_text_suite(root, request.param, samples_of=unlike_samples)
    return in_float64(open_family(load_suite(file), device="cpu"))


def test_batches_without_an_order_have_little_padding(unlike: Family) -> None:
    drawn = unlike.samples("left", "calibration", COUNT, 42)
    kept, sorted_ = unlike.expert_pass(drawn, 64), unlike.expert_pass(drawn, 64, in_order=False)
    assert [one["input_ids"].shape for one in kept.batches] == [(COUNT, 24)]
    assert kept.indices == drawn.indices
    assert [len(one["input_ids"]) for one in sorted_.batches] == [16, 16, 8]
    lengths = [one["input_ids"].shape[1] for one in sorted_.batches]
    assert lengths[0] == 24
    assert max(lengths[1:]) <= 6
    rows = [row[row > 0] for one in sorted_.batches for row in one["input_ids"]]
    for index, row in zip(sorted_.indices, rows, strict=True):  # the draw is the whole split, in its order
        assert torch.equal(row, drawn.inputs["input_ids"][index][drawn.inputs["input_ids"][index] > 0])


def test_texts_of_like_lengths_and_texts_beside_pictures_keep_their_order(unlike: Family) -> None:
    drawn = unlike.samples("left", "calibration", COUNT, 42)
    alike = replace(drawn, inputs={**drawn.inputs, "attention_mask": torch.ones_like(drawn.inputs["attention_mask"])})
    beside = replace(drawn, inputs={**drawn.inputs, "pixel_values": torch.zeros(COUNT, 3, 2, 2)})
    for one in (alike, beside):
        assert unlike.expert_pass(one, 64, in_order=False).indices == drawn.indices


@pytest.mark.parametrize("recipe", RECIPES)
def test_calibration_does_not_depend_on_the_order(unlike: Family, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(unlike, recipe=recipe, samples=COUNT, lam=0.05)
    found = calibrate_family(unlike, config)
    monkeypatch.setattr(opening, "WASTED", float("inf"))
    padded = expert_passes(unlike, config)
    assert all(len(one.batches) == 1 for one in padded.values())
    expected = calibrate_family(unlike, config, experts=padded)
    for name in unlike.adapter.tower:
        ours, theirs = (one.weights.read([name])[name].double() for one in (found, expected))
        assert float((ours - theirs).norm()) <= 1e-10 * float(theirs.norm()), name
    assert found.record["tasks"] == expected.record["tasks"]  # the same draw, however it was walked over


def test_raised_drift_is_looked_for_on_texts_of_middling_length(unlike: Family, tmp_path: Path) -> None:
    found = calibrate_to_folder(unlike, config_for(unlike, samples=COUNT, lam=0.05), tmp_path / "out")["final_drift"]
    for task, expert in unlike.experts.items():
        drawn = unlike.samples(task, "calibration", COUNT, 42)
        middle = unlike.expert_pass(drawn, 64, in_order=False).batches[1]
        places = torch.linspace(0, len(middle["input_ids"]) - 1, 8).round().long()
        batch = {name: tensor[places] for name, tensor in middle.items()}
        own, before = (
            final_features(unlike.adapter, one, {}, [batch], unlike.compute) for one in (expert, unlike.merged)
        )
        assert found[task]["samples"] == 8
        assert found[task]["merged"] == pytest.approx(float((before - own).norm() / own.norm()), rel=1e-9)


def test_what_was_drawn_is_told_whatever_the_batches(unlike: Family) -> None:
    """A run that is taken up again with smaller batches, for want of memory, is of the same samples."""
    task = next(iter(unlike.experts))
    drawn, fewer = (unlike.samples(task, "calibration", count, 0) for count in (None, 7))
    passes = [unlike.expert_pass(drawn, size, in_order=order) for size in (4, 64) for order in (True, False)]
    assert len({one.digest for one in passes}) == 1
    assert unlike.expert_pass(fewer, 4).digest != passes[0].digest
