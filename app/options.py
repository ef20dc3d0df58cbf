"""The controls of a calibration: in the body of the Calibrate page, in the sidebar of pages that compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import opening, state, stopped, view
from app.selection import CALIBRATED, OPTIONS, SYMBOLS, chosen_parts, turned_switches
from featcal.calibration.config import (
    CAUTIOUS,
    NUMBERS,
    PAPER,
    RECIPES,
    CalibrationConfig,
    idle_options,
    resolve_parts,
)
from featcal.figures.names import plain
from featcal.session.session import Session
from featcal.system.errors import InputError
from featcal.system.formatting import exactly

LAM = (*(float(f"{digit}e{power}") for power in range(-7, 1) for digit in (1, 2, 5)), 10.0)
SAMPLES = (8, 16, 32, 64, 128, 256)
RHO = tuple(step / 10 for step in range(41))
ALPHA = tuple(step / 20 for step in range(21))
MU = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0, 10.0)
SWITCHES = {
    "biases": (
        "Calibrate biases",
        "Fit each bias to what the new weights leave over on average (Eq. 55). Off: biases stay as merged.",
    ),
    "layernorms": (
        "Calibrate LayerNorms",
        "Fit scale and shift of every LayerNorm to the experts' (Eq. 59). Off: they stay as merged.",
    ),
    "rmsnorms": (
        "Calibrate RMSNorms",
        "featcal's extension of Eq. 59 to norms without a shift; the paper leaves them.",
    ),
    "completion_only": ("Count answers alone", "Tokens of the prompt get weight 0 in the statistics."),
    "weigh_tokens": (
        "Weigh tokens",
        "A token counts by how much the expert's task vector does to it. Helps most with text; a tenth dearer.",
    ),
}
"""Options that are on or off: label and help."""


def controls_on_page(session: Session) -> None:
    """All controls in the body of a page."""
    _recipe(session, st)
    switches = len(_switches(session))
    first = st.columns(len(_sliders(session)))
    second = st.columns(max(4, switches + 1), vertical_alignment="center")
    _controls(session, [*first, *second[:switches]])
    _offer_defaults(second[min(switches, len(second) - 1)])
    _exact_fields(session, second[-1])
    _parts(session)


def controls_in_sidebar(session: Session) -> None:
    """The same in the sidebar."""
    _recipe(session, st.sidebar)
    _controls(session, [st.sidebar] * (len(_sliders(session)) + len(_switches(session))))


def describe(config: CalibrationConfig, session: Session) -> str:
    """λ, ρ, α, samples and whatever else differs from the suite's default, in one line."""
    defaults = opening.defaults(session)
    numbers = [] if config.recipe == PAPER else [config.recipe]
    numbers += [f"{SYMBOLS[name]} {exactly(getattr(config, name))}" for name in (*NUMBERS[config.recipe], "samples")]
    numbers += [f"{config.augment} {'copy' if config.augment == 1 else 'copies'}"] if config.augment else []
    numbers += [f"seed {config.seed}"] if config.seed != defaults.seed else []
    numbers += [switch.replace("-", " ") for switch in turned_switches(config, defaults)]
    return " · ".join([*numbers, *(plain(f"only {', '.join(names)}") for names in chosen_parts(config).values())])


def offer(session: Session, what: str) -> None:
    """Say what a calibration would add to the page, and one button that makes it."""
    st.info(what, icon=":material/tune:")
    defaults = opening.defaults(session)
    label = f"Calibrate with the defaults (λ {defaults.lam:g}, ρ {defaults.rho:g}, α {defaults.alpha:g})"
    st.button(label, type="primary", on_click=_reset, kwargs={"b": CALIBRATED})


def chosen_config(session: Session) -> CalibrationConfig:
    """The suite's defaults with what was chosen in their place; ends the page where an option is outside its range."""
    asked = state.selection().options()
    meant = {name: asked[name] for name in asked if name not in SWITCHES or name in opening.switches(session)}
    try:
        config = replace(recipe_defaults(session), **meant)
        return resolve_parts(config, session.family.adapter, session.tasks)
    except InputError as error:
        view.problem(error)
        _offer_defaults(st)
        stopped.end_page()


def recipe_defaults(session: Session) -> CalibrationConfig:
    """Of the recipe and the number of samples that are chosen.

    Raises:
        InputError: there is no such recipe, or no such number.
    """
    selected = state.selection()
    return opening.defaults(session, selected.recipe, selected.samples)


def _recipe(session: Session, place: Any) -> None:
    """How a block is calibrated; another recipe starts from defaults of its own."""
    note = (
        "paper: Algorithm 1 as published. refined: featcal's own, piece by piece inside a block. informed: refined, "
        "with what the experts' weights know as a prior (docs/theory.md)."
    )
    now, home = chosen_config(session).recipe, opening.defaults(session).recipe
    state.control(place.segmented_control, "recipe", now, home, "Recipe", RECIPES, required=True, help=note)
    if now != PAPER:
        config = chosen_config(session)
        on = all(getattr(config, name) == number for name, number in CAUTIOUS.items())
        note = (
            "α 0.3 and β 0: for calibration samples in fog, or drifted from what the model will see; with clean or "
            "merely noisy ones it costs about two points."
        )
        state.control(place.toggle, "cautious", on, False, "Cautious", help=note)


