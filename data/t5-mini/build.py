"""Rebuild the ``t5-mini`` suite from nothing: ``python data/t5-mini/build.py [--seed S] [--out DIR]``.

A small T5 in the manner of FLAN-T5 is trained on all four tasks at once (the base), mostly on plain sentences and a
little on the hard ones, of which the tasks are made. Then it is fine-tuned on each task by itself (the experts), with
its embedding and its output layer frozen. The README beside this file has the results.
Two processor cores, no network. The texts do not depend on the seed, which is that of the training alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from safetensors.torch import save_file
from texts import LABELS, PROMPTS, TASKS, Row, rows
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

HERE = Path(__file__).resolve().parent
SPLITS = {"calibration": 256, "validation": 128, "test": 500}
PAD, END = 0, 1  # as T5 has them
POSITIONS = 64

Shape = Mapping[str, int | float | bool | str]
SHAPE: Shape = {
    "d_model": 96, "d_kv": 32, "num_heads": 4, "d_ff": 192, "num_layers": 3, "num_decoder_layers": 2,
    "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD, "tie_word_embeddings": False,
}  # fmt: skip

PLAIN_POOL, HARD_POOL = 450, 8000  # sentences per task
EMBEDDING_SCALE = 0.2  # of T5's own start, whose embeddings are too large to move in a short training
BASE_STEPS, BASE_RATE, BASE_BATCH = 800, 1e-3, 64
HARD_SHARE = {
    "sentiment": 0.04,
    "grammar": 0.05,
    "entailment": 0.08,
    "paraphrase": 0.12,
}  # of the sentences of the base
EXPERT_STEPS, EXPERT_RATE, EXPERT_BATCH = 800, 3e-4, 32

Pairs = list[tuple[list[int], list[int]]]


def held_out(task: str) -> list[Row]:
    """The sentences that nobody trains on: those of all splits, one after the other."""
    return rows(task, sum(SPLITS.values()), seed=1)


def pool(task: str, plain: bool) -> list[Row]:
    """The training sentences of one style, none of them held out."""
    without = frozenset(PROMPTS[task].format(**row) for row in held_out(task))
    return rows(task, PLAIN_POOL if plain else HARD_POOL, seed=2, plain=plain, without=without)


def write_texts(out: Path) -> None:
    """The held-out sentences of each task with their splits, byte for byte the same every time."""
    for task in TASKS:
        order = iter(held_out(task))
        lines = [json.dumps({"split": name} | next(order)) for name, count in SPLITS.items() for _ in range(count)]
        (out / f"{task}.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of every word that the suite uses."""
    special = ["<pad>", "</s>", "<unk>"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="isolated")]
    )
    texts = [label for labels in LABELS.values() for label in labels]
    for task in TASKS:
        sentences = held_out(task) + pool(task, plain=True) + pool(task, plain=False)
        texts += [PROMPTS[task].format(**row) for row in sentences]
    pieces = {piece for text in texts for piece, _ in core.pre_tokenizer.pre_tokenize_str(text.lower())}
    core.model = models.WordLevel({word: i for i, word in enumerate(special + sorted(pieces))}, unk_token="<unk>")
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=POSITIONS, model_input_names=["input_ids", "attention_mask"],
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip


def encode(tokenizer: PreTrainedTokenizerFast, task: str, chosen: list[Row]) -> Pairs:
    """Token numbers of prompts and answers."""
    prompts = tokenizer([PROMPTS[task].format(**row) for row in chosen])["input_ids"]
    answers = tokenizer([row["label"] for row in chosen])["input_ids"]
    return list(zip(prompts, answers, strict=True))


def collate(pairs: Pairs) -> dict[str, Tensor]:
    """One padded batch as ``T5ForConditionalGeneration`` takes it."""

    def pad(sequences: list[list[int]], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=value)

    prompts = pad([prompt for prompt, _ in pairs], PAD)
    labels = pad([answer for _, answer in pairs], -100)
    return {"input_ids": prompts, "attention_mask": (prompts != PAD).long(), "labels": labels}


