"""Merge by RegMean++ (arXiv 2508.03121): RegMean on the expert's block, given features of the merged model so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featcal.baselines.regmean import RegMean
from featcal.suite.methods import SAMPLES, register_method


@register_method("regmean++", "RegMean on features of the merged model so far", paper="2508.03121", needs=(SAMPLES,))
@dataclass(frozen=True)
class RegMeanPlusPlus(RegMean):
    streamed: ClassVar[bool] = True
