"""What a model of a suite may be named by, and what tells it from others."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from weakref import ref

from featcal.calibration.config import CalibrationConfig
from featcal.errors import InputError
from featcal.family import Calibrated
from featcal.formats.weights import Weights
from featcal.jsons import read_json
from featcal.suite_files import model_stamp

ModelId = str | CalibrationConfig | Weights | Calibrated
"""A model of a suite: "base", "merged", the options it is calibrated with, a checkpoint (folder or Hub id), a
calibration's result, or weights. "expert" is every expert on its own task, where models are scored or pooled."""


def label_of(model: ModelId) -> str:
    """What charts, tables and documents call a model."""
    if isinstance(model, str):
        return model
    if isinstance(model, CalibrationConfig):
        return "calibrated"
    return model.weights.label if isinstance(model, Calibrated) else model.label


def model_key(model: ModelId) -> Hashable:
    """Equal for the same model of one suite: a name, options, a checkpoint while its files are as they are, an object
    that is the very same."""
    if isinstance(model, CalibrationConfig):
        return model
    if not isinstance(model, str):
        return Same(model)
    return model if model in ("base", "merged") else (model, Path.cwd(), model_stamp(model, Path.cwd()))


class Same:
    """A key for an object that has no content to be told by: equal for the very same object, as long as it lives."""

    def __init__(self, thing: object) -> None:
        self._id, self._thing = id(thing), ref(thing)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        thing = self._thing()
        return isinstance(other, Same) and thing is not None and other._thing() is thing


def recorded_config(folder: Path) -> CalibrationConfig:
    """The options of the calibration that wrote a folder.

    Raises:
        InputError: it holds no record of one.
    """
    missing = f"{folder} has no featcal.json of a calibration; give a calibrated folder or 'merged'"
    try:
        return CalibrationConfig(**read_json(folder / "featcal.json", missing=missing)["config"])
    except (KeyError, TypeError) as error:
        raise InputError(missing) from error
