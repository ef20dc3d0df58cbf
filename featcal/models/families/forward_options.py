"""Read the options of a configuration as the library's class does, including defaults for
options that the file leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_DEFAULTS = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
}
"""Options that classes of transformers 5 have dropped or read with a default, and the value that transformers 4 wrote
for them. The installed version has no code for another value, so another value still counts as a difference.
"""
_ACTIVATIONS = ("hidden_act", "hidden_activation")
"""Pairs of names of one option; a class reads the name that is a field of its configuration."""


def forward_options(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return options of a configuration by name: the stated value, else the default of the class that reads the
    option; None if the class does not read it.
    """
    return {name: _drop_old_kind(_forward_option(config, name)) for name in names}


def _drop_old_kind(value: Any) -> Any:
    """Return a value without the old key `type` of rotary positions, which nothing reads where `rope_type` stands
    beside it: files of several versions keep other words there."""
    if not isinstance(value, dict):
        return value
    return {name: _drop_old_kind(one) for name, one in value.items() if name != "type" or "rope_type" not in value}


def _forward_option(config: Any, name: str) -> Any:
    # Configurations of timm are no dataclasses, and call nothing by two names.
    declared = {*getattr(config, "__dataclass_fields__", ()), *getattr(config, "attribute_map", ())}
    if name in _ACTIVATIONS and name not in declared and declared.intersection(_ACTIVATIONS):
        return None
    value = getattr(config, name, None)
    if value is None and name == "head_dim" and getattr(config, "num_attention_heads", None):
        return config.hidden_size // config.num_attention_heads
    return _DEFAULTS.get(name) if value is None else value
