"""Tiny language models made on the fly, each with experts near it and ready-made token samples."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.formats.weights import Overlay, Weights

WORDS = ["<pad>", "</s>", "<unk>", "yes", "no", *[f"w{i}" for i in range(27)]]
ROWS = len(WORDS)
TASKS = ("left", "right")
CONFIGS: dict[str, dict[str, Any]] = {
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": ROWS, "d_model": 16,
        "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 3, "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
        "pad_token_id": 0, "eos_token_id": 1, "relative_attention_num_buckets": 8,
    },
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": ROWS, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    },
}  # fmt: skip
CONFIGS["t5-tied"] = {**CONFIGS["t5"], "tie_word_embeddings": True}
CONFIGS["llama-tied"] = {**CONFIGS["llama"], "tie_word_embeddings": True}
CONFIGS["t5-lora"] = CONFIGS["t5"]
KINDS = tuple(CONFIGS)
"""Kinds of which everything must hold that holds for any architecture; those below are for references alone."""
CONFIGS["t5-gated"] = {**CONFIGS["t5"], "layer_norm_epsilon": 0.02}
CONFIGS["t5-relu"] = {**CONFIGS["t5"], "feed_forward_proj": "relu", "layer_norm_epsilon": 0.02}
CONFIGS["llama-plain"] = {**CONFIGS["llama"], "rms_norm_eps": 0.02}
CONFIGS["llama-biased"] = {**CONFIGS["llama"], "rms_norm_eps": 0.02, "attention_bias": True, "mlp_bias": True}


def library_model(kind: str, **options: Any) -> Any:
    """The library's own model with random weights of a size that makes every layer matter.

    Args:
        options: what its configuration has besides, or instead of, that of the kind.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    config = CONFIGS[kind] | options
    if kind.startswith("t5"):
        model: Any = T5ForConditionalGeneration(T5Config(**config))
        if not config["tie_word_embeddings"]:
            model.lm_head.weight = torch.nn.Parameter(torch.randn(ROWS, 16))
    else:
        model = LlamaForCausalLM(LlamaConfig(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            elif "embed" not in name and "shared" not in name:
                parameter.normal_(0, 0.3)
    return model.eval()


def write_text_base(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A checkpoint folder with tokenizer; returns its tensors, shared ones once."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    model = library_model(kind)
    tensors = {name: p.detach().to(dtype).contiguous() for name, p in model.named_parameters()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind.startswith("t5"):
        tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    specials = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write_text_expert(folder: Path, base: dict[str, Tensor], kind: str, seed: int, distance: float = 0.3) -> None:
    """A checkpoint near the base: every tensor moved by noise of relative size `distance`."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in base.items():
        noise = torch.randn(tensor.shape, generator=generator)
        moved[name] = (tensor.float() + distance * noise * tensor.float().norm() / noise.norm()).to(tensor.dtype)
    folder.mkdir(parents=True)
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))


def write_lora(folder: Path, base: dict[str, Tensor], seed: int, distance: float) -> None:
    """A peft adapter of rank 4 on every query and value, of about `distance` of their size."""
    generator = torch.Generator().manual_seed(seed)
    update = {}
    for name in base:
        if name.endswith((".q.weight", ".v.weight")):
            rows, columns = base[name].shape
            down = torch.randn(4, columns, generator=generator)
            up = torch.randn(rows, 4, generator=generator)
            up *= distance * base[name].norm() / (2 * (up @ down).norm())
            module = f"base_model.model.{name.removesuffix('.weight')}"
            update |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    folder.mkdir(parents=True)
    save_file(update, folder / "adapter_model.safetensors", {"format": "pt"})
    options = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q", "v"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**options, "task_type": "SEQ_2_SEQ_LM"}))


def token_samples(kind: str, seed: int, count: int = 8) -> dict[str, Tensor]:
    """Token ids with padding on the right, their mask and the answers: `ids`, `mask`, `labels`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 9, (count,), generator=generator)
    lengths[0] = 8
    mask = (torch.arange(8) < lengths[:, None]).long()
    ids = torch.randint(3, ROWS, (count, 8), generator=generator) * mask
    answers = torch.randint(3, 5, (count, 1), generator=generator)
    if kind.startswith("t5"):
        extra = torch.randint(5, ROWS, (count, 1), generator=generator)
        extra[::2] = -100
        return {"ids": ids, "mask": mask, "labels": torch.cat([answers, extra], dim=1)}
    return {"ids": ids, "mask": mask}


def write_text_suite(
    root: Path,
    kind: str,
    distance: float = 0.3,
    dtype: torch.dtype = torch.float32,
    tasks: tuple[str, ...] = TASKS,
    samples_of: Callable[[str, int], dict[str, Tensor]] = token_samples,
) -> Path:
    """A whole suite folder; returns its suite file."""
    base = write_text_base(root / "base", kind, dtype)
    samples: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for seed, task in enumerate(tasks):
        if kind == "t5-lora":
            write_lora(root / "adapters" / task, base, seed + 1, 3 * distance)
        else:
            write_text_expert(root / "experts" / task, base, kind, seed + 1, distance)
        entry: dict[str, Any] = {"expert": f"base+adapters/{task}" if kind == "t5-lora" else f"experts/{task}"}
        for number, split in enumerate(("calibration", "test")):
            drawn = samples_of(kind, 10 * seed + number)
            samples |= {f"{task}.{split}.{name}": tensor for name, tensor in drawn.items()}
            options = {"mask": f"{task}.{split}.mask"}
            if "labels" in drawn:
                options["labels"] = f"{task}.{split}.labels"
            entry[split] = {"tensors": "samples.safetensors", "key": f"{task}.{split}.ids", **options}
        entries[task] = entry
    save_file(samples, root / "samples.safetensors")
    merged = {"method": "task-arithmetic", "scale": 0.5}
    file = root / "suite.yaml"
    file.write_text(yaml.safe_dump({"name": f"tiny-{kind}", "base": "base", "merged": merged, "tasks": entries}))
    return file


def text_suite(root: Path, kind: str) -> Path:
    """The tiny suite with its samples as text."""
    file = write_text_suite(root, kind)
    content = yaml.safe_load(file.read_text())
    generator = torch.Generator().manual_seed(5)
    for task in TASKS:
        rows = []
        for number in range(12):
            length = int(torch.randint(2, 6, (1,), generator=generator))
            words = [WORDS[int(i)] for i in torch.randint(5, ROWS, (length,), generator=generator)]
            rows.append(
                {"split": "test" if number % 2 else "calibration", "text": " ".join(words), "label": number % 2}
            )
        lines = "".join(json.dumps({**row, "label": (i // 2) % 2}) + "\n" for i, row in enumerate(rows))
        (root / f"{task}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        source = {"jsonl": f"{task}.jsonl.gz", "input": "w0 {text} w1", "label": "label", "targets": ["no", "yes"]}
        content["tasks"][task] = {
            "expert": f"experts/{task}",
            "metric": "exact_match",
            "max_target_length": 4,
            "calibration": {**source, "split": "calibration"},
            "test": {**source, "split": "test"},
        }
    file.write_text(yaml.safe_dump(content))
    return file


@torch.no_grad()
def distributions(model: Any, prompt: torch.Tensor, answer: list[int], seq2seq: bool) -> torch.Tensor:
    """Of the next token in front of every token of an answer."""
    if seq2seq:
        start = torch.tensor([[0, *answer[:-1]]])
        logits = model(input_ids=prompt[None], decoder_input_ids=start, use_cache=False).logits[0]
    else:
        logits = model(input_ids=torch.cat([prompt, torch.tensor(answer)])[None], use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1]
    return logits.double().softmax(-1)


def scaled(model: Weights, by: float) -> Weights:
    """Every matrix of the blocks times a number."""
    blocks = (".block.", ".layers.")
    names = [name for name, one in model.info.items() if any(b in name for b in blocks) and len(one.shape) == 2]
    return Overlay("scaled", model, {name: by * tensor for name, tensor in model.read(names).items()})
