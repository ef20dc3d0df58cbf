"""
Adapters in memory
==================

Adapters that peft has just trained, merged and repaired without a file.

Two short trainings over the base of ``lm-mini``, which comes with featcal.
"""

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import featcal
from featcal.figures import charts, tables

ROOT = featcal.load_suite("lm-mini").root
tokenizer = AutoTokenizer.from_pretrained(ROOT / "base")
load = AutoModelForCausalLM.from_pretrained

# %%
# Train
# -----


def train(texts):
    """Return the base with an adapter that was trained on texts."""
    maps = ["q_proj", "v_proj", "up_proj", "down_proj"]
    torch.manual_seed(0)
    model = get_peft_model(load(ROOT / "base"), LoraConfig(r=8, target_modules=maps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(20):
        batch = texts[16 * step % len(texts) :][:16]
        ids = tokenizer(batch, padding=True, return_tensors="pt")
        model(**ids, labels=ids.input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


texts = {}
for task in ("sentiment", "rewrite"):
    rows = pd.read_json(ROOT / f"{task}.jsonl.gz", lines=True)[:256]
    texts[task] = [f"{one.text} : {one.label}" for one in rows.itertuples()]
adapted = {task: train(own) for task, own in texts.items()}
type(adapted["sentiment"]).__name__

# %%
# Merge, look, repair
# -------------------
# ``merge_and_unload`` puts an adapter into the weights of the base that it was trained over, so the base of the suite
# is loaded once more. Of saved adapters the folders do: ``"BASE+ADAPTER"``.

suite = featcal.Suite.of(
    base=load(ROOT / "base"),
    experts={task: model.merge_and_unload() for task, model in adapted.items()},
    samples=texts,
    tokenizer=tokenizer,
)
session = featcal.open_session(suite)
config = featcal.CalibrationConfig(samples=32)
lines = {
    name: tables.relative_drift_table(featcal.measure_drift(session, one, samples=32))
    for name, one in (("merged", "merged"), ("calibrated", config))
}
charts.compare_drift(lines)

# %%
# ``featcal.calibrate(session, config).to_model()`` is the repaired model, of the same class as the base.
#
# **What to keep:** an adapter that is merged into its base is an expert like any other.
