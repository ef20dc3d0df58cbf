"""Describe in words how a model was calibrated, for its card and its record."""

from __future__ import annotations

from collections.abc import Sequence

from featcal.export.card import CardProvenance
from featcal.family.opening import Family
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.command_lines import calibrate_line
from featcal.suite.schema import Suite


def account_of(
    family: Family, config: CalibrationConfig, defaults: CalibrationConfig, warnings: Sequence[str]
) -> CardProvenance:
    """Return the description of a calibration for its model card.

    Args:
        defaults: the suite's own options.
    """
    texts = {task: one["text"] for task in family.suite.tasks if (one := describe_text(family.suite, task))}
    return CardProvenance(
        f"{family.suite.name}, calibrated",
        "A merged model whose linear maps were calibrated in closed form, block by block in forward order, so that "
        "its features come closer to those of the task experts. Same architecture, no extra modules.",
        config.settings() | {f"text of {task}": text for task, text in texts.items()},
        lambda suite: calibrate_line(suite, config, defaults, "calibrated", family.merged_name),
        warnings,
    )


def describe_text(suite: Suite, task: str) -> dict[str, str]:
    """Return the record's entry about a task whose samples its expert wrote; empty for other tasks."""
    source = suite.tasks[task].calibration
    asked = source.self_generated if source is not None else None
    return {} if asked is None else {"text": asked.description}
