"""Features side by side: numbers of every layer, and the map that they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from tiny_clip import BLOCKS, TASKS
from torch import Tensor

from featcal.calibration.conditioning import measure_conditioning
from featcal.cli import featcal_command
from featcal.family.opening import Family
from featcal.session import projection
from featcal.session.feature_maps import FeatureMaps, clouds_json
from featcal.session.measurements import Measurements
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.methods import EXPERT
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError, InputError, NumericalError

ON = EvaluationSamples(6, "validation", 3)
NAMES = ("merged", "base")


def clouds(family: Family) -> FeatureMaps:
    return FeatureMaps.from_names(Session(family), NAMES, ON)


def run(*words: object) -> Result:
    return CliRunner().invoke(featcal_command, [*map(str, words)])


def test_cosines_and_distances_are_those_of_the_features(tiny: Family) -> None:
    own = clouds(tiny)
    found = dict(iter(own.to_frame().groupby(["task", "layer", "model"], sort=False)))
    layers = [*(f"block {i}" for i in range(BLOCKS)), "head"]
    keys = [(task, layer, model) for task in TASKS for layer in layers for model in (EXPERT, *NAMES)]
    assert list(found) == keys
    for task, layer, model in keys:
        rows = found[task, layer, model]
        expert, one = (own.session.measure.layer_features(name, task, ON)[layer].double() for name in (EXPERT, model))
        cosine = (expert * one).sum(1) / (expert.norm(dim=1) * one.norm(dim=1))
        assert list(rows["cosine"]) == pytest.approx(cosine.tolist(), abs=1e-6)
        distance = (2 - 2 * cosine).clamp_min(0).sqrt()  # of unit vectors
        assert list(rows["distance"]) == pytest.approx(distance.tolist(), abs=1e-3)
        if layer == "head" and model != EXPERT:
            assert list(rows["cosine"]) == pytest.approx(
                own.session.measure.features(model, ON).tasks[task].cosine.tolist()
            )


@pytest.mark.parametrize("alone", [False, True])
def test_the_map_is_made_of_the_pooled_features(alone: bool, tiny: Family) -> None:
    frame = clouds(tiny).to_frame(["signs"], alone=alone, pooled=True)
    features = {layer: np.stack([*rows["feature"]]) for layer, rows in frame.groupby("layer", sort=False)}
    assert all(np.linalg.norm(one, axis=1) == pytest.approx(1, abs=1e-6) for one in features.values())
    blocks = [layer for layer in features if layer != "head"]
    together = [[layer] for layer in blocks] if alone else [blocks]
    for on_one in [*together, ["head"]]:
        expected = projection.pca_map(np.concatenate([features[layer] for layer in on_one]))
        shown = frame[frame["layer"].isin(on_one)]
        np.testing.assert_allclose(shown[["x", "y"]].to_numpy(), expected, atol=1e-5)


def test_samples_that_are_not_on_the_map_have_no_place(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "MOST_POINTS", 12)
    own = clouds(tiny)
    (layer,) = clouds_json(own, own.to_frame(["pets"], ["head"]))["tasks"]["pets"]["layers"]
    on_map = projection.draw_points(6, 3)
    assert len(on_map) == 4
    for model in (EXPERT, *NAMES):
        points = [one for one in layer["points"] if one["model"] == model]
        assert [one["sample"] for one in points] == list(range(6))
        assert [one["sample"] for one in points if one["x"] is not None and one["y"] is not None] == on_map
        assert all(-1 <= one["cosine"] <= 1 + 1e-9 for one in points)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tasks": ["pet"]}, r"task 'pet': only pets, signs .* Did you mean 'pets'"),
        ({"layers": ["embeddings"]}, "layer 'embeddings': only block 0, "),
    ],
)
def test_unknown_names_are_named(asked: dict[str, Any], message: str, tiny: Family) -> None:
    with pytest.raises(InputError, match=message):
        clouds(tiny).to_frame(**asked)


def test_the_expert_alone_is_nothing_to_compare(tiny: Family) -> None:
    with pytest.raises(InputError, match="at least one model beside the expert"):
        FeatureMaps.from_names(Session(tiny), [EXPERT], ON)


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
def test_a_feature_without_a_direction_is_an_error(wrong: float, tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Measurements.layer_features

    def broken(self: Measurements, model: Any, *more: Any) -> dict[str, Tensor]:
        found = real(self, model, *more)
        return {layer: torch.full_like(one, wrong) if model.kind == "base" else one for layer, one in found.items()}

    monkeypatch.setattr(Measurements, "layer_features", broken)
    with pytest.raises(NumericalError, match="task 'signs', block 0: a feature of model 'base' is zero or not finite"):
        clouds(tiny).to_frame(["signs"], ["block 1"])


def test_the_command_prints_means_or_every_sample(tiny_suite_file: Path, tiny: Family) -> None:
    given = (
        "study",
        "features",
        tiny_suite_file,
        *(word for name in NAMES for word in ("--model", name)),
        "--task",
        "signs",
    )
    drawn = ("--eval-samples", 6, "--split", "validation", "--seed", 3)
    done = run(*given, *drawn, "--layer", "vision_model.encoder.layers.1", "--layer", "head")
    assert done.exit_code == 0, done.output
    header, *rows = (line.split() for line in done.stdout.splitlines())
    assert header == ["task", "layer", "model", "cosine", "distance"]
    frame = clouds(tiny).to_frame(["signs"])
    means = frame.groupby(["layer", "model"])[["cosine", "distance"]].mean()
    said = [(layer, model) for layer in ("block 1", "head") for model in NAMES]
    assert [row[-2:] for row in rows] == [[f"{one:.4f}" for one in means.loc[key]] for key in said]
    document = json.loads(run(*given, *drawn, "--json").stdout)
    assert document == json.loads(json.dumps(clouds_json(clouds(tiny), frame)))
    assert (document["split"], document["seed"], document["models"]) == ("validation", 3, [EXPERT, *NAMES])


def test_conditioning_is_that_of_the_options(tiny_suite_file: Path, tiny: Family) -> None:
    given = ("study", "conditioning", tiny_suite_file, "--model", "calibrated:lam=0.2,samples=5,blocks=block 1")
    systems = json.loads(run(*given, "--json").stdout)["systems"]
    expected = measure_conditioning(tiny, CalibrationConfig(lam=0.2, samples=5, blocks=("block 1",)))
    assert len(expected) == 4
    for found, one in zip(systems, expected, strict=True):
        assert found == pytest.approx(one.to_json())
    assert run(*given).stdout.splitlines()[0].split()[-2:] == ["condition", "effective_rank"]
    refused = run("study", "conditioning", tiny_suite_file, "--model", "merged")
    assert isinstance(refused.exception, FeatcalError)
    assert "'merged' is not a calibration" in str(refused.exception)
