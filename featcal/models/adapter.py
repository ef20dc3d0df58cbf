"""Describe an architecture: where its blocks are and how a forward pass walks them.

A model is a *skeleton* (the library's own modules, parameters on the meta device) and a dict of tensors. An adapter
never rewrites a forward: block i is the library's own module, run on the tensors of any one model.
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

from featcal.formats.in_memory import name_place
from featcal.formats.located_model import Located
from featcal.formats.sentences import SentenceText
from featcal.formats.weights import Weights
from featcal.models.compute import computing, find_device
from featcal.models.families.mixture import Mixture
from featcal.models.linear_maps import KINDS, LinearMap, is_transposed, widths
from featcal.system.errors import NoScores

if TYPE_CHECKING:
    from featcal.models.generation import Generator

M = TypeVar("M", bound=nn.Module)
Answers = Literal["classes", "text"]
"""Kind of decision: the class with the largest score, or generated text."""
PromptEncoder = Callable[[list[str]], Tensor]
"""Texts → features `[n, k]` in the space of final features, not normalised."""
Batch = Mapping[str, Tensor]
"""Keyword inputs of the model for some samples of one task."""
FIRST_LAYER, LAST_LAYER = "embeddings", "head"
"""Names, in charts and tables, of the part before the blocks, and of the final norm and projection."""


@runtime_checkable
class TokenOptions(Protocol):
    """The calibration options that decide how much each token counts."""

    @property
    def patch_weight(self) -> float:
        """Weight of the other tokens in the last block, if the head reads one token alone."""

    @property
    def completion_only(self) -> bool:
        """True if only positions that predict the answer count, in causal language models."""

    @property
    def image_weight(self) -> float:
        """Weight of a picture's tokens relative to those of the text."""


