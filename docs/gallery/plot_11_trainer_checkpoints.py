"""
Checkpoints of the Trainer
==========================

The folders that transformers' Trainer leaves behind are experts as they are.

Two short trainings of the base of ``lm-mini``, which comes with featcal.
"""

from pathlib import Path
from tempfile import mkdtemp

import pandas as pd
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import featcal
from featcal.figures import charts, tables

ROOT = featcal.load_suite("lm-mini").root
RUNS = Path(mkdtemp())
tokenizer = AutoTokenizer.from_pretrained(ROOT / "base")
STEPS = 20

# %%
# Train
# -----


def train(task, texts):
    """Train on texts, and return the folder of the last checkpoint."""
    ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    options = TrainingArguments(
        RUNS / task,
        max_steps=STEPS,
        save_steps=STEPS,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    model = AutoModelForCausalLM.from_pretrained(ROOT / "base")
    data = [{"input_ids": one, "labels": one} for one in ids]
    Trainer(model, options, train_dataset=data).train()
    return RUNS / task / f"checkpoint-{STEPS}"


texts = {}
for task in ("sentiment", "rewrite"):
    rows = pd.read_json(ROOT / f"{task}.jsonl.gz", lines=True)[:256]
    texts[task] = [f"{one.text} : {one.label}" for one in rows.itertuples()]
experts = {task: train(task, own) for task, own in texts.items()}
sorted(file.name for file in experts["sentiment"].iterdir())

# %%
# What else lies in a checkpoint, of the optimizer, the schedule and the Trainer itself, is not looked at.
#
# DeepSpeed leaves shards in ``global_step20``. ``python -m deepspeed.utils.zero_to_fp32 FOLDER FOLDER
# --safe_serialization`` puts ``model.safetensors`` beside them; without it ``featcal check`` prints this command.

shards = experts["rewrite"] / f"global_step{STEPS}"
shards.mkdir()
(shards / "mp_rank_00_model_states.pt").write_bytes(b"optimizer and weights")
(experts["rewrite"] / "latest").write_text(shards.name)

# %%
# Merge, look, repair
# -------------------

suite = featcal.Suite.of(base=ROOT / "base", experts=experts, samples=texts)
session = featcal.open_session(suite)
config = featcal.CalibrationConfig(samples=32)
lines = {
    name: tables.relative_drift_table(featcal.measure_drift(session, one, samples=32))
    for name, one in (("merged", "merged"), ("calibrated", config))
}
charts.compare_drift(lines)

# %%
# **What to keep:** a training ends with a folder that can be merged; nothing has to be moved, renamed or removed.
