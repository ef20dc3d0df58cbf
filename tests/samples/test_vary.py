"""Varied copies of calibration pictures: what they are, in which order they are drawn, and who cannot have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_text import write_text_suite

from featcal import calibrate_to_folder, load_suite, open_family
from featcal.calibration.calibrate import config_for, expert_passes
from featcal.family.opening import Family
from featcal.preflight.check import check_suite
from featcal.samples import vary as varying
from featcal.samples.vary import NOISE, SHIFT, vary
from featcal.server.lengths import seconds_to_calibrate
from featcal.session.model_names import name_calibration
from featcal.session.model_ref import resolve_model
from featcal.session.session import Session
from featcal.studies.replay.again import replay_record
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.command_lines import calibrate_line
from featcal.system.errors import InputError

STILL = {"DEGREES": 0.0, "SCALE": 0.0, "SHIFT": 0.0, "NOISE": 0.0}


@pytest.fixture(scope="module")
def pictures() -> Family:
    return open_family(load_suite("clip-mini"), "cpu")


def only(monkeypatch: pytest.MonkeyPatch, **strengths: float) -> None:
    """Nothing is varied but what is given."""
    for name, strength in (STILL | strengths).items():
        monkeypatch.setattr(varying, name, strength)


def random(height: int = 30, width: int = 40) -> Any:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_copy_with_no_strength_is_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    assert (vary(random(), 42, "a", 0, 1) == random()).all()


def test_geometry_repeats_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """No corner is black, however far the copy is turned, shrunk and shifted."""
    only(monkeypatch, DEGREES=10.0, SCALE=0.12, SHIFT=0.06)
    even = np.full((24, 33, 3), 201, dtype=np.uint8)
    assert all((vary(even, 42, "a", 0, copy) == even).all() for copy in range(1, 60))


def test_a_shift_is_a_share_of_the_side(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, SHIFT=SHIFT)
    spot = np.zeros((100, 200, 3), dtype=np.uint8)
    spot[50, 100] = 255
    found = np.array([_centre(vary(spot, 42, "a", 0, copy)) for copy in range(1, 200)]) - (50, 100)
    assert (np.abs(found).max(0) < (6.1, 12.1)).all()
    assert (np.abs(found).max(0) > (5.5, 11.0)).all()
    assert np.abs(found.mean(0)).max() < 1.2


def _centre(image: Any) -> Any:
    weight = image[..., 0].astype(float)
    rows, columns = np.indices(weight.shape)
    return (weight * rows).sum() / weight.sum(), (weight * columns).sum() / weight.sum()


def test_turn_and_scale_stay_within_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two spots on a line, how far apart they are and how the line lies."""
    only(monkeypatch, DEGREES=10.0, SCALE=0.12)
    spots = np.zeros((201, 201, 3), dtype=np.uint8)
    spots[99:102, 40] = spots[99:102, 160] = 255
    turns, scales = [], []
    for copy in range(1, 150):
        image = vary(spots, 42, "a", 0, copy)
        left, right = np.array(_centre(image[:, :100])), np.array(_centre(image[:, 100:])) + np.array((0, 100))
        down, across = right - left
        turns.append(np.degrees(np.arctan2(down, across)))
        scales.append(np.hypot(down, across) / 120)
    assert 9 < max(turns) < 10.4
    assert -10.4 < min(turns) < -9
    assert 1.1 < max(scales) < 1.13
    assert 0.87 < min(scales) < 0.9


def test_noise_is_of_any_strength_up_to_its_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, NOISE=NOISE)
    grey = np.full((40, 40, 3), 128, dtype=np.uint8)
    deviations = np.array([(vary(grey, 42, "a", 0, copy) / 255).std() for copy in range(1, 200)])
    assert deviations.min() < 0.01
    assert NOISE - 0.01 < deviations.max() < NOISE + 0.005
    assert deviations.mean() == pytest.approx(NOISE / 2, rel=0.1)


def test_what_is_drawn_depends_on_seed_task_sample_and_copy() -> None:
    first = vary(random(), 42, "a", 0, 1)
    assert (vary(random(), 42, "a", 0, 1) == first).all()
    others = [(43, "a", 0, 1), (42, "b", 0, 1), (42, "a", 1, 1), (42, "a", 0, 2)]
    assert not any((vary(random(), *other) == first).all() for other in others)


