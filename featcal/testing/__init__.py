"""Is an architecture told truly? Tests of any decoder-only model, in one call.

`check_adapter(model, facts)` writes a base, two experts near it and a merged model, all with the shapes of a tiny
`model` of the library with random weights, and holds what featcal makes of them against the library's own forward and
against a second computation of the whole calibration in float64 that uses hooks alone (`reference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featcal.models.architectures import register_decoder, supported
from featcal.models.decoder_facts import DecoderFacts
from featcal.testing.checks import CHECKS
from featcal.testing.trial import write_trial


def check_adapter(model: Any, facts: DecoderFacts) -> Mapping[str, Mapping[str, float]]:
    """Register the facts, if their `model_type` is not known yet, and apply every check of `CHECKS`.

    Args:
        model: an instance of the library's class with a tiny configuration: few blocks, so that every kind of block is
            there, widths of 16 to 64. Its weights are replaced by random ones. Give a window of fewer than 8 tokens
            where blocks have one.

    Returns:
        What was measured, by check and by name: all of it is a deviation, but "drift".

    Raises:
        AssertionError: the first check that fails; says what was found.
        InputError: as everything in featcal: facts that do not describe the model.
    """
    if facts.model_type not in supported():
        register_decoder(facts)
    with TemporaryDirectory(prefix="featcal-check-") as folder:
        trial = write_trial(model, facts, Path(folder))
        return {name: check(trial) for name, check in CHECKS.items()}
