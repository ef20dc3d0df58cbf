"""Compute attention by a kernel that is chosen for each call, so that no thread changes a setting of other threads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from featcal.system.errors import InputError

_NAME = "featcal"
_SMALL_SCORES = 2**25
"""Largest size in bytes of the attention scores for which plain products are used."""


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return `scaled_dot_product_attention`, on the CPU as plain products and softmax if its scores are small.

    Args:
        query, key, value: `[batch, heads, tokens, width]`.
        attn_mask, options: passed on to torch.
    """
    # On the CPU the fused kernel, made for long sequences, takes three times as long on few scores.
    if _is_small(query, key):
        return _plain(query, key, value, attn_mask, **options)
    return scaled_dot_product_attention(query, key, value, attn_mask, **options)


def choose_attention(model: PreTrainedModel) -> None:
    """Let a skeleton of transformers compute attention by `attention`; no one else may hold a part of it."""
    model.set_attn_implementation(_NAME)


def _is_small(query: Tensor, key: Tensor) -> bool:
    scores = query.shape[:-1].numel() * key.shape[-2] * query.element_size()
    # In bfloat16 the fused kernel is the faster one, even on few scores.
    return query.device.type == "cpu" and query.dtype is not torch.bfloat16 and scores <= _SMALL_SCORES


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return attention by the operations that torch takes if every fused kernel is switched off.

    Args:
        options: `scale` and `enable_gqa`, as torch has them.
    """
    if attn_mask is None and not (is_causal or dropout_p or options.get("enable_gqa") or query.itemsize < 4):
        # Torch looks through all scores for tokens that may attend to nothing, of which there are none without a mask.
        scale = options.get("scale")
        root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        return torch.softmax((query * root) @ (key.mT * root), -1) @ value
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # This kernel adds its mask, whatever the dtype: one of booleans would add 0 and 1.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    mixed: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, **options
    )[0]
    return mixed


def _capped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Return attention with scores bounded by cap * tanh(scores / cap) before the mask, softmax in float32 at least.

    Args:
        options: `softcap` and, if not 1 / sqrt(width), `scaling`, as transformers passes them.

    Returns:
        `[batch, tokens, heads, width]`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    scale, cap = options.get("scaling"), options["softcap"]
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap)
    causal = options.get("is_causal")
    if mask is None and query.shape[2] > 1 and (getattr(module, "is_causal", True) if causal is None else causal):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        # The smallest number and not -inf: rows under padding may attend to nothing, and would become NaN.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype is torch.bool else scores + mask
    shares = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (shares @ value).transpose(1, 2).contiguous()


class _PlainKernel(TorchFunctionMode):
    """Mode in which this thread's calls of torch's attention go to `_plain`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        called = _plain if func is scaled_dot_product_attention else func
        return called(*args, **(kwargs or {}))


def _forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return attention by transformers' own function around torch's kernels, or around ours if they are faster.

    Raises:
        InputError: an option of an architecture changes its attention in a way that featcal does not know.
    """
    if options.get("s_aux") is not None:
        raise InputError(
            "this architecture uses attention sinks (an extra score besides those of the tokens), which featcal does "
            "not compute"
        )
    if options.get("softcap") is not None:
        return _capped_attention(module, query, key, value, attention_mask, **options), None
    if not _is_small(query, key):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    with _PlainKernel():
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]


AttentionInterface.register(_NAME, _forward)
AttentionMaskInterface.register(_NAME, sdpa_mask)
