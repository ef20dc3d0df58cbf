"""Add up statistics that were collected separately, if they belong together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from featcal.system.errors import InputError


def require_alike(what: str, one: Mapping[str, object], other: Mapping[str, object]) -> None:
    """Require that two lists of facts about statistics agree, entry by entry.

    Raises:
        InputError: they differ; the message names `what` and the first entry that differs.
    """
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            raise InputError(
                f"{what}: cannot merge statistics whose {key} differ: {one.get(key)!s} and {other.get(key)!s}"
            )


def add_alike(total: Tensor, part: Tensor) -> None:
    """Add in place, from any device, without broadcasting or rounding.

    Raises:
        InputError: shapes or dtypes differ.
    """
    # `add_` would broadcast another shape and round another dtype without a word.
    described = ({"shapes": list(tensor.shape), "dtypes": tensor.dtype} for tensor in (total, part))
    require_alike("sums", *described)
    total.add_(part.to(total.device))
