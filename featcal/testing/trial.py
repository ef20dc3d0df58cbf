"""Write a suite of tiny models of one architecture, and open it with featcal and with the library alone."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.calibration.calibrate import config_for
from featcal.evaluation.heads import stored_head
from featcal.family.opening import Family, open_family
from featcal.formats.weights import InMemory, Weights
from featcal.models.compute import Compute
from featcal.models.families.decoder_facts import DecoderFacts, DecoderPart, ExpertFacts
from featcal.models.families.encoder_facts import EncoderFacts
from featcal.models.features import final_features
from featcal.suite.calibration_options import PAPER, CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.testing.reference import STACKED, Piece, ReferenceOptions, Sample, TokenWeights, every_token, inputs

Facts = DecoderFacts | EncoderFacts
TASKS = ("left", "right")
COUNT, LONGEST, SHORTEST = 5, 12, 4
"""Samples of a task; tokens of a text, padding aside."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """A suite of a base, a merged model and two experts, all near each other, with padded
    texts of random tokens or random pixels.
    """

    facts: Facts
    root: Path
    model_class: Any

    @cached_property
    def family(self) -> Family:
        """Open the suite as a user does."""
        return open_family(load_suite(self.root / "suite.yaml"), "cpu")

    @cached_property
    def exact(self) -> Family:
        """Return the family with all tensors in float64."""
        family = self.family

        def double(model: Weights) -> InMemory:
            held = model.read(family.adapter.tower)
            return InMemory(model.label, {name: tensor.double() for name, tensor in held.items()})

        return replace(
            family,
            compute=Compute(CPU, torch.float64),
            base=double(family.base),
            merged=double(family.merged),
            experts={task: double(expert) for task, expert in family.experts.items()},
        )

    def library(self, folder: str, dtype: torch.dtype = torch.float64) -> Any:
        """Load a model with the library, with its plainest attention and plainest mixture of experts."""
        plain = {
            "attn_implementation": "eager",
            **({"experts_implementation": "eager"} if _mixture_facts(self.facts) else {}),
        }
        return self.model_class.from_pretrained(self.root / folder, dtype=dtype, **plain).eval()

    @cached_property
    def models(self) -> Mapping[str, Any]:
        """Load "base" and "merged" with the library, in float64."""
        return {name: self.library(name) for name in ("base", "merged")}

    @cached_property
    def experts(self) -> Mapping[str, Any]:
        return {task: self.library(f"experts/{task}") for task in TASKS}

    def padded_inputs(self, task: str, split: str = "calibration") -> dict[str, Tensor]:
        """Return model inputs of all samples of a task, texts padded on the right."""
        drawn = load_file(self.root / "samples.safetensors")
        if f"{task}.{split}.mask" not in drawn:
            return {"pixel_values": drawn[f"{task}.{split}.samples"]}
        return {"input_ids": drawn[f"{task}.{split}.samples"], "attention_mask": drawn[f"{task}.{split}.mask"]}

    def single_samples(self, task: str) -> list[Sample]:
        """Return every calibration sample by itself, without padding, in the order in which featcal draws them."""
        padded = self.padded_inputs(task)
        order = self.family.samples(task, "calibration", None, CalibrationConfig.seed).indices
        if "pixel_values" in padded:
            return [{"pixel_values": padded["pixel_values"][i : i + 1].double()} for i in order]
        ids, mask = padded["input_ids"], padded["attention_mask"]
        return [{"input_ids": ids[i : i + 1, : int(mask[i].sum())]} for i in order]

    @property
    def blocks(self) -> list[str]:
        """Return the names of all blocks in the library's model."""
        return [block.path for block in self.family.adapter.blocks()]

    def canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of blocks under canonical names, given tensors under the names of the library's model."""
        found: dict[str, Tensor] = {}
        experts = _mixture_facts(self.facts)
        tensors = tensors if experts is None else _separate_maps(tensors, experts)
        for block in self.family.adapter.blocks():
            inside = len(block.path) + 1
            found |= block.canonical({n[inside:]: t for n, t in tensors.items() if n.startswith(f"{block.path}.")})
        return found

    def scores(self, library: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the library's scores of every sample: of the token after the end of a text, or of classes; the final
        features if the head is made from prompts.
        """
        if isinstance(self.facts, EncoderFacts):
            found = library(**inputs)
            scores: Tensor = found.pooler_output if self.facts.pooler else found.logits
            return scores
        logits: Tensor = library(**inputs, use_cache=False).logits
        if self.facts.classifier:
            return logits
        return logits[torch.arange(len(logits)), inputs["attention_mask"].sum(1) - 1]

    def compute_scores(self, model: Weights, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return featcal's scores of every sample: the final features under the head stored
        with the model's weights.
        """
        adapter, compute = self.family.adapter, self.family.compute
        features = final_features(adapter, model, {}, [inputs], compute)
        if isinstance(self.facts, EncoderFacts) or self.facts.classifier:
            head = stored_head(adapter, model, ()) if adapter.classifier else None
            return features if head is None else head.scores(features)
        return adapter.output(compute.place(model.read(adapter.scoring)), features)

    def token_weights(self, config: CalibrationConfig) -> TokenWeights:
        """Return the weights of tokens by module, for the reference; a sample has no padding."""
        keys, last = getattr(self.facts, "keys", ()), self.blocks[-1]
        if not self.family.adapter.class_token:
            return every_token

        def weights(_: Sample, module: str, tokens: int) -> Tensor:
            counted = torch.ones(tokens, dtype=torch.float64)
            if module.startswith(f"{last}.") and module.removeprefix(f"{last}.") not in keys:
                counted[1:] = config.patch_weight
            return counted

        return weights

    def config(self, **options: Any) -> CalibrationConfig:
        """Return calibration options with a ridge that is not tiny, for all samples in batches of unequal size."""
        # A tiny ridge would magnify rounding; with uneven batches a mean over batches is not that over samples.
        return config_for(self.family, **{"lam": 0.05, "rho": 1.5, "alpha": 0.3, "batch_size": 4, **options})

    def options(self, config: CalibrationConfig) -> ReferenceOptions:
        """Return a calibration's options as `ReferenceOptions`."""
        stage = self.family.adapter.stages[0]
        kinds = ((torch.nn.LayerNorm,) if config.layernorms else ()) + (
            (stage.norm,) if config.rmsnorms and stage.norm else ()
        )
        axis = 1 if stage.head_axis is None else stage.head_axis - 1
        routers = [f"{block.path}.{name}" for block in stage.blocks for name in block.routers] if config.routers else []
        o = ReferenceOptions(config.lam, config.rho, config.alpha, norms=kinds, beta=config.beta, mu=config.mu)
        o = replace(o, weigh_tokens=config.weigh_tokens, norm_offset=stage.norm_offset, head_axis=axis)
        return replace(o, routers=tuple(routers))

    def pieces(self, config: CalibrationConfig) -> list[Piece]:
        """Return the modules that are solved together, in order, each with the module that
        receives its residual stream.
        """
        if config.recipe == PAPER:
            return [([block], None) for block in self.blocks]
        found: list[Piece] = []
        one = self.single_samples(TASKS[0])[:1]
        for block in self.blocks:
            called = inputs(self.models["base"], [block], one, every_token)
            for part in self.facts.parts:
                found += _pieces_of(block, part, list(called), self.facts)
        return found


def _pieces_of(block: str, part: DecoderPart, called: list[str], facts: Facts) -> list[Piece]:
    """Return the pieces of one residual part: norm, maps that share an input, norms over heads, output map, norm after
    it.

    Args:
        called: modules of the block with tensors of their own, in the order of their calls.
    """
    inside = tuple(f"{block}.{own}." for own in (part.module, part.joined) if own)
    within = [name for name in called if name.startswith(inside)]
    # The norm of ModernBERT's first part is none: the state was normed by the embeddings.
    norm = next((name for name in called if part.norm and name == f"{block}.{part.norm}"), None)
    pieces: list[Piece] = [([norm], None)] if norm else []
    together: set[str] = set()
    for name in within[:-1]:
        shared = next((names for names in facts.shared if name.removeprefix(f"{block}.") in names), None)
        names = [name] if shared is None else [f"{block}.{one}" for one in shared]
        if name not in together:
            pieces.append((names, None))
        together |= {*names}
    experts = _mixture_facts(facts)
    if experts is not None and within[-1] == f"{block}.{experts.module}":
        return [*pieces, *(([f"{within[-1]}.{kind}"], None) for kind in STACKED)]
    stream = norm or within[0]
    pieces.append((within[-1:], None if part.post_norm or part.joined else stream))
    return [*pieces, *([([f"{block}.{part.post_norm}"], None)] if part.post_norm else [])]


def _mixture_facts(facts: Facts) -> ExpertFacts | None:
    """Return the facts about the experts of a mixture; None if there is none."""
    return None if isinstance(facts, EncoderFacts) else facts.experts


def _separate_maps(tensors: Mapping[str, Tensor], facts: ExpertFacts) -> dict[str, Tensor]:
    """Return the tensors with the maps of every expert of a mixture apart."""
    found: dict[str, Tensor] = {}
    gate, up, down = facts.maps
    for name, tensor in tensors.items():
        where, _, kind = name.rpartition(".")
        if not where.endswith(f".{facts.module}") or kind not in STACKED:
            found[name] = tensor
            continue
        names = (gate, up) if kind == STACKED[0] else (down,)
        for place, whole in enumerate(tensor):
            parts = zip(names, whole.chunk(len(names)), strict=True)
            found |= {f"{where}.{place}.{own}.weight": part for own, part in parts}
    return found


def write_trial(model: Any, facts: Facts, root: Path, dtype: torch.dtype = torch.float32) -> Trial:
    """Write a suite folder of models near each other.

    Args:
        model: gives shapes and configuration; it stays unchanged.
        dtype: of the files.
    """
    base = deepcopy(model).float()
    generator = torch.Generator().manual_seed(3)
    _scatter(base, facts, generator)
    experts = {task: _perturb(base, facts, generator) for task in TASKS}
    merged = deepcopy(base)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(sum(expert.get_parameter(name) for expert in experts.values()) / len(experts))
    for folder, one in {"base": base, "merged": merged, **{f"experts/{t}": e for t, e in experts.items()}}.items():
        one.to(dtype).save_pretrained(root / folder)
    samples: dict[str, Tensor] = {}
    tasks: dict[str, Any] = {}
    held = torch.Generator().manual_seed(4)  # of its own, so that nothing else is drawn differently
    for task in TASKS:
        tasks[task] = {"expert": f"experts/{task}"}
        for split, drawing in (("calibration", generator), ("test", generator), ("validation", held)):
            drawn = _draw_samples(base, facts, drawing)
            samples |= {f"{task}.{split}.{name}": tensor for name, tensor in drawn.items()}
            named = {"key" if name == "samples" else name: f"{task}.{split}.{name}" for name in drawn}
            tasks[task][split] = {"tensors": "samples.safetensors", **named}
    save_file(samples, root / "samples.safetensors")
    content = {"name": f"trial-{facts.model_type}", "base": "base", "merged": "merged", "tasks": tasks}
    (root / "suite.yaml").write_text(yaml.safe_dump(content))
    return Trial(facts, root, type(model))


def _draw_samples(model: Any, facts: Facts, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw samples of one split: token ids with their mask, or pixels; with labels for a classifier."""
    classes = isinstance(facts, EncoderFacts) or facts.classifier
    labels = {"labels": torch.arange(COUNT) % 2} if classes else {}
    table = facts.table if isinstance(facts, EncoderFacts) else facts.embedding
    if not table:
        side = model.config.image_size
        return {"samples": torch.randn(COUNT, 3, side, side, generator=generator), **labels}
    rows = model.get_submodule(f"{facts.stack}.{table}").weight.shape[0]
    mask = torch.arange(LONGEST) < _lengths(generator)
    # Ids below 3 are left to padding, beginning and end, which models may treat apart.
    ids = torch.randint(3, rows, (COUNT, LONGEST), generator=generator) * mask
    return {"samples": ids, "mask": mask.long(), **labels}


def _lengths(generator: torch.Generator) -> Tensor:
    lengths = torch.randint(SHORTEST, LONGEST, (COUNT, 1), generator=generator)
    lengths[0] = LONGEST
    return lengths


@torch.no_grad()
def _scatter(model: Any, facts: Facts, generator: torch.Generator) -> None:
    """Draw random weights of a size that makes every layer matter."""
    offset = 0.0 if isinstance(facts, EncoderFacts) else facts.norm_offset
    embedding = "embeddings." if isinstance(facts, EncoderFacts) else facts.embedding
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            scale = "norm" in name.split(".")[-2].lower() or ".ln_" in name or name.endswith(("lambda1", ".gamma"))
            parameter.copy_((1 - offset if scale and not name.endswith("bias") else 0) + 0.2 * noise)
        else:
            parameter.copy_(noise * (1.0 if embedding in name else 0.3))


@torch.no_grad()
def _perturb(base: Any, facts: Facts, generator: torch.Generator) -> Any:
    """Return a model with noise on every tensor: of relative size 0.3; 0.15 where everything depends on a single
    token; 0.03 in a pooler, which no calibration changes.
    """
    single, moved = isinstance(facts, EncoderFacts) or facts.classifier, deepcopy(base)
    still = f"{facts.pooler}." if isinstance(facts, EncoderFacts) and facts.pooler else None
    for name, parameter in moved.named_parameters():
        distance = 0.03 if still and name.startswith(still) else 0.15 if single else 0.3
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(distance * noise * parameter.norm() / noise.norm())
    return moved


def assert_that(true: bool, what: str) -> None:
    """Raise AssertionError unless the condition holds, even under python -O."""
    if not true:
        raise AssertionError(what)
