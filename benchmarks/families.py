"""Random models in the right shapes, written once below a work folder and used again."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.system.atomic_files import put

T5_HEAD = 64
"""Width of an attention head of T5."""
EXPERT_DISTANCE = 0.1
"""Size of an expert's task vector relative to the base, tensor by tensor."""
SCALE = 0.3
"""Of Task Arithmetic."""


@dataclass(frozen=True)
class ClipShape:
    """A CLIP vision tower."""

    width: int = 768
    hidden: int = 3072
    blocks: int = 12
    heads: int = 12
    patch: int = 32
    image: int = 224

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def stem(self) -> int:
        """Multiplications and additions for a picture ahead of the first block."""
        return 2 * (self.tokens - 1) * 3 * self.patch**2 * self.width

    def groups(self, last: bool) -> list[tuple[int, int]]:
        """(inputs, outputs) of linear maps of a block that share a Gram matrix; in the last one the query has weights
        of its own."""
        d = self.width
        attention = [(d, d), (d, 2 * d)] if last else [(d, 3 * d)]
        return [*attention, (d, d), (d, self.hidden), (self.hidden, d)]

    @property
    def maps(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of every linear map of a block."""
        d = self.width
        return [*4 * [(d, d)], (d, self.hidden), (self.hidden, d)]

    def config(self) -> dict[str, Any]:
        """Content of `config.json`."""
        return {
            "architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", "hidden_act": "quick_gelu",
            "hidden_size": self.width, "intermediate_size": self.hidden, "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads, "patch_size": self.patch, "image_size": self.image,
            "projection_dim": 512,
        }  # fmt: skip


B32 = ClipShape()
L14 = ClipShape(width=1024, hidden=4096, blocks=24, heads=16, patch=14)
SMALL = ClipShape(width=256, hidden=1024, blocks=6, heads=4)


@dataclass(frozen=True)
class LlamaShape:
    """A decoder with grouped-query attention and a head of its own; deep and narrow, so that the model is large and
    one block small."""

    width: int = 1024
    hidden: int = 2816
    blocks: int = 96
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 32000
    stem = 0

    def groups(self, last: bool) -> list[tuple[int, int]]:
        """(inputs, outputs) of linear maps of a block that share a Gram matrix; the last block is as the others."""
        d, keys = self.width, self.kv_heads * self.width // self.heads
        return [(d, d + 2 * keys), (d, d), (d, 2 * self.hidden), (self.hidden, d)]

    @property
    def block(self) -> int:
        """Parameters of the linear maps of a block."""
        return sum(d * m for d, m in self.groups(False))

    @property
    def parameters(self) -> int:
        return self.blocks * self.block + 2 * self.vocabulary * self.width

    def config(self) -> dict[str, Any]:
        """Content of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": self.vocabulary,
            "hidden_size": self.width, "intermediate_size": self.hidden, "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": "bfloat16",
        }  # fmt: skip


LLAMA_1B = LlamaShape(width=2048, hidden=5632, blocks=22, heads=32, kv_heads=4)
"""1.1 billion parameters."""
LLAMA_8B = LlamaShape(width=4096, hidden=14336, blocks=32, heads=32, kv_heads=8, vocabulary=128256)
LLAMA_70B = LlamaShape(width=8192, hidden=28672, blocks=80, heads=64, kv_heads=8, vocabulary=128256)
PADDING = 1 / 8
"""Share of the rows' tokens in a Llama suite that are padding."""
SHARDS = 4
"""Files of every model of a Llama suite."""


def clip_suite(work: Path, shape: ClipShape, tasks: int, samples: int) -> Path:
    """Suite file of a base, a merged model, `tasks` experts and `samples` pictures for each, as tensors.

    The experts are two distinct files under many names (hard links): twenty of B/32 take the disk of two.
    """
    root = work / "clip-{width}x{hidden}x{blocks}-{heads}-{patch}-{image}".format(**asdict(shape))
    _once(root, lambda folder: _write_clip(folder, shape))
    entries: dict[str, Any] = {}
    for task in range(tasks):
        _link(root / f"expert-{task % 2}", root / "experts" / f"t{task}")
        pictures = root / "pictures" / f"t{task}-{samples}.safetensors"
        if not pictures.is_file():
            pictures.parent.mkdir(exist_ok=True)
            noise = torch.Generator().manual_seed(1000 + task)
            tensor = torch.randn(samples, 3, shape.image, shape.image, generator=noise)
            _save({"pixels": tensor}, pictures)
        source = {"tensors": str(pictures.relative_to(root)), "key": "pixels"}
        entries[f"t{task}"] = {"expert": f"experts/t{task}", "calibration": source}
    return _write_suite(root, f"{tasks}x{samples}", entries)


def whole_clip_suites(work: Path, shape: ClipShape, tasks: int, samples: int) -> dict[str, Path]:
    """Suite files like that of `clip_suite`, on a base with its text tower, by how it is stored: as "safetensors",
    or "pickled" as `pytorch_model.bin`."""
    suite = clip_suite(work, shape, tasks, samples)
    root = suite.parent
    _once(root / "whole", lambda folder: _write_whole_clip(folder, shape, root / "base"))
    content = yaml.safe_load(suite.read_text("utf-8"))
    recipe = {"method": "task-arithmetic", "scale": SCALE}
    found = {}
    for stored in ("safetensors", "pickled"):
        found[stored] = root / f"suite-{stored}-{tasks}x{samples}.yaml"
        changed = {**content, "name": f"{content['name']}-{stored}", "base": f"whole/{stored}", "merged": recipe}
        found[stored].write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
    return found


