"""Load a whole model with transformers' `from_pretrained`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal.formats.checkpoint import read_config
from featcal.formats.grid import SETTINGS
from featcal.formats.in_memory import model_beside
from featcal.formats.located_model import explain_model_errors
from featcal.system.errors import InputError, NumericalError


def load_pretrained(model_class: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model (float32, eval mode) and transformers' loading report; nothing else goes to stderr.

    Tensors of another shape are listed in the report as `mismatched_keys`. For the folder of a model in memory, which
    has no weights, the model's own tensors are used. Packed weights are unpacked.
    """
    held = model_beside(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with _quietly(folder):
        if held is None:
            model, report = model_class.from_pretrained(folder, **options, **_unpacking(model_class, folder))
        else:
            tensors = {name: tensor.cpu() for name, tensor in held.tensors.items()}
            model, report = model_class.from_pretrained(None, config=str(folder), state_dict=tensors, **options)
    return model.eval(), report


def _unpacking(model_class: Any, folder: Path) -> dict[str, Any]:
    """Return the option that unpacks packed weights while loading; none for a folder without them."""
    if SETTINGS not in read_config(folder, "model"):
        return {}
    # Else they are unpacked at the first call of the whole model, which a caller of one of its parts never makes.
    from transformers import AutoConfig

    config = (getattr(model_class, "config_class", None) or AutoConfig).from_pretrained(folder)
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    return {"config": config}


def model_of(folder: Path, tensors: Mapping[str, Tensor]) -> Any:
    """Return the model that `from_pretrained` would load from a folder with these tensors: in eval mode, of the class
    and dtype in its `config.json`. It may share memory with the tensors.

    Args:
        folder: has all files of a checkpoint except the weights.
        tensors: by their names in files.

    Raises:
        InputError: the folder names no class of transformers.
        NumericalError: a tensor would be re-initialised.
    """
    import transformers

    config = read_config(folder, "model")
    named = str(next(iter(config.get("architectures") or ()), ""))
    model_class = getattr(transformers, named, None)
    if model_class is None:
        raise InputError(f"config.json names {named or 'no class'}, which transformers does not have; save the model")
    options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with _quietly(folder):
        model, report = model_class.from_pretrained(None, config=str(folder), state_dict=dict(tensors), **options)
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    _require_complete(report, named)
    model.config.name_or_path = ""
    return model.eval()


@contextmanager
def _quietly(folder: Path) -> Iterator[None]:
    """Run one load at a time, without progress bars and advice on stderr; error messages name the folder."""
    from transformers.utils import logging

    with _loading:
        shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        # The report says what matters; the advice may be wrong: an untied head is advised against whatever config.json
        # says.
        logging.set_verbosity_error()
        try:
            with explain_model_errors("transformers", str(folder / "config.json")):
                yield
        finally:
            logging.set_verbosity(verbosity)
            if shown:
                logging.enable_progress_bar()


_loading = threading.Lock()
"""Lock that is held while transformers loads: loading replaces torch's initialisers for the whole process, and a
second load at the same time would restore the wrong ones.
"""


def load_complete(model_class: Any, folder: Path, unused: tuple[str, ...] = ()) -> Any:
    """Return the model, checking that every tensor came from the folder.

    Args:
        unused: beginnings of names of tensors that may be missing, since nothing is computed with them.

    Raises:
        NumericalError: a tensor would be re-initialised.
    """
    model, report = load_pretrained(model_class, folder)
    _require_complete(report, str(folder), unused)
    return model


def _require_complete(report: Mapping[str, Any], what: str, unused: tuple[str, ...] = ()) -> None:
    missing = [name for name in map(str, report["missing_keys"]) if not unused or not name.startswith(unused)]
    lost = sorted([*missing, *map(str, report["mismatched_keys"])])
    if lost:
        raise NumericalError(f"{what}: transformers would re-initialise {', '.join(lost[:4])}; not finished")
