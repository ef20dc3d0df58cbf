"""Writing a calibrated model to a folder, and the command line that does the same."""

from __future__ import annotations

import shlex
from pathlib import Path

import streamlit as st

from app import state, view
from app.options import SWITCHES
from app.workspace import Workspace
from featcal.calibration.config import CalibrationConfig
from featcal.errors import FeatcalError

_LOADERS = {
    "clip": "CLIPModel",
    "clip_vision_model": "CLIPVisionModel",
    "t5": "T5ForConditionalGeneration",
    "llama": "LlamaForCausalLM",
}
"""`model_type` → the class of transformers that loads it."""


def section(ws: Workspace, config: CalibrationConfig) -> None:
    """Folder name, button, what was written and how to load it."""
    st.subheader("Take it with you")
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    name = left.text_input("Folder to write (must not exist)", default_name(ws.family.suite.name, config), key="folder")
    if right.button("Write the checkpoint", type="primary", icon=":material/save:", width="stretch"):
        try:
            with st.spinner("Writing, reloading and comparing …", show_time=True):
                files = ws.calibrated(config).save(Path(name).expanduser())
            st.session_state["written"] = (config, Path(name).expanduser().resolve(), files)
        except FeatcalError as error:
            view.problem(error)
    written = st.session_state.get("written")
    if written and written[0] == config:
        _show_written(written[1], written[2], ws)
    st.caption("The same from the command line:")
    st.code(command(state.reference(), config, ws.defaults, name), language="bash", wrap_lines=True)


def default_name(suite: str, config: CalibrationConfig) -> str:
    """A folder name that says how the model was made."""
    return f"{suite}-lam{config.lam:g}-rho{config.rho:g}-alpha{config.alpha:g}-n{config.samples}"


def command(suite: str, config: CalibrationConfig, defaults: CalibrationConfig, out: str) -> str:
    """The `featcal calibrate` line with these options; it says of a switch what differs from the suite's defaults."""
    turned = [name for name in SWITCHES if getattr(config, name) != getattr(defaults, name)]
    parts = [
        f"featcal calibrate {shlex.quote(suite)}",
        f"--lam {config.lam:g} --rho {config.rho:g} --alpha {config.alpha:g} --samples {config.samples}",
        *(f"--{'' if getattr(config, name) else 'no-'}{name.replace('_', '-')}" for name in turned),
        f"--out {shlex.quote(out)}",
    ]
    return " ".join(parts)


def _show_written(folder: Path, files: list[str], ws: Workspace) -> None:
    st.success(f"Written and verified by reloading: `{folder}` ({', '.join(files)})", icon=":material/check_circle:")
    if ws.family.adapter.family == "open_clip":
        st.code(f'import open_clip\n\nmodel = open_clip.create_model("local-dir:{folder.as_posix()}")')
        return
    loader = _LOADERS[ws.family.container.config["model_type"]]
    st.code(f'from transformers import {loader}\n\nmodel = {loader}.from_pretrained("{folder.as_posix()}")')
