"""Find what experts changed outside the tower, which a recipe leaves out: it merges the tower alone."""

from __future__ import annotations

from collections.abc import Mapping

from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.system.distributed import ALONE, Ranks
from featcal.system.formatting import some


def note_left_out(family: Family, ranks: Ranks = ALONE) -> dict[str, str]:
    """Return a sentence, by task, for every expert that differs from the base in tensors which a merge leaves out.

    Tensors are read one by one; those that an adapter does not touch are not read. A classifier of a task's own is not
    left out: it scores every model on that task. Nothing is said where the base is not known.
    """
    if not family.is_base_known:
        return {}
    notes, maps = {}, family.adapter.classifier
    # Each rank reads the experts whose tasks it leads, and all share what was found.
    for task, expert in ranks.select_led(family.experts).items():
        known = family.adapter.tower + tuple(f"{name}.{kind}" for name in maps for kind in ("weight", "bias"))
        names = changed_names(family.base, expert, known)
        if names:
            count = "one tensor" if len(names) == 1 else f"{len(names)} tensors"
            notes[task] = (
                f"expert '{task}': it changed {count} outside the tower that is merged ({some(names, 3)}); they are "
                "left out, and the written model has the base's"
            )
    return ranks.union(notes)


def changed_names(base: Weights, expert: Weights, tower: tuple[str, ...]) -> list[str]:
    """Return names of the tensors outside `tower` that both models have and that hold other values in the expert."""
    touched: Mapping[str, object] = getattr(expert, "changes", expert.info)  # an adapter has only what it changes
    names = sorted(set(touched) & set(base.info) - set(tower))
    return [name for name in names if not _same(base, expert, name)]


def _same(base: Weights, expert: Weights, name: str) -> bool:
    own, other = base.read([name])[name], expert.read([name])[name]
    if own.numel() == other.numel() == 1:  # files hold a number as a scalar or as a vector of one
        own, other = own.reshape(()), other.reshape(())
    # Storage in another precision is not a change: the base's values are rounded likewise.
    return own.shape == other.shape and own.to(other.dtype).equal(other)
