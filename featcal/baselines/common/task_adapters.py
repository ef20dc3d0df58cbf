"""Write the adapters of a model with one per task, each a folder that peft loads over the model."""

from __future__ import annotations

from pathlib import Path

from featcal.baselines.common.fold_heads import task_file_name
from featcal.export.adapter_files import LowRankDifference, write_adapter
from featcal.family.opening import Family
from featcal.formats.hub import ADAPTERS
from featcal.formats.located_model import Located
from featcal.formats.low_rank import Adapted
from featcal.formats.weights import Weights
from featcal.models.model import Model


def adapted_by_task(model: Weights) -> Model | None:
    """Return the model if low-rank adapters per task are its only additions, else None."""
    if not isinstance(model, Model) or model.maps or model.heads or not model.adapted:
        return None
    return model if all(isinstance(one, Adapted) for one in model.adapted.values()) else None


def write_adapters(folder: Path, family: Family, container: Located, model: Model) -> dict[str, str]:
    """Write the adapter of every task below `folder`; returns their places in it by task.

    Raises:
        InputError: an architecture that peft cannot adapt, or the disk is full or not writable.
    """
    places: dict[str, str] = {}
    for task, one in model.adapted.items():
        assert isinstance(one, Adapted)
        place = folder / ADAPTERS / task_file_name(task)
        place.mkdir(parents=True)
        write_adapter(place, family.adapter, container, LowRankDifference(model.under, one, one.products, ()), None)
        places[task] = place.relative_to(folder).as_posix()
    return places


def describe_adapters() -> str:
    """Describe, for a card, the folders of adapters and how to load them."""
    return (
        f"Every folder in `{ADAPTERS}` is a LoRA for samples of one task, over this model: "
        "`PeftModel.from_pretrained(model, FOLDER)`, and for featcal `MODEL+FOLDER`."
    )