@dataclass(frozen=True)
class Call:
    """Arguments of one block on one batch; `args[0]` is the token state `[batch, tokens, width]`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    apart: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = field(default_factory=dict)
    """Positional arguments after the state, and keyword arguments, of blocks that the library calls with other
    arguments than the first block, such as the mask of a window; by name of the block.
    """

    @property
    def hidden_state(self) -> Tensor:
        hidden: Tensor = self.args[0]
        return hidden

    def with_state(self, state: Tensor) -> Call:
        """Return this call on another state."""
        return replace(self, args=(state, *self.args[1:]))

    def block_call(self, block: str) -> Call:
        """Return the call of the block of this name."""
        if block not in self.apart:
            return self
        args, kwargs = self.apart[block]
        return Call((self.hidden_state, *args), kwargs)

    def tree(self) -> Any:
        """Return all contents of the call as nested containers; `Call(*tree)` makes the call again."""
        return self.args, dict(self.kwargs), {name: (args, dict(own)) for name, (args, own) in self.apart.items()}


Sublayer = Callable[[Call], Call]
"""One residual part of a block, such as its attention: maps the call before it to the call after it."""


@dataclass(frozen=True)
class Block:
    """One block of a model: `name` is the prefix of its tensors, `module` its skeleton."""

    name: str
    module: nn.Module
    names: tuple[str, ...] = field(init=False)
    """Canonical names of the block's tensors."""
    linears: Mapping[str, LinearMap] = field(init=False, compare=False)
    """Every linear map of the block that all tokens pass, by name inside it, in module order; weights may be stored in
    either orientation (`models.linear_maps`)."""
    mixtures: Mapping[str, Mixture] = field(init=False, compare=False)
    """Every mixture of experts, by name inside the block; its linear maps get the tokens that its router sends."""
    routers: Mapping[str, LinearMap] = field(init=False, compare=False)
    """The router of every mixture, by name inside the block, where its scores are a linear map of a token's state. Its
    module returns more than the scores, so it is in neither `linears` nor `maps`.
    """
    layernorms: Mapping[str, nn.LayerNorm] = field(init=False, compare=False)
    """Every LayerNorm, by name inside the block."""

    @property
    def path(self) -> str:
        """Return the path of the module in the library's whole model."""
        return self.name

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(f"{self.name}.{n}" for n, _ in self.module.named_parameters()))
        object.__setattr__(self, "mixtures", self.modules_of(Mixture))
        inside = tuple(f"{name}." for name in self.mixtures)
        passed = {name: module for name, module in self.maps.items() if not name.startswith(inside)}
        object.__setattr__(self, "linears", passed)
        routers = {one.router: self.module.get_submodule(one.router) for one in self.mixtures.values() if one.router}
        object.__setattr__(self, "routers", routers)
        object.__setattr__(self, "layernorms", self.modules_of(nn.LayerNorm))

    @property
    def maps(self) -> dict[str, LinearMap]:
        """Return every linear map, those of a mixture's experts too, by name inside the block, in module order."""
        return self.modules_of(*KINDS)

    def token_shares(self) -> list[tuple[LinearMap, float]]:
        """Return every linear map with the share of all tokens that pass it, as far as known without a run."""
        own = [(module, 1.0) for module in self.linears.values()]
        mixed = ((one, mixture.token_share) for mixture in self.mixtures.values() for one in mixture.modules())
        return [*own, *((one, share) for one, share in mixed if isinstance(one, KINDS))]

    @property
    def features(self) -> float:
        """Return how many numbers one token takes up in the inputs of all linear maps that
        it passes, and in their outputs counted twice.
        """
        sizes = ((*widths(module), share) for module, share in self.token_shares())
        return sum(share * (inputs + 2 * outputs) for inputs, outputs, share in sizes)

    def stored_name(self, module: str) -> str:
        """Return the name that files give to a module of the block."""
        return f"{self.name}.{module}"

    def modules_of(self, *kinds: type[M]) -> dict[str, M]:
        """Return every module of the given classes by name inside the block, in module order."""
        return {name: module for name, module in self.module.named_modules() if isinstance(module, kinds)}

    def names_of(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the canonical names of the tensors of some modules, by name inside the block."""
        starts = tuple(f"{self.stored_name(module)}." for module in modules)
        return tuple(name for name in self.names if name.startswith(starts))

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that belong to the block, under their names inside it, given
        tensors under canonical names.
        """
        return {name[len(self.name) + 1 :]: tensors[name] for name in self.names if name in tensors}

    def canonical(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under canonical names, given those under names inside the block."""
        return {f"{self.name}.{name}": tensor for name, tensor in local.items()}

    def run(self, local: Mapping[str, Tensor], call: Call) -> Any:
        """Return the output of the block's own forward with these tensors, complete and by name inside the block."""
        own = call.block_call(self.name)
        # strict: a missing tensor would stay on the meta device, and a map without bias then returns uninitialised
        # memory.
        return functional_call(self.module, dict(local), own.args, dict(own.kwargs), tie_weights=False, strict=True)

    def run_part(self, local: Mapping[str, Tensor], part: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a module inside the block, such as its attention, run with these tensors."""
        own = {name[len(part) + 1 :]: tensor for name, tensor in local.items() if name.startswith(f"{part}.")}
        module = self.module.get_submodule(part)
        return functional_call(module, own, args, kwargs, tie_weights=False, strict=True)


class Stage(ABC):
    """Consecutive blocks in forward order, which start from one captured first call. CLIP has one stage. An
    encoder-decoder has two: the decoder's first call is captured when the encoder is done.
    """

    name: str
    blocks: tuple[Block, ...]
    outer: tuple[str, ...]
    """Tensors outside the blocks that the first call needs (embeddings, first norm)."""
    norm: type[nn.Module] | None = None
    """Class of the scale-only norms (RMSNorm) inside the blocks; None without such norms."""
    norm_offset = 0.0
    """Number that these norms add to their stored weight: 1 if they compute (1 + weight) * z."""
    head_axis: int | None = None
    """Axis of the heads in the inputs of norms over each head's part of a token: 2 for `[batch, tokens, heads, width]`,
    1 for `[batch, heads, tokens, width]`; None without such norms."""
    leads = False
    """True if the sequence of a picture begins with a class token that the head reads, alone or with the patches."""
    spent: tuple[str, ...] = ()
    """Names of inputs that are no longer needed after the stage's first call."""
    feeds = True
    """True if anything after the stage depends on it, final features included."""

    @abstractmethod
    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        """Return the call of block 0 on `inputs`; `upstream` is the call after the last block of the stage before."""

    @abstractmethod
    def weighting(self, index: int, module: str) -> str:
        """Return the name of the rule by which tokens of `module` in block `index` are
        weighted; "all" gives every token weight 1.
        """

    @abstractmethod
    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Return the weights `[batch, tokens]`, >= 0, under a rule of `weighting`; None
        means all 1, and 0 leaves a token out.
        """

    def part(self, module: str) -> str:
        """Return the name of the residual part, as in `sublayers`, to which a linear map of
        a block belongs; "block" if the block has no parts.
        """
        return "block"

    def sharing(self, index: int) -> Sequence[Sequence[str]] | None:
        """Return all linear maps of a block, grouped by the input that they share; None if
        only a run can show the groups.
        """
        return None

    def arrange_tokens(self, given: Tensor) -> Tensor:
        """Return the input of a norm as `[batch, tokens, width]` or `[batch, tokens, heads, width]`."""
        return given.movedim(1, 2) if given.ndim == 4 and self.head_axis == 1 else given

    def state(self, call: Call, inputs: Batch) -> Tensor:
        """Return everything about this batch that later layers read, `[batch, tokens, width]`, with padding zeroed."""
        return call.hidden_state

    def own_state(self, call: Call, inputs: Batch) -> Tensor:
        """Return the part of `state` that this stage's own blocks produce, with padding zeroed."""
        return self.state(call, inputs)

    def token_ids(self, inputs: Batch) -> Mapping[str, Tensor]:
        """Return the ids `[batch, tokens]` of all tokens of `state`, in the order of its token axis, keyed by the text
        that they come from; -100 on padding. Empty for tokens without ids, such as patches of pictures.
        """
        return {}

    def with_state(self, call: Call, state: Tensor) -> Call:
        """Return the call on another state."""
        return call.with_state(state)

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        """Return the residual parts of a block in order, which together make up the block; empty if the block has no
        such parts.

        Args:
            tensors: placed, by name inside the block.
        """
        return {}

    def advance(self, call: Call, output: Any) -> Call:
        """Return the call of the next block, given what this block returned."""
        return call.with_state(output[0] if isinstance(output, tuple) else output)


class Adapter(ABC):
    """Description of one architecture family at one size."""

    in_use: AbstractContextManager[Any]
    """Lock held by the thread that walks through the skeleton, since its modules can take
    the tensors of only one model at a time.
    """

    def __new__(cls, *_: Any, **__: Any) -> Adapter:
        adapter = super().__new__(cls)
        # In `__new__`, so that subclasses need not call an `__init__` that is abstract.
        adapter.in_use = threading.RLock()
        return adapter

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        """Build the skeleton from `config.json`; `names` are the tensors of the checkpoint."""

    family: str
    library = "transformers"
    """Package that loads the written model."""
    classes: tuple[str, ...] = ()
    """Names in `architectures` of a `config.json` whose checkpoints have the tensors of this architecture."""
    remakes: Mapping[str, str] = {}
    """Names in `architectures` of other classes → a function that converts one into a model of this architecture."""
    modality: Literal["pixels", "seq2seq", "causal", "text"]
    """Kind of samples: "pixels", "seq2seq" (text to text), "causal" (text to continue) or "text" (to classify)."""
    scores_with: Literal["prompts", "vocabulary", "own"]
    """Source of a task's head if the model has none for the task: "prompts" (features of class prompts, by the
    base's text tower), "vocabulary" (the model's own tensor in `scoring`, a row per token) or "own" (the head of the
    task's expert).
    """
    stages: tuple[Stage, ...]
    tower: tuple[str, ...]
    """Canonical names that base, merged model and every expert must have: all tensors that a merger merges."""
    head: tuple[str, ...]
    """Canonical names read from the base for every model (CLIP: the visual projection), possibly none."""
    closing: tuple[str, ...]
    """Names of the tensors in `tower` that `final` needs."""
    scoring: tuple[str, ...] = ()
    """Names of the tensors in `tower` that `output` needs."""
    scale = 1.0
    """Factor by which final features are multiplied before `scoring`."""
    softcap: float | None = None
    """Bound of the scores of tokens: cap * tanh(scores / cap); None without one."""
    vocabulary: tuple[str, ...] = ()
    """Names of tensors with one row per token of the vocabulary."""
    classifier: tuple[str, ...] = ()
    """Names of the linear maps, with tanh between them, that form every expert's own head from final features to
    scores, if `scores_with` is "own"; for any other head (`head_module`), the last map of the head.
    """
    aliases: Mapping[str, str] = {}
    """Names under which files repeat a tensor → the tensor; both must hold the same values."""
    image_processor = ""
    """Class of transformers that turns pictures into pixels, unless the files name another;
    empty for the class in the base's settings.
    """
    class_token = False
    """True if the first token is a class token."""
    causal = False
    """True if every token attends only to tokens before it."""
    sentence_text: SentenceText | None = None
    """Changes that sentence-transformers makes to a text before the model reads it; None
    for models that give no embeddings.
    """
    reads_prompts = False
    """True if the text tower is a stage too: every picture then comes with a prompt, and each model's own text tower
    makes its heads from class prompts.
    """
    image_token: int | None = None
    """Token that takes the place of a part of a picture, in a language model that reads pictures."""
    kept_float32: tuple[str, ...] = ()
    """Parts of names of tensors that transformers keeps in float32 when it loads a float16 model."""
    defaults: Mapping[str, Any]
    """The paper's settings of Algorithm 1 for this architecture."""
    settings: Mapping[str, Any]
    """Options that change the forward without changing a shape; all models of a suite must have equal values."""
    limits = ""
    """Limits, in words, of an architecture that no row of facts describes; empty for all others."""

    @property
    def has_facts(self) -> bool:
        """Say whether a row of facts, or code of its own, describes the architecture."""
        return not self.limits

    @abstractmethod
    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """Return final features `[batch, k]` after the last block; needs the tensors in `closing` and `head`."""

    def answer_features(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> list[Tensor]:
        """Return, per sample, the final features `[tokens, k]` at every position that decides a token of its answer
        (one position if the answer is a class); needs the same tensors as `final`.
        """
        return [*self.final(tensors, call, inputs)[:, None]]

    @property
    def embeds(self) -> bool:
        """Say whether final features are embeddings of texts, whose cosines measure how alike two texts are."""
        return self.sentence_text is not None

    def head_module(self) -> tuple[nn.Module, Mapping[str, str]] | None:
        """Return the library's own module from final features to scores, on meta, and the name in files of each of its
        tensors; None where linear maps with tanh between them are the head (`classifier`)."""
        return None

    @property
    def head_tensors(self) -> tuple[str, ...]:
        """Return the names in files of every expert's own head, if `scores_with` is "own", biases included."""
        found = self.head_module()
        if found is not None:
            return tuple(found[1].values())
        return tuple(f"{name}.{kind}" for name in self.classifier for kind in ("weight", "bias"))

    @property
    def answers(self) -> Answers:
        """Return the kind of decision of models without a head of their own."""
        return "text" if self.scores_with == "vocabulary" else "classes"

    @property
    def generates(self) -> bool:
        """Say whether the library's own class continues text."""
        return self.answers == "text"

    def generating(self, tensors: Mapping[str, Tensor], folder: Path) -> Generator:
        """Return a generator that answers batches with text, on the given tensors of the tower, if `answers` is "text".

        Args:
            folder: checkpoint whose generation settings are used.
        """
        raise NotImplementedError(f"a {self.family} model generates no text")

    def output(self, tensors: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """Return the library model's output for final features: the features, or scores of a language model."""
        return features

    @abstractmethod
    def probe(self) -> Batch:
        """Return small fixed inputs on which a written model is compared with the one in memory."""

    @abstractmethod
    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        """Return `output` as the originating library computes it from a checkpoint folder.

        Raises:
            NumericalError: the library would re-initialise a tensor.
        """

    def prompt_encoder(self, base: Located) -> tuple[PromptEncoder, float]:
        """Return a function that encodes class prompts with the base's text tower, and the factor by which cosines
        between prompts and features are multiplied.

        Raises:
            NoScores: the base has no text tower, or no tokenizer.
            InputError: the tokenizer cannot be used.
        """
        raise NoScores(f"base: {name_place(base.folder)} has no text tower, so there is no zero-shot head")

    def prompt_encoder_of(self, base: Located, model: Weights) -> tuple[PromptEncoder, float]:
        """Return a function that encodes class prompts with a model's own text tower, and the factor by which cosines
        are multiplied, if `reads_prompts`.

        Raises:
            NoScores: the base has no text tower, or no tokenizer.
            InputError: the tokenizer cannot be used.
        """
        raise NotImplementedError(f"{model.label} has no text tower of its own")

    def prompt_inputs(self, base: Located, texts: Sequence[str]) -> Batch:
        """Return the text tower's inputs for prompts, `[prompts, tokens]`, if `reads_prompts`.

        Raises:
            NoScores: the base has no tokenizer.
            InputError: the tokenizer cannot be used.
        """
        raise NotImplementedError(f"a {self.family} model reads no prompts")

    @abstractmethod
    def tokens(self, inputs: Batch) -> int:
        """Return the number of tokens of a batch, summed over all stages, padding included."""

    @abstractmethod
    def misfit(self, inputs: Batch) -> str | None:
        """Return the reason why the model cannot take these inputs; None if it can."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor in `tower` and `head`."""

    @abstractmethod
    def canonical(self, stored: str) -> str | None:
        """Return the canonical name of a tensor in a checkpoint file; None for a tensor that is redundant."""

    def ties_head(self, config: Mapping[str, Any]) -> bool:
        """Say whether a model of this kind with this `config.json` scores with its embedding."""
        return bool(config.get("tie_word_embeddings", True))

    @abstractmethod
    def is_carried(self, name: str) -> bool:
        """Say whether a tensor outside `tower` and `head` is a known part of the
        checkpoint, such as a text tower, and is copied unchanged.
        """

    def portable(self, config: Mapping[str, Any], model: Weights) -> tuple[dict[str, Any], list[str]]:
        """Return a `config.json` that transformers 4 (4.57) and 5 read alike, and notes for users of version 4.

        Args:
            config: from the origin of the files; its settings are those of this adapter.
            model: the model to be written.
        """
        return dict(config), []

    def loader(self, config: Mapping[str, Any]) -> str:
        """Return the class of `library` that loads a model with this `config.json`."""
        return self.classes[0] if self.classes else "AutoModel"

    def loading(self, folder: Path, config: Mapping[str, Any]) -> str:
        """Return lines of Python that load a written model with this `config.json`."""
        named = self.loader(config)
        return f'from {self.library} import {named}\n\nmodel = {named}.from_pretrained("{folder.as_posix()}")'

    def blocks(self) -> list[Block]:
        """Return every block of every stage in forward order."""
        return [block for stage in self.stages for block in stage.blocks]

    def block_layers(self) -> list[str]:
        """Return the names of all blocks, in forward order, as charts and tables show them."""
        several = len(self.stages) > 1
        return [
            f"{stage.name} block {i}" if several else f"block {i}"
            for stage in self.stages
            for i in range(len(stage.blocks))
        ]

    def block_names(self) -> dict[str, str]:
        """Return the names of all blocks in tables, options and messages, by the prefix of
        a block's tensors, in forward order.
        """
        return dict(zip((block.name for block in self.blocks()), self.block_layers(), strict=True))

    def name_of(self, block: Block) -> str:
        """Return the name of a block in tables, options and messages: `block 0`, or
        `encoder block 3` if there are several stages.
        """
        return self.block_names()[block.name]

    def layers(self) -> list[str]:
        """Return the names of all layers in forward order: for every stage the part before
        its blocks and the blocks, then the head.
        """
        blocks = iter(self.block_layers())
        stages = ([self.first_layer(stage), *islice(blocks, len(stage.blocks))] for stage in self.stages)
        return [*chain.from_iterable(stages), LAST_LAYER]

    def first_layer(self, stage: Stage) -> str:
        """Return the name, in charts and tables, of the part before a stage's blocks."""
        return FIRST_LAYER if len(self.stages) == 1 else f"{stage.name} {FIRST_LAYER}"

    def class_token_at(self, stage: Stage) -> bool:
        """Say whether the first token of a stage is a class token: in a stage of pictures, not in one of prompts."""
        return self.class_token and stage.feeds

    def class_token_layers(self) -> dict[str, list[str]]:
        """Return the layers whose state begins with a class token, by the name of their stage's first layer."""
        names = iter(self.block_layers())
        # Without that first layer itself: after it the class token's state is the same for every sample.
        found = {self.first_layer(stage): [*islice(names, len(stage.blocks))] for stage in self.stages}
        own = {self.first_layer(stage) for stage in self.stages if self.class_token_at(stage)}
        return {first: layers for first, layers in found.items() if first in own}

    @property
    def reads_packed(self) -> bool:
        """Say whether the model's library loads linear maps in the layout "pack-quantized"."""
        return self.library == "transformers"

    @property
    def transposed_weights(self) -> frozenset[str]:
        """Return the names of weights of linear maps that are stored `[inputs, outputs]`."""
        return frozenset(
            f"{block.stored_name(name)}.weight"
            for block in self.blocks()
            for name, module in block.linears.items()
            if is_transposed(module)
        )

    def uncalibrated_names(self, routers: bool = False) -> list[str]:
        """Return names of tensors inside blocks that belong to no linear map and no norm (tables of positions,
        convolutions, states), so that no calibration changes them.

        Args:
            routers: whether those of mixtures are calibrated.
        """
        found = []
        for stage in self.stages:
            for block in stage.blocks:
                norms = block.layernorms if stage.norm is None else block.modules_of(stage.norm, nn.LayerNorm)
                fitted = (*block.maps, *norms, *(block.routers if routers else ()))
                known = tuple(f"{block.stored_name(name)}." for name in fitted)
                found += [name for name in block.names if not name.startswith(known)]
        return found

    def parts(self) -> list[str]:
        """Return the residual parts of all linear maps of the blocks (`Stage.part`), in the order of the modules."""
        found = (stage.part(name) for stage in self.stages for block in stage.blocks for name in block.maps)
        return list(dict.fromkeys(found))


@contextmanager
def walking(adapter: Adapter) -> Iterator[None]:
    """Give this thread alone the use of an adapter's blocks inside the `with`, under `computing`, without gradients.

    Other threads that want the same adapter wait until this walk has ended, even by an error.
    """
    with adapter.in_use, torch.no_grad(), computing:
        yield


class _StopForward(Exception):
    """The exception that the hook on block 0 raises; the only exception that is caught there."""


def capture_call(model: nn.Module, first_block: nn.Module, tensors: Mapping[str, Tensor], **inputs: Any) -> Call:
    """Return the call by which `model`'s own forward calls `first_block`, without running the block.

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
        # strict, so that a name in `tensors` that the model lacks is an error and not ignored.
        functional_call(model, parameters, (), inputs, strict=True)
    except _StopForward:
        pass
    finally:
        handle.remove()
    return seen[0]


def read_alone(call: Call, read: Tensor | int, other: float, attended: Tensor | None = None) -> Tensor:
    """Return token weights `[batch, tokens]`, float64, for a head that reads one token of every sample; that token has
    weight 1.

    Args:
        call: of the stage's first block.
        read: position of that token in every sample, `[batch]` or one for all.
        other: weight of every other token.
        attended: 1 for tokens, 0 for padding, which has no weight.
    """
    batch, place = len(call.hidden_state), find_device(call.hidden_state.device, torch.float64)
    weights = torch.full(call.hidden_state.shape[:2], other, device=place, dtype=torch.float64)
    weights[torch.arange(batch, device=place), torch.as_tensor(read, device=place)] = 1.0
    return weights if attended is None else weights * attended.to(place)


def check_buffers(skeleton: nn.Module) -> nn.Module:
    """Return `skeleton` in eval mode; raise RuntimeError if a buffer was left on the meta device, without values."""
    unset = [name for name, buffer in skeleton.named_buffers() if buffer.is_meta]
    if unset:
        raise RuntimeError(f"buffers without values in the skeleton: {', '.join(unset)}")
    return skeleton.eval()
