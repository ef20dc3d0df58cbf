"""From the options of a baseline to its model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from featcal.baselines.adamerging import adamerging
from featcal.baselines.coefficients import coefficients
from featcal.baselines.esm import esm
from featcal.baselines.fisher import fisher
from featcal.baselines.fitted import Fitted
from featcal.baselines.gradients import heads_of
from featcal.baselines.lot import lot
from featcal.baselines.options import (
    AdaMerging,
    Baseline,
    Coefficients,
    Esm,
    Fisher,
    Lot,
    Polish,
    React,
    RegMean,
    Sampled,
    Surgery,
    Svc,
)
from featcal.baselines.polish import polish
from featcal.baselines.react import react
from featcal.baselines.regmean import regmean
from featcal.baselines.surgery import surgery
from featcal.baselines.svc import svc
from featcal.calibration.calibrate import expert_passes
from featcal.export.record_facts import read_draws
from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, Kept, require_same_compute
from featcal.suite.facts import suite_facts
from featcal.suite.name_grammar import AFTER
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
    """Make the model that the options stand for.

    Args:
        family: its merged model is what a method that acts on a model acts on; another one stands there by
            `Family.with_merged`.
        experts: expert passes to use again, of `options.counting` and `options.split`; left out, samples are drawn
            where any are needed.

    Raises:
        InputError: samples or models that are not usable.
        NumericalError: features that are not finite, or a system without a trustworthy solution.
    """
    started, run = time.perf_counter(), family.run(progress)
    passes: Mapping[str, ExpertPass] = {}
    if isinstance(options, Sampled):
        kept = Kept.from_device(family.compute.device)
        passes = expert_passes(family, options.counting, kept, options.split) if experts is None else experts
        require_same_compute(passes, family.compute)
    drawn = read_draws(passes)
    weights, account = _make(run, family, options, passes)
    record = {
        "suite": family.suite.name,
        "suite_file": suite_facts(family.suite),
        "model": options.name,
        "options": asdict(options),
        "of": family.merged.label if options.kind in AFTER else None,
        "tasks": drawn,
        **account,
        "seconds": {"total": time.perf_counter() - started, **run.seconds},
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": all_versions(),
        "machine": machine_facts(family.compute.device),
    }
    return Fitted(family, options, weights, record)


def _make(
    run: Run, family: Family, options: Baseline, experts: Mapping[str, ExpertPass]
) -> tuple[Weights, Mapping[str, Any]]:
    """The model, and what its method has to say of it."""
    match options:
        case RegMean():
            return regmean(run, experts, options), {}
        case Lot():
            return lot(run, experts, options), {}
        case Esm():
            return esm(run, experts, options), {}
        case Coefficients():
            return coefficients(run, experts, options)
        case Fisher():
            return fisher(run, experts, heads_of(family, family.experts, options.split), options), {}
        case AdaMerging():
            scored = dict.fromkeys(experts, family.base)
            return adamerging(run, experts, heads_of(family, scored, options.split), options)
        case Svc():
            return svc(run, family.experts, family.merged, options), {}
        case Polish():
            return polish(run, experts, family.merged, options)
        case Surgery():
            return surgery(run, experts, family.merged, options)
        case React():
            return react(run, experts, family.merged, options)
