"""
Which block is at fault
=======================

Of a merge that lost the attention of one block, drift alone does not show which block. Attribution does.

``lm-mini`` is a small language model with four experts. It comes with featcal.
"""

import tempfile

import pandas as pd
import torch

import featcal
from featcal.figures import ledger_tables, tables

session = featcal.open_session("lm-mini")

# %%
# A fault to look for
# -------------------
# A tool forgot one matrix: what attention writes in block 1 is zero. Nothing crashes, and the model still answers.

model = featcal.merge(session.family).to_model()
with torch.no_grad():
    model.model.layers[1].self_attn.o_proj.weight.zero_()

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(f"{folder}/faulty")
    faulty = featcal.measure_drift(
        session, f"{folder}/faulty", samples=16, attribution=True
    )
sound = featcal.measure_drift(session, samples=16, attribution=True)

# %%
# Drift over the norm of the expert's features: it is larger after every block from there on, and largest at the end,
# where nothing is wrong.

drift = {
    "sound": tables.relative_drift_table(sound),
    "faulty": tables.relative_drift_table(faulty),
}
pd.DataFrame(drift).round(2)

# %%
# Who caused the final drift
# --------------------------
# Every block's own mismatch is followed through all later blocks to the end (Prop. 2). The contributions add up to the
# final drift, so each has a share.

faulty.plot()

# %%
# Shares in %, without the fault and with it. Without it no block stands out.

attributed = {"sound": sound, "faulty": faulty}
shares = {
    name: ledger_tables.attribution_table(one, tables.ALL_TASKS).set_index("layer")[
        "share"
    ]
    for name, one in attributed.items()
}
(100 * pd.DataFrame(shares)).round().astype(int)

# %%
# **What to keep:** the block where drift is large is where it shows; the block with the largest share is where to look.
