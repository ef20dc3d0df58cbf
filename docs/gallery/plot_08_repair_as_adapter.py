"""
The repair as a LoRA
====================

A merge is online already, and people have downloaded it. Its repair can be a small file beside it.

``clip-mini`` is a small CLIP with eight experts.
"""

import pandas as pd
import plotly.express as px

import featcal
from featcal.calibration.low_rank import Limits
from featcal.figures.theme import COLOUR, apply_theme

session = featcal.open_session("clip-mini")
config = featcal.CalibrationConfig(recipe="informed", samples=32)
VALIDATION = {"split": "validation", "samples": 64}

# %%
# Cut to a rank
# -------------
# What the repair changed in a matrix is cut down to a few directions. Which ones is decided by what the change does to
# the inputs of that matrix, not by its size.

rows = []
for rank in (1, 2, 4, 8, 16, 32):
    repair = session.fit.repair(config, "merged", Limits(rank=rank))
    score = featcal.evaluate(session, repair.weights, **VALIDATION).average
    rows.append(
        {
            "rank": rank,
            "left out, %": 100 * repair.lost_share,
            "accuracy, %": 100 * score,
        }
    )

frame = pd.DataFrame(rows)
frame.round(1)

# %%
merged, calibrated = (
    100 * featcal.evaluate(session, one, **VALIDATION).average
    for one in ("merged", config)
)
figure = px.line(frame, x="rank", y="accuracy, %", markers=True, log_x=True)
figure.update_traces(
    line={"color": COLOUR["calibrated"], "width": 3}, marker={"size": 10}
)
figure.update_xaxes(tickvals=frame["rank"])
figure.add_hline(
    y=merged,
    line={"color": COLOUR["merged"], "dash": "dot"},
    annotation_text="the merge",
)
figure.add_hline(
    y=calibrated,
    line={"color": COLOUR["calibrated"], "dash": "dot"},
    annotation_text="the whole repair",
)
apply_theme(figure, 400)

# %%
# The matrices here are 96 to 384 wide, and rank 16 keeps most of the gain.
#
# On the command line this is ``featcal export calibrated --as adapter --rank 16 --out repair``; peft loads the folder
# over the merge that everybody has.
#
# **What to keep:** a repair can be handed on without the model, and its rank decides how much of it arrives.
