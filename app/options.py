"""The controls of a calibration: in the body of the Calibrate page, in the sidebar of pages that compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state
from app.workspace import Workspace
from featcal.calibration.config import CalibrationConfig

LAM = (*(float(f"{digit}e{power}") for power in range(-7, 1) for digit in (1, 2, 5)), 10.0)
SAMPLES = (8, 16, 32, 64, 128, 256)
SWITCHES = {
    "biases": ("Calibrate biases", "Eq. 55"),
    "layernorms": ("Calibrate LayerNorms", "Eq. 59"),
    "rmsnorms": (
        "Calibrate RMSNorms",
        "featcal's extension of Eq. 59 to norms without a shift; the paper leaves them.",
    ),
    "completion_only": ("Count answers alone", "Tokens of the prompt get weight 0 in the statistics."),
}
"""Options that are on or off: label and help."""
KEYS = ("lam", "rho", "alpha", "samples", *SWITCHES)
COMPARE = "calibrated"
"""Key of the switch that says whether this session looks at a calibrated model."""
_OWNER = "suite of the options"


def on_page(ws: Workspace, n: int) -> CalibrationConfig:
    """All controls in the body; the calibration they ask for is made and compared with on every other page.

    Its features on `n` samples per task and those of the merged model are there when this returns.
    """
    _follow_suite(ws)
    first = st.columns(4)
    second = st.columns(4, vertical_alignment="center")
    switches = ws.switches
    config = _controls(ws, [*first, *second[: len(switches)]])
    second[min(len(switches), 3)].button(
        "Back to this suite's defaults", on_click=_reset, args=(ws.defaults,), icon=":material/restart_alt:"
    )
    st.session_state[COMPARE] = True
    with state.progress(second[3]) as report:
        ws.calibrated(config, report)
        ws.features("merged", n, report)
        ws.features(config, n, report)
    return config


def in_sidebar(ws: Workspace) -> CalibrationConfig | None:
    """A switch and, if it is on, the controls of a calibration, which is then made; None if it is off."""
    with st.sidebar:
        if not st.toggle("Compare with calibrated", key=COMPARE, bind="query-params"):
            return None
        _follow_suite(ws)
        config = _controls(ws, [st.sidebar] * (4 + len(ws.switches)))
        with state.progress() as report:
            ws.calibrated(config, report)
    return config


def offer(ws: Workspace, what: str) -> None:
    """Say what a calibration would add to the page, and one button that makes it."""
    st.info(what, icon=":material/tune:")
    defaults = ws.defaults
    label = f"Calibrate with the defaults (λ {defaults.lam:g}, ρ {defaults.rho:g}, α {defaults.alpha:g})"
    st.button(label, type="primary", on_click=_compare_with, args=(defaults,))


def _controls(ws: Workspace, places: Sequence[DeltaGenerator]) -> CalibrationConfig:
    """λ, ρ, α, samples, then the switches that mean something for this architecture, each in its place."""
    defaults = ws.defaults
    lam, rho, alpha, samples = places[:4]
    config = replace(
        defaults,
        lam=float(_steps(lam, "λ, ridge strength", "lam", LAM, defaults.lam, _LAM)),
        rho=round(rho.slider("ρ, anchor", 0.0, 4.0, defaults.rho, 0.1, key="rho", bind="query-params", help=_RHO), 2),
        alpha=round(
            alpha.slider(
                "α, expert features", 0.0, 1.0, defaults.alpha, 0.05, key="alpha", bind="query-params", help=_ALPHA
            ),
            2,
        ),
        samples=int(_steps(samples, "Calibration samples per task", "samples", SAMPLES, defaults.samples, _SAMPLES)),
    )
    switched: dict[str, Any] = {}
    for place, name in zip(places[4:], ws.switches, strict=True):
        label, note = SWITCHES[name]
        switched[name] = place.toggle(label, getattr(defaults, name), key=name, bind="query-params", help=note)
    return replace(config, **switched)


_LAM = "Pull towards the anchor (Eq. 12). Paper: 0.05 for CLIP, 1e-5 for FLAN-T5, 1e-5 or 3 for Llama."
_RHO = "Anchor = ρ merged + (1 − ρ) base (Eq. 11): 1 is the merged model. Paper: 2, and 0.5 for Llama."
_ALPHA = (
    "Share of the expert's own inputs in the targets (Eq. 10). Paper: 0.3 for CLIP, 0.6 for FLAN-T5, 0.15 for Llama."
)
_SAMPLES = "Paper: 256. Fewer are faster."


def _steps(place: DeltaGenerator, label: str, key: str, steps: Sequence[float], default: float, note: str) -> float:
    """A slider over unevenly spaced values, the default among them."""
    offered = sorted({*steps, default})
    return place.select_slider(
        label, offered, value=default, format_func=lambda value: f"{value:g}", key=key, bind="query-params", help=note
    )


def _follow_suite(ws: Workspace) -> None:
    """Another suite starts from its own defaults; what a link or an earlier page has chosen stays."""
    before = st.session_state.get(_OWNER)
    st.session_state[_OWNER] = state.reference()
    if before not in (None, state.reference()):
        _reset(ws.defaults)


def _reset(defaults: CalibrationConfig) -> None:
    for key in KEYS:
        st.session_state[key] = getattr(defaults, key)


def _compare_with(defaults: CalibrationConfig) -> None:
    _reset(defaults)
    st.session_state[COMPARE] = True
