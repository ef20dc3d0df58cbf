"""Keep results that were computed, within a budget."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Results(Generic[K]):
    """Results by key, as many as a budget has room for; the least recently used goes first.

    Not safe for threads by itself: its owner has them take turns.

    Args:
        budget: how much there is room for; what is larger by itself is made and handed over, but not kept.
        size: what a result takes of it, key included; `nbytes` if the budget is bytes.
    """

    def __init__(self, budget: int, size: Callable[[object], int]) -> None:
        self.budget, self.taken = budget, 0
        self._size = size
        self._kept: OrderedDict[K, tuple[Any, int]] = OrderedDict()

    def get_or_make(self, key: K, make: Callable[[], T]) -> T:
        """Return the kept result, or else what `make` gives, to be kept. Where it raises, nothing is kept."""
        if key not in self._kept:
            # Before anything is kept, so that a failure or an ended piece of work leaves no trace.
            made = make()
            self.keep(key, made)
            return made
        self._kept.move_to_end(key)
        found: T = self._kept[key][0]
        return found

    def keep(self, key: K, result: object) -> None:
        """Keep a result, in place of one with the same key; the least recently used make room."""
        size = self._size((key, result))
        self.drop(key)
        if size > self.budget:
            return
        while self.taken + size > self.budget:
            self.drop(next(iter(self._kept)))
        self._kept[key] = result, size
        self.taken += size

    def drop(self, key: K) -> None:
        """Keep it no longer, if it is kept."""
        self.taken -= self._kept.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Keep nothing longer."""
        self._kept.clear()
        self.taken = 0

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[K]:
        """Yield the keys, least recently used first."""
        return iter(self._kept)


def nbytes(thing: object, beside: Iterable[object] = ()) -> int:
    """Count the bytes of tensors, arrays and words in a thing, through data classes, dictionaries and sequences.

    What is there twice counts once; of a view counts all that it keeps alive. Other objects count as themselves,
    without what hangs on them: so do mappings that are not dictionaries.

    Args:
        beside: what somebody else holds, such as the models of a suite; it does not count, nor what it holds.

    >>> import torch
    >>> shared = torch.zeros(1000)
    >>> 4000 <= nbytes({"a": shared, "b": shared[:10]}) < 4200
    True
    """
    seen: dict[int, object] = {id(one): one for one in beside}
    storages: set[int] = set()
    todo, total = [thing], 0
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            # A view keeps the whole of its storage alive, and several tensors may share one.
            total += 0 if storage.data_ptr() in storages else storage.nbytes()
            storages.add(storage.data_ptr())
        elif isinstance(one, np.ndarray):
            total += one.nbytes
        # Other mappings may read from disk what is looked up, so their values are left alone.
        elif isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            todo += one
        elif is_dataclass(one):
            todo += vars(one).values()
        else:
            total += sys.getsizeof(one)
    return total
