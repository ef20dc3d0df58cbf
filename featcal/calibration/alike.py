"""Adding up statistics that were counted apart: only what belongs together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from featcal.system.errors import InputError


def require_alike(what: str, one: Mapping[str, object], other: Mapping[str, object]) -> None:
    """Two accounts of how something was counted must agree, entry by entry.

    Raises:
        InputError: they do not; names `what` and the first entry that differs.
    """
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            raise InputError(
                f"{what}: cannot merge statistics whose {key} differ: {one.get(key)!s} and {other.get(key)!s}"
            )


def add_alike(total: Tensor, part: Tensor) -> None:
    """Add in place, from whichever device; nothing is broadcast or rounded.

    Raises:
        InputError: another shape or dtype.
    """
    described = ({"shapes": list(tensor.shape), "dtypes": tensor.dtype} for tensor in (total, part))
    require_alike("sums", *described)
    total.add_(part.to(total.device))
