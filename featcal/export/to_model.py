"""Return a model as an object of its library's class, without a folder."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from featcal.export.content import content_of
from featcal.export.record_facts import require_unchanged
from featcal.export.write import require_weights_alone, write_beside
from featcal.family.opening import Family
from featcal.formats.load_pretrained import model_of
from featcal.formats.located_model import Located
from featcal.formats.weights import Overlay, Weights
from featcal.system.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def to_library_model(family: Family, container: Located, model: Weights) -> PreTrainedModel:
    """Return, bit for bit, the model that `from_pretrained` would load from the folder of `write_model`; quantised
    weights are dense here.

    Args:
        family: the suite of the model.
        container: model that gives the class, the configuration and the tensors outside the tower.

    Raises:
        InputError: a model of another library, one with maps or heads of its own, a class that transformers does not
            have, or a model in memory that has changed since its suite was made.
    """
    adapter = family.adapter
    require_weights_alone(model)
    if adapter.library != "transformers":
        raise InputError(
            f"{model.label}: to_model gives models of transformers, and this is one of {adapter.library}; save it, and "
            "load the folder with that"
        )
    require_unchanged(family)
    source = container.open(adapter.canonical, adapter.aliases)
    tensors = content_of(adapter, source, model, list(source.info))
    with TemporaryDirectory(prefix="featcal-model-") as place:
        # Without its grid: what is handed over is dense.
        write_beside(container, Path(place), adapter, Overlay(model.label, model, {}))
        return model_of(Path(place), {name: tensor.clone() for name, tensor in tensors.items()})