def _switches(session: Session) -> list[str]:
    """Those of the recipe that is chosen."""
    paper = chosen_config(session).recipe == PAPER
    return [name for name in opening.switches(session) if not (paper and name == "weigh_tokens")]


def _controls(session: Session, places: Sequence[DeltaGenerator]) -> CalibrationConfig:
    """λ, ρ, α, samples, then the switches that mean something for this architecture, each in its place."""
    config, defaults, sliders = chosen_config(session), recipe_defaults(session), _sliders(session)

    def control(draw: Any, name: str, label: str, note: str) -> None:
        state.control(draw, name, getattr(config, name), getattr(defaults, name), label, help=note)

    for place, (name, steps, label, note) in zip(places[: len(sliders)], sliders, strict=True):
        now = getattr(config, name)
        offered = sorted({*steps, now, getattr(defaults, name)})
        slider = partial(place.select_slider, options=offered, format_func=_step_name)
        control(slider, name, label, note)
    for place, name in zip(places[len(sliders) :], _switches(session), strict=True):
        control(place.toggle, name, *SWITCHES[name])
    return config


def _parts(session: Session) -> None:
    """What is calibrated, and on which tasks; nothing chosen is all."""
    config, adapter = chosen_config(session), session.family.adapter
    named = ", ".join(chosen_parts(config)) or "everything"
    with st.expander(f"Calibrate a part (now: {named})", icon=":material/select_all:"):
        offered = {
            "blocks": ("Blocks", adapter.block_layers(), "What is not chosen stays as merged, to the last bit."),
            "maps": ("Kinds of linear maps", adapter.parts(), "Norms have switches of their own."),
            "tasks": ("Tasks", session.tasks, "Whose experts and samples count; drift and scores are of all tasks."),
        }
        for place, (name, (label, names, note)) in zip(st.columns(3), offered.items(), strict=True):
            now = list(getattr(config, name) or ())
            state.control(place.multiselect, name, now, [], label, names, placeholder="all", help=note)


def _exact_fields(session: Session, place: DeltaGenerator) -> None:
    """Fields for values between a slider's steps."""
    config, defaults = chosen_config(session), recipe_defaults(session)
    most = {"alpha": 1.0, "beta": 1.0}
    with place.popover("Type values", icon=":material/keyboard:"):
        for name in NUMBERS[config.recipe]:
            state.control(
                st.number_input,
                name,
                getattr(config, name),
                getattr(defaults, name),
                SYMBOLS[name],
                min_value=None if name == "rho" else 0.0,
                max_value=most.get(name),
                format="%.7g",
                step=None,
                variant="typed",
            )
        if "augment" not in idle_options(session.family.adapter):
            note = "Varied copies of every calibration picture, each as dear as one: 1, or 3 below 32 samples, help."
            state.control(
                st.number_input,
                "augment",
                config.augment,
                defaults.augment,
                "Copies",
                min_value=0,
                step=1,
                help=note,
                variant="typed",
            )
        note = "Decides which calibration samples are drawn, together with the task's name."
        state.control(
            st.number_input, "seed", config.seed, defaults.seed, "Seed", min_value=1, step=1, help=note, variant="typed"
        )


# select_slider: a slider with a range would be another widget, drawn at its end, as soon as a typed value widens it
_SLIDERS = (
    (
        "lam",
        LAM,
        "λ, ridge strength",
        "Pull towards the anchor (Eq. 12). Paper: 0.05 for CLIP, 1e-5 for FLAN-T5, 1e-5 or 3 for Llama.",
    ),
    (
        "rho",
        RHO,
        "ρ, anchor",
        "Anchor = ρ merged + (1 − ρ) base (Eq. 11): 1 is the merged model. Paper: 2, and 0.5 for Llama.",
    ),
    (
        "alpha",
        ALPHA,
        "α, expert features",
        "Share of the expert's own inputs in the targets (Eq. 10). Paper: 0.3 for CLIP, 0.6 for FLAN-T5, 0.15 for "
        "Llama.",
    ),
    (
        "beta",
        ALPHA,
        "β, stream",
        "Share of the residual stream's gap to the expert that output maps are to close; not of the paper's recipe.",
    ),
    (
        "mu",
        MU,
        "μ, prior",
        "Weight of what the experts' own weights say of the inputs that they were trained on; 0 is the refined recipe.",
    ),
    ("samples", SAMPLES, "Calibration samples per task", "Paper: 256. Fewer are faster."),
)
"""Option, the values that its slider offers, label and help."""


def _sliders(session: Session) -> list[tuple[str, tuple[float, ...], str, str]]:
    """Those of the recipe that is chosen."""
    return [one for one in _SLIDERS if one[0] in (*NUMBERS[chosen_config(session).recipe], "samples")]


def _step_name(step: float | str) -> str:
    """A step as its slider names it; of one that is not offered any more streamlit hands back the name."""
    return step if isinstance(step, str) else exactly(step)


def _offer_defaults(place: Any) -> None:
    place.button("Back to this suite's defaults", on_click=_reset, icon=":material/restart_alt:")


def _reset(**also: Any) -> None:
    """Leave every option to the suite."""
    state.select(**dict.fromkeys(OPTIONS), **also)
