"""What is made of the models of an open suite: calibrations, baselines, and what a calibration costs and depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from featcal.baselines.fit import fit
from featcal.baselines.fitted import Fitted
from featcal.baselines.options import Sampled
from featcal.calibration.block_preview import Preview, hold
from featcal.calibration.calibrate import CalibrationResult, calibrate, select_tasks
from featcal.calibration.conditioning import Conditioning, measure_conditioning
from featcal.calibration.config import CalibrationConfig
from featcal.drift.source import SourceExcess, measure_sources
from featcal.export.write import require_weights_alone
from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.models.lane import ExpertPass
from featcal.session.model_names import (
    ModelId,
    baseline_of,
    calibration_of,
    full_name,
    label_of,
    model_key,
    recorded_calibration,
    weights_of,
)
from featcal.session.open_suite import Kind, OpenSuite
from featcal.suite.name_grammar import FITTED, REFERENCE, model_name
from featcal.suite.views import DriftOptions, View
from featcal.system.errors import InputError
from featcal.system.progress import Progress, silent

_DRIFT = DriftOptions()
_CALIBRATED = Kind[CalibrationResult]("calibrated")
_FITTED = Kind[Fitted]("fitted")
_WEIGHTS = Kind[Weights]("weights")
_SOURCES = Kind[list[SourceExcess]]("sources")
_CONDITIONING = Kind[list[Conditioning]]("conditioning")
_PREVIEW = Kind[Preview]("preview")


@dataclass(frozen=True)
class Fits:
    """Make models of an open suite, each once; reached by `Session.fit`."""

    suite: OpenSuite

    def calibrate(self, model: CalibrationConfig | str, progress: Progress = silent) -> CalibrationResult:
        """The suite's merged model, calibrated with these options; or a calibration by its name, which may be of
        another model (`calibrated:rho=1@tsv-m`).

        Raises:
            InputError: a name of another kind, or an option that is unknown or outside its range.
        """
        if isinstance(model, CalibrationConfig):
            return self._calibrate(model, lambda: self.suite.calibration_passes(model), progress)
        config, below = calibration_of(model, self.suite.family)
        if below == "merged":
            return self.calibrate(config, progress)

        def make() -> CalibrationResult:
            return calibrate(
                self.family_with(below), config, experts=self.suite.calibration_passes(config), progress=progress
            )

        return self.suite.get_or_make(_CALIBRATED, (config, model_key(below)), make)

    def adopt_calibration(
        self,
        config: CalibrationConfig,
        make: Callable[[], CalibrationResult],
        is_stale: Callable[[CalibrationResult], bool],
    ) -> CalibrationResult:
        """Keep what another process has calibrated as this calibration, which `calibrate` gives from then on.

        Args:
            make: gives it, where none is kept.
            is_stale: says that a kept one can no longer be read; it is made again then.
        """
        if is_stale(self.suite.get_or_make(_CALIBRATED, config, make)):
            self.suite.forget(_CALIBRATED, config)
        return self.suite.get_or_make(_CALIBRATED, config, make)

    def family_with(self, model: str) -> Family:
        """The suite with a model, by its name, in the place of its merged one: what is calibrated then.

        Raises:
            InputError: no such model, or one that is more than its weights.
        """
        name = full_name(self.suite.resolve(model), self.suite.family)
        if name == "merged":
            return self.suite.family
        weights = self.weights(self.suite.resolve(name))
        require_weights_alone(weights)
        return self.suite.family.with_merged(weights, name)

    def baseline(self, model: str, progress: Progress = silent) -> Fitted:
        """The model that a baseline makes of the suite, by its name.

        Raises:
            InputError: a name of another kind, or an option that is unknown or outside its range.
            NumericalError: as `fit`.
        """
        options, below = baseline_of(model, self.suite.family)

        def make() -> Fitted:
            family, passes = self.suite.family, None
            if below != "merged":
                family = family.with_merged(
                    self.weights(self.suite.resolve(below)), full_name(self.suite.resolve(below), family)
                )
            if isinstance(options, Sampled):
                passes = self.suite.calibration_passes(options.counting, options.split)
            found = fit(family, options, experts=passes, progress=progress)
            return replace(found, record={**found.record, "model": self.suite.resolve(model)})

        return self.suite.get_or_make(_FITTED, (options, model_key(self.suite.resolve(below))), make)

    def weights(self, model: ModelId) -> Weights:
        """The tensors of a model; calibrated, if options are given.

        Raises:
            InputError: as `Family.model`.
        """
        if isinstance(model, CalibrationConfig):
            return self.calibrate(model).weights
        if not isinstance(model, str):
            return self.suite.family.model(model)
        kind = model_name(model).kind
        if kind in FITTED:
            return self.baseline(model).weights
        if kind == "calibrated":
            return self.calibrate(model).weights
        return self.suite.get_or_make(_WEIGHTS, model_key(model), lambda: weights_of(model, self.suite.family))

    def sources(self, model: ModelId, progress: Progress = silent) -> list[SourceExcess]:
        """What fitting the calibrated blocks on other feature sources would have cost (Prop. 8).

        Args:
            model: options to calibrate with, a calibration by its name, or the folder of a calibrated checkpoint, whose
                own options are used. What was calibrated stands in the place of the merged model.

        Raises:
            InputError: a model that is neither: a folder that holds no record of a calibration among them.
        """

        def make() -> list[SourceExcess]:
            config, below = self._calibration(model)
            passes = self.suite.calibration_passes(config)
            if isinstance(model, CalibrationConfig):
                weights = self._calibrate(model, lambda: passes, progress).weights
            else:
                weights = self.weights(model)
            return measure_sources(self.family_with(below), weights, config, passes, progress)

        return self.suite.get_or_make(_SOURCES, model_key(model), make)

    def conditioning(self, model: ModelId, progress: Progress = silent) -> list[Conditioning]:
        """How well every linear system of a calibration is posed; takes a calibration and its decompositions.

        Args:
            model: as in `sources`.

        Raises:
            InputError: a model that is none of a calibration, or as `calibrate`.
        """

        def make() -> list[Conditioning]:
            config, below = self._calibration(model)
            passes, first = self.suite.calibration_passes(config), self.suite.first_block if below == "merged" else None
            return measure_conditioning(self.family_with(below), config, passes, first, progress)

        return self.suite.get_or_make(_CONDITIONING, model_key(model), make)

    def preview(self, of: CalibrationConfig, layer: str, view: View = _DRIFT, progress: Progress = silent) -> Preview:
        """What previews of one block of a calibration need; that of the last one alone is kept.

        Args:
            of: the exact run that everything in front of the block is left as.
            layer: the block, as tables name it.
            view: the samples that drift is measured on.

        Raises:
            InputError: no such block, one that `of` leaves as merged, or another precision than "exact".
        """
        key = (of, layer, *self.suite.key(view))
        if of.precision != "exact":
            raise InputError(f"previews are of exact calibrations; this one has precision '{of.precision}'")

        def make() -> Preview:
            run = self.suite.family.run(progress)
            fitted = select_tasks(of, self.suite.calibration_passes(of))
            weights = self._calibrate(of, lambda: fitted, progress).weights
            return hold(run, of, weights, layer, fitted, self.suite.measured_passes(view, self.suite.samples(view)))

        return self.suite.get_or_replace(_PREVIEW, key, make)

    def has_preview(self, of: CalibrationConfig, layer: str, view: View) -> bool:
        """Whether `preview` would cost nothing."""
        return self.suite.has(_PREVIEW, (of, layer, *self.suite.key(view)))

    def _calibration(self, model: ModelId) -> tuple[CalibrationConfig, str]:
        """The options of a calibration, and the name of the model that is calibrated.

        Raises:
            InputError: a model that is none, or a folder that holds no record of one.
        """
        if isinstance(model, CalibrationConfig):
            return model, "merged"
        if not isinstance(model, str):
            raise InputError(
                f"'{label_of(model)}' is an object; give the options of a calibration, its name or its folder"
            )
        kind = model_name(model).kind
        if kind == "calibrated":
            return calibration_of(model, self.suite.family)
        if kind != REFERENCE:
            raise InputError(f"'{model}' is no calibration; give its options, as calibrated:lam=0.05,rho=2@{model}")
        return recorded_calibration(Path(model))

    def _calibrate(
        self, config: CalibrationConfig, passes: Callable[[], Mapping[str, ExpertPass]], progress: Progress
    ) -> CalibrationResult:
        def make() -> CalibrationResult:
            return calibrate(
                self.suite.family, config, experts=passes(), first=self.suite.first_block, progress=progress
            )

        return self.suite.get_or_make(_CALIBRATED, config, make)
