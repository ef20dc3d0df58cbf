"""Define a pool: all samples of a source, fetched one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Image = NDArray[np.uint8]
"""One picture `[H, W, 3]`."""
_AT_ONCE, _MOST, _FIRST = 2**28, 256, 4
"""Bytes of decoded pictures and number of pictures in memory at most; pictures that tell first how large they are."""


@dataclass(frozen=True)
class Conversation:
    """Turns of a conversation, each with "role" and "content", and the name of its row for messages."""

    turns: tuple[Mapping[str, Any], ...]
    place: str


@dataclass(frozen=True)
class TextExample:
    """A text that a model reads, and its right answer (None if the source does not say)."""

    input: str
    target: str | None
    pair: str | None = None
    """The second text, if a model reads two."""
    conversation: Conversation | None = None
    """The turns of input and answer, until a chat template has written them."""
    tokens: tuple[list[int], list[int]] | None = None
    """Token ids of input and answer as a chat template wrote them, with all special tokens."""


@dataclass(frozen=True)
class FetchedLabels:
    """Class indices of remote rows, fetched on demand; None for rows of which none has a label."""

    read: Callable[[Sequence[int]], NDArray[np.integer] | None]

    def __getitem__(self, wanted: Sequence[int]) -> NDArray[np.integer] | None:
        return self.read(wanted)


@dataclass(frozen=True)
class Pool:
    """All samples of a source; exactly one of `images`, `tensors`, `texts` and `tokens` gives them by index.

    With `tokens` there may also be `texts`, the words of the ids; with `texts` there may be `images`, one for each
    text.
    """

    size: int
    labels: NDArray[np.integer] | FetchedLabels | None
    """Class indices `[size]`, or None."""
    class_names: tuple[str, ...] | None
    images: Callable[[Sequence[int]], list[Image]] | None = None
    """Pictures as they are stored."""
    tensors: Callable[[Sequence[int]], Tensor] | None = None
    """Preprocessed pictures `[n, 3, H, W]`."""
    texts: Callable[[Sequence[int]], list[TextExample]] | None = None
    tokens: Callable[[Sequence[int]], Mapping[str, Tensor]] | None = None
    """`input_ids` `[n, T]`, and `attention_mask` `[n, T]` and `labels` `[n, U]` if the source has them."""
    counted_names: bool = False
    """True if labels count the class names in sorted order, because the data set has no numbers."""
    notes: tuple[str, ...] = ()
    """Remarks on samples or options that were left out."""
    prepare: Callable[[Sequence[int]], None] | None = None
    """Fetches the remote data of some samples at once."""

    @property
    def is_text(self) -> bool:
        return self.texts is not None or self.tokens is not None


def decode_in_parts(images: Sequence[Image]) -> Iterator[Sequence[Image]]:
    """Yield pictures that are decoded when they are taken, as many at a time as memory allows of the largest so far."""
    start, count, largest = 0, _FIRST, 1
    while start < len(images):
        some = images[start : start + count]
        start, largest = start + len(some), max(largest, *(one.nbytes for one in some))
        yield some
        count = max(1, min(_MOST, _AT_ONCE // largest))
