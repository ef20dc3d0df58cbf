"""Make models from those of an open suite, calibrations and baselines, and measure quantities that calibrations depend
on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from featcal.baselines.common.baseline import Sampled
from featcal.baselines.common.fit import fit
from featcal.baselines.common.fitted_model import Fitted
from featcal.calibration.block_preview import Preview, build_preview
from featcal.calibration.block_statistics import FirstBlock
from featcal.calibration.calibrate import CalibrationResult, calibrate_family
from featcal.calibration.conditioning import Conditioning, measure_conditioning
from featcal.calibration.config import select_tasks
from featcal.calibration.low_rank import Limits
from featcal.calibration.repair import RepairAdapter, Start, fit_repair
from featcal.drift.source import SourceExcess, measure_sources
from featcal.export.record_facts import require_same_start
from featcal.export.write import require_weights_alone
from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.models.compute import require_float64
from featcal.models.lane import ExpertPass
from featcal.session.model_names import holds_calibration, read_calibration_record, recorded_calibration, weights_of
from featcal.session.model_ref import OBJECT, ModelId, ModelRef
from featcal.session.open_suite import OpenSuite, ResultKind
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.methods import REFERENCE, baseline_names
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.progress import Progress, silent

_DRIFT = DriftOptions()
_CALIBRATED = ResultKind[CalibrationResult]("calibrated")
_FITTED = ResultKind[Fitted]("fitted")
_WEIGHTS = ResultKind[Weights]("weights")
_SOURCES = ResultKind[list[SourceExcess]]("sources")
_CONDITIONING = ResultKind[list[Conditioning]]("conditioning")
_PREVIEW = ResultKind[Preview]("preview")
_UNCHANGED = ResultKind[bool]("unchanged start")


@dataclass(frozen=True)
class Fits:
    """Make models of an open suite, each once; reached by `Session.fit`."""

    suite: OpenSuite

    def calibrate(self, model: ModelId, progress: Progress = silent) -> CalibrationResult:
        """Calibrate the suite's merged model, or another one named in `model` (`calibrated:rho=1@tsv-m`).

        Args:
            model: options of a calibration, or its name.

        Raises:
            InputError: a model of another kind, or an option that is unknown or outside its range.
        """
        one = self.suite.resolve(model)
        config, _ = one.require_calibration()
        return self._calibrate(one, lambda: self.suite.calibration_passes(config, once=True), progress)

    def adopt_calibration(
        self,
        model: ModelId,
        make: Callable[[], CalibrationResult],
        is_stale: Callable[[CalibrationResult], bool],
    ) -> CalibrationResult:
        """Cache the calibration of another process, which `calibrate` then returns.

        Args:
            model: as in `calibrate`.
            make: returns it, if none is cached.
            is_stale: says whether a cached one can no longer be read; then `make` is called again.
        """
        key = self.suite.resolve(model).key
        if is_stale(self.suite.get_or_make(_CALIBRATED, key, make)):
            self.suite.forget(_CALIBRATED, key)
        return self.suite.get_or_make(_CALIBRATED, key, make)

    def family_with(self, model: ModelId) -> Family:
        """Return the suite with a model instead of its merged one, to calibrate that model.

        Raises:
            InputError: no such model, or one with maps or heads of its own.
        """
        one = self.suite.resolve(model)
        if one.kind != "merged":
            require_weights_alone(self.weights(one))
        return self._start_from(one)

    def _start_from(self, one: ModelRef) -> Family:
        """Return the suite with a model instead of its merged one, even if the model has maps or heads of its own."""
        if one.kind != "merged":
            return self.suite.family.with_merged(self.weights(one), one.name)
        merged = self.suite.made.get(one.key)
        return self.suite.family if merged is None else replace(self.suite.family, merged=merged)

    def baseline(self, model: ModelId, progress: Progress = silent) -> Fitted:
        """Return the model that a baseline makes of the suite.

        Raises:
            InputError: a model of another kind, an option that is unknown or outside its range, or a device without
                float64.
            NumericalError: the fit has no trustworthy solution.
        """
        one = self.suite.resolve(model)
        options, of = one.baseline, one.of
        if options is None or of is None:
            raise InputError(f"model '{one.name}' is not a baseline; those are {', '.join(baseline_names())}")
        require_float64(self.suite.family.compute.device, f"model '{one.name}'")

        def make() -> Fitted:
            family, passes = self._start_from(of), None
            if isinstance(options, Sampled):
                passes = self.suite.calibration_passes(options.counting, options.split)
            # The expert passes are those of calibrations with the same samples, so experts run once for both.
            found = fit(family, options, experts=passes, progress=progress)
            return replace(found, record={**found.record, "model": one.name})

        return self.suite.get_or_make(_FITTED, (options, of.key), make)

    def weights(self, model: ModelId) -> Weights:
        """Return the tensors of a model; calibrations and baselines are computed if necessary.

        Raises:
            InputError: there is no such model, or it does not fit the suite.
        """
        one = self.suite.resolve(model)
        if one.given is not None:
            return self.suite.family.model(one.given)
        if one.key in self.suite.made:
            return self.suite.made[one.key]
        if one.config is not None:
            return self.calibrate(one).weights
        if one.baseline is not None:
            return self.baseline(one).weights
        family = self.suite.family if one.of is None else self.family_with(one.of)
        return self.suite.get_or_make(_WEIGHTS, one.key, lambda: weights_of(one.name, family))

    def sources(self, model: ModelId, progress: Progress = silent) -> list[SourceExcess]:
        """Measure the cost of fitting the calibrated blocks on other feature sources (Prop. 8).

        Args:
            model: options of a calibration, a calibration by its name, or the folder of a calibrated checkpoint, with
                its own options. The calibrated model's start replaces the suite's merged model.

        Raises:
            InputError: a model of another kind, or a folder without the record of a calibration.
        """

        one = self.suite.resolve(model)

        def make() -> list[SourceExcess]:
            config, of = self._calibration(one)
            passes = self.suite.calibration_passes(config)
            if one.config is None:
                weights = self.weights(one)
            else:
                weights = self._calibrate(one, lambda: passes, progress).weights
            return measure_sources(self.family_with(of), weights, config, passes, progress)

        return self.suite.get_or_make(_SOURCES, one.key, make)

    def repair(self, model: ModelId, over: Start, limits: Limits, progress: Progress = silent) -> RepairAdapter:
        """Truncate the change of a calibration to a low rank, as an adapter over the model before calibration, or over
        the base.

        Args:
            model: as in `sources`.

        Raises:
            InputError: a model that is not a calibration or has no change, or an architecture that peft cannot adapt.
        """
        one = self.suite.resolve(model)
        config, of = self._calibration(one)
        passes = select_tasks(config, self.suite.calibration_passes(config))
        weights = self.weights(one) if one.config is None else self._calibrate(one, lambda: passes, progress).weights
        return fit_repair(self.family_with(of), weights, config, passes, over, limits, progress)

    def conditioning(self, model: ModelId, progress: Progress = silent) -> list[Conditioning]:
        """Measure the condition of every linear system of a calibration; takes a calibration and its decompositions.

        Args:
            model: as in `sources`.

        Raises:
            InputError: a model that is not a calibration, or options that are unknown or outside their range.
        """

        one = self.suite.resolve(model)

        def make() -> list[Conditioning]:
            config, of = self._calibration(one)
            passes, first = self.suite.calibration_passes(config), self._first_block(of)
            return measure_conditioning(self.family_with(of), config, passes, first, progress)

        return self.suite.get_or_make(_CONDITIONING, one.key, make)

    def preview(
        self, of: ModelId, layer: str, view: EvaluationSamples = _DRIFT, progress: Progress = silent
    ) -> Preview:
        """Precompute the block statistics for previews of one block, so that the next slider move previews instantly.

        Args:
            of: the exact run whose blocks before this one stay: options of a calibration, or its name.
            layer: name of the block in tables.
            view: the samples that measure drift.

        Raises:
            InputError: no such block, one that `of` leaves as merged, or another precision than "exact".
        """
        one = self.suite.resolve(of)
        config, start = self._calibration(one)
        if config.precision != "exact":
            raise InputError(f"a preview needs a calibration with precision 'exact', not '{config.precision}'")

        def make() -> Preview:
            run = self.family_with(start).run(progress)
            fitted = select_tasks(config, self.suite.calibration_passes(config))
            weights = self._calibrate(one, lambda: fitted, progress).weights
            return build_preview(
                run, config, weights, layer, fitted, self.suite.measured_passes(view, self.suite.samples(view))
            )

        # Statistics of a whole block are large, so that of the last block alone is kept.
        return self.suite.get_or_replace(_PREVIEW, (one.key, layer, *self.suite.key(view)), make)

    def has_preview(self, of: ModelId, layer: str, view: EvaluationSamples) -> bool:
        """Say whether `preview` is cached."""
        return self.suite.has(_PREVIEW, (self.suite.resolve(of).key, layer, *self.suite.key(view)))

    def find_calibration(self, model: ModelId) -> tuple[CalibrationConfig, ModelRef] | None:
        """Return the options of a calibration and the model from which it started, also of a calibrated folder by its
        record; None for a model that is not calibrated."""
        one = self.suite.resolve(model)
        if isinstance(one.given, CalibrationResult):
            return one.given.config, self.suite.resolve(one.given.family.merged)
        if one.config is not None:
            return self._calibration(one)
        return self._recorded_calibration(one) if one.kind == REFERENCE and holds_calibration(one.name) else None

    def record(self, model: ModelId, progress: Progress = silent) -> Mapping[str, Any]:
        """Return the record of a calibration: that of the result, or the file of a calibrated folder.

        Raises:
            InputError, NumericalError: as `calibrate`.
        """
        one = self.suite.resolve(model)
        return (
            read_calibration_record(Path(one.name)) if one.kind == REFERENCE else self.calibrate(one, progress).record
        )

    def _calibration(self, model: ModelRef) -> tuple[CalibrationConfig, ModelRef]:
        """Return the options of a calibration, and the model that it calibrates.

        Raises:
            InputError: the model is not a calibration, its folder has no record of one, or the suite's models have
                changed since.
        """
        if model.config is not None and model.of is not None:
            return model.config, model.of
        if model.kind == OBJECT:
            raise InputError(f"'{model.label}' is an object; give the options of a calibration, its name or its folder")
        if model.kind != REFERENCE:
            raise InputError(
                f"'{model.name}' is not a calibration; give its options, as calibrated:lam=0.05,rho=2@{model.name}"
            )
        config, of = self._recorded_calibration(model)

        def check() -> bool:
            folder = Path(model.name)
            require_same_start(read_calibration_record(folder), self.family_with(of), folder)
            return True

        self.suite.get_or_make(_UNCHANGED, model.key, check)
        return config, of

    def _recorded_calibration(self, model: ModelRef) -> tuple[CalibrationConfig, ModelRef]:
        config, of = recorded_calibration(Path(model.name))
        return config, self.suite.resolve(of)

    def _calibrate(
        self, model: ModelRef, passes: Callable[[], Mapping[str, ExpertPass]], progress: Progress
    ) -> CalibrationResult:
        """Calibrate on expert passes that are made only if nothing is cached."""

        def make() -> CalibrationResult:
            config, of = self._calibration(model)
            first = self._first_block(of)
            return calibrate_family(self.family_with(of), config, experts=passes(), first=first, progress=progress)

        return self.suite.get_or_make(_CALIBRATED, model.key, make)

    def _first_block(self, of: ModelRef) -> FirstBlock | None:
        """Return the cache of the first block that calibrations of the suite's own merged model share, else None."""
        return self.suite.first_block if of.kind == "merged" else None
