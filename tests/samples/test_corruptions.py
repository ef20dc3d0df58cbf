"""Corrupted pictures: what the corruptions are, and that a source has them and nothing else of the suite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from featcal.samples import corruptions
from featcal.samples.corruptions import NOISE, corrupt_picture
from featcal.samples.sources import preview_samples
from featcal.studies.corrupt import corrupt_suite
from featcal.studies.history import suite_hash
from featcal.suite.schema import load_suite, suite_from_dict
from featcal.suite.source import CORRUPTIONS, Corruption, Source
from featcal.system.errors import InputError


def how(kind: str, severity: int = 3) -> Corruption:
    return Corruption.model_validate({"kind": kind, "severity": severity})


def grey(side: int = 64, value: int = 128) -> Any:
    return np.full((side, side, 3), value, dtype=np.uint8)


def stripes(side: int = 224) -> Any:
    """Dark and light columns, four pixels wide."""
    image = grey(side, 64)
    image[:, (np.arange(side) // 4) % 2 == 0] = 192
    return image


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_noise_has_its_deviation(severity: int) -> None:
    found = corrupt_picture(grey(200), how("gaussian-noise", severity), 0) / 255 - 128 / 255
    clipped = np.random.default_rng(0).normal(128 / 255, NOISE[severity - 1], 500_000).clip(0, 1)
    assert found.std() == pytest.approx(clipped.std(), rel=0.02)
    assert found.mean() == pytest.approx(clipped.mean() - 128 / 255, abs=0.004)


def test_blur_keeps_what_is_even_and_levels_what_is_not() -> None:
    assert corrupt_picture(grey(), how("motion-blur"), 3).tolist() == grey().tolist()
    contrasts = [corrupt_picture(stripes(), how("motion-blur", severity), 3).std() for severity in (1, 2, 3)]
    assert stripes().std() == 64
    assert 40 > contrasts[0] > contrasts[1] > contrasts[2]


def test_blur_follows_the_side() -> None:
    """A picture of 32 pixels is not smeared over fifteen."""
    spot = np.zeros((32, 32, 3), dtype=np.uint8)
    spot[16, 16] = 255
    touched = np.argwhere(corrupt_picture(spot, how("motion-blur", 3), 0)[..., 0])
    assert 3 <= len(touched) <= 14
    assert np.abs(touched - 16).max() <= 5


@pytest.mark.parametrize("severity", [1, *(pytest.param(more, marks=pytest.mark.slow) for more in (2, 3, 4, 5))])
def test_fog_adds_light_and_takes_contrast(severity: int) -> None:
    found = np.mean([corrupt_picture(stripes(), how("fog", severity), sample) for sample in range(20)], axis=0)
    columns = found.mean(axis=(0, 2))
    light, dark = (columns[(np.arange(224) // 4) % 2 == part].mean() for part in (0, 1))
    thickness = corruptions.FOG[severity - 1][0]
    brightest = 192 / 255
    assert (light - dark) / 128 == pytest.approx(brightest / (brightest + thickness), rel=0.05)


def test_half_a_pixel_is_half_of_both() -> None:
    ramp = np.tile(np.arange(6.0), (4, 1))[..., None].repeat(3, axis=2)
    assert corruptions._shift(ramp, 0.0, 1.5)[0, :, 0].tolist() == [1.5, 2.5, 3.5, 4.5, 5, 5]
    assert corruptions._shift(ramp.transpose(1, 0, 2), 0.25, 0.0)[:, 0, 0].tolist() == [0.25, 1.25, 2.25, 3.25, 4.25, 5]


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_what_is_drawn_depends_on_the_sample_alone(kind: str) -> None:
    one, other = (corrupt_picture(stripes(48), how(kind), sample) for sample in (1, 2))
    assert np.array_equal(one, corrupt_picture(stripes(48), how(kind), 1))
    assert not np.array_equal(one, other)
    assert one.dtype == np.uint8
    assert one.shape == (48, 48, 3)
    tall = corrupt_picture(np.zeros((20, 33, 3), dtype=np.uint8), how(kind), 0)
    assert tall.shape == (20, 33, 3)


def test_only_calibration_pictures_of_the_study_change() -> None:
    clean = load_suite("clip-mini")
    foggy = corrupt_suite(clean, "fog", 3)
    assert suite_hash(clean) != suite_hash(foggy) != suite_hash(corrupt_suite(clean, "fog", 4))
    for split, same in (("calibration", False), ("validation", True), ("test", True)):
        pairs = [preview_samples(suite, "shapes", split, 6, 42) for suite in (clean, foggy)]
        before, after = (np.stack(list(one.images or ())) for one in pairs)
        assert np.array_equal(before, after) == same
        assert pairs[0].indices == pairs[1].indices
    few = preview_samples(foggy, "shapes", "calibration", 6, 42)
    rest = preview_samples(foggy, "shapes", "calibration", None, 42)
    assert np.array_equal((few.images or [])[2], (rest.images or [])[few.indices[2]])


def test_a_suite_without_corruption_says_nothing_of_it() -> None:
    """So that histories of suites stay theirs."""
    assert "corruption" not in load_suite("clip-mini").model_dump_json(exclude_none=True)
    said = Source.model_validate({"embedded": "shapes", "corruption": {"kind": "fog"}}).model_dump()
    assert said["corruption"] == {"kind": "fog", "severity": 3}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"embedded": "shapes", "corruption": {"kind": "snow"}}, "kind"),
        ({"embedded": "shapes", "corruption": {"kind": "fog", "severity": 6}}, "severity"),
        ({"tensors": "x.safetensors", "key": "a", "corruption": {"kind": "fog"}}, "preprocessed tensors"),
        ({"jsonl": "x.jsonl", "input": "{a}", "corruption": {"kind": "fog"}}, "not text or preprocessed tensors"),
    ],
)
def test_other_corruptions_are_refused(source: dict[str, Any], message: str) -> None:
    content = {"name": "x", "base": "b", "merged": "m", "tasks": {"t": {"expert": "e", "calibration": source}}}
    with pytest.raises(InputError, match=message):
        suite_from_dict(content, load_suite("clip-mini").root)


@pytest.mark.parametrize(
    ("suite", "kind", "severity"), [("t5-mini", "fog", 3), ("clip-mini", "snow", 3), ("clip-mini", "fog", 0)]
)
def test_the_study_refuses_text_and_what_it_does_not_know(suite: str, kind: str, severity: int) -> None:
    with pytest.raises(InputError, match=r"pictures|kinds are"):
        corrupt_suite(load_suite(suite), kind, severity)
