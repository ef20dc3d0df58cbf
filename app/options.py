"""Draw the controls of a calibration, only on the Calibrate page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import opening, state, view
from app.selection import OPTIONS, chosen_parts, turned_switches
from featcal.calibration.config import all_parts, idle_options, resolve_options
from featcal.figures.names import plain
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.calibration_options import (
    CAUTIOUS,
    INFORMED,
    NUMBERS,
    PAPER,
    PARTIAL,
    SHORTHANDS,
    SWITCHES,
    CalibrationConfig,
    Option,
    recipe_numbers,
)
from featcal.system.errors import InputError
from featcal.system.formatting import exactly, message, shorten


def controls_on_page(session: Session) -> DeltaGenerator:
    """Draw the recipe and its sliders in the body of a page, above rarely changed options; return the place of
    these."""
    with st.container(gap="xsmall"):
        _recipe(session, st)
        _recommend(session)
        sliders = [st.container() for _ in _sliders(session)]
        with st.container(horizontal=True, gap="small"):
            more = st.popover("More", icon=":material/settings:", type="tertiary")
            _exact_fields(session, st)
    _controls(session, [*sliders, *[more] * len(_switches(session))])
    with more:
        _parts(session)
    return more


def summarise_options(model: ModelRef, session: Session) -> str:
    """Return recipe, λ, ρ, α, samples and all other options that differ from the suite's default, in one line."""
    config, _ = model.require_calibration()
    numbers = _numbers(config, (*NUMBERS[config.recipe], "samples"))
    return " · ".join([config.recipe, *numbers, *_rest(config, session)])


def describe_difference(config: CalibrationConfig, session: Session) -> str:
    """Return the differences from the defaults of suite and recipe, in one line."""
    home, own = opening.defaults(session), opening.defaults(session, config.recipe, config.samples)
    recipe = [] if config.recipe == home.recipe else [config.recipe]
    moved = [name for name in NUMBERS[config.recipe] if getattr(config, name) != getattr(own, name)]
    moved += ["samples"] if config.samples != home.samples else []
    return " · ".join([*recipe, *_numbers(config, moved), *_rest(config, session)]) or "defaults"


def _numbers(config: CalibrationConfig, names: Iterable[str]) -> list[str]:
    return [f"{OPTIONS[name].symbol} {exactly(getattr(config, name))}" for name in names]


def _rest(config: CalibrationConfig, session: Session) -> list[str]:
    """Return the differences from the suite's defaults, apart from a recipe's numbers and the samples."""
    defaults = opening.defaults(session)
    differences = _numbers(config, ["decisions"] if config.decisions != defaults.decisions else [])
    differences += [f"{config.augment} {'copy' if config.augment == 1 else 'copies'}"] if config.augment else []
    differences += [f"seed {config.seed}"] if config.seed != defaults.seed else []
    differences += [switch.replace("-", " ") for switch in turned_switches(config, defaults)]
    return [*differences, *(plain(f"only {', '.join(names)}") for names in chosen_parts(config).values())]


def defaults_explained(session: Session, config: CalibrationConfig) -> str:
    """Explain in three sentences the origin of a recipe's defaults: recipe, architecture, number of samples."""
    home, own = opening.defaults(session), opening.defaults(session, config.recipe, config.samples)
    own_options, names = session.family.suite.calibration.explicit_options(), NUMBERS[config.recipe]
    why = "which this suite's file asks for" if "recipe" in own_options else "which is the published one"
    chosen = "" if config.recipe == home.recipe else f"; {config.recipe} was chosen in its place"
    numbers = ", ".join(_numbers(own, names))
    whose = "the paper's" if config.recipe == PAPER else "featcal's own"
    alike = recipe_numbers(config.recipe, config.samples) == recipe_numbers(config.recipe, config.samples, False)
    where = "all architectures" if alike and config.recipe != PAPER else f"{session.family.adapter.family} models"
    bare = resolve_options(
        CalibrationConfig(recipe=config.recipe, samples=config.samples), session.family.adapter, session.tasks
    )
    suite_symbols = [OPTIONS[name].symbol for name in names if getattr(own, name) != getattr(bare, name)]
    but = f", but for {', '.join(suite_symbols)}, which the suite's file sets" if suite_symbols else ""
    every = {n: opening.defaults(session, config.recipe, n) for n in map(int, OPTIONS["samples"].steps)}
    values = {name: {n: getattr(one, name) for n, one in every.items()} for name in names}
    moving = [f"{OPTIONS[name].symbol} ({', '.join(f'{exactly(value)} at {n}' for n, value in one.items())})"
              for name, one in values.items() if len({*one.values()}) > 1]  # fmt: skip
    follow = f"{' and '.join(moving)} follow{'s' * (len(moving) == 1)} the number of samples"
    return (
        f"The default recipe is {home.recipe}, {why}{chosen}. With {config.samples} samples per task: {numbers}, "
        f"{whose} numbers for {where}{but}. "
        f"{follow if moving else 'They are the same for every number of samples'}; {home.samples} is what "
        f"{'the suite asks for' if 'samples' in own_options else 'a slider can answer for quickly'}."
    )


def chosen_config(session: Session) -> CalibrationConfig:
    """Return the suite's defaults with the chosen options; options that cannot be used are left out, with a sentence
    that explains why."""
    asked = state.selection().options()
    meant = {name: asked[name] for name in asked if name not in SWITCHES or name in opening.switches(session)}
    try:
        return _config(session, meant)
    except InputError:
        pass
    kept: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name in sorted(meant, key=lambda name: name not in ("recipe", "samples")):  # which decide on all others
        try:
            _config(session, kept | {name: meant[name]})
            kept[name] = meant[name]
        except InputError as error:
            problems[name] = (
                f"{name} = {shorten(str(meant[name]), 40)} cannot be used and is left out: {message(str(error))}"
            )
    view.leave_out_faults(problems, kept)
    return _config(session, kept)


