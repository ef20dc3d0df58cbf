"""What a report calls its models."""

from __future__ import annotations

from collections.abc import Sequence

from featcal.figures.theme import ROLES
from featcal.model_ids import spelled
from featcal.schema.model_name import model_name
from featcal.session import Session


def called(names: Sequence[str], session: Session) -> dict[str, str]:
    """Short names for charts → names with every option that tells a model from others of the suite."""
    return {
        (kind if (kind := model_name(name).kind) in ROLES else "merged"): spelled(session.named(name), session.family)
        for name in names
    }
