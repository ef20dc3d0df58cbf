"""Rebuild the ``lm-mini`` suite from nothing: ``python data/lm-mini/build.py [--seed S] [--out DIR]``.

A small causal model of the Qwen3 kind is trained on all four tasks at once (the base), mostly on plain sentences and a
little on the hard ones, of which the tasks are made. Then it is fine-tuned on each task by itself (the experts), with
its embedding, which is its output layer too, frozen. A model that is there already is not trained again, so a build
that was stopped goes on. The README beside this file has the results.
One processor core, no network. The texts do not depend on the seed, which is that of the training alone.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from safetensors.torch import save_file
from tasks import PROMPTS, TASKS, Row, rows
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("t5_mini_build", HERE.parent / "t5-mini" / "build.py")
assert _spec is not None
assert _spec.loader is not None
t5_mini = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(t5_mini)

SPLITS = t5_mini.SPLITS
PAD, END, START, UNKNOWN = range(4)
SPECIAL = ["<pad>", "</s>", "<s>", "<unk>"]
POSITIONS = 128

SHAPE = {
    "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 192, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "attention_dropout": 0.0, "max_position_embeddings": POSITIONS, "rope_theta": 10000.0, "initializer_range": 0.02,
    "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
    "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": START,
}  # fmt: skip

PLAIN_POOL, HARD_POOL = 450, 8000  # texts per task
PROMPT_SHARE = 0.2  # of a token of a prompt in the loss, where one of an answer has 1
BASE_STEPS, BASE_RATE, BASE_BATCH = 1000, 2e-3, 64
HARD_SHARE = {"sentiment": 0.02, "entailment": 0.04, "correct": 0.01, "rewrite": 0.005}  # of the base's texts
EXPERT_STEPS, EXPERT_RATE, EXPERT_BATCH = 600, 3e-4, 32

Pairs = list[tuple[list[int], list[int]]]


def held_out(task: str) -> list[Row]:
    """The texts that nobody trains on: those of all splits, one after the other."""
    return rows(task, sum(SPLITS.values()), seed=1)


def pool(task: str, plain: bool) -> list[Row]:
    """The training texts of one style, none of them held out."""
    without = frozenset(PROMPTS[task].format(**row) for row in held_out(task))
    return rows(task, PLAIN_POOL if plain else HARD_POOL, seed=2, plain=plain, without=without)


def write_texts(out: Path) -> None:
    """The held-out texts of each task with their splits, byte for byte the same every time."""
    for task in TASKS:
        order = iter(held_out(task))
        lines = [json.dumps({"split": name} | next(order)) for name, count in SPLITS.items() for _ in range(count)]
        (out / f"{task}.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of every word that the suite uses; a text begins with the start token."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="isolated")]
    )
    texts = []
    for task in TASKS:
        sentences = held_out(task) + pool(task, plain=True) + pool(task, plain=False)
        texts += [PROMPTS[task].format(**row) for row in sentences] + [row["label"] for row in sentences]
    pieces = {piece for text in texts for piece, _ in core.pre_tokenizer.pre_tokenize_str(text.lower())}
    core.model = models.WordLevel({word: i for i, word in enumerate(SPECIAL + sorted(pieces))}, unk_token="<unk>")
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=POSITIONS, model_input_names=["input_ids", "attention_mask"],
        pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>",
    )  # fmt: skip


def encode(tokenizer: PreTrainedTokenizerFast, task: str, chosen: list[Row]) -> Pairs:
    """Token numbers of prompts, and of answers with the token that ends them."""
    prompts = tokenizer([PROMPTS[task].format(**row) for row in chosen])["input_ids"]
    answers = tokenizer([row["label"] for row in chosen], add_special_tokens=False)["input_ids"]
    return [(prompt, [*answer, END]) for prompt, answer in zip(prompts, answers, strict=True)]


def loss_of(model: Qwen3ForCausalLM, pairs: Pairs) -> Tensor:
    """Cross entropy of the next token, a token of a prompt weighted by ``PROMPT_SHARE``."""

    def pad(sequences: list[list[int]], value: float) -> Tensor:
        rows = [torch.tensor(s) for s in sequences]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = pad([prompt + answer for prompt, answer in pairs], PAD)
    share = pad([[PROMPT_SHARE] * len(prompt) + [1.0] * len(answer) for prompt, answer in pairs], 0.0)[:, 1:]
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False).logits[:, :-1]
    nats = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (nats * share.flatten()).sum() / share.sum()


def train_base(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Train on all tasks at once."""
    torch.manual_seed(seed)
    model, rng = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **SHAPE)), random.Random(seed)
    plain = {task: encode(tokenizer, task, pool(task, plain=True)) for task in TASKS}
    hard = {task: encode(tokenizer, task, pool(task, plain=False)) for task in TASKS}
    for number, _ in enumerate(t5_mini.steps(list(model.parameters()), BASE_RATE, BASE_STEPS, warm_up=100)):
        batch = [
            rng.choice((hard if rng.random() < HARD_SHARE[task] else plain)[task])
            for task in TASKS
            for _ in range(BASE_BATCH // len(TASKS))
        ]
        loss = loss_of(model, batch)
        loss.backward()
        if number % 200 == 0:
            print(f"base: step {number} of {BASE_STEPS}, loss {loss.item():.3f}", flush=True)
    return model


def train_expert(out: Path, task: str, seed: int) -> Qwen3ForCausalLM:
    """Fine-tune the base on one task; the embedding stays the base's."""
    model, tokenizer = load(out / "base"), PreTrainedTokenizerFast.from_pretrained(out / "base")
    model.model.embed_tokens.requires_grad_(False)
    rng = random.Random(f"{seed} {task}")
    pairs = encode(tokenizer, task, pool(task, plain=False))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in t5_mini.steps(trained, EXPERT_RATE, EXPERT_STEPS, warm_up=50):
        loss = loss_of(model, rng.sample(pairs, EXPERT_BATCH))
        loss.backward()
    print(f"{task}: expert trained, loss {loss.item():.4f}", flush=True)
    return model


def load(folder: Path) -> Qwen3ForCausalLM:
    """The model of a folder in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    """A folder that ``Qwen3ForCausalLM`` loads, in transformers 4 too: half precision, each tensor once."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: t.detach().half().contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    config = SHAPE | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32",
        "vocab_size": model.config.vocab_size,
    }  # fmt: skip
    t5_mini.write_json(folder / "config.json", config)
    special = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
    t5_mini.write_json(folder / "generation_config.json", special)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})  # last: it says that all is there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--anew", action="store_true", help="train what is there already too")
    arguments = parser.parse_args()
    out, start = arguments.out, time.process_time()
    torch.set_num_threads(1)

    def missing(folder: Path) -> bool:
        return arguments.anew or not (folder / "model.safetensors").is_file()

    (out / "base").mkdir(parents=True, exist_ok=True)
    write_texts(out)
    tokenizer = make_tokenizer()
    t5_mini.write_tokenizer(tokenizer, out / "base")
    if missing(out / "base"):
        write_model(train_base(tokenizer, arguments.seed), out / "base")
        print(f"base written after {time.process_time() - start:.0f} s of the processor", flush=True)
    for task in TASKS:
        if missing(out / "experts" / task):
            write_model(train_expert(out, task, arguments.seed), out / "experts" / task)
    print(f"suite written after {time.process_time() - start:.0f} s of the processor", flush=True)


if __name__ == "__main__":
    sys.exit(main())
