"""
Where the decision turns
========================

A model's answer is read after every block. There is a block in which the merge takes another way than the expert.

``lm-mini`` is a small language model; one of its tasks is to say whether a sentence is positive or negative.
"""

import featcal
from featcal.figures import layer_charts, layer_tables

session = featcal.open_session("lm-mini")
models = {
    "merged": "merged",
    "calibrated": featcal.CalibrationConfig(recipe="informed", samples=32),
}
view = featcal.EvaluationSamples(64, "validation")

# %%
# What is decided after every block
# ----------------------------------
# The state after a block goes through the model's own final norm and head, as if the model ended there. The table has
# the share of samples on which that gives the expert's final decision, and the expert's own share beside it.

depth = {
    name: session.measure.depth(one, "sentiment", view) for name, one in models.items()
}
table = layer_tables.agreement_table({"sentiment": depth["merged"]}).set_index("layer")
table["calibrated"] = layer_tables.agreement_table(
    {"sentiment": depth["calibrated"]}
).set_index("layer")["agreement"]
table.rename(columns={"agreement": "merged", "expert_agreement": "expert"})[
    ["expert", "merged", "calibrated"]
].round(2)

# %%
# One sentence
# ------------
# The first sentence on which the merge and its repair part, block by block. The line is where a decision stays.

ends = [
    [one.words[answer] for answer in one.answers[-1, :, 0].tolist()]
    for one in depth.values()
]
sample = next(
    i
    for i, (merged, repaired) in enumerate(zip(*ends, strict=True))
    if merged != repaired
)
layer_charts.course_chart(layer_tables.course_table(depth, sample))

# %%
# All three decide in the same block, in the middle of the model. The merge is as sure as the others, of the wrong word.
# No later block has a doubt that it could use.
#
# **What to keep:** a merge does not forget at the end; it turns in the middle, and the blocks after follow.
