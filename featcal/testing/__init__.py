"""Test in one call whether the facts of a decoder-only model, or of an encoder with a head, are true.

`check_adapter(model, facts)` writes a base, two experts near it and a merged model, all with the shapes of a tiny
`model` of the library with random weights, and holds what featcal makes of them against the library's own forward and
against a second computation of the whole calibration in float64 that uses hooks alone (`reference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featcal.models.families.decoder_facts import FACTS, with_classifier
from featcal.models.families.encoder_facts import ENCODERS, EncoderFacts
from featcal.models.families.registry import register_decoder, register_encoder
from featcal.testing.checks import CHECKS
from featcal.testing.trial import Facts, write_trial


def check_adapter(model: Any, facts: Facts) -> Mapping[str, Mapping[str, float]]:
    """Register the facts, if they are not featcal's own, and apply every check of `CHECKS`.

    Args:
        model: an instance of the library's class with a tiny configuration: few blocks, so that every kind of block is
            there, widths of 16 to 64, a window of fewer than 8 tokens where blocks have one. Its shapes are used, with
            random weights. Attention goes through transformers' interface or is written as products and a softmax:
            torch's fused kernel has no forward-mode derivative, which attribution takes.

    Returns:
        What was measured, by check and by name: all of it is a deviation, but "drift".

    Raises:
        AssertionError: a check fails; the message says what was found.
        InputError: facts that do not describe the model.
    """
    if isinstance(facts, EncoderFacts):
        if facts not in ENCODERS:
            register_encoder(facts)
    elif facts not in FACTS and facts not in map(with_classifier, FACTS):
        register_decoder(facts)
    with TemporaryDirectory(prefix="featcal-check-") as folder:
        trial = write_trial(model, facts, Path(folder))
        return {name: check(trial) for name, check in CHECKS.items()}
