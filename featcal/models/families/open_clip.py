"""Adapt open_clip's vision transformer, with open_clip's own modules. Its attention packs query, key and value into one
`in_proj_weight`, so that hooks do not see them. Here the attention runs as four linear maps on *views* of the packed
tensor; names in files stay open_clip's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featcal.formats.located_model import Located
from featcal.formats.open_clip import load_folder, open_clip_model, tokenizer
from featcal.formats.open_clip_config import check_plain, quick_gelu, weight_name
from featcal.models.adapter import (
    Adapter,
    Batch,
    Block,
    Call,
    PromptEncoder,
    Stage,
    Sublayer,
    capture_call,
    check_buffers,
)
from featcal.models.attention import attention
from featcal.models.families.clip import ClipVision, VisionStage, misfit_of_pictures
from featcal.system.errors import InputError, NoScores
from featcal.system.extras import require_packages

_TOWER = "visual."
_PROJECTION = "visual.proj"
_PACKED = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
_CARRIED = (
    "transformer.", "token_embedding.", "positional_embedding", "ln_final.", "text_projection", "text.",
    "logit_scale", "logit_bias",
)  # fmt: skip
_SAME = 1e-4
"""Largest difference, relative to the largest value, at which two float32 attentions are the same."""


class SplitAttention(nn.Module):
    """Self-attention as four linear maps that hooks can see; the same function as the fused module.

    It is called like `nn.MultiheadAttention` (and then returns a pair), like open_clip's own `Attention`, or with `k_x`
    and `v_x`. Masks are additive.

    Raises:
        InputError: the attention has options that these maps do not cover.
    """

    def __init__(self, fused: Any) -> None:
        super().__init__()
        extra = sorted({name for name, _ in fused.named_parameters()} - _PACKED)
        if extra or getattr(fused, "add_zero_attn", False) or not getattr(fused, "batch_first", True):
            raise InputError(f"open_clip attention with {', '.join(extra) or 'options'} that featcal does not read")
        width, biased = fused.out_proj.in_features, fused.in_proj_bias is not None
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, biased, device="meta") for _ in range(3))
        self.out_proj = nn.Linear(width, width, fused.out_proj.bias is not None, device="meta")
        self._heads = fused.num_heads
        self._returns_pair = isinstance(fused, nn.MultiheadAttention)

    def forward(
        self,
        q_x: Tensor,
        k_x: Tensor | None = None,
        v_x: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Any:
        if attn_mask is not None and not attn_mask.is_floating_point():
            raise TypeError(f"an additive attention mask is expected, not {attn_mask.dtype}")
        k_x, v_x = q_x if k_x is None else k_x, q_x if v_x is None else v_x
        projected = self.q_proj(q_x), self.k_proj(k_x), self.v_proj(v_x)
        q, k, v = (part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in projected)
        mask = None if attn_mask is None else attn_mask.to(q.dtype)
        mixed = attention(q, k, v, mask)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return (output, None) if self._returns_pair else output


@dataclass(frozen=True)
class PackedAttentionBlock(Block):
    """A block whose files pack query, key and value: `names` are those in files, and the
    module holds the three separately.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        own = dict.fromkeys(_packed_name(name) for name, _ in self.module.named_parameters())
        object.__setattr__(self, "names", tuple(f"{self.name}.{name}" for name in own))

    def names_of(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the names in files of the tensors that hold those of some modules, by name inside the block."""
        starts = tuple(f"{module}." for module in modules)
        own = (_packed_name(name) for name, _ in self.module.named_parameters() if name.startswith(starts))
        return tuple(f"{self.name}.{name}" for name in dict.fromkeys(own))

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the block by name inside it; query, key and value are views of the packed tensor."""
        local = super().local(tensors)
        for kind in ("weight", "bias"):
            packed = local.pop(f"attn.in_proj_{kind}", None)
            if packed is not None:
                local |= dict(zip(_split_names(kind), packed.chunk(3), strict=True))
        return local

    def canonical(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under their names in files; a packed tensor needs all three of its parts."""
        whole = dict(local)
        for kind in ("weight", "bias"):
            parts = [whole.pop(name) for name in _split_names(kind) if name in whole]
            if parts:
                packed = parts[0].new_empty((3 * len(parts[0]), *parts[0].shape[1:]))
                for view, part in zip(packed.chunk(3), parts, strict=True):
                    view.copy_(part)
                whole[f"attn.in_proj_{kind}"] = packed
        return super().canonical(whole)


def _split_names(kind: str) -> list[str]:
    return [f"attn.{part}_proj.{kind}" for part in "qkv"]


def _packed_name(name: str) -> str:
    kind = name.rsplit(".", 1)[-1]
    return f"attn.in_proj_{kind}" if name in _split_names(kind) else name


def split_attention(transformer: nn.Module) -> None:
    """Replace the attention of every block of an open_clip transformer by linear maps.

    Raises:
        InputError: blocks take the token axis first, or their attention is another function.
    """
    if not getattr(transformer, "batch_first", True):
        raise InputError("open_clip transformer with batch_first=False, which featcal does not read")
    for index, block in enumerate(transformer.get_submodule("resblocks").children()):
        fused, split = block.attn, SplitAttention(block.attn)
        if index == 0 and not isinstance(fused, nn.MultiheadAttention):
            _check_same(fused, split)
        block.attn = split


def _check_same(fused: Any, split: SplitAttention) -> None:
    """Raise InputError if an attention of open_clip and its linear maps give different outputs."""
    # open_clip's own attention class changes between versions, so it is compared instead of trusted.
    generator = torch.Generator().manual_seed(0)
    width = fused.out_proj.in_features
    own = {name: torch.randn(tuple(p.shape), generator=generator) / width**0.5 for name, p in fused.named_parameters()}
    parts = {f"attn.{name}": tensor for name, tensor in own.items()}
    apart = PackedAttentionBlock("b", nn.ModuleDict({"attn": split})).local({f"b.{n}": t for n, t in parts.items()})
    state = torch.randn(1, 5, width, generator=generator)
    try:
        theirs = functional_call(fused, own, (state,), strict=True)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(f"open_clip's {type(fused).__name__} cannot be run apart from its model: {error}") from error
    ours = functional_call(split, {n.removeprefix("attn."): t for n, t in apart.items()}, (state,), strict=True)
    # Not `>`: a NaN must be refused, too.
    if not float((ours - theirs).abs().max()) <= _SAME * float(theirs.abs().max()):
        raise InputError(f"open_clip's {type(fused).__name__} is not the attention that featcal knows")


def residual_parts(block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
    """Return attention and MLP of an open_clip block, layer scale and inner norms included."""

    def run(names: tuple[str, ...], hidden: Tensor, **kwargs: Any) -> Tensor:
        for name in names:
            if hasattr(block.module, name):
                output = block.run_part(tensors, name, hidden, **(kwargs if name == "attn" else {}))
                hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def attention(call: Call) -> Call:
        attended = run(("ln_1", "attn", "ln_attn", "ls_1"), call.hidden_state, attn_mask=call.kwargs.get("attn_mask"))
        return Call((call.hidden_state + attended, *call.args[1:]), call.kwargs)

    def mlp(call: Call) -> Call:
        return Call((call.hidden_state + run(("ln_2", "mlp", "ls_2"), call.hidden_state), *call.args[1:]), call.kwargs)

    return {"attention": attention, "mlp": mlp}


class ImageStage(VisionStage):
    """The stage from pixels through embeddings and first norm to the blocks, with token weights as in every CLIP."""

    def __init__(self, visual: Any) -> None:
        self._visual = visual
        blocks = visual.transformer.resblocks
        self.blocks = tuple(
            PackedAttentionBlock(f"{_TOWER}transformer.resblocks.{i}", block) for i, block in enumerate(blocks)
        )
        after = ("transformer.", "ln_post.", "proj")
        self.outer = tuple(f"{_TOWER}{name}" for name, _ in visual.named_parameters() if not name.startswith(after))

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        own = {name.removeprefix(_TOWER): tensor for name, tensor in outer.items()}
        pixels = inputs["pixel_values"].to(own["conv1.weight"].dtype)
        return capture_call(self._visual, self.blocks[0].module, own, x=pixels)

    def weighting(self, index: int, module: str) -> str:
        last = index == len(self.blocks) - 1
        return "class-token" if last and module not in ("attn.k_proj", "attn.v_proj") else "all"

    def part(self, module: str) -> str:
        return "attention" if module.startswith("attn.") else "mlp"

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        return residual_parts(block, tensors)


class OpenClip(Adapter):
    """The image tower of an open_clip model; `visual.proj` is the head that is read from the base.

    Args:
        config: `model_cfg` and `preprocess_cfg` of an `open_clip_config.json`.

    Raises:
        InputError: lists everything that is not open_clip's plain vision transformer.
    """

    family = "open_clip"
    library = "open_clip"
    modality = "pixels"
    scores_with = "prompts"
    class_token = True
    defaults: Mapping[str, Any] = ClipVision.defaults
    head = (_PROJECTION,)

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        require_packages("open_clip")
        from open_clip.model import CLIP

        model_cfg = config["model_cfg"]
        check_plain(model_cfg)
        vision = dict(model_cfg["vision_cfg"])
        with torch.device("meta"):
            # open_clip builds both towers; the text tower is not used, so that one layer is enough.
            whole: Any = CLIP(model_cfg["embed_dim"], vision, {"layers": 1}, quick_gelu(model_cfg))
        self.visual = whole.visual
        split_attention(self.visual.transformer)
        check_buffers(self.visual)
        self.settings = activation_settings(model_cfg, vision) | {
            "heads": self.visual.transformer.resblocks[0].attn._heads,
            "image_size": tuple(self.visual.image_size),
            "patch_size": tuple(self.visual.patch_size),
        }
        self._input_shape = (3, *self.visual.image_size)
        self.stages: tuple[Stage, ...] = (ImageStage(self.visual),)
        stored = dict.fromkeys(_packed_path(f"{_TOWER}{name}") for name, _ in self.visual.named_parameters())
        self.tower = tuple(name for name in stored if name != _PROJECTION)
        self.closing = tuple(name for name in self.tower if name.startswith(f"{_TOWER}ln_post."))

    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """Return the class token after the last norm and the projection; without a
        projection, the normed class token itself.
        """
        norm = {name.rsplit(".", 1)[1]: tensors[name] for name in self.closing}
        pooled: Tensor = functional_call(self.visual.ln_post, norm, (call.hidden_state[:, 0],), strict=True)
        return pooled @ tensors[_PROJECTION] if _PROJECTION in tensors else pooled

    def probe(self) -> Batch:
        return {"pixel_values": torch.randn(2, *self._input_shape, generator=torch.Generator().manual_seed(0))}

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        """Return pooled features before the projection, from open_clip's own strict loader."""
        model = load_folder(folder)
        model.visual.proj = None
        with torch.no_grad():
            pooled: Tensor = model.visual(inputs["pixel_values"])
        return pooled

    def loading(self, folder: Path, config: Mapping[str, Any]) -> str:
        return f'import open_clip\n\nmodel = open_clip.create_model("local-dir:{folder.as_posix()}")'

    def prompt_encoder(self, base: Located) -> tuple[PromptEncoder, float]:
        """Return prompt encoder and logit scale of an open_clip model, with open_clip's own tokenizer."""
        if not any(name.endswith("token_embedding.weight") for name in base.names):
            raise NoScores(f"{base.label}: {base.config_source} has no text tower, so there is no zero-shot head")
        model, tokenize = open_clip_model(base), tokenizer(base)

        def encode(texts: list[str]) -> Tensor:
            features: Tensor = model.encode_text(tokenize(texts))
            return features

        return encode, float(model.logit_scale.exp())

    def tokens(self, inputs: Batch) -> int:
        return len(self.visual.positional_embedding) * len(inputs["pixel_values"])

    def misfit(self, inputs: Batch) -> str | None:
        return misfit_of_pictures(inputs, self._input_shape, "preprocess_cfg")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return packed_shapes(self.visual, _TOWER)

    def canonical(self, stored: str) -> str | None:
        return weight_name(stored)

    @staticmethod
    def is_carried(name: str) -> bool:
        return name.startswith(_CARRIED) or name == _PROJECTION


def packed_shapes(module: nn.Module, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor under its name in files; `module` has its attention split."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        stored, shape = _packed_path(f"{prefix}{name}"), tuple(parameter.shape)
        shapes[stored] = (3 * shape[0], *shape[1:]) if stored != f"{prefix}{name}" else shape
    return shapes


def _packed_path(name: str) -> str:
    block, separator, local = name.rpartition(".attn.")
    return f"{block}.{_packed_name(f'attn.{local}')}" if separator else name


def activation_settings(model_cfg: Mapping[str, Any], tower_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that change activations and norms of a tower without changing a shape."""
    return {
        "quick_gelu": quick_gelu(model_cfg),
        "act_kwargs": dict(tower_cfg.get("act_kwargs") or {}),
        "norm_kwargs": dict(tower_cfg.get("norm_kwargs") or {}),
    }
