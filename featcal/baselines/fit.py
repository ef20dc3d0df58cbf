"""From the options of a baseline to its model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

from featcal.baselines.fitted import Fitted
from featcal.baselines.options import Options, RegMean
from featcal.baselines.regmean import regmean
from featcal.calibration.calibrate import expert_passes, versions
from featcal.family import Family
from featcal.models.lane import ExpertPass, require_same_compute
from featcal.progress import Progress, peak_rss_bytes, silent


def fit(
    family: Family,
    options: Options,
    *,
    experts: Mapping[str, ExpertPass] | None = None,
    progress: Progress = silent,
) -> Fitted:
    """Make the model that the options stand for.

    Args:
        experts: expert passes to use again, of `options.counting`; left out, samples are drawn.

    Raises:
        InputError: samples or models that are not usable.
        NumericalError: features that are not finite, or a system without a trustworthy solution.
    """
    started = time.perf_counter()
    passes = expert_passes(family, options.counting) if experts is None else experts
    require_same_compute(passes, family.compute)
    run = family.run(progress)
    assert isinstance(options, RegMean)
    weights = regmean(run, passes, options)
    record = {
        "suite": family.suite.name,
        "model": options.name,
        "options": asdict(options),
        "tasks": {task: {"samples": len(one.indices), "indices": list(one.indices)} for task, one in passes.items()},
        "seconds": {"total": time.perf_counter() - started, **run.seconds},
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": versions(),
    }
    return Fitted(family, options, weights, record)
