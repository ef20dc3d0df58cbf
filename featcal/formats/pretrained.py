"""Load a whole model through transformers as its users do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from featcal.formats.located import explain_model_errors
from featcal.system.errors import NumericalError


def load_pretrained(model_class: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model (float32, eval mode) and transformers' loading report; nothing else goes to stderr.

    Tensors of another shape are in the report as `mismatched_keys`.
    """
    from transformers.utils import logging

    with _loading:
        shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        # The report says what matters; the advice may be wrong: an untied head is advised against whatever config.json
        # says.
        logging.set_verbosity_error()
        try:
            with explain_model_errors("transformers", str(folder / "config.json")):
                model, report = model_class.from_pretrained(
                    folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
                )
        finally:
            logging.set_verbosity(verbosity)
            if shown:
                logging.enable_progress_bar()
    return model.eval(), report


_loading = threading.Lock()
"""Held while transformers loads: it replaces torch's initialisers for the whole process, and the later of two loads at
once would put back the replacements of the other."""


def load_complete(model_class: Any, folder: Path) -> Any:
    """Return the model, checking that every tensor came from the folder.

    Raises:
        NumericalError: a tensor would be re-initialised.
    """
    model, report = load_pretrained(model_class, folder)
    lost = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if lost:
        raise NumericalError(f"{folder}: transformers would re-initialise {', '.join(lost[:4])}; not finished")
    return model
