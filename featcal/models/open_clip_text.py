"""open_clip's text transformer, for experts that fine-tuned it too: an adapter of its own beside the image tower's.

The two towers share no layer, so calibrating the one does not change what the other is calibrated on. They are fed
by different samples (pictures, token ids) and are therefore two adapters, not two stages of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip.model import CustomTextCLIP
from torch import Tensor
from torch.func import functional_call

from featcal.errors import InputError
from featcal.models.adapter import Adapter, Batch, Block, Call, Stage, TokenOptions, capture_call, check_buffers
from featcal.models.clip import ClipVision
from featcal.models.open_clip import (
    PackedBlock,
    activation_settings,
    check_plain,
    packed_shapes,
    quick_gelu,
    residual_parts,
    split_attention,
    weight_name,
)

_DTYPE_GIVER = "transformer.resblocks.0.mlp.c_fc.weight"
"""open_clip casts embeddings to the dtype of this tensor, which block 0 holds."""


class TextStage(Stage):
    """Token ids → embeddings → causal blocks. Tokens after the end token reach nothing and count nothing."""

    name = "text"

    def __init__(self, text: Any, prefix: str) -> None:
        self._text, self._prefix = text, prefix
        blocks = text.transformer.resblocks
        self.blocks = tuple(PackedBlock(f"{prefix}transformer.resblocks.{i}", block) for i, block in enumerate(blocks))
        self.outer = (f"{prefix}token_embedding.weight", f"{prefix}positional_embedding")

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        own = {name.removeprefix(self._prefix): tensor for name, tensor in outer.items()}
        own[_DTYPE_GIVER] = own["positional_embedding"].new_empty(0)
        return capture_call(self._text, self.blocks[0].module, own, text=inputs["input_ids"])

    def weighting(self, index: int, module: str) -> str:
        """In the last block only the end token reaches the output, except through keys and values."""
        last = index == len(self.blocks) - 1
        return "end-token" if last and module not in ("attn.k_proj", "attn.v_proj") else "text"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        mask = _up_to_end(inputs["input_ids"]).double()
        if weighting == "text":
            return mask
        weights = mask * options.patch_weight
        weights[torch.arange(len(weights)), inputs["input_ids"].argmax(-1)] = 1.0
        return weights

    def state(self, call: Call, inputs: Batch) -> Tensor:
        return call.hidden * _up_to_end(inputs["input_ids"])[:, :, None].to(call.hidden.dtype)

    def sublayers(
        self, block: Block, tensors: Mapping[str, Tensor], call: Call
    ) -> Mapping[str, Callable[[Tensor], Tensor]]:
        return residual_parts(block, tensors, call)


class OpenClipText(Adapter):
    """The text tower of an open_clip model, causal; `text_projection` is the head that is read from the base.

    Batches hold `input_ids` `[batch, context]` as open_clip's tokenizer makes them: the end token has the highest id.
    """

    family = "open_clip text"
    modality = "causal"
    scores_with = "own"
    defaults: Mapping[str, Any] = ClipVision.defaults

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        model_cfg = config["model_cfg"]
        check_plain(model_cfg)
        text_cfg = dict(model_cfg["text_cfg"])
        _check_causal(text_cfg)
        with torch.device("meta"):
            whole: Any = CustomTextCLIP(model_cfg["embed_dim"], {"layers": 1}, text_cfg, quick_gelu(model_cfg))
        self.text = whole.text
        self.text.register_buffer("attn_mask", self.text.build_causal_mask().to(device), persistent=False)
        split_attention(self.text.transformer)
        check_buffers(self.text)
        self.settings = activation_settings(model_cfg, text_cfg) | {"heads": self.text.heads}
        prefix = "text." if "text.positional_embedding" in names else ""
        self._prefix, self._context, self._vocabulary = prefix, self.text.context_length, self.text.vocab_size
        self.stages: tuple[Stage, ...] = (TextStage(self.text, prefix),)
        self.head = (f"{prefix}text_projection",)
        self.tower = tuple(name for name in self.shapes() if name not in self.head)
        self.closing = tuple(name for name in self.tower if name.startswith(f"{prefix}ln_final."))

    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """End token → last norm → projection; without a projection the normed end token itself."""
        ends = inputs["input_ids"].argmax(-1)
        pooled = call.hidden[torch.arange(len(ends), device=ends.device), ends]
        norm = {name.rsplit(".", 1)[1]: tensors[name] for name in self.closing}
        normed: Tensor = functional_call(self.text.ln_final, norm, (pooled,), strict=True)
        return normed @ tensors[self.head[0]] if self.head[0] in tensors else normed

    def probe(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, self._vocabulary - 1, (2, self._context), generator=generator)
        ids[0, self._context // 2], ids[1, -1] = self._vocabulary - 1, self._vocabulary - 1
        ids[0, self._context // 2 + 1 :] = 0
        return {"input_ids": ids}

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        """Pooled features before the projection, from open_clip's own loader."""
        from featcal.formats.open_clip import load_folder

        model = load_folder(folder)
        getattr(model, "text", model).text_projection = None
        with torch.no_grad():
            pooled: Tensor = model.encode_text(inputs["input_ids"])
        return pooled

    def tokens(self, inputs: Batch) -> int:
        return inputs["input_ids"].numel()

    def misfit(self, inputs: Batch) -> str | None:
        ids = inputs.get("input_ids")
        if ids is None:
            return "no input_ids; a text tower takes token ids"
        if ids.ndim != 2 or ids.shape[1] != self._context:
            return f"token ids have shape {list(ids.shape)}, the text tower takes [n, {self._context}]"
        if int(ids.max()) >= self._vocabulary or int(ids.min()) < 0:
            return f"token ids reach from {int(ids.min())} to {int(ids.max())}, the vocabulary has {self._vocabulary}"
        return None

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return packed_shapes(self.text, self._prefix)

    def canonical(self, stored: str) -> str | None:
        return weight_name(stored)

    @staticmethod
    def carried(name: str) -> bool:
        return name.startswith(("visual.", "logit_scale", "logit_bias", "text_projection", "text.text_projection"))


def _up_to_end(ids: Tensor) -> Tensor:
    """True up to and with the end token, the highest id of every row."""
    return torch.arange(ids.shape[1], device=ids.device) <= ids.argmax(-1, keepdim=True)


def _check_causal(text_cfg: Mapping[str, Any]) -> None:
    width, heads = text_cfg.get("width", 512), text_cfg.get("heads", 8)
    found = {
        f"a width of {width} that is no multiple of its {heads} heads": width % heads,
        "an embedded class token": text_cfg.get("embed_cls"),
        "attention to later tokens": text_cfg.get("no_causal_mask"),
        f"pool_type '{text_cfg.get('pool_type')}'": text_cfg.get("pool_type", "argmax") != "argmax",
        "no plain projection": text_cfg.get("proj_bias") or text_cfg.get("proj_type", "linear") != "linear",
    }
    problems = [f"open_clip text tower with {what}, which featcal does not read" for what, is_so in found.items()
                if is_so]  # fmt: skip
    if problems:
        raise InputError(*problems)
