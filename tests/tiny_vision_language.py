"""A suite of tiny models of pictures and text, with files as the Hub has them: JSON Lines that name PNG files, an image
processor's settings, a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from featcal import Family, load_suite, open_family
from featcal.models.vision_language_facts import VISION_LANGUAGE, VisionLanguageFacts

ROWS = {facts.model_type: facts for facts in VISION_LANGUAGE}
TASKS = ("left", "right")
SPECIAL = ["<pad>", "</s>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = [*SPECIAL, *[f"w{i}" for i in range(33)]]
SIDES = ((16, 24), (24, 32), (16, 16), (32, 16), (24, 16))
"""Of the pictures: 6, 12, 4, 8 and 6 tokens, in windows of four."""
COUNT = len(SIDES)
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_TEXT = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}  # fmt: skip
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 12, "hidden_size": 16, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 12, "out_hidden_size": 16, "intermediate_size": 20, "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}  # fmt: skip
_ALL_VISION = {"depth": 2, "num_heads": 1, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


def tiny_vision_language(facts: VisionLanguageFacts, **options: Any) -> Any:
    """The library's own model with random weights of a size that makes every layer matter."""
    generator = torch.Generator().manual_seed(0)
    config = getattr(transformers, str(facts.config))(
        text_config=_TEXT,
        vision_config=_ALL_VISION | _VISION[facts.model_type],
        **{"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4, **options},
    )
    model = getattr(transformers, str(facts.model))(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = "norm" in name or "ln_q" in name
            if parameter.ndim == 1:
                parameter.copy_((1.0 if scale and name.endswith("weight") else 0.0) + 0.2 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed_tokens" in name else 0.3))
    return model.eval()


@dataclass(frozen=True)
class PicturedTrial:
    """Base, merged model and two experts near each other; pictures of several sizes with questions and answers."""

    facts: VisionLanguageFacts
    root: Path

    @cached_property
    def family(self) -> Family:
        return open_family(load_suite(self.root / "suite.yaml"), "cpu")

    def library(self, folder: str, dtype: torch.dtype = torch.float64) -> Any:
        kind = getattr(transformers, str(self.facts.model))
        return kind.from_pretrained(self.root / folder, dtype=dtype, attn_implementation="eager").eval()

    def rows(self, task: str, split: str = "calibration") -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.root / f"{task}-{split}.jsonl").read_text().splitlines()]

    def processor(self) -> Any:
        """The library's own, of the three parts that the base's files hold."""
        return getattr(transformers, f"{str(self.facts.model).removesuffix('ForConditionalGeneration')}Processor")(
            transformers.Qwen2VLImageProcessor.from_pretrained(self.root / "base"),
            transformers.AutoTokenizer.from_pretrained(self.root / "base"),
            transformers.Qwen2VLVideoProcessor(),
        )

    def alone(self, task: str, split: str = "calibration", answered: bool = True) -> list[Mapping[str, Tensor]]:
        """Every sample by itself, as the library's own processor makes it."""
        processor, found = self.processor(), []
        for row in self.rows(task, split):
            text = f"{MARK} {row['question']}" + (f" {row['answer']} </s>" if answered else "")
            picture = Image.open(self.root / row["image"])
            found.append(dict(processor(text=[text], images=[picture], return_tensors="pt")))
        return found


def write_pictured(
    facts: VisionLanguageFacts, root: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> PicturedTrial:
    """Write the suite folder.

    Args:
        options: of the models' configuration.
    """
    base = tiny_vision_language(facts, **options)
    generator = torch.Generator().manual_seed(3)
    experts = {task: _near(base, tiny_vision_language(facts, **options), generator) for task in TASKS}
    models = {"base": base, **{f"experts/{task}": expert for task, expert in experts.items()}}
    merged = tiny_vision_language(facts, **options)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(sum(expert.get_parameter(name) for expert in experts.values()) / len(experts))
    for folder, model in {**models, "merged": merged}.items():
        model.to(dtype).save_pretrained(root / folder)
    for folder in ("base", "merged"):
        write_processor(root / folder)
    tasks: dict[str, Any] = {}
    for number, task in enumerate(TASKS):
        tasks[task] = {"expert": f"experts/{task}"}
        for split in ("calibration", "test"):
            _write_samples(root, f"{task}-{split}", torch.Generator().manual_seed(2 * number + (split == "test")))
            tasks[task][split] = {
                "jsonl": f"{task}-{split}.jsonl", "image": "image", "input": f"{MARK} {{question}}",
                "target": " {answer}",
            }  # fmt: skip
    suite = {"name": "pictured", "base": "base", "merged": "merged", "tasks": tasks}
    (root / "suite.yaml").write_text(yaml.safe_dump(suite))
    return PicturedTrial(facts, root)


@torch.no_grad()
def _near(base: Any, moved: Any, generator: torch.Generator) -> Any:
    """The second model, made the first with every tensor moved by noise of relative size 0.15."""
    for name, parameter in moved.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(base.get_parameter(name) + 0.15 * noise * base.get_parameter(name).norm() / noise.norm())
    return moved


def write_processor(folder: Path) -> None:
    """Settings of the image processor, and a tokenizer of words."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 64, "max_pixels": 4096,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named).save_pretrained(folder)


def _write_samples(root: Path, name: str, generator: torch.Generator) -> None:
    lines = []
    for number, (height, width) in enumerate(SIDES):
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(root / f"{name}-{number}.png")
        words = [f"w{int(i)}" for i in torch.randint(33, (2 + number,), generator=generator)]
        row = {"image": f"{name}-{number}.png", "question": " ".join(words), "answer": f"{words[0]} w{number}"}
        lines.append(json.dumps(row))
    (root / f"{name}.jsonl").write_text("\n".join(lines))
