"""Load a whole model through transformers, the way its users will."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_pretrained(model_class: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """(model in float32 and eval mode, transformers' loading report), without a progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.eval(), report
