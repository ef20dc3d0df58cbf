"""What featcal must know about an architecture: where its blocks are and how a forward pass walks them.

A model is a *skeleton* (the library's own modules, parameters on the meta device) and a dict of tensors. An
adapter never rewrites a forward: block i runs as the library's own module on the tensors of whichever model.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featcal.formats.located import Located
from featcal.formats.weights import Weights
from featcal.models.compute import computing
from featcal.models.families.mixture import Mixture
from featcal.models.linear_maps import KINDS, LinearMap, is_transposed, widths
from featcal.system.errors import NoScores

if TYPE_CHECKING:
    from featcal.models.generation import Generator

M = TypeVar("M", bound=nn.Module)
Answers = Literal["classes", "text"]
"""What a decision is: the class with the largest score, or generated text."""
PromptEncoder = Callable[[list[str]], Tensor]
"""Texts → features `[n, k]` in the space of final features, not normalised."""
Batch = Mapping[str, Tensor]
"""Keyword inputs of the model for some samples of one task."""
FIRST_LAYER, LAST_LAYER = "embeddings", "head"
"""What charts and tables call what stands in front of the blocks, and final norm and projection."""


@runtime_checkable
class TokenOptions(Protocol):
    """The options of a calibration that decide how much a token counts."""

    @property
    def patch_weight(self) -> float:
        """Weight of the other tokens in the last block, where the head reads one token alone."""

    @property
    def completion_only(self) -> bool:
        """In causal language models, count the positions that predict the answer alone."""

    @property
    def image_weight(self) -> float:
        """Weight of a picture's tokens among those of the text."""