def test_copies_are_drawn_behind_all_pictures(pictures: Family) -> None:
    plain = pictures.samples("digits", "calibration", 5, 42)
    drawn = pictures.samples("digits", "calibration", 5, 42, copies=2)
    pixels = drawn.inputs["pixel_values"]
    assert drawn.indices == plain.indices * 3
    assert (len(drawn), drawn.total) == (15, 15)
    assert pixels[:5].equal(plain.inputs["pixel_values"])
    assert plain.labels is not None
    assert drawn.labels is not None
    assert drawn.labels.tolist() == plain.labels.tolist() * 3
    assert plain.images is not None
    own = vary(plain.images[3], 42, "digits", plain.indices[3], 2)
    assert pixels[13].equal(pictures._preparation().pixels([own])[0])
    part = pictures.samples("digits", "calibration", 5, 42, slice(4, 7), copies=2)
    assert part.inputs["pixel_values"].equal(pixels[4:7])


@pytest.mark.slow
def test_a_calibration_takes_them_says_so_and_can_be_replayed(pictures: Family, tmp_path: Path) -> None:
    config = config_for(pictures, samples=4, augment=2, tasks=("digits", "flags"), blocks=("block 0",), batch_size=5)
    assert [batch["pixel_values"].shape[0] for batch in expert_passes(pictures, config)["flags"].batches] == [5, 5, 2]
    calibrate_to_folder(pictures, config, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "featcal.json").read_text())
    assert record["config"]["augment"] == 2
    digits = record["tasks"]["digits"]
    assert (digits["samples"], digits["copies"], len(digits["indices"])) == (4, 8, 4)
    assert digits["tokens"] == 12 * 17
    assert replay_record(tmp_path / "out").same
    fewer = config_for(pictures, samples=4, tasks=("digits", "flags"))
    assert "copies" not in calibrate_to_folder(pictures, fewer, tmp_path / "plain")["tasks"]["digits"]


def test_names_and_commands_say_how_many(pictures: Family) -> None:
    config = config_for(pictures, samples=8, augment=3)
    assert name_calibration(config, pictures) == "calibrated:lam=0.05,rho=2,alpha=0.3,samples=8,augment=3"
    assert resolve_model(name_calibration(config, pictures), pictures).config == config
    assert "--samples 8 --augment 3 --out" in calibrate_line("s", config, config_for(pictures), "o")


@pytest.mark.slow
def test_a_session_does_not_take_one_for_the_other(pictures: Family) -> None:
    session, block = Session(pictures), pictures.adapter.blocks()[0]
    made = [session.fit.calibrate(config_for(pictures, samples=4, augment=n, blocks=("block 0",))) for n in (0, 1)]
    plain, varied = (one.weights.read(block.names) for one in made)
    assert any(not plain[name].equal(varied[name]) for name in block.names)


def test_they_cost_what_as_many_samples_do(pictures: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcal.preflight.estimates.gemm_rate", lambda _: 1e10)
    few, copies, many = (
        seconds_to_calibrate(Session(pictures), config_for(pictures, samples=samples, augment=augment))
        for samples, augment in ((8, 0), (8, 3), (32, 0))
    )
    assert few < copies == pytest.approx(many)


def test_text_has_none(tmp_path: Path) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path, "llama")), "cpu")
    with pytest.raises(InputError, match="augment makes varied copies of pictures, but a llama model reads text"):
        config_for(family, augment=1)
    with pytest.raises(InputError, match="augment makes varied copies of pictures, but the source holds text"):
        expert_passes(family, CalibrationConfig(augment=1))


def test_preprocessed_pictures_have_none(tiny: Family) -> None:
    says = "augment makes varied copies of pictures, but the source holds tensors of an unknown scale"
    says = f"task 'pets', calibration samples: {says}"
    with pytest.raises(InputError, match=says):
        expert_passes(tiny, config_for(tiny, augment=1))
    advised = tiny.suite.calibration.model_copy(update={"augment": 1})
    report = check_suite(tiny.suite.model_copy(update={"calibration": advised}), probe=False)
    assert any(says in problem for problem in report.problems)


def test_a_number_of_copies(pictures: Family) -> None:
    with pytest.raises(InputError, match="augment is -1; it is at least 0"):
        config_for(pictures, augment=-1)