def llama_suite(work: Path, shape: LlamaShape, tasks: int, samples: int, length: int) -> Path:
    """Suite file of bf16 models in `SHARDS` shards, with `samples` rows of `length` random token ids for each task.

    A quarter of the rows is padded to half (`PADDING`); blocks straddle shards.
    """
    root = work / "llama-{width}x{hidden}x{blocks}-{heads}-{kv_heads}-{vocabulary}-{n}".format(
        **asdict(shape), n=SHARDS
    )
    _once(root, lambda folder: _write_llama(folder, shape))
    entries: dict[str, Any] = {}
    for task in range(tasks):
        _link(root / f"expert-{task % 2}", root / "experts" / f"t{task}")
        tokens = root / "tokens" / f"t{task}-{samples}x{length}.safetensors"
        if not tokens.is_file():
            tokens.parent.mkdir(exist_ok=True)
            noise = torch.Generator().manual_seed(1000 + task)
            mask = torch.ones(samples, length, dtype=torch.long)
            mask[::4, length // 2 :] = 0
            ids = torch.randint(2, shape.vocabulary, (samples, length), generator=noise) * mask
            _save({"ids": ids, "mask": mask}, tokens)
        source = {"tensors": str(tokens.relative_to(root)), "key": "ids", "mask": "mask"}
        entries[f"t{task}"] = {"expert": f"experts/t{task}", "calibration": source}
    return _write_suite(root, f"{tasks}x{samples}x{length}", entries)


def weight_bytes(folder: Path) -> int:
    """Size of a checkpoint's weight files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _write_clip(root: Path, shape: ClipShape) -> None:
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPVisionModelWithProjection

    with torch.device("meta"):
        model = CLIPVisionModelWithProjection(CLIPVisionConfig(**shape.config()))
    shapes = {n: p.shape for n, p in model.named_parameters() if n.startswith("vision_model.")}
    _write_models(root, shapes, shape.config(), torch.float32, _in_one_file)


def _write_whole_clip(root: Path, shape: ClipShape, vision: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(vision_config=shape.config())
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in CLIPModel(config).named_parameters()}
    noise = torch.Generator().manual_seed(0)
    tensors = {name: _random(name, one, noise) for name, one in shapes.items() if one}
    tensors["logit_scale"] = torch.tensor(math.log(100.0))
    tensors |= load_file(vision / "model.safetensors")
    for stored in ("safetensors", "pickled"):
        folder = root / stored
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps({**config.to_dict(), "architectures": ["CLIPModel"]}), encoding="utf-8"
        )
    _in_one_file(root / "safetensors", tensors)
    torch.save(tensors, root / "pickled" / "pytorch_model.bin")


def _write_llama(root: Path, shape: LlamaShape) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape.config()))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    _write_models(root, shapes, shape.config(), torch.bfloat16, _in_shards)


def _write_models(
    root: Path,
    shapes: Mapping[str, torch.Size],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    write: Callable[[Path, Mapping[str, Tensor]], None],
) -> None:
    """`base`, `expert-0`, `expert-1` and `merged`, the Task Arithmetic of the two."""
    noise = torch.Generator().manual_seed(0)
    base = {name: _random(name, shape, noise).to(dtype) for name, shape in shapes.items()}
    vectors: dict[str, Tensor] = {}

    def save(name: str, tensors: Mapping[str, Tensor]) -> None:
        folder = root / name
        folder.mkdir(parents=True)
        write(folder, tensors)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    save("base", base)
    for expert in range(2):
        moved = {name: _moved(tensor, noise) for name, tensor in base.items()}
        save(f"expert-{expert}", moved)
        for name in base:
            step = moved[name].float() - base[name].float()
            vectors[name] = (vectors[name] + step if name in vectors else step).to(dtype)
    save("merged", {name: (t.float() + SCALE * vectors[name].float()).to(dtype) for name, t in base.items()})


def _random(name: str, shape: torch.Size, noise: torch.Generator) -> Tensor:
    """Features keep their scale through a linear map of this size; norms scale by about one. Queries of T5, which
    divides no product of them, are shorter: a saturated softmax would make every rounding a hundredth of the output."""
    tensor = torch.randn(shape, generator=noise)
    if name.endswith("Attention.q.weight"):
        tensor /= math.sqrt(T5_HEAD)
    if len(shape) < 2:
        return 1 + 0.1 * tensor if "norm" in name and name.endswith("weight") else 0.1 * tensor
    return tensor / math.sqrt(tensor[0].numel())


def _moved(tensor: Tensor, noise: torch.Generator) -> Tensor:
    step = torch.randn(tensor.shape, generator=noise)
    length = EXPERT_DISTANCE * float(tensor.float().norm() / step.norm())
    return (tensor.float() + step * length).to(tensor.dtype)


def _in_one_file(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})


def _in_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    written = 0
    for name, tensor in tensors.items():
        parts[min(SHARDS * written // total, SHARDS - 1)][name] = tensor
        written += tensor.nbytes
    names = [f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors" for number in range(SHARDS)]
    for file, part in zip(names, parts, strict=True):
        save_file(part, folder / file, {"format": "pt"})
    places = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _once(root: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder that appears when it is complete; nothing where it is there already."""
    if root.is_dir():
        return
    unfinished = root.with_name(root.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write(unfinished)
    unfinished.rename(root)


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a file that appears when it is complete."""
    put(file, lambda unfinished: save_file(dict(tensors), unfinished))


def _link(source: Path, folder: Path) -> None:
    """The same files under another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not (folder / file.name).exists():
            os.link(file, folder / file.name)


def _write_suite(root: Path, name: str, tasks: Mapping[str, Any]) -> Path:
    file = root / f"suite-{name}.yaml"
    content = {"name": f"{root.name}-{name}", "base": "base", "merged": "merged", "tasks": dict(tasks)}
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return file
