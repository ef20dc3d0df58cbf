"""What a model of a suite may be named by, and what tells it from others."""

from __future__ import annotations

import shlex
from collections.abc import Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import ref

from featcal.baselines.shared.baseline import Baseline, baseline_options
from featcal.baselines.shared.folded import with_heads
from featcal.calibration.anchor import AnchorWeights
from featcal.calibration.calibrate import all_parts, config_for
from featcal.calibration.config import IDLE, NUMBERS, OF_A_RECIPE, PAPER, PARTIAL, CalibrationConfig
from featcal.export.merge import recipe_for
from featcal.family.opening import Calibrated, Family
from featcal.formats.weights import Weights
from featcal.session.fingerprint import model_stamp
from featcal.suite.methods import baseline_names, is_baseline, is_method, method
from featcal.suite.name_grammar import (
    ALL,
    REFERENCE,
    ModelName,
    format_parts,
    known_option,
    model_name,
    parts_of,
    reference_in,
    takes_options,
    value_of,
)
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, exactly
from featcal.system.json_files import read_json
from featcal.system.sandbox import require_inside

ModelId = str | CalibrationConfig | Weights | Calibrated
"""A model of a suite: a name (`suite.name_grammar`), the options it is calibrated with, a calibration's result, or
weights. "expert" is every expert on its own task, where models are scored or pooled."""
_OPTIONS = {name: type(value) for name, value in asdict(CalibrationConfig()).items()}
_SHORT = {"cautious": bool}
"""Short for several of these options, which is what a full name says."""
_RHO = "rho"


def resolve_model(model: ModelId, family: Family) -> ModelId:
    """What a name stands for: of "calibrated" the options (those that are not said are the suite's, else the
    paper's), of a baseline and of another model calibrated the name with all options, of every other model itself.

    Raises:
        InputError: an option that is unknown or outside its range, or a name that is a folder's as well.
    """
    if not isinstance(model, str):
        return model
    name = _read(model)
    if is_baseline(name.kind):
        below = "merged" if name.of is None else _model_below(name, family)
        return baseline_options(name, family).name + ("" if below == "merged" else f"@{below}")
    if name.kind != "calibrated":
        return model
    config = _config_of(name, family)
    return config if name.of == "merged" else f"{full_name(config, family)}@{_model_below(name, family)}"


def calibration_of(model: str, family: Family) -> tuple[CalibrationConfig, str]:
    """The options of a calibration that is named, and the full name of the model that is calibrated.

    Raises:
        InputError: a name of another kind, or an option that is unknown or outside its range.
    """
    name = _read(model)
    if name.kind != "calibrated":
        raise InputError(f"model '{model}' is no calibration; write calibrated:lam=0.05,rho=2@{model}")
    return _config_of(name, family), _model_below(name, family)


def _config_of(name: ModelName, family: Family) -> CalibrationConfig:
    options: dict[str, Any] = {}
    for option, text in name.options:
        known_option(option, (*_OPTIONS, *_SHORT), "calibrated")
        if option in PARTIAL:
            options[option] = parts_of(text) or all_parts(family)[option]
            continue
        kind = _SHORT.get(option) or _OPTIONS[option]
        options[option] = value_of(text, kind, f"model 'calibrated': {option}")
    return config_for(family, **options)


def _model_below(name: ModelName, family: Family) -> str:
    """The full name of the model that another one is made of."""
    return full_name(resolve_model(name.of or "merged", family), family)


def baseline_of(model: str, family: Family) -> tuple[Baseline, str]:
    """The options of a baseline that is named, and the name of the model that it is made of.

    Raises:
        InputError: a name of another kind, or an option that is unknown or outside its range.
    """
    name = _read(model)
    if not is_baseline(name.kind):
        raise InputError(f"model '{model}' is no baseline; those are {', '.join(baseline_names())}")
    return baseline_options(name, family), name.of or "merged"


def full_name(model: ModelId, family: Family) -> str:
    """The name that `resolve_model` makes the same model of: of options all that matter most, and what differs from the
    suite's; of an object that has no name its label.

    >>> full_name("anchor:rho=2", None)
    'anchor:rho=2'
    """
    if not isinstance(model, CalibrationConfig):
        return label_of(model)
    own = config_for(family)
    always = (*NUMBERS[model.recipe], "samples")
    said = [
        f"{name}={_format_value(value)}"
        for name in _OPTIONS
        if name not in IDLE
        if (value := getattr(model, name)) != getattr(own, name) or name in always
    ]
    return f"calibrated:{','.join(said)}"


