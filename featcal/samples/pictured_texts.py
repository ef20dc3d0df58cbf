"""Prepare texts that come with a picture each for a language model that reads both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from featcal.samples.pool import Image, TextExample, decode_in_parts
from featcal.samples.prepare import Preparation, Prepared, prepare_causal, tokenizer_of
from featcal.system.errors import InputError


def prepare_pictured(
    examples: Sequence[TextExample], images: Sequence[Image], preparation: Preparation, max_length: int
) -> Prepared:
    """Return the inputs of `prepare_causal`, with a picture's token repeated once for every merged patch.

    Beside them are `pixel_values` `[n, patches, values]`, zero after a picture's own, and `image_grid_thw` `[n, 3]`.

    Args:
        images: decoded when they are taken.

    Raises:
        InputError: a text has no place for its picture or several, or would have to be cut; there is no usable
            processor, or it cannot make one batch of the pictures.
    """
    mark = tokenizer_of(preparation.folder).convert_ids_to_tokens(preparation.image_token)
    patches: list[Tensor] = []
    grids: list[Tensor] = []
    for some in decode_in_parts(images):
        own, grid, merged = preparation.patches(some)
        patches, grids = [*patches, *own], [*grids, grid]
    grid = torch.cat(grids)
    counts = (grid.prod(1) // merged).tolist()
    placed = [_place_picture(example, mark, count) for example, count in zip(examples, counts, strict=True)]
    made = prepare_causal(placed, preparation.folder, max_length)
    # A text that lost some of its picture's tokens would not fit the patches any more.
    if made.truncated:
        raise InputError(
            f"{made.truncated} of {len(examples)} texts have more than {max_length} tokens with their pictures (the "
            f"largest has {max(counts)}), and none is cut; raise 'max_length' or lower 'max_pixels' of the "
            "base's image processor"
        )
    return Prepared({**made.inputs, "pixel_values": pad_sequence(patches, True), "image_grid_thw": grid})


def _place_picture(example: TextExample, mark: str, count: int) -> TextExample:
    """Return the text with as many tokens as its picture has."""
    if example.input.count(mark) != 1:
        raise InputError(
            f"a text has {example.input.count(mark)} places for its picture, expected one: write {mark} into 'input' "
            f"at the place of the picture ({example.input[:60]!r})"
        )
    return replace(example, input=example.input.replace(mark, mark * count))
