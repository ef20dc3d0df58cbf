"""List the names of the models that studies measure, with their samples and seeds."""

from __future__ import annotations

from featcal.suite.methods import EXPERT, PROPOSED, Method, baseline_names, is_method, merger_names, method
from featcal.suite.name_grammar import model_name
from featcal.suite.options import options_of_class

OF_SAMPLES = ("merged", "regmean++", "surgery", "probsurgery", "calibrated", *PROPOSED)
"""Default methods of studies about calibration samples (their number, corruption)."""
_ANCHORS = ("tsv-m", "wudi-optimum")
"""Models, besides the suite's merged one, from which calibrations start."""


def everything(anchor: float) -> list[str]:
    """Return the name of every recommended method, at its defaults or by its `About.compared`: experts and base,
    mergers, other models made from the experts, calibrations, then methods that act on another model.

    Args:
        anchor: rho of the calibration's anchor, which needs no data.
    """
    calibrated = ["calibrated", *PROPOSED]
    anchored = [f"{one}@{model}" for one in calibrated for model in _ANCHORS]
    beside = [method(name) for name in baseline_names()]
    fitted, after = (
        [one for kind in beside if kind.on_another is on for one in _models_of(kind)] for on in (False, True)
    )
    mergers = [one for name in merger_names() for one in _models_of(method(name))]
    return [EXPERT, "base", "merged", *mergers, f"anchor:rho={anchor:g}", *fitted, *calibrated, *anchored, *after]


def _models_of(kind: type[Method]) -> tuple[str, ...]:
    return kind.about.compared or (kind.kind,)


def with_samples(model: str, samples: int, seed: int) -> str:
    """Return the name with these samples and this seed wherever it, or the model below it, has no such option.

    Raises:
        InputError: an invalid name.

    >>> with_samples("polished:steps=5@calibrated:seed=1", 8, 42)
    'polished:steps=5,samples=8,seed=42@calibrated:seed=1,samples=8'
    >>> with_samples("dare:drop=0.9", 8, 42), with_samples("tsv-m", 8, 42)
    ('dare:drop=0.9,seed=42', 'tsv-m')
    """
    name = model_name(model)
    takes = _draws(name.kind)
    if not takes and name.of is None:
        return model
    values = {"samples": str(samples), "seed": str(seed)}
    options = {**dict(name.options), **{one: values[one] for one in takes if one not in dict(name.options)}}
    settings = ",".join(f"{option}={value}" for option, value in options.items())
    below = "" if name.of in (None, "merged") else f"@{with_samples(str(name.of), samples, seed)}"
    return f"{name.kind}{':' if settings else ''}{settings}{below}"


def takes_samples(model: str) -> bool:
    """Say whether `with_samples` can set the number of samples: False if the name states it anywhere.

    >>> [takes_samples(name) for name in ("calibrated:rho=1", "tsv-m", "polished:steps=5@calibrated:samples=8")]
    [True, True, False]
    """
    name = model_name(model)
    return "samples" not in dict(name.options) and (name.of in (None, "merged") or takes_samples(str(name.of)))


def _draws(kind: str) -> tuple[str, ...]:
    """Return the given samples and seed as options, if models of this kind have these options."""
    own = [one.name for one in options_of_class(method(kind))] if is_method(kind) else []
    return ("samples", "seed") if kind == "calibrated" else tuple(one for one in ("samples", "seed") if one in own)