@dataclass(frozen=True)
class Call:
    """How one block is called on one batch; `args[0]` is the token state `[batch, tokens, width]`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    apart: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = field(default_factory=dict)
    """Of blocks that the library calls otherwise than the first one, by name: what they are given behind their state,
    and by keyword, such as the mask of a window."""

    @property
    def hidden_state(self) -> Tensor:
        hidden: Tensor = self.args[0]
        return hidden

    def with_state(self, state: Tensor) -> Call:
        """The same call on another state."""
        return replace(self, args=(state, *self.args[1:]))

    def block_call(self, block: str) -> Call:
        """How the block of this name is called on the state."""
        if block not in self.apart:
            return self
        args, kwargs = self.apart[block]
        return Call((self.hidden_state, *args), kwargs)

    def tree(self) -> Any:
        """Everything in it as nested containers; `Call(*tree)` is the call again."""
        return self.args, dict(self.kwargs), {name: (args, dict(own)) for name, (args, own) in self.apart.items()}


Sublayer = Callable[[Call], Call]
"""One residual part of a block, such as its attention: the call before it → the call after it."""


@dataclass(frozen=True)
class Block:
    """One block: `name` is the prefix of its tensors, `module` its skeleton."""

    name: str
    module: nn.Module
    names: tuple[str, ...] = field(init=False)
    """Canonical names of the block's tensors."""
    linears: Mapping[str, LinearMap] = field(init=False, compare=False)
    """Every linear map of the block that all tokens pass, by name inside it, in module order, however it stores its
    weight (`models.linear_maps`)."""
    mixtures: Mapping[str, Mixture] = field(init=False, compare=False)
    """Every mixture of experts, likewise; its linear maps are given the tokens that its router sends to them."""
    layernorms: Mapping[str, nn.LayerNorm] = field(init=False, compare=False)
    """Every LayerNorm, likewise."""

    @property
    def path(self) -> str:
        """Where the module is in the library's whole model."""
        return self.name

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(f"{self.name}.{n}" for n, _ in self.module.named_parameters()))
        object.__setattr__(self, "mixtures", self.modules_of(Mixture))
        inside = tuple(f"{name}." for name in self.mixtures)
        passed = {name: module for name, module in self.maps.items() if not name.startswith(inside)}
        object.__setattr__(self, "linears", passed)
        object.__setattr__(self, "layernorms", self.modules_of(nn.LayerNorm))

    @property
    def maps(self) -> dict[str, LinearMap]:
        """Every linear map, those of the experts of a mixture too, by name inside the block, in module order."""
        return self.modules_of(*KINDS)

    def token_shares(self) -> list[tuple[LinearMap, float]]:
        """Every linear map, and the share of all tokens that pass it, as far as that is known without running."""
        own = [(module, 1.0) for module in self.linears.values()]
        mixed = ((one, mixture.token_share) for mixture in self.mixtures.values() for one in mixture.modules())
        return [*own, *((one, share) for one, share in mixed if isinstance(one, KINDS))]

    @property
    def features(self) -> float:
        """Numbers that one token has in inputs and, twice, outputs of all linear maps that it passes."""
        sizes = ((*widths(module), share) for module, share in self.token_shares())
        return sum(share * (inputs + 2 * outputs) for inputs, outputs, share in sizes)

    def stored_name(self, module: str) -> str:
        """What files call a module of the block."""
        return f"{self.name}.{module}"

    def modules_of(self, *kinds: type[M]) -> dict[str, M]:
        """Every module of some classes by name inside the block, in module order."""
        return {name: module for name, module in self.module.named_modules() if isinstance(module, kinds)}

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`{canonical name: tensor}` → `{name inside the block: tensor}`."""
        return {name[len(self.name) + 1 :]: tensors[name] for name in self.names}

    def canonical(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `local`."""
        return {f"{self.name}.{name}": tensor for name, tensor in local.items()}

    def run(self, local: Mapping[str, Tensor], call: Call) -> Any:
        """The block's own forward with the given tensors (names inside the block, complete: strict)."""
        own = call.block_call(self.name)
        return functional_call(self.module, dict(local), own.args, dict(own.kwargs), tie_weights=False, strict=True)

    def run_part(self, local: Mapping[str, Tensor], part: str, /, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module called `part` inside the block, such as its attention."""
        own = {name[len(part) + 1 :]: tensor for name, tensor in local.items() if name.startswith(f"{part}.")}
        module = self.module.get_submodule(part)
        return functional_call(module, own, args, kwargs, tie_weights=False, strict=True)


class Stage(ABC):
    """Blocks that follow each other in forward order, fed by one first call.

    CLIP has one stage, an encoder-decoder two: the decoder's first call is taken after the encoder is done.
    """

    name: str
    blocks: tuple[Block, ...]
    outer: tuple[str, ...]
    """Tensors outside the blocks that the first call needs (embeddings, first norm)."""
    norm: type[nn.Module] | None = None
    """Class of the scale-only norms (RMSNorm) inside the blocks, where there are any."""
    norm_offset = 0.0
    """What these norms add to their stored weight: 1 where they are (1 + weight) * z."""
    head_axis: int | None = None
    """Axis of the heads in what norms over each head's part of a token are given: 2 of `[batch, tokens, heads, width]`,
    1 of `[batch, heads, tokens, width]`; None where there are no such norms."""
    spent: tuple[str, ...] = ()
    """Names of inputs that nothing but the first call of the stage reads."""
    feeds = True
    """Whether anything behind the stage, final features included, depends on it."""

    @abstractmethod
    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        """The call of block 0 on `inputs`; `upstream` is the call after the last block of the stage before."""

    @abstractmethod
    def weighting(self, index: int, module: str) -> str:
        """Name of the token weighting of `module` in block `index`; "all" is weight 1 on every token."""

    @abstractmethod
    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Weights `[batch, tokens]`, >= 0, of a weighting on one batch; None means all 1, 0 leaves a token out."""

    def part(self, module: str) -> str:
        """The residual part (named as in `sublayers`) that a linear map of a block belongs to, by its name inside the
        block; "block" where an architecture's block does not fall apart."""
        return "block"

    def sharing(self, index: int) -> Sequence[Sequence[str]] | None:
        """Linear maps of a block that share an input, all of them, where that is known before it runs."""
        return None

    def arrange_tokens(self, given: Tensor) -> Tensor:
        """What a norm is given as `[batch, tokens, width]` or `[batch, tokens, heads, width]`."""
        return given.movedim(1, 2) if given.ndim == 4 and self.head_axis == 1 else given

    def state(self, call: Call, inputs: Batch) -> Tensor:
        """Everything that later layers see of this batch, `[batch, tokens, width]`, with padding zeroed."""
        return call.hidden_state

    def own_state(self, call: Call, inputs: Batch) -> Tensor:
        """The part of `state` that this stage's own blocks produce, `[batch, tokens, width]`, with padding zeroed."""
        return self.state(call, inputs)

    def with_state(self, call: Call, state: Tensor) -> Call:
        """The same call on another state."""
        return call.with_state(state)

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        """The residual parts of a block, from call to call, in order; together they are the block.

        Empty where an architecture's block does not fall apart like this.

        Args:
            tensors: placed, by name inside the block.
        """
        return {}

    def advance(self, call: Call, output: Any) -> Call:
        """The call of the next block, given what this block returned."""
        return call.with_state(output[0] if isinstance(output, tuple) else output)


class Adapter(ABC):
    """One architecture family at one size."""

    in_use: AbstractContextManager[Any]
    """Held by the thread that walks through the skeleton, whose modules take the tensors of one model at a time."""

    def __new__(cls, *_: Any, **__: Any) -> Adapter:
        adapter = super().__new__(cls)
        adapter.in_use = threading.RLock()
        return adapter

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        """Build the skeleton from `config.json`; `names` are the tensors of the checkpoint."""

    family: str
    library = "transformers"
    """Package that loads the written model."""
    classes: tuple[str, ...] = ()
    """Names in `architectures` of a `config.json` whose tensors are those of this architecture."""
    remakes: Mapping[str, str] = {}
    """Names in `architectures` of other classes, and how to make a model of this architecture of one."""
    modality: Literal["pixels", "seq2seq", "causal", "text"]
    """What samples are: "pixels", "seq2seq" (text to text), "causal" (text to continue) or "text" (to classify)."""
    scores_with: Literal["prompts", "vocabulary", "own"]
    """What scores a task for which a model brings no head: "prompts" (features of class prompts, by the base's text
    tower), "vocabulary" (the model's own tensor in `scoring`, a row per token) or "own" (what the task's expert
    brings)."""
    stages: tuple[Stage, ...]
    tower: tuple[str, ...]
    """Canonical names that base, merged and every expert must have: all that a merger acts on."""
    head: tuple[str, ...]
    """Canonical names read from the base for every model (CLIP: the visual projection), possibly none."""
    closing: tuple[str, ...]
    """Names of the tower that `final` needs."""
    scoring: tuple[str, ...] = ()
    """Names of the tower that `output` needs."""
    scale = 1.0
    """Factor of the final features before `scoring`."""
    softcap: float | None = None
    """Bound of the scores of tokens: cap * tanh(scores / cap); None where there is none."""
    vocabulary: tuple[str, ...] = ()
    """Names of tensors with one row per token of the vocabulary."""
    classifier: tuple[str, ...] = ()
    """Names of the linear maps that are the head of every expert's own, from final features to scores, with tanh
    between them; where `scores_with` is "own"."""
    aliases: Mapping[str, str] = {}
    """Names under which files repeat a tensor, and the tensor: both must hold the same values."""
    image_processor = ""
    """Class of transformers that makes pixels of pictures, where the files do not say how in another way; empty for the
    one that the base's settings name."""
    class_token = False
    """Whether the first token is a class token."""
    causal = False
    """Whether every token sees those before it alone."""
    embeds = False
    """Whether final features are embeddings of texts, whose cosines say how alike two texts are."""
    reads_prompts = False
    """Whether the text tower is a stage too, so that every picture comes with a prompt and every model's own text tower
    makes the heads of class prompts."""
    image_token: int | None = None
    """Of a language model that reads pictures: the token that stands for a part of one."""
    kept_float32: tuple[str, ...] = ()
    """Parts of the names of tensors that transformers keeps in float32 when it loads a float16 model."""
    defaults: Mapping[str, Any]
    """The paper's settings of Algorithm 1 for this architecture."""
    settings: Mapping[str, Any]
    """Options that change the forward without changing a shape; all models of a suite must agree on them."""

    @abstractmethod
    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """Final features `[batch, k]` from the call after the last block; needs the tensors in `closing` and `head`."""

    @property
    def answers(self) -> Answers:
        """What the decisions of these models are, where a model brings no head."""
        return "text" if self.scores_with == "vocabulary" else "classes"

    @property
    def generates(self) -> bool:
        """Whether the library's own class continues text."""
        return self.answers == "text"

    def generating(self, tensors: Mapping[str, Tensor], folder: Path) -> Generator:
        """What answers batches with text, on the given tensors of the tower; where `answers` is "text".

        Args:
            folder: checkpoint whose generation settings are used.
        """
        raise NotImplementedError(f"a {self.family} model generates no text")

    def output(self, tensors: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """What the library's own model returns for final features: the features, or a language model's scores."""
        return features

    @abstractmethod
    def probe(self) -> Batch:
        """Small fixed inputs on which a written model is compared with the one in memory."""

    @abstractmethod
    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        """`output` as the originating library computes it from a checkpoint folder.

        Raises:
            NumericalError: the library would re-initialise a tensor.
        """

    def prompt_encoder(self, base: Located) -> tuple[PromptEncoder, float]:
        """What encodes class prompts through the base's text tower, and the factor of their cosines to features.

        Raises:
            NoScores: the base has no text tower, or no tokenizer.
            InputError: a tokenizer that cannot be used.
        """
        raise NoScores(f"base: {base.folder} has no text tower, so there is no zero-shot head")

    def prompt_encoder_of(self, base: Located, model: Weights) -> tuple[PromptEncoder, float]:
        """The same through the text tower of a model; where `reads_prompts`.

        Raises:
            NoScores, InputError: as `prompt_encoder`.
        """
        raise NotImplementedError(f"{model.label} has no text tower of its own")

    def prompt_inputs(self, base: Located, texts: Sequence[str]) -> Batch:
        """What the text tower reads of prompts, `[prompts, tokens]`; where `reads_prompts`.

        Raises:
            NoScores: the base has no tokenizer.
            InputError: one that cannot be used.
        """
        raise NotImplementedError(f"a {self.family} model reads no prompts")

    @abstractmethod
    def tokens(self, inputs: Batch) -> int:
        """Tokens of a batch in all stages together, padding included."""

    @abstractmethod
    def misfit(self, inputs: Batch) -> str | None:
        """What keeps `inputs` from being inputs of the model; None if nothing does."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in `tower` and `head`."""

    @abstractmethod
    def canonical(self, stored: str) -> str | None:
        """Canonical name of a tensor in a checkpoint file; None for one that carries no information."""

    @abstractmethod
    def is_carried(self, name: str) -> bool:
        """Whether a tensor outside `tower` and `head` is a known part of the checkpoint (such as a text tower)."""

    def portable(self, config: Mapping[str, Any], model: Weights) -> tuple[dict[str, Any], list[str]]:
        """A `config.json` that transformers 4 (4.57) and 5 read alike, and notes on what version 4 cannot be told.

        Args:
            config: as the origin of the files has it; its settings are those of this adapter.
            model: the one that is written.
        """
        return dict(config), []

    def loader(self, config: Mapping[str, Any]) -> str:
        """The class of `library` that loads a model with this `config.json`."""
        return self.classes[0] if self.classes else "AutoModel"

    def loading(self, folder: Path, config: Mapping[str, Any]) -> str:
        """Lines of Python that load a written model with this `config.json`."""
        named = self.loader(config)
        return f'from {self.library} import {named}\n\nmodel = {named}.from_pretrained("{folder.as_posix()}")'

    def blocks(self) -> list[Block]:
        """Every block of every stage in forward order."""
        return [block for stage in self.stages for block in stage.blocks]

    def block_layers(self) -> list[str]:
        """Names of all blocks as charts and tables show them, in forward order."""
        several = len(self.stages) > 1
        return [
            f"{stage.name} block {i}" if several else f"block {i}"
            for stage in self.stages
            for i in range(len(stage.blocks))
        ]

    def layers(self) -> list[str]:
        """Names of all layers in forward order: what stands in front of every stage, its blocks, and last the head."""
        blocks = iter(self.block_layers())
        stages = ([self.first_layer(stage), *islice(blocks, len(stage.blocks))] for stage in self.stages)
        return [*chain.from_iterable(stages), LAST_LAYER]

    def first_layer(self, stage: Stage) -> str:
        """Name of what stands in front of a stage, as charts and tables show it."""
        return FIRST_LAYER if len(self.stages) == 1 else f"{stage.name} {FIRST_LAYER}"

    def class_token_at(self, stage: Stage) -> bool:
        """Whether the first token of a stage is a class token: that of pictures, of prompts not."""
        return self.class_token and stage.feeds

    def class_token_layers(self) -> dict[str, list[str]]:
        """Layers whose state has a class token in front, behind the name of what stands in front of their stage, where
        it is the same for every sample."""
        names = iter(self.block_layers())
        found = {self.first_layer(stage): [*islice(names, len(stage.blocks))] for stage in self.stages}
        own = {self.first_layer(stage) for stage in self.stages if self.class_token_at(stage)}
        return {first: layers for first, layers in found.items() if first in own}

    @property
    def transposed_weights(self) -> frozenset[str]:
        """Names of weights of linear maps that are stored `[inputs, outputs]`."""
        return frozenset(
            f"{block.stored_name(name)}.weight"
            for block in self.blocks()
            for name, module in block.linears.items()
            if is_transposed(module)
        )

    def uncalibrated_names(self) -> list[str]:
        """Names of tensors inside blocks that belong to no linear map and no norm, so that no calibration changes them:
        tables of positions, convolutions, states."""
        found = []
        for stage in self.stages:
            for block in stage.blocks:
                norms = block.layernorms if stage.norm is None else block.modules_of(stage.norm, nn.LayerNorm)
                known = tuple(f"{block.stored_name(name)}." for name in (*block.maps, *norms))
                found += [name for name in block.names if not name.startswith(known)]
        return found

    def parts(self) -> list[str]:
        """The residual parts that linear maps of the blocks belong to (`Stage.part`), in the order of the modules."""
        found = (stage.part(name) for stage in self.stages for block in stage.blocks for name in block.maps)
        return list(dict.fromkeys(found))


@contextmanager
def walking(adapter: Adapter) -> Iterator[None]:
    """Inside the `with`, this thread walks through an adapter's blocks: no gradients, `computing`, one walk at a time.

    Other threads that want the same adapter wait until this walk ends, however it ends.
    """
    with adapter.in_use, torch.no_grad(), computing:
        yield


class _StopForward(Exception):
    """Raised by the hook on block 0; nothing else may be caught."""


def capture_call(model: nn.Module, first_block: nn.Module, tensors: Mapping[str, Tensor], **inputs: Any) -> Call:
    """How `model`'s own forward calls `first_block`, without running it.

    Args:
        model: skeleton; parameters that `tensors` leaves out stay on meta and must not be reached.
        tensors: parameters before `first_block`, by name in `model`.
    """
    seen: list[Call] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Call(args, kwargs))
        raise _StopForward

    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers()), **tensors}
    handle = first_block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        functional_call(model, parameters, (), inputs, strict=True)
    except _StopForward:
        pass
    finally:
        handle.remove()
    return seen[0]


def read_alone(call: Call, read: Tensor | int, other: float, attended: Tensor | None = None) -> Tensor:
    """Token weights `[batch, tokens]`, float64, where the head reads one token of every sample alone: 1 for that one.

    Args:
        call: of the stage's first block.
        read: its position in every sample, `[batch]` or one for all.
        other: weight of every other token.
        attended: 1 for tokens, 0 for padding, which counts for nothing.
    """
    batch, device = len(call.hidden_state), call.hidden_state.device
    weights = torch.full(call.hidden_state.shape[:2], other, device=device, dtype=torch.float64)
    weights[torch.arange(batch, device=device), read] = 1.0
    return weights if attended is None else weights * attended


def check_buffers(skeleton: nn.Module) -> nn.Module:
    """`skeleton` in eval mode; RuntimeError if a buffer was left on the meta device (its values would be garbage)."""
    unset = [name for name, buffer in skeleton.named_buffers() if buffer.is_meta]
    if unset:
        raise RuntimeError(f"buffers without values in the skeleton: {', '.join(unset)}")
    return skeleton.eval()
