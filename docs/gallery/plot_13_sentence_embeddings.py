"""
Sentence embeddings
===================

What ``encode`` of sentence-transformers gives after a repair is what was measured; shown on a tiny encoder.
"""

import json
from pathlib import Path
from tempfile import mkdtemp

import pandas as pd
import plotly.express as px
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import featcal
from featcal.figures.theme import apply_theme

ROOT, RUNS = featcal.load_suite("lm-mini").root, Path(mkdtemp())
tokenizer = AutoTokenizer.from_pretrained(ROOT / "base")
torch.manual_seed(0)


def save(model, folder):
    """Write a model as sentence-transformers does; returns its folder."""
    top = "sentence_transformers.models."
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    parts = [{"name": k, "path": p, "type": top + k} for p, k in kinds.items()]
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "modules.json").write_text(json.dumps(parts))
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def likeness(model, pairs):
    """Compare the texts of pairs as ``encode`` of sentence-transformers reads them."""
    encoded = []
    for texts in (pairs.input, pairs.pair):
        read = tokenizer([*texts], padding=True, return_tensors="pt")
        mask = read.attention_mask[..., None]
        states = model(read.input_ids, read.attention_mask).last_hidden_state
        encoded.append((states * mask).sum(1) / mask.sum(1))
    return torch.cosine_similarity(*encoded)


size = {"vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 3}
tiny = BertModel(BertConfig(**size, num_attention_heads=4, intermediate_size=128))
base, samples, experts = save(tiny, RUNS / "base"), {}, {}
rows = pd.read_json(ROOT / "entailment.jsonl.gz", lines=True)[:128]
pairs = pd.DataFrame({"input": rows.premise, "pair": rows.hypothesis})
ways = {"meaning": rows.label == "entailment", "length": rows.premise.str.len() > 20}
for task, alike in ways.items():
    model, right = AutoModel.from_pretrained(base), torch.tensor([*alike]).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(12):
        (likeness(model, pairs) - right).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    experts[task] = save(model, RUNS / task)
    samples[task] = pairs.assign(target=alike * 1.0).to_dict("records")

# %%
# A pair and a number are scored by the cosine of the two embeddings.

suite = featcal.Suite.of(base=base, experts=experts, samples=samples, test=samples)
result = featcal.calibrate(suite, featcal.CalibrationConfig(samples=64))
result.save(RUNS / "calibrated")
scored = featcal.evaluate(suite, result).tasks["meaning"]
encoded = likeness(AutoModel.from_pretrained(RUNS / "calibrated"), pairs).tolist()
frame = pd.DataFrame({"measured": map(float, scored.predictions), "encoded": encoded})
assert (frame.measured - frame.encoded).abs().max() < 1e-5
apply_theme(px.scatter(frame, x="measured", y="encoded"), 400)

# %%
# **What to keep:** the written folder is one of sentence-transformers, and embeds as it did when it was measured.
