"""
Which recipe
============

A recipe says what a block is fitted to. Three of them, on three suites, with the same 32 samples per task.

The suites come with featcal: eight tasks of pictures, four of T5, four of a language model.
"""

import pandas as pd
import plotly.express as px

import featcal
from featcal.figures.theme import apply_theme, colours

RECIPES = ("paper", "refined", "informed")
VALIDATION = {"split": "validation", "samples": 64}

# %%
# ``paper`` fits a whole block at once, as published. ``refined`` goes piece by piece, on what the pieces in front of it
# give. ``informed`` adds what the experts' weights know: a prior, for directions that 32 samples do not show.

rows = []
for name in ("clip-mini", "t5-mini", "lm-mini"):
    session = featcal.open_session(name)
    models = {"no repair": "merged"}
    models |= {
        recipe: featcal.CalibrationConfig(recipe=recipe, samples=32)
        for recipe in RECIPES
    }
    models |= {"the experts": "expert"}
    for label, model in models.items():
        score = featcal.evaluate(session, model, **VALIDATION).average
        rows.append({"suite": name, "model": label, "average score, %": 100 * score})

frame = pd.DataFrame(rows)
frame.pivot(index="suite", columns="model", values="average score, %")[[*models]].round(
    1
)

# %%
# Numbers that a recipe needs are left out: each brings its own for the architecture and the number of samples.

figure = px.line(
    frame,
    x="model",
    y="average score, %",
    color="suite",
    markers=True,
    color_discrete_sequence=colours(3),
)
apply_theme(figure, 400)

# %%
# **What to keep:** ``informed`` is the best of the three on every suite here; begin with it.