def make_model(vocabulary: int, shape: Shape = SHAPE) -> T5ForConditionalGeneration:
    """An untrained model whose output layer is its own: transformers 5 ties it, whatever the configuration says."""
    model = T5ForConditionalGeneration(T5Config(vocab_size=vocabulary, **shape))
    width = model.config.d_model
    model.lm_head.weight = nn.Parameter(torch.randn(vocabulary, width) * width**-0.5)
    with torch.no_grad():
        model.shared.weight.mul_(EMBEDDING_SCALE)
    return model


def steps(parameters: list[nn.Parameter], rate: float, count: int, warm_up: int) -> Iterator[None]:
    """AdamW over ``count`` steps, warmed up, then a cosine down to zero; the caller fills the gradients."""
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.01, betas=(0.9, 0.98))
    for step in range(count):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (count - warm_up)))
        for group in optimizer.param_groups:
            group["lr"] = rate * ((step + 1) / warm_up if step < warm_up else cosine)
        optimizer.zero_grad()
        yield
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def train_base(tokenizer: PreTrainedTokenizerFast, seed: int) -> T5ForConditionalGeneration:
    """Train on all tasks at once."""
    torch.manual_seed(seed)
    model, rng = make_model(len(tokenizer)), random.Random(seed)
    plain = {task: encode(tokenizer, task, pool(task, plain=True)) for task in TASKS}
    hard = {task: encode(tokenizer, task, pool(task, plain=False)) for task in TASKS}
    for number, _ in enumerate(steps(list(model.parameters()), BASE_RATE, BASE_STEPS, warm_up=100)):
        batch = [
            rng.choice((hard if rng.random() < HARD_SHARE[task] else plain)[task])
            for task in TASKS
            for _ in range(BASE_BATCH // len(TASKS))
        ]
        loss = model(**collate(batch)).loss
        loss.backward()
        if number % 200 == 0:
            print(f"base: step {number} of {BASE_STEPS}, loss {loss.item():.3f}", flush=True)
    return model


def train_expert(out: Path, task: str, seed: int) -> T5ForConditionalGeneration:
    """Fine-tune the base on one task; embedding and output layer stay the base's."""
    model, tokenizer = load(out / "base"), PreTrainedTokenizerFast.from_pretrained(out / "base")
    model.shared.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    rng = random.Random(f"{seed} {task}")
    pairs = encode(tokenizer, task, pool(task, plain=False))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in steps(trained, EXPERT_RATE, EXPERT_STEPS, warm_up=50):
        loss = model(**collate(rng.sample(pairs, EXPERT_BATCH))).loss
        loss.backward()
    print(f"{task}: expert trained, loss {loss.item():.4f}", flush=True)
    return model


def load(folder: Path) -> T5ForConditionalGeneration:
    """The model of a folder in float32, its output layer untied."""
    model = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() != model.shared.weight.data_ptr(), "the output layer is tied"
    return model


def write_model(model: T5ForConditionalGeneration, folder: Path, shape: Shape = SHAPE) -> None:
    """A folder that ``T5ForConditionalGeneration`` loads: half precision, each tensor once."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: t.detach().half().contiguous() for n, t in model.state_dict().items() if "embed_tokens" not in n}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(shape) | {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "torch_dtype": "float32",
        "vocab_size": model.config.vocab_size, "is_encoder_decoder": True,
    }  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {"decoder_start_token_id": PAD, "eos_token_id": END, "pad_token_id": PAD}
    )


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"tokenizer_class": "PreTrainedTokenizerFast"})


def build_expert(work: tuple[Path, str, int]) -> None:
    """Train and write one expert, in a process of its own with one thread."""
    out, task, seed = work
    torch.set_num_threads(1)
    write_model(train_expert(out, task, seed), out / "experts" / task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--workers", type=int, default=2, help="experts trained at a time")
    arguments = parser.parse_args()
    start = time.time()
    (arguments.out / "base").mkdir(parents=True, exist_ok=True)
    write_texts(arguments.out)
    tokenizer = make_tokenizer()
    write_tokenizer(tokenizer, arguments.out / "base")
    write_model(train_base(tokenizer, arguments.seed), arguments.out / "base")
    print(f"base written after {time.time() - start:.0f} s", flush=True)
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as workers:
        workers.map(build_expert, [(arguments.out, task, arguments.seed) for task in TASKS], chunksize=1)
    print(f"suite written after {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
