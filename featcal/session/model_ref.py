"""Resolve a model of a suite from a name, options, weights or a calibration's result."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

from featcal.baselines.common.baseline import Baseline, baseline_options
from featcal.calibration.config import resolve_options
from featcal.family.opening import Calibrated, Family
from featcal.formats.model_files import Commit
from featcal.formats.weights import Weights
from featcal.session.fingerprint import model_stamp
from featcal.session.model_names import config_of_name, name_calibration
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.methods import EXPERT, is_baseline
from featcal.suite.name_grammar import model_name, name_on, reference_in
from featcal.system.errors import InputError
from featcal.system.fingerprints import FileStamp

OBJECT = "object"
"""Kind of weights and of results of calibrations that a caller passes as objects."""


@dataclass(frozen=True, eq=False)
class ModelRef:
    """A model of a suite; `resolve_model` makes it. Two of them are the same model if their keys are equal.

    Args:
        kind: that of its name (`suite.name_grammar.ModelName`), or `OBJECT`.
        name: the full name, which means the same model everywhere; for an object its label.
        label: its name in charts, tables and documents.
        config: all options of a calibration.
        baseline: all options of a baseline.
        of: the model that a calibration, a baseline or an anchor starts from, if it is not the suite's own merge.
        given: the object itself.
    """

    kind: str
    name: str
    label: str
    config: CalibrationConfig | None = None
    baseline: Baseline | None = None
    of: ModelRef | None = None
    given: Weights | Calibrated | None = None

    @property
    def calibration(self) -> CalibrationConfig | None:
        """Return the options of a calibration of the suite's own merged model; None for every other model."""
        return self.config if self.of is not None and self.of.kind == "merged" else None

    def require_calibration(self) -> tuple[CalibrationConfig, ModelRef]:
        """Return the options of a calibration, and the model that it calibrates.

        Raises:
            InputError: a model of another kind.
        """
        if self.config is None or self.of is None:
            raise InputError(f"model '{self.name}' is not a calibration; write calibrated:lam=0.05,rho=2@{self.name}")
        return self.config, self.of

    @property
    def is_every_expert(self) -> bool:
        """Say whether the model is "every expert on its own task", for scores and pooled features."""
        return self.name == "expert"

    @property
    def key(self) -> Hashable:
        """Return a key that is equal for the same model of a suite: a name, options, a checkpoint with its current
        files, or the very same object."""
        if self.given is not None:
            return IdentityKey(self.given)
        options = self.config or self.baseline
        if options is not None and self.of is not None:
            return options, self.of.key
        # A relative reference means another folder elsewhere, so where the process stands is a part of the key.
        return self.name if reference_in(self.name) is None else (self.name, Path.cwd(), self.files)

    @property
    def files(self) -> tuple[FileStamp | Commit, ...]:
        """Return the state of the files of a checkpoint that the model is or starts from; none if that is the suite's
        own, or an object."""
        reference = None if self.given is not None else reference_in(self.name)
        return () if reference is None else model_stamp(reference, Path.cwd())


BASE, MERGED, EVERY_EXPERT = (ModelRef(name, name, name) for name in ("base", "merged", EXPERT))
"""Models that every suite has; the last is every expert on its own task."""
ModelId = str | CalibrationConfig | Weights | Calibrated | ModelRef
"""All forms in which a caller may give a model: a name (`suite.name_grammar`), options of a calibration, weights, a
calibration's result, or a `ModelRef`."""


def resolve_model(given: ModelId, family: Family, of: ModelId = MERGED) -> ModelRef:
    """Resolve a model. Options of a calibration or of a baseline that a name does not have are the suite's, else the
    method's own.

    Args:
        of: the model to calibrate, if `given` are options of a calibration.

    Raises:
        InputError: an option that is unknown or outside its range, or an object that is not a model.
    """
    if isinstance(given, ModelRef):
        return given
    if isinstance(given, CalibrationConfig):
        return _calibration(
            resolve_options(given, family.adapter, family.suite.tasks), resolve_model(of, family), family
        )
    if not isinstance(given, str | Weights | Calibrated):
        raise InputError(
            f"model: a {type(given).__name__} is not a model of this suite; give its name, a folder or what featcal "
            "returned, or make a suite with it: featcal.Suite.of(merged=…)"
        )
    if not isinstance(given, str):
        label = given.weights.label if isinstance(given, Calibrated) else given.label
        return ModelRef(OBJECT, label, label, given=given)
    name = model_name(given)
    if name.kind == "calibrated":
        return _calibration(config_of_name(name, family), resolve_model(name.of or MERGED, family), family)
    if is_baseline(name.kind):
        options, start = baseline_options(name, family), resolve_model(name.of or MERGED, family)
        whole = name_on(options.name, start.name)
        return ModelRef(name.kind, whole, whole, baseline=options, of=start)
    if name.kind == "anchor" and name.of not in (None, MERGED.name):
        start = resolve_model(name.of, family)
        whole = name_on(given.partition("@")[0], start.name)
        return ModelRef(name.kind, whole, whole, of=start)
    return ModelRef(name.kind, given, given)


def _calibration(config: CalibrationConfig, start: ModelRef, family: Family) -> ModelRef:
    whole = name_on(name_calibration(config, family), start.name)
    return ModelRef("calibrated", whole, "calibrated" if start.kind == "merged" else whole, config=config, of=start)


class IdentityKey:
    """A cache key for an object without a comparable content: equal only for the very same object, as long as it
    lives."""

    def __init__(self, thing: object) -> None:
        # A weak reference, since a key must not keep a model in memory; the id may be given again once it is gone.
        self._id, self._thing = id(thing), ref(thing)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        thing = self._thing()
        return isinstance(other, IdentityKey) and thing is not None and other._thing() is thing
