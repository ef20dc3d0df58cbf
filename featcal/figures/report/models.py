"""Name models for charts: short names without markup, in the colours of four roles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from featcal.calibration.calibrate import config_for
from featcal.family.opening import Family
from featcal.figures.names import cut_text, short_model
from featcal.figures.theme import ROLES, Shown
from featcal.session.model_names import holds_calibration
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.calibration_options import OPTIONS, CalibrationConfig
from featcal.suite.methods import ALL, REFERENCE
from featcal.suite.name_grammar import model_name
from featcal.suite.options import format_value
from featcal.system.errors import InputError

MOST = 2
"""Most models of one role that charts can distinguish."""
_LABEL = 36
"""Most characters of a model's name in a chart; one with a calibration's options may have twice as many."""


def name_models(names: Sequence[str], session: Session) -> dict[str, str]:
    """Map the names of a report's models in charts (`Shown`) to their full names, which identify them in the suite.

    Raises:
        InputError: more models of one role than charts can distinguish, or an unknown name.
    """
    found = label_models(((name, session.resolve(name)) for name in dict.fromkeys(names)), session.family)
    roles = [shown.role for shown in found if isinstance(shown, Shown)]
    for role in roles:
        if roles.count(role) > MOST:
            like = ", ".join(name for name, one in zip(dict.fromkeys(names), roles, strict=True) if one == role)
            raise InputError(
                f"{like} would look alike: a chart can distinguish {MOST} models of a role; write two reports"
            )
    return {shown: model.name for shown, model in found.items()}


def label_models(named: Iterable[tuple[str, ModelRef]], family: Family) -> dict[str, ModelRef]:
    """Map names in charts (`Shown`) to models. Of two models of a role one is drawn as the second: not the suite's own,
    else the later in the alphabet, so that colours stay when models change places.

    Args:
        named: the given name, and its model.
        family: of the suite whose recommended options a label leaves out.
    """
    found: dict[str, ModelRef] = {}
    everything = [(text, model, find_role(text)) for text, model in named]
    first = {
        role: min((text != role, text) for text, _, other in everything if other == role) for *_, role in everything
    }
    for text, model, role in everything:
        label = _label(text, model, family)
        # A plain role's name means the suite's own model of that role: nothing else may be called by it.
        while label in found or (label in ROLES and text not in (label, "merged")):
            label += " (B)"
        one_expert = text.startswith("expert:")  # beside every expert on its own task, which pages add
        found[Shown(label, role, first[role][1] != text or one_expert)] = model
    return found


def find_role(text: str) -> str:
    """Return the role whose colours a model has: a merge the merged model's, a folder with a record a calibration's."""
    kind = model_name(text).kind
    if kind != REFERENCE:
        return kind if kind in ROLES else "merged"
    return "calibrated" if holds_calibration(text) else "merged"


def _label(text: str, model: ModelRef, family: Family) -> str:
    """Return a short name without anything that Markdown or plotly would draw."""
    config, of = model.config, model.of
    if config is not None and text != "calibrated":
        words = ["calibrated", config.recipe, *_differences(config, family)]
    elif model_name(text).kind == REFERENCE:
        words = [Path(text).name or text]
    else:
        words = [short_model(text if of is None else text.partition("@")[0])]
    if of is not None and of.kind != "merged" and text != "calibrated":  # a role is a label of its own
        words.append(f"of {_label(of.name, of, family)}")
    has_options = config is not None or (of is not None and of.config is not None)
    return cut_text(re.sub(r"[^\w .,+()-]+", "-", ", ".join(words)), 2 * _LABEL if has_options else _LABEL)


def _differences(config: CalibrationConfig, family: Family) -> list[str]:
    """Return the options that are not the suite's own for the recipe, as one text; nothing if there are none."""
    own = config_for(family, recipe=config.recipe)
    words = [
        f"{option.symbol or name} {'+'.join(value or (ALL,)) if option.kind is tuple else format_value(value)}"
        for name, option in OPTIONS.items()
        if (value := getattr(config, name)) != getattr(own, name)
    ]
    return [" ".join(words)] if words else []
