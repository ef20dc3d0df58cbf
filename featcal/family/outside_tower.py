"""Find changes of experts that a merge leaves out: outside the tower, which alone a recipe merges, updates that an
adapter's own configuration does not select, and rows of a vocabulary that the base does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from featcal.family.opening import Family
from featcal.formats.weights import FirstRows, Weights
from featcal.system.distributed import ALONE, Ranks
from featcal.system.formatting import some


def note_left_out(family: Family, ranks: Ranks = ALONE) -> dict[str, str]:
    """Return a sentence, by task, for every expert of which something is left out of a merge.

    Tensors are read one by one; those that an adapter does not touch are not read. A classifier of a task's own is not
    left out: it scores every model on that task. Nothing is said where the base is not known.
    """
    if not family.is_base_known:
        return {}
    notes = {}
    # Each rank reads the experts whose tasks it leads, and all share what was found.
    for task, expert in ranks.select_led(family.experts).items():
        if found := [*_find_rows(expert), *_find_unselected(expert), *_find_outside(family, expert)]:
            notes[task] = f"expert '{task}': {'; '.join(found)}"
    return ranks.union(notes)


def _find_rows(expert: Weights) -> Iterator[str]:
    """Yield the rows of a vocabulary that an expert has beyond the base's."""
    if isinstance(expert, FirstRows):
        rows = {(expert.under.info[name].shape[0] - kept, kept) for name, kept in expert.rows.items()}
        for more, kept in sorted(rows):
            count = "one row" if more == 1 else f"{more} rows"
            yield f"its vocabulary has {count} more than the base's {kept}; what was trained there is left out"


def _find_unselected(expert: Weights) -> Iterator[str]:
    """Yield the tensors in an adapter's file that its configuration does not select."""
    stored = expert.under if isinstance(expert, FirstRows) else expert
    modules: Sequence[str] = getattr(stored, "ignored_modules", ())
    if modules:
        count = "one module" if len(modules) == 1 else f"{len(modules)} modules"
        yield (
            f"its adapter_config.json does not select {count} whose updates are in its file ({some(modules, 3)}); they "
            "are left out, as peft does"
        )


def _find_outside(family: Family, expert: Weights) -> Iterator[str]:
    """Yield the tensors that an expert changed outside the tower."""
    known = (*family.adapter.tower, *family.adapter.head_tensors)
    names = changed_names(family.base, expert, known)
    if names:
        count = "one tensor" if len(names) == 1 else f"{len(names)} tensors"
        yield (
            f"it changed {count} outside the tower that is merged ({some(names, 3)}); they are left out, and the "
            "written model has the base's"
        )


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