def calibrate_command(
    suite: str, config: CalibrationConfig, defaults: CalibrationConfig, out: str, model: str = "merged"
) -> str:
    """The `featcal calibrate` line with these options.

    Args:
        suite: its name or its file.
        defaults: the suite's own options; of what is seldom changed, what differs from them is said.
        model: what is calibrated.
    """
    parts = ["featcal", "calibrate", suite, *(() if model == "merged" else ("--model", model))]
    parts += ["--recipe", config.recipe] if config.recipe != PAPER or config.recipe != defaults.recipe else []
    for name in (*NUMBERS[config.recipe], "samples"):
        parts += _flag(name, getattr(config, name))
    for name in _OPTIONS:
        if name not in ("recipe", "samples", *OF_A_RECIPE, *PARTIAL, *IDLE):
            value = getattr(config, name)
            parts += _flag(name, value) if value != getattr(defaults, name) else []
    for name in PARTIAL:
        chosen = getattr(config, name)
        if chosen is not None or getattr(defaults, name) is not None:
            listed = (ALL,) if chosen is None else chosen
            apart = any("," in one for one in listed)  # a list with commas between would be read as other names
            parts += [word for one in (listed if apart else [",".join(listed)]) for word in (f"--{name}", one)]
    return shlex.join([*parts, "--out", out])


def _flag(name: str, value: bool | float | str) -> list[str]:
    """Return an option as words of the command line."""
    flag = name.replace("_", "-")
    return [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", _format_value(value)]


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, tuple):
        return format_parts(value)
    return exactly(value) if isinstance(value, float) else str(value).lower()


def weights_of(model: str, family: Family) -> Weights:
    """The tensors of a model that is named, but for calibrated ones and baselines.

    Raises:
        InputError: no such model, options that it does not have, or a checkpoint that does not fit the suite.
    """
    name = _read(model)
    if name.kind == "expert":
        return _expert(name, family)
    if name.kind == "anchor":
        return AnchorWeights(_rho(name, model), family.base, family.merged)
    if name.kind == REFERENCE:
        return with_heads(family, family.model(model), Path(model).expanduser())
    if name.kind in ("base", "merged"):
        return family.model(model)
    return family.merge(recipe_for(family.suite, model))


def _read(model: str) -> ModelName:
    """The parts of a name that can mean one thing alone."""
    name = model_name(model)
    if takes_options(model) and Path(model).exists():
        option = "seed=42" if model == "calibrated" else "scale=1"
        if is_method(model):
            option = method(model)().name.partition(":")[2].partition(",")[0] or "dtype=float32"
        raise InputError(
            f"two models are called '{model}': the folder here, and what featcal calls so; write ./{model} for the "
            f"folder, or give the other an option, such as {model}:{option}"
        )
    return name


def _expert(name: ModelName, family: Family) -> Weights:
    known = family.experts
    if name.task is None:
        raise InputError(f"model 'expert' is every expert on its own task; name one: expert:{next(iter(known))}")
    if name.task not in known:
        raise InputError(
            f"model 'expert:{name.task}': no such task; there are {', '.join(known)}.{did_you_mean(name.task, known)}"
        )
    return known[name.task]


def _rho(name: ModelName, model: str) -> float:
    for option, text in name.options:
        known_option(option, (_RHO,), "anchor")
        return float(value_of(text, float, f"model '{model}': {_RHO}"))
    raise InputError("model 'anchor' needs its rho, such as anchor:rho=2")


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
    reference = reference_in(model)
    if reference is None:
        return model
    return model, Path.cwd(), model_stamp(reference, Path.cwd())


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
    return recorded_calibration(folder)[0]


def recorded_calibration(folder: Path) -> tuple[CalibrationConfig, str]:
    """The options of the calibration that wrote a folder, and the name of the model that it calibrated.

    Raises:
        InputError: it holds no record of one.
    """
    require_inside(folder / "featcal.json", "record")
    missing = f"{folder} has no featcal.json of a calibration; give a calibrated folder or 'merged'"
    record = read_json(folder / "featcal.json", missing=missing)
    try:
        return CalibrationConfig(**record["config"]), str(record.get("model", "merged"))
    except (KeyError, TypeError) as error:
        raise InputError(missing) from error
