"""Rebuild the ``clip-mini`` suite from nothing: ``python data/clip-mini/build.py [--seed S] [--out DIR]``.

A small CLIP is trained on all eight tasks (the base): on plain pictures with their ordinary captions, and on
pictures in the look of each task with captions out of a catalogue ("item shapes3"), whose words no prompt uses.
So the base sees the looks well but knows their names only by analogy with the plain pictures. Then its vision
tower is fine-tuned on each task by itself (the experts). The README beside this file has the results.
Two processor cores, no network.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

from featcal.samples.embedded_pictures import CLASSES, TEMPLATES, draw_pictures

HERE = Path(__file__).resolve().parent
TASKS = list(CLASSES)
TEMPLATE_COUNT = 3  # captions per class
POSITIONS = 16

WIDTH, BLOCKS, MLP, HEADS, PATCH, PROJECTION = 160, 4, 320, 5, 8, 64
PIXEL_MEAN, PIXEL_STD = 0.5, 0.25

BASE_STEPS, BASE_RATE, BASE_DECAY, BASE_POOL = 700, 1e-3, 0.05, 4000
BASE_PLAIN, BASE_CATALOGUE = 4, 12  # pictures per task and step
EXPERT_STEPS, EXPERT_RATE, EXPERT_DECAY, EXPERT_POOL = 200, 1.2e-3, 0.01, 5000
EXPERT_BATCH = 64
EXPERT_TAPER = 0.8  # each block learns at this fraction of the rate of the block after it

Tokens = dict[str, torch.Tensor]
Pool = tuple[np.ndarray, np.ndarray]


def write_glyphs(path: Path) -> None:
    """The atlas of letters and the scans of digits, shuffled once and for all."""
    from PIL import Image, ImageDraw, ImageFont
    from sklearn.datasets import load_digits

    side, font = 32, ImageFont.load_default(26)
    letters = np.zeros((26, side, side), np.uint8)
    for index in range(26):
        picture = Image.new("L", (side, side))
        ImageDraw.Draw(picture).text((side / 2, side / 2), chr(65 + index), fill=255, font=font, anchor="mm")
        letters[index] = np.asarray(picture)
    scans = load_digits()
    order = np.random.RandomState(1234).permutation(len(scans.target))
    digits = np.round(scans.images[order] * (255 / 16)).astype(np.uint8)
    np.savez_compressed(path, letters=letters, digits=digits, digit_labels=scans.target[order].astype(np.uint8))


def captions(template: int) -> list[str]:
    """One caption per class of every task, in the order of ``CLASSES``."""
    return [TEMPLATES[task][template].format(name) for task in TASKS for name in CLASSES[task]]


def catalogue() -> list[str]:
    """The caption of each class in the catalogue."""
    return [f"item {task}{index}" for task in TASKS for index in range(len(CLASSES[task]))]


def class_range(task: str) -> slice:
    """Where the classes of a task lie among those of all tasks."""
    start = sum(len(CLASSES[other]) for other in TASKS[: TASKS.index(task)])
    return slice(start, start + len(CLASSES[task]))


def make_tokenizer(texts: list[str], positions: int = POSITIONS) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of these texts. The end token must not have number 2, which CLIP reads as an old
    convention."""
    special = ["<pad>", "<bos>", "<unk>", "<eos>"]
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text.lower())})
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 3)]
    )
    names = dict(zip(("pad_token", "bos_token", "unk_token", "eos_token"), special, strict=True))
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=positions, model_input_names=inputs, **names)


def make_model(vocabulary: int) -> CLIPModel:
    """An untrained CLIP of the size of the suite."""
    text = {
        "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS, "vocab_size": vocabulary, "projection_dim": PROJECTION,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3,
    }  # fmt: skip
    vision = {
        "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "intermediate_size": MLP,
        "num_attention_heads": HEADS, "image_size": 32, "patch_size": PATCH, "projection_dim": PROJECTION,
    }  # fmt: skip
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=PROJECTION))