def _config(session: Session, chosen: Mapping[str, Any]) -> CalibrationConfig:
    """Return the defaults with other options.

    Raises:
        InputError: one of them is out of range or excludes another.
    """
    defaults = opening.defaults(session, chosen.get("recipe"), chosen.get("samples"))
    return resolve_options(replace(defaults, **chosen), session.family.adapter, session.tasks)


def fields_of(session: Session, config: CalibrationConfig) -> dict[str, Any]:
    """Return the fields of the selection for these options; None if suite or recipe give the value."""
    home, own = opening.defaults(session), opening.defaults(session, config.recipe, config.samples)
    left_out = {name: home if name in ("recipe", "samples") else own for name in OPTIONS}
    values = {name: getattr(config, name) for name in OPTIONS}
    return {name: None if value == getattr(left_out[name], name) else value for name, value in values.items()}


def recipe_defaults(session: Session) -> CalibrationConfig:
    """Return the defaults for the chosen recipe and number of samples.

    Raises:
        InputError: there is no such recipe, or no such number.
    """
    selected = state.selection()
    return opening.defaults(session, selected.recipe, selected.samples)


def _recipe(session: Session, place: Any) -> None:
    """Draw the choice of a recipe; another recipe starts from its own defaults."""
    config, home, recipe = chosen_config(session), opening.defaults(session).recipe, OPTIONS["recipe"]
    draw = place.segmented_control
    usable = opening.recipes(session)
    listed = [one for one in recipe.choices if one in usable or one == config.recipe]
    state.control(draw, "recipe", config.recipe, home, recipe.label, listed, required=True, help=recipe.help)
    cautious = SHORTHANDS["cautious"]
    if config.recipe in cautious.recipes:
        on = all(getattr(config, name) == number for name, number in CAUTIOUS.items())
        state.control(place.toggle, "cautious", on, False, cautious.label, help=cautious.help)


def _recommend(session: Session) -> None:
    """Draw a button for the recommended recipe, if another one is chosen and it can be."""
    if chosen_config(session).recipe == INFORMED or INFORMED not in opening.recipes(session):
        return
    st.button(
        f"Recommended: {INFORMED}",
        on_click=state.look_at,
        kwargs={"recipe": INFORMED},
        icon=":material/recommend:",
        type="tertiary",
        help=f"On every suite that was measured, {INFORMED} gave the best average of the recipes; on one, whose "
        "experts are hardly better than the base, that depends on how these were trained. The default recipe is "
        f"{PAPER}, the method as published.",
    )


def _switches(session: Session) -> list[str]:
    """Return the switches of the chosen recipe."""
    recipe = chosen_config(session).recipe
    return [name for name in opening.switches(session) if recipe in OPTIONS[name].recipes]


def _sliders(session: Session) -> list[str]:
    """Return the options of the chosen recipe with a slider."""
    recipe = chosen_config(session).recipe
    found = [name for name, one in OPTIONS.items() if one.steps and recipe in one.recipes]
    return sorted(found, key=lambda name: not OPTIONS[name].of_recipe)  # the recipe's own numbers first, then samples


def _controls(session: Session, places: Sequence[DeltaGenerator]) -> None:
    """Draw λ, ρ, α, samples, then the switches that have an effect for this architecture, each in its place."""
    config, defaults = chosen_config(session), recipe_defaults(session)
    for place, name in zip(places, [*_sliders(session), *_switches(session)], strict=True):
        one, now, home = OPTIONS[name], getattr(config, name), getattr(defaults, name)
        draw: Any = place.toggle
        if one.steps:  # a slider with a range would be another widget as soon as a typed value widens it
            offered = sorted({*one.steps, now, home})
            draw = partial(place.select_slider, options=offered, format_func=_step_name)
        state.control(draw, name, now, home, one.label, help=one.help)


def _parts(session: Session) -> None:
    """Draw the choice of parts to calibrate, and of tasks; no choice means all."""
    config, known = chosen_config(session), all_parts(session.family.adapter, session.tasks)
    for name in PARTIAL:
        one, now = OPTIONS[name], list(getattr(config, name) or ())
        state.control(st.multiselect, name, now, [], one.label, known[name], placeholder=one.left_out, help=one.help)


def _exact_fields(session: Session, place: Any) -> None:
    """Draw fields for values between a slider's steps, and for numbers without a slider."""
    config, defaults = chosen_config(session), recipe_defaults(session)
    idle = idle_options(session.family.adapter)
    with place.popover("Type values", icon=":material/keyboard:", type="tertiary"):
        for name, one in OPTIONS.items():
            if one.kind not in (int, float) or config.recipe not in one.recipes or name in idle:
                continue
            state.control(
                st.number_input,
                name,
                getattr(config, name),
                getattr(defaults, name),
                one.symbol or one.label,
                min_value=_limit(one, one.least),
                max_value=_limit(one, one.most),
                help=one.help,
                variant="typed",
                **({"step": 1} if one.kind is int else {"format": "%.7g", "step": None}),
            )


def _limit(one: Option, value: float | None) -> float | None:
    """Return an end of an option's range for a field; None if it has none."""
    return None if value is None else one.kind(value)


def _step_name(step: float | str) -> str:
    """Return the label of a slider's step; a step that is no longer offered is returned as its own label."""
    return step if isinstance(step, str) else exactly(step)


def reset() -> None:
    """Reset every option to the suite's."""
    state.look_at(**dict.fromkeys(OPTIONS))
