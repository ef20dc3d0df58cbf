"""A model whose files were found, whatever layout they have."""

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
"""Whose files they are, transformers' or open_clip's, in the words of `featcal export --format`."""


TEXT_CLASSES = "SEQ_CLS"
"""What peft calls training for classes of texts."""


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` names a class of transformers with a classifier for texts."""
    return str(next(iter(config.get("architectures") or ()), "")).endswith("ForSequenceClassification")


@dataclass(frozen=True)
class Pictures:
    """What makes model inputs of pictures."""

    prepare: Callable[[Sequence[NDArray[np.uint8]]], Tensor]
    """Pictures `[H, W, 3]` → `pixel_values` `[n, 3, H, W]` float32."""
    made_by: Mapping[str, str]
    """Its function and backend, for the record of a run."""


@dataclass(frozen=True)
class Located:
    """A model of transformers' layout; nothing but headers was read."""

    layout: ClassVar[Layout] = "hf"
    label: str
    folder: Path
    """Where tokenizer, processor and other files lie."""
    config: Mapping[str, Any]
    """What `adapter_for` needs: content of `config.json`, or its like."""
    names: Sequence[str]
    """Names of all tensors as they are stored."""
    open: Callable[[Canonical, Mapping[str, str]], Stored]
    """The model under canonical names, given the adapter's `canonical` and `aliases`."""
    trained_for: str = ""
    """`task_type` of the LoRA on top, where there is one that says it."""

    @property
    def classifies(self) -> bool:
        """Whether its files say that it has a classifier for texts."""
        return self.trained_for == TEXT_CLASSES or is_classifier(self.config)

    @property
    def config_source(self) -> str:
        """What says which architecture it is, for messages."""
        return str(self.folder / "config.json")

    def pictures(self) -> Pictures | None:
        """What makes model inputs of pictures, where that is not the image processor in `folder`."""
        return None

    def notes(self) -> list[str]:
        """What may be meant so but should be known: things that the files leave open."""
        return []


@contextmanager
def explain_model_errors(label: str, described_in: str) -> Iterator[None]:
    """Inside the `with`, a library makes a model of a description; where it cannot, the error says of which.

    Raises:
        InputError: in place of whatever the library raises for values that make no model.
    """
    try:
        yield
    except FeatcalError:
        raise
    except (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, OSError) as error:
        why = shorten(" ".join(str(error).split()), 200)
        raise InputError(
            f"{label}: {described_in} describes no model that can be run ({why}); get the file of this model again"
        ) from error