def pixels(images: np.ndarray) -> torch.Tensor:
    """Normalised float images [n, 3, 32, 32] of uint8 ones [n, 32, 32, 3]."""
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - PIXEL_MEAN) / PIXEL_STD


def picture_pool(task: str, count: int, seed: int, *, plain: bool = False) -> Pool:
    """Training pictures of a task, plain or in its look, and their classes."""
    rng = np.random.RandomState(seed)
    labels = rng.permutation(np.arange(count) % len(CLASSES[task])).astype(np.int64)
    return draw_pictures(task, labels, rng, split="train", plain=plain), labels


def sample(pools: dict[str, Pool], count: int, rng: np.random.RandomState) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` pictures of each task and their classes, numbered over all tasks."""
    rows = {task: rng.randint(0, len(pool[1]), count) for task, pool in pools.items()}
    images = np.concatenate([pools[task][0][rows[task]] for task in pools])
    target = np.concatenate([pools[task][1][rows[task]] + class_range(task).start for task in pools])
    return pixels(images), torch.from_numpy(target)


def image_features(model: CLIPModel, images: torch.Tensor) -> torch.Tensor:
    """Unit features [n, d]."""
    pooled = model.vision_model(pixel_values=images).pooler_output
    return F.normalize(model.visual_projection(pooled), dim=-1)


def text_features(model: CLIPModel, tokens: Tokens) -> torch.Tensor:
    """Unit features [classes, d]."""
    return F.normalize(model.text_projection(model.text_model(**tokens).pooler_output), dim=-1)


def tokenise(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tokens:
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def steps(
    groups: list[list[torch.nn.Parameter]], rates: list[float], count: int, decay: float, warm_up: int
) -> Iterator[None]:
    """AdamW over ``count`` steps, warmed up, then a cosine down to zero; the caller fills the gradients.

    Each group of parameters has a rate of its own.
    """
    everything = [parameter for group in groups for parameter in group]
    settings = [
        {"params": [p for p in group if (p.ndim > 1) == matrices], "weight_decay": decay * matrices, "peak": rate}
        for group, rate in zip(groups, rates, strict=True)
        for matrices in (True, False)
    ]
    optimizer = torch.optim.AdamW(settings, betas=(0.9, 0.98))
    for step in range(count):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (count - warm_up)))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * ((step + 1) / warm_up if step < warm_up else cosine)
        optimizer.zero_grad()
        yield
        torch.nn.utils.clip_grad_norm_(everything, 1.0)
        optimizer.step()


def train_base(tokenizer: PreTrainedTokenizerFast, seed: int) -> CLIPModel:
    """Train on all tasks at once, plain pictures against all prompts and the others against the catalogue."""
    torch.manual_seed(seed)
    model = make_model(len(tokenizer))
    prompts = [tokenise(tokenizer, captions(k)) for k in range(TEMPLATE_COUNT)]
    items = tokenise(tokenizer, catalogue())
    plain = {t: picture_pool(t, BASE_POOL, 1000 * seed + i, plain=True) for i, t in enumerate(TASKS)}
    looks = {t: picture_pool(t, BASE_POOL, 1000 * seed + 50 + i) for i, t in enumerate(TASKS)}
    rng = np.random.RandomState(seed)
    for number, _ in enumerate(steps([list(model.parameters())], [BASE_RATE], BASE_STEPS, BASE_DECAY, 100)):
        plain_images, plain_target = sample(plain, BASE_PLAIN, rng)
        look_images, look_target = sample(looks, BASE_CATALOGUE, rng)
        images = image_features(model, torch.cat([plain_images, look_images]))
        names = text_features(model, prompts[rng.randint(TEMPLATE_COUNT)])
        scale, cut = model.logit_scale.exp(), len(plain_images)
        named = F.cross_entropy(scale * images[:cut] @ names.T, plain_target, reduction="sum")
        entries = scale * images[cut:] @ text_features(model, items).T
        loss = (named + F.cross_entropy(entries, look_target, reduction="sum")) / len(images)
        loss.backward()
        if number % 200 == 0:
            print(f"base: step {number} of {BASE_STEPS}, loss {loss.item():.3f}", flush=True)
    return model


def train_expert(base: CLIPModel, tokenizer: PreTrainedTokenizerFast, task: str, seed: int) -> CLIPModel:
    """Fine-tune the encoder blocks of the vision tower on one task; everything else stays the base's."""
    model = copy.deepcopy(base).requires_grad_(False)
    blocks = [list(block.requires_grad_(True).parameters()) for block in model.vision_model.encoder.layers]
    rates = [EXPERT_RATE * EXPERT_TAPER ** (BLOCKS - 1 - index) for index in range(BLOCKS)]
    source = 1000 * seed + 100 + TASKS.index(task)
    images, labels = picture_pool(task, EXPERT_POOL, source)
    with torch.no_grad():
        prompts = [tokenise(tokenizer, captions(k)) for k in range(TEMPLATE_COUNT)]
        texts = [text_features(base, prompt)[class_range(task)] for prompt in prompts]
    scale = base.logit_scale.exp().item()
    rng = np.random.RandomState(source)
    for _ in steps(blocks, rates, EXPERT_STEPS, EXPERT_DECAY, 40):
        rows = rng.randint(0, EXPERT_POOL, EXPERT_BATCH)
        features = image_features(model, pixels(images[rows]))
        logits = scale * features @ texts[rng.randint(TEMPLATE_COUNT)].T
        loss = F.cross_entropy(logits, torch.from_numpy(labels[rows]))
        loss.backward()
    print(f"{task}: expert trained, loss {loss.item():.3f}", flush=True)
    return model


def half(model: torch.nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """The weights in half precision under names that transformers 4 and 5 both read."""
    return {prefix + name: value.half().contiguous() for name, value in model.state_dict().items()}


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_base(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A folder that ``CLIPModel``, ``AutoTokenizer`` and ``AutoImageProcessor`` load."""
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    save_file(half(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict() | {"architectures": ["CLIPModel"], "torch_dtype": "float32"}
    write_json(folder / "config.json", config)
    processor = {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True, "do_resize": True, "resample": 3,
        "size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32},
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [PIXEL_MEAN] * 3, "image_std": [PIXEL_STD] * 3,
    }  # fmt: skip
    write_json(folder / "preprocessor_config.json", processor)


def write_expert(model: CLIPModel, folder: Path) -> None:
    """A folder that ``CLIPVisionModel`` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = half(model.vision_model, "vision_model.")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.vision_config.to_diff_dict()
    write_json(folder / "config.json", config | {"architectures": ["CLIPVisionModel"], "torch_dtype": "float32"})


def build_expert(work: tuple[Path, str, int]) -> None:
    """Train and write one expert, in a process of its own with one thread."""
    out, task, seed = work
    torch.set_num_threads(1)
    base = CLIPModel.from_pretrained(out / "base", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "base")
    write_expert(train_expert(base, tokenizer, task, seed), out / "experts" / task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--workers", type=int, default=2, help="experts trained at a time")
    arguments = parser.parse_args()
    start = time.time()
    (arguments.out / "base").mkdir(parents=True, exist_ok=True)
    if not (HERE / "glyphs.npz").exists():
        write_glyphs(HERE / "glyphs.npz")
    texts = [text for template in range(TEMPLATE_COUNT) for text in captions(template)]
    tokenizer = make_tokenizer(texts + catalogue())
    write_base(train_base(tokenizer, arguments.seed), tokenizer, arguments.out / "base")
    print(f"base written after {time.time() - start:.0f} s", flush=True)
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as workers:
        workers.map(build_expert, [(arguments.out, task, arguments.seed) for task in TASKS], chunksize=1)
    print(f"suite written after {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
