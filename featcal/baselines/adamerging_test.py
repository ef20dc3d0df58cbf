"""Merge by AdaMerging as published, trained on the entropy for *test* inputs (arXiv 2310.02575); see `adamerging`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featcal.baselines.adamerging import AdaMerging
from featcal.suite.methods import TEST_DATA, TRAINING, register_method


@register_method(
    "adamerging-test",
    "AdaMerging as published: coefficients trained on the entropy for *test* inputs, which no other model sees",
    paper="2310.02575",
    needs=(TEST_DATA, TRAINING),
    compared=("adamerging-test:steps=200,seed=42",),
)
@dataclass(frozen=True)
class AdaMergingTest(AdaMerging):
    split: ClassVar[str] = "test"
