"""Fit the model of a baseline's options."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

from featcal.baselines.common.baseline import Baseline, FitInputs, Sampled
from featcal.baselines.common.fitted_model import Fitted
from featcal.calibration.calibrate import expert_passes
from featcal.export.record_facts import read_draws
from featcal.family.opening import Family
from featcal.models.lane import ExpertPass, WalkCache, require_same_compute
from featcal.suite.facts import suite_facts
from featcal.system.environment import machine_facts
from featcal.system.progress import Progress, peak_rss_bytes, silent
from featcal.system.versions import all_versions


def fit(
    family: Family,
    options: Baseline,
    *,
    experts: Mapping[str, ExpertPass] | None = None,
    progress: Progress = silent,
) -> Fitted:
    """Fit the model of some options.

    Args:
        family: its merged model is the start of a method that acts on a model; `Family.with_merged` sets another one.
        experts: expert passes to reuse, of `options.counting` and `options.split`; by default samples are drawn if
            necessary.

    Raises:
        InputError: samples or models that are not usable.
        NumericalError: features that are not finite, or a system without a trustworthy solution.
    """
    started, run = time.perf_counter(), family.run(progress)
    passes: Mapping[str, ExpertPass] = {}
    if isinstance(options, Sampled):
        kept = WalkCache.from_device(family.compute.device)
        passes = expert_passes(family, options.counting, kept, options.split) if experts is None else experts
        require_same_compute(passes, family.compute)
    drawn = read_draws(passes)
    weights, account = options.make(FitInputs(run, family, passes))
    record = {
        "suite": family.suite.name,
        "suite_file": suite_facts(family.suite),
        "model": options.name,
        "options": asdict(options),
        "of": family.merged.label if options.on_another else None,
        "tasks": drawn,
        **account,
        "seconds": {"total": time.perf_counter() - started, **run.seconds},
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": all_versions(),
        "machine": machine_facts(family.compute.device),
    }
    return Fitted(family, options, weights, record)
