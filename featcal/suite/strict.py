"""What all parts of a suite file have in common."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Strict(BaseModel):
    """Unknown keys are errors; values never change; true and false are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name is not None:
            takes = _types(cls.model_fields[info.field_name].annotation)
            if takes & {int, float} and not takes & {bool, Any}:
                raise ValueError(f"expected a number, not {str(value).lower()}")
        return value


def _types(annotation: object) -> set[object]:
    """A type, and those that it is made of."""
    return {annotation}.union(*map(_types, get_args(annotation))) if get_args(annotation) else {annotation}
