"""Cache computed results within a budget."""

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
    """Cache of results by key, within a budget; the least recently used is evicted first.

    Not thread-safe: its owner must lock it.

    Args:
        budget: capacity; a result that is larger than it is returned without caching.
        size: function that returns the size of a result with its key; `nbytes` if the budget is bytes.
    """

    def __init__(self, budget: int, size: Callable[[object], int]) -> None:
        self.budget, self.taken = budget, 0
        self._size = size
        self._kept: OrderedDict[K, tuple[Any, int]] = OrderedDict()

    def get_or_make(self, key: K, make: Callable[[], T]) -> T:
        """Return the cached result, or call `make` and cache its result; nothing is cached if it raises."""
        if key in self._kept:
            found: T = self[key]
            return found
        # Before anything is kept, so that a failure or an ended piece of work leaves no trace.
        made = make()
        self.keep(key, made)
        return made

    def __getitem__(self, key: K) -> Any:
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def keep(self, key: K, result: object) -> None:
        """Cache a result, replacing one with the same key; evict the least recently used ones."""
        size = self._size((key, result))
        self.drop(key)
        if size > self.budget:
            return
        while self.taken + size > self.budget:
            self.drop(next(iter(self._kept)))
        self._kept[key] = result, size
        self.taken += size

    def drop(self, key: K) -> None:
        """Evict a result, if it is cached."""
        self.taken -= self._kept.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Evict all results."""
        self._kept.clear()
        self.taken = 0

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[K]:
        """Yield the keys, least recently used first."""
        return iter(self._kept)


def nbytes(thing: object, beside: Iterable[object] = ()) -> int:
    """Count the bytes of tensors, arrays and words in an object, through data classes, dictionaries and sequences.

    A repeated object counts once; a view counts with all memory that it keeps alive. Other objects, including mappings
    that are not dictionaries, count without their contents.

    Args:
        beside: objects that are not counted, nor their contents, such as the models of a suite.

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
