"""Define the base class of all parts of a suite file."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Strict(BaseModel):
    """Base of all parts of a suite file: unknown keys are errors; values are immutable; true and false are not
    numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: object, info: ValidationInfo) -> object:
        # Python's bool is an int, so pydantic would read `limit: true` as 1.
        if isinstance(value, bool) and info.field_name is not None:
            takes = _types(cls.model_fields[info.field_name].annotation)
            if takes & {int, float} and not takes & {bool, Any}:
                raise ValueError(f"expected a number, not {str(value).lower()}")
        return value


def _types(annotation: object) -> set[object]:
    """Return a type together with the types that it is composed of."""
    return {annotation}.union(*map(_types, get_args(annotation))) if get_args(annotation) else {annotation}
