"""Define a method other than calibration: options, and a function from a suite and its samples to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from featcal.calibration.calibrate import config_for
from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.methods import BASELINE, Method, method
from featcal.suite.name_grammar import ModelName, read_options
from featcal.suite.options import option, options_of_class, type_of

Made = tuple[Weights, Mapping[str, Any]]
"""Model, and the method's part of its record."""


@dataclass(frozen=True)
class FitInputs:
    """Input of a method: the suite with its models, and the samples."""

    run: Run
    family: Family
    """Suite of the models; its merged model is the start of methods that act on a model."""
    experts: Mapping[str, ExpertPass]
    """One expert pass per task, whose batches are the samples; empty if the method uses none."""


@dataclass(frozen=True)
class Baseline(Method):
    """A method other than calibration.

    >>> import featcal, torch
    >>> from dataclasses import dataclass
    >>> from featcal.formats.weights import Overlay
    >>> @featcal.register_method("half-way", "between the base and the merged model")
    ... @dataclass(frozen=True)
    ... class HalfWay(featcal.Baseline):
    ...     share: float = featcal.option(0.5, "share of the merge's change", least=0, most=1)
    ...     def make(self, given):
    ...         base, merged = (one.read(given.run.adapter.tower) for one in (given.family.base, given.family.merged))
    ...         moved = {name: torch.lerp(base[name], merged[name], self.share) for name in base}
    ...         return Overlay("half-way", given.family.merged, moved), {}
    >>> session = featcal.open_session("lm-mini")
    >>> for model in ("base", "half-way", "merged"):
    ...     print(model, round(featcal.measure_drift(session, model, samples=8).macro_cosine, 2))
    base 0.76
    half-way 0.81
    merged 0.86
    """

    role: ClassVar[str] = BASELINE

    def make(self, given: FitInputs) -> Made:
        """Return the model.

        Raises:
            InputError: samples or models that are not usable.
            NumericalError: features that are not finite, or a system without a trustworthy solution.
        """
        raise NotImplementedError

    @classmethod
    def defaults(cls, family: Family) -> dict[str, Any]:
        """Return the options whose defaults come from the suite or the architecture."""
        return {}


@dataclass(frozen=True)
class Sampled(Baseline):
    """A method that uses samples."""

    samples: int = option(256, "calibration samples per task; a task that has fewer gives all it has", least=1)
    seed: int = option(42, "together with the task's name it decides which samples are drawn")
    split: ClassVar[str] = "calibration"
    """Split of the samples."""
    calibrations: ClassVar[float] = 1.0
    """Calibrations on the same samples that take as long, roughly."""

    @classmethod
    def defaults(cls, family: Family) -> dict[str, Any]:
        own = config_for(family)
        return {"samples": own.samples, "seed": own.seed}

    @property
    def counting(self) -> CalibrationConfig:
        """Return a calibration on the same samples, in which every token except padding has weight 1."""
        return CalibrationConfig(samples=self.samples, seed=self.seed, patch_weight=1.0)


@dataclass(frozen=True)
class Trained(Sampled):
    """A method that takes steps of Adam on samples."""

    steps: int = option(1000, "steps of Adam", least=0)
    rate: float = option(1e-3, "step size of Adam", above=0)
    batch: int = option(16, "samples of every task in a step", least=1)


def baseline_options(name: ModelName, family: Family) -> Baseline:
    """Return the options of a named baseline; options that the name does not have are the suite's, else the
    architecture's, else the method's own.

    Raises:
        InputError: an option that is unknown or outside its range.
    """
    kind = method(name.kind)
    assert issubclass(kind, Baseline)
    given = read_options(name, {one.name: type_of(one) for one in options_of_class(kind)})
    return kind(**kind.defaults(family) | given)
