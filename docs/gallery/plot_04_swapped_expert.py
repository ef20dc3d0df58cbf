"""
A swapped expert
================

Two experts are listed under each other's name. Nothing complains, the merge is the same, and calibration breaks it.

``clip-mini`` has eight experts; here ``digits`` and ``letters`` change places.
"""

import featcal
from featcal.figures import charts, tables

suite = featcal.load_suite("clip-mini")
digits, letters = suite.tasks["digits"], suite.tasks["letters"]
swapped = {
    "digits": digits.model_copy(update={"expert": letters.expert}),
    "letters": letters.model_copy(update={"expert": digits.expert}),
}
session = featcal.open_session(
    suite.model_copy(update={"tasks": {**suite.tasks, **swapped}})
)

# %%
# One look at the experts
# -----------------------
# Task Arithmetic adds all task vectors, so it does not matter to the merge which is whose. It matters to everything
# that holds the merge against an expert. Every expert on its own task, beside the model that they all came from:

config = featcal.CalibrationConfig(recipe="informed", samples=32)
models = {"base": "base", "merged": "merged", "calibrated": config, "expert": "expert"}
scores = {
    name: featcal.evaluate(session, one, split="validation", samples=64)
    for name, one in models.items()
}
charts.score_dots(tables.score_table(scores), [*scores], "accuracy, %")

# %%
# Six experts know their task. Two are worse than the base: they were trained for something else. The calibrated model
# does what it was told and goes towards the wrong expert, so ``digits`` ends below the merge.
#
# ``featcal check`` looks for this before it computes anything else, and names both.
#
# **What to keep:** an expert that is worse than the base on its own task is not that task's expert.
