"""Check the sample numbers that a measurement gets as arguments."""

from __future__ import annotations

from featcal.system.errors import InputError


def require_sample(sample: int, count: int) -> None:
    """Raise InputError unless a sample is one of the `count` measured ones."""
    # A negative one would be read from the end, and be another sample than was asked for.
    if not 0 <= sample < count:
        raise InputError(f"sample {sample} is out of range: {count} samples are measured, numbered 0 to {count - 1}")
