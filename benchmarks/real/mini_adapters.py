"""LoRA adapters for the texts of a toy: `python benchmarks/real/mini_adapters.py t5-mini|lm-mini --out FOLDER`.

Every task of the suite gets an adapter of rank 8 on all linear maps of the blocks, trained on the texts and with the
steps of the suite's own experts (`data/*/build.py`). What is written is the suite with these adapters in place of its
experts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from minilm import LORA_ALPHA, RANK, Adapted
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from featcal.system.resources import data_path

TARGETS = {"t5-mini": ["q", "k", "v", "o", "wi_0", "wi_1", "wo"],
           "lm-mini": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}  # fmt: skip
TASK_TYPE = {"t5-mini": "SEQ_2_SEQ_LM", "lm-mini": "CAUSAL_LM"}


def builder_of(suite: str) -> Any:
    """The module that built the suite: its models, texts and loss."""
    folder = data_path(suite)
    sys.path.insert(0, str(folder))
    found = importlib.util.spec_from_file_location(f"build_{suite.partition('-')[0]}", folder / "build.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def train(suite: str, task: str, seed: int, rate: float, build: Any) -> nn.Module:
    """An adapter of one task beside the base's maps; nothing else learns."""
    base = data_path(suite) / "base"
    torch.manual_seed(seed)
    model, tokenizer = build.load(base).requires_grad_(False), PreTrainedTokenizerFast.from_pretrained(base)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS[suite]:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Adapted(module))
    rng, pairs = random.Random(f"{seed} {task}"), build.encode(tokenizer, task, build.pool(task, plain=False))
    steps = getattr(build, "t5_mini", build).steps
    for _ in steps([p for p in model.parameters() if p.requires_grad], rate, build.EXPERT_STEPS, warm_up=50):
        few = rng.sample(pairs, build.EXPERT_BATCH)
        loss = model(**build.collate(few)).loss if suite == "t5-mini" else build.loss_of(model, few)
        loss.backward()
    print(f"{suite}, {task}: loss {loss.item():.4f}", flush=True)
    return model


def write(suite: str, model: nn.Module, folder: Path) -> None:
    """A folder as peft writes it."""
    folder.mkdir(parents=True)
    low = {f"base_model.model.{name}": one.contiguous() for name, one in model.state_dict().items() if "lora_" in name}
    save_file(low, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": TASK_TYPE[suite], "r": RANK, "lora_alpha": LORA_ALPHA, "bias": "none",
              "target_modules": TARGETS[suite], "base_model_name_or_path": suite, "inference_mode": True}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_suite(suite: str, out: Path) -> None:
    """The suite's file with the adapters, and everything else where the suite has it."""
    home = data_path(suite)
    content = yaml.safe_load((home / "suite.yaml").read_text())
    content |= {"name": f"{suite}-lora", "base": str(home / "base")}
    for task, entry in content["tasks"].items():
        entry["expert"] = f"{home / 'base'}+{(out / task).absolute()}"
        for split in ("calibration", "validation", "test"):
            entry[split]["jsonl"] = str(home / entry[split]["jsonl"])
    (out / "suite.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=TARGETS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapters and the suite's file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3, help="of AdamW; the suite's own experts have 3e-4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    build = builder_of(options.suite)
    options.out.mkdir(parents=True, exist_ok=True)
    write_suite(options.suite, options.out)
    for task in build.TASKS:
        if not (options.out / task).exists():
            adapter = train(options.suite, task, options.seed, options.rate, build)
            write(options.suite, adapter, options.out / task)


if __name__ == "__main__":
    main()
