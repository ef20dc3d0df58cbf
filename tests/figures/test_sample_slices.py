"""Parts of a task's samples: by class, by answers of two models, by low margin."""

from __future__ import annotations

import numpy as np

from featcal.figures.sample_slices import mask_answers, mask_classes, mask_margins
from featcal.figures.sample_tables import PerSample


def test_answers_of_two_models_fix_and_break() -> None:
    a, b = (PerSample(right=tuple(map(bool, right))) for right in ((1, 1, 0, 0), (1, 0, 1, 0)))
    masks = {words: np.flatnonzero(mask).tolist() for words, mask in mask_answers({"a": a, "b": b}, ["a", "b"]).items()}
    assert masks == {
        "a right": [0, 1],
        "a wrong": [2, 3],
        "b right": [0, 2],
        "b wrong": [1, 3],
        "fixed": [2],
        "broken": [1],
    }
    assert set(mask_answers({"a": a, "b": PerSample()}, ["a", "b"])) == {"a right", "a wrong"}


def test_low_margins_are_a_share_of_all() -> None:
    margin = np.random.default_rng(0).permutation(20.0 * np.arange(20))
    found = {words: sorted(margin[mask]) for words, mask in mask_margins(margin).items()}
    assert {words: len(one) for words, one in found.items()} == {
        "lowest half": 10,
        "lowest quarter": 5,
        "lowest tenth": 2,
    }
    assert all(one == [20.0 * i for i in range(len(one))] for one in found.values())


def test_classes_are_those_that_samples_share() -> None:
    assert {name: mask.tolist() for name, mask in mask_classes(["b", "a", "b"]).items()} == {
        "a": [False, True, False],
        "b": [True, False, True],
    }
    assert mask_classes(["a", "b"]) == {}
