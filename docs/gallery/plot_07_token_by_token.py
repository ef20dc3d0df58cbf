"""
Token by token
==============

Drift is not spread evenly over a text. A few tokens carry most of it.

``lm-mini`` is a small language model; one of its tasks is to rewrite a sentence.
"""

import pandas as pd
import plotly.express as px

import featcal
from featcal.figures.theme import finish

session = featcal.open_session("lm-mini")
view = featcal.EvaluationSamples(8, "validation")

# %%
# The features of every token are held against the expert's, behind every layer. The squares of all tokens add up to the
# drift of the layer.

found = session.measure.tokens("merged", "rewrite", view)
rows = pd.DataFrame(found.rows(0))
rows = rows[rows["layer"].str.startswith("block")]
words = [f"{place} {word}" for place, word in rows[["position", "token"]].drop_duplicates().itertuples(index=False)]

# %%
# A text through the model
# ------------------------
# From left to right the text, from top to bottom the blocks.

grid = rows.pivot(index="layer", columns="position", values="relative_drift").to_numpy()
layers = list(rows["layer"].unique())
figure = px.imshow(grid, x=words, y=layers, color_continuous_scale="Oranges", aspect="auto")
figure.update_coloraxes(colorbar_title="drift")
figure.update_xaxes(tickangle=-60, title="token")
finish(figure, 380)

# %%
# How much of the last block's squared drift the fullest quarter of the tokens carries, over eight texts:

last = found.find("block 3")
shares = [one.square().sort(descending=True).values for one in last.drift]
round(float(sum(one[: len(one) // 4].sum() / one.sum() for one in shares) / len(shares)), 2)

# %%
# **What to keep:** look at the tokens before you look at averages.
