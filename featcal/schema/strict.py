"""What all parts of a suite file have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown keys are errors; values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
