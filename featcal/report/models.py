"""What a report calls its models."""

from __future__ import annotations

from collections.abc import Sequence

from featcal.figures.theme import ROLES
from featcal.schema.model_name import model_name
from featcal.session import Session


def called(names: Sequence[str], session: Session) -> dict[str, str]:
    return {(kind if (kind := model_name(name).kind) in ROLES else "merged"): name for name in names}
