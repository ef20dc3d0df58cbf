"""
Your own models, and no labels
==============================

Models as transformers has them, texts as lists, and a repair that is chosen without looking at an answer.

The models here are those of ``lm-mini``, which comes with featcal, loaded as one loads one's own.
"""

import pandas as pd
from transformers import AutoModelForCausalLM, AutoTokenizer

import featcal
from featcal.figures import tables

ROOT = featcal.load_suite("lm-mini").root
QUESTIONS = {
    "sentiment": "Given the sentence '{}', is the sentiment positive or negative?",
    "correct": "Write the sentence '{}' without a mistake.",
}

# %%
# A suite of objects
# ------------------
# A base, experts, and sixteen texts of every task: questions, without answers. The merged model is left out, so it is
# Task Arithmetic at 0.3. Answers there are in the validation split alone, to look at in the end.

texts, answered = {}, {}
for task, question in QUESTIONS.items():
    rows = pd.read_json(ROOT / f"{task}.jsonl.gz", lines=True)
    rows["question"] = [question.format(text) for text in rows["text"]]
    texts[task] = list(rows[rows["split"] == "calibration"]["question"][:16])
    validation = rows[rows["split"] == "validation"][:64]
    answered[task] = list(zip(validation["question"], validation["label"], strict=True))

load = AutoModelForCausalLM.from_pretrained
suite = featcal.Suite.of(
    base=load(ROOT / "base"),
    experts={task: load(ROOT / "experts" / task) for task in QUESTIONS},
    samples=texts,
    validation=answered,
    tokenizer=AutoTokenizer.from_pretrained(ROOT / "base"),
    name="two tasks",
)

# %%
# A choice without labels
# -----------------------
# Every candidate is fitted on three quarters of the texts, four times, and judged on the fourth: how probable are the
# experts' own decisions under it?

session = featcal.open_session(suite)
chosen = featcal.select(session)
chosen

# %%
# Answers, to look at once
# ------------------------
# ``default`` is the recipe that would have been taken without a choice. What was chosen is a model of transformers
# again: ``chosen.calibrated.to_model()``.

models = {"merged": "merged", "default": chosen.default, "chosen": chosen.calibrated}
scores = {
    name: featcal.evaluate(session, model, split="validation")
    for name, model in models.items()
}
tables.score_table(scores).round(1)

# %%
# **What to keep:** which repair is good can be asked of the experts: nobody has to write an answer.
