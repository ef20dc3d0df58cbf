"""Describe a located model, whatever layout its files have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from featcal.formats.weights import Canonical, Stored
from featcal.system.errors import FeatcalError, InputError
from featcal.system.formatting import shorten

Layout = Literal["hf", "open_clip"]
"""Layout of the files, transformers' or open_clip's, by the words of `featcal export --format`."""


TEXT_CLASSES = "SEQ_CLS"
"""peft's name for training on classes of texts."""


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Say whether a `config.json` names a class of transformers with a classifier for texts."""
    return str(next(iter(config.get("architectures") or ()), "")).endswith("ForSequenceClassification")


@dataclass(frozen=True)
class PicturePreprocessing:
    """The function that turns pictures into model inputs, and its name."""

    prepare: Callable[[Sequence[NDArray[np.uint8]]], Tensor]
    """Pictures `[H, W, 3]` → `pixel_values` `[n, 3, H, W]` float32."""
    made_by: Mapping[str, str]
    """Name of the function and its backend, for the record of a run."""


@dataclass(frozen=True)
class Located:
    """A located model in transformers' layout, of which only headers were read."""

    layout: ClassVar[Layout] = "hf"
    label: str
    folder: Path
    """Folder with tokenizer, processor and other files."""
    config: Mapping[str, Any]
    """Content of `config.json`, or an equivalent for another layout, for `adapter_for`."""
    names: Sequence[str]
    """Stored names of all tensors."""
    open: Callable[[Canonical, Mapping[str, str]], Stored]
    """Function that opens the model under canonical names, given the adapter's `canonical` and `aliases`."""
    trained_for: str = ""
    """`task_type` of the LoRA adapter of the model; empty without an adapter, or if it is not given."""
    adapter_folder: Path | None = None
    """Folder of that adapter, if it is on this machine."""

    @property
    def classifies(self) -> bool:
        """Say whether the files name a classifier for texts."""
        return self.trained_for == TEXT_CLASSES or is_classifier(self.config)

    @property
    def owns_folder(self) -> bool:
        """Say whether the files beside the weights belong to them; False for a single weight file among others."""
        return True

    @property
    def config_source(self) -> str:
        """Return the file that gives the architecture, for messages."""
        return str(self.folder / "config.json")

    def pictures(self) -> PicturePreprocessing | None:
        """Return the picture preparation if it is not the image processor in `folder`, else None."""
        return None

    def notes(self) -> list[str]:
        """Return notes for the user about facts that the files do not state."""
        return []


@contextmanager
def explain_model_errors(label: str, described_in: str) -> Iterator[None]:
    """Convert a library's error inside the `with`, about an invalid description of a model, to an InputError.

    Raises:
        InputError: the description is invalid; the message names `described_in`, its place, and the reason.
    """
    try:
        yield
    except FeatcalError:
        raise
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, OSError) as error:
        why = shorten(" ".join(str(error).split()), 200)
        raise InputError(
            f"{label}: {described_in} does not describe a model that can be run ({why}); get the file again"
        ) from error
