"""A pool: everything a source holds, fetched sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Image = NDArray[np.uint8]
"""One picture `[H, W, 3]`."""


@dataclass(frozen=True)
class TextExample:
    """What a model reads, and what it should answer (None where the source does not say)."""

    input: str
    target: str | None
    pair: str | None = None
    """The second text, where a model reads two."""


@dataclass(frozen=True)
class Pool:
    """All samples of a source; exactly one of `images`, `tensors`, `texts` and `tokens` gives them by index.

    With `tokens` there may be `texts` too, which say in words what the ids are; with `texts` there may be `images`, one
    that each text comes with.
    """

    size: int
    labels: NDArray[np.integer] | None
    """`[size]` class indices, or None."""
    class_names: tuple[str, ...] | None
    images: Callable[[Sequence[int]], list[Image]] | None = None
    """Pictures as they are stored."""
    tensors: Callable[[Sequence[int]], Tensor] | None = None
    """Preprocessed pictures `[n, 3, H, W]`."""
    texts: Callable[[Sequence[int]], list[TextExample]] | None = None
    tokens: Callable[[Sequence[int]], Mapping[str, Tensor]] | None = None
    """`input_ids` `[n, T]`, and `attention_mask` `[n, T]` and `labels` `[n, U]` where the source has them."""
    counted_names: bool = False
    """Labels count the class names in sorted order, for want of numbers of the data set's own."""

    @property
    def is_text(self) -> bool:
        return self.texts is not None or self.tokens is not None
