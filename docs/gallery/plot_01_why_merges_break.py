"""
Why merges break
================

A merged model drifts from its experts a little in every block, and carries on what it has drifted before.

``clip-mini`` is a small CLIP with eight experts, merged by Task Arithmetic. It comes with featcal.
"""

import featcal
from featcal.figures import charts, tables

session = featcal.open_session("clip-mini")
MODELS = ("base", "merged", "expert")

# %%
# What is lost
# ------------
# Every expert is good at its own task. The merge is hardly better than the model that they all came from.

scores = {
    model: featcal.evaluate(session, model, split="validation", samples=32)
    for model in MODELS
}
tables.score_table(scores).round(1)

# %%
# Where it is lost
# ----------------
# After every block, *drift* is how far the merged model's features are from the expert's, on the expert's own
# samples. It is the sum of two vectors (Prop. 1). The *local mismatch* is what this block does differently on the
# expert's own input. The *propagation* is what it makes of the drift that comes in.

ledger = featcal.measure_drift(session, samples=16)
ledger.plot()

# %%
# The mismatch of a block stays about the same. The propagation grows: from the second block on, most of the drift was
# made by the blocks in front. So a block cannot be repaired by itself. It has to be repaired on what it will be given
# once the blocks in front of it are repaired, and that is the order in which featcal goes.
#
# What a repair changes
# ---------------------
# One ridge regression per linear map, block by block, on 32 pictures per task without labels.

config = featcal.CalibrationConfig(recipe="informed", samples=32)
after = featcal.measure_drift(session, config, samples=16)
lines = {
    name: tables.relative_drift_table(one)
    for name, one in (("merged", ledger), ("calibrated", after))
}
charts.compare_drift(lines)

# %%
# **What to keep:** a merge breaks in every block a little, and each block works with what the others broke.
