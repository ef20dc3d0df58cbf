"""Numbers in a model's configuration that no model can have: a library would ask for memory or time by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from featcal.system.errors import InputError
from featcal.system.formatting import shortened

_LAYERS = frozenset({"num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "layers"})
_SIZES = frozenset({
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "image_size",
    "patch_size", "vocab_size", "projection_dim", "max_position_embeddings", "d_model", "d_kv", "d_ff", "num_heads",
    "num_channels", "n_embd", "n_head", "width", "embed_dim", "head_width", "heads", "context_length",
})  # fmt: skip
_OFTEN_NONE = frozenset({"num_key_value_heads", "head_dim", "num_decoder_layers"})
_OFTEN_LISTS = frozenset({"image_size", "patch_size", "intermediate_size"})
MOST_LAYERS, MOST_SIZE = 10_000, 1 << 26
"""Far above every published model (126 layers, 256 thousand rows of a vocabulary), far below what fills a machine."""


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Let a configuration pass whose sizes a model can have, those of its towers included.

    Raises:
        InputError: listing every size that is no whole number from 1 to `MOST_SIZE`, or `MOST_LAYERS` of layers;
            `where` names the file.
    """
    problems = [f"{where}: {name} is {shortened(repr(value), 40)}, {wanted}" for name, value, wanted in _wrong(config)]
    if problems:
        raise InputError(*problems)


def _wrong(config: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and not under.count("."):
            yield from _wrong(value, f"{under}{name}.")
        elif name in _LAYERS or name in _SIZES:
            most = MOST_LAYERS if name in _LAYERS else MOST_SIZE
            several = value if isinstance(value, list) and name in _OFTEN_LISTS else [value]
            fine = all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= most for one in several)
            if not fine and not (value is None and name in _OFTEN_NONE):
                yield f"{under}{name}", value, f"a model has a whole number from 1 to {most}"
