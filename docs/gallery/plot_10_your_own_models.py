"""
Your own models, and no labels
==============================

Models as transformers has them, texts as lists, and a repair that is chosen without looking at an answer.

The models here are those of ``lm-mini``, which comes with featcal, loaded as one loads one's own.
"""

import pandas as pd
from transformers import AutoModelForCausalLM, AutoTokenizer

import featcal

ROOT = featcal.load_suite("lm-mini").root
QUESTIONS = {
    "sentiment": "Given the sentence '{}', is the sentiment positive or negative?",
    "correct": "Write the sentence '{}' without a mistake.",
}

# %%
# A suite of objects
# ------------------
# A base, experts, and a few texts of every task: questions, without answers. The merged model is left out, so it is
# Task Arithmetic at 0.3.

texts = {}
for task, question in QUESTIONS.items():
    rows = pd.read_json(ROOT / f"{task}.jsonl.gz", lines=True)
    texts[task] = [question.format(text) for text in rows[rows["split"] == "calibration"]["text"][:16]]

suite = featcal.Suite.of(
    base=AutoModelForCausalLM.from_pretrained(ROOT / "base"),
    experts={task: AutoModelForCausalLM.from_pretrained(ROOT / "experts" / task) for task in QUESTIONS},
    samples=texts,
    tokenizer=AutoTokenizer.from_pretrained(ROOT / "base"),
    name="two tasks",
)

# %%
# A choice without labels
# -----------------------
# Every candidate is fitted on three quarters of the texts, four times, and judged on the fourth: how probable are the
# experts' own decisions under it?

chosen = featcal.select(suite)
chosen

# %%
# What comes back is a model of transformers, to use or to save.

model = chosen.calibrated.to_model()
type(model).__name__, chosen.model

# %%
# **What to keep:** whether a repair helps can be asked of the experts: nobody has to write an answer.
