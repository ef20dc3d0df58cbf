"""The controls of a calibration: in the body of the Calibrate page, in the sidebar of pages that compare."""

from __future__ import annotations

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state, view
from app.workspace import Workspace
from featcal.calibration.config import CalibrationConfig
from featcal.errors import FeatcalError

DEFAULTS = CalibrationConfig(samples=64)
"""The paper's options for CLIP, with as many samples as a slider can answer for within a second."""
LAM = (*(float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 2, 5)), 10.0)
SAMPLES = (8, 16, 32, 64, 128, 256)
KEYS = ("lam", "rho", "alpha", "samples", "biases", "layernorms")
COMPARE = "calibrated"
"""Key of the switch that says whether this session looks at a calibrated model."""


def on_page(ws: Workspace, n: int) -> CalibrationConfig:
    """All controls in the body; the calibration they ask for is made and compared with on every other page."""
    one, two, three, four = st.columns(4)
    with one:
        lam = _lam()
    with two:
        rho = _rho()
    with three:
        alpha = _alpha()
    with four:
        samples = _samples()
    one, two, three, four = st.columns(4, vertical_alignment="center")
    with one:
        biases = _biases()
    with two:
        layernorms = _layernorms()
    three.button("Back to the paper's values", on_click=_reset, icon=":material/restart_alt:")
    st.session_state[COMPARE] = True
    return _made(ws, CalibrationConfig(lam, rho, alpha, samples, biases=biases, layernorms=layernorms), n, four)


def in_sidebar(ws: Workspace, n: int) -> CalibrationConfig | None:
    """A switch and, if it is on, the controls; None if it is off."""
    with st.sidebar:
        if not st.toggle("Compare with calibrated", key=COMPARE, bind="query-params"):
            return None
        config = CalibrationConfig(_lam(), _rho(), _alpha(), _samples(), biases=_biases(), layernorms=_layernorms())
    return _made(ws, config, n, st.sidebar)


def offer(what: str) -> None:
    """Say what a calibration would add to the page, and one button that makes it."""
    st.info(what, icon=":material/tune:")
    label = f"Calibrate with the paper's defaults (λ {DEFAULTS.lam:g}, ρ {DEFAULTS.rho:g}, α {DEFAULTS.alpha:g})"
    st.button(label, type="primary", on_click=_compare_with_defaults)


def _made(ws: Workspace, config: CalibrationConfig, n: int, bar: DeltaGenerator) -> CalibrationConfig:
    """`config` once its calibration and drift are computed; where that fails, say why and end the page."""
    try:
        with state.progress(bar) as report:
            ws.calibrated(config, report)
            ws.drift("merged", n, report)
            ws.drift(config, n, report)
    except FeatcalError as error:
        view.problem(error)
        st.stop()
    return config


def _lam() -> float:
    return float(
        st.select_slider(
            "λ, ridge strength",
            LAM,
            value=DEFAULTS.lam,
            format_func=lambda value: f"{value:g}",
            key="lam",
            bind="query-params",
            help="Pull towards the anchor (Eq. 12). Paper: 0.05 for CLIP.",
        )
    )


def _rho() -> float:
    note = "Anchor = ρ merged + (1 − ρ) base (Eq. 11): 1 is the merged model. Paper: 2."
    return round(st.slider("ρ, anchor", 0.0, 4.0, DEFAULTS.rho, 0.1, key="rho", bind="query-params", help=note), 2)


def _alpha() -> float:
    note = "Share of the expert's own inputs in the targets (Eq. 10). Paper: 0.3."
    value = st.slider("α, expert features", 0.0, 1.0, DEFAULTS.alpha, 0.05, key="alpha", bind="query-params", help=note)
    return round(value, 2)


def _samples() -> int:
    return int(
        st.select_slider(
            "Calibration samples per task",
            SAMPLES,
            value=DEFAULTS.samples,
            key="samples",
            bind="query-params",
            help="Paper: 256. Fewer are faster.",
        )
    )


def _biases() -> bool:
    return st.toggle("Calibrate biases", DEFAULTS.biases, key="biases", bind="query-params", help="Eq. 55")


def _layernorms() -> bool:
    return st.toggle("Calibrate LayerNorms", DEFAULTS.layernorms, key="layernorms", bind="query-params", help="Eq. 59")


def _reset() -> None:
    for key in KEYS:
        st.session_state[key] = getattr(DEFAULTS, key)


def _compare_with_defaults() -> None:
    _reset()
    st.session_state[COMPARE] = True
