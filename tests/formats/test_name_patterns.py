"""Patterns from files of strangers: matched as `re` matches them, and in a time that is bounded."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest

from featcal.formats.name_patterns import LONGEST, Matcher, check_pattern, match_end
from featcal.formats.peft import AdapterConfig
from featcal.system.errors import InputError

NAMES = [
    f"{stack}layers.{i}.{rest}"
    for stack in ("model.", "model.language_model.", "visual.")
    for i in (0, 11)
    for rest in ("self_attn.q_proj", "mlp.down_proj", "mlp.experts.3.up-proj", "norm")
]
USUAL = [
    "q_proj", "model.layers.0.self_attn.q_proj", "layers.0", "self.attn.q.proj", "up-proj", "q_proj|k_proj", ".*_proj",
    r"^model.layers.\d+.*q_proj$", r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)",
    r"^(?!.*visual).*\.(q_proj|down_proj)$", r"^(model)(?=\.).*\.norm", r"layers\.(0|1{1,2})\..*", r"(\w+)\.\d+\.norm",
]  # fmt: skip
"""As peft, unsloth and ms-swift write them."""
HOSTILE = [
    "(a+)+b", "(a|a)*b", "(a|aa)+[!?]", "((a*)*)*[!?]", "(.*)" * 12 + "[!?]", "(.*?)" * 12 + "[!?]", r"(\w+\.?)+[!?]",
    r"(.|.)*(.|.)*[!?]", "(?=(.+)+[!?])x", "(?!(a|a)*[!?])z", r"(.+)(.+)(.+)\1\2\3[!?]", "(.{1,99}){1,99}[!?]",
    "((.{0,999}){0,999}){0,999}[!?]", "(?:(a|b|ab|ba|.)*)*[!?]", "((.)|(..))*(?(1)[!]|[?])", "a{1,4000000000}[!?]",
    ".?" * 100 + "." * 100, "(" * 90 + "a" + ")*" * 90 + "[!?]", "(" * 1900 + "a" + ")" * 1900,
]  # fmt: skip


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_match_what_re_matches(pattern: str) -> None:
    matcher = Matcher()
    check_pattern(pattern, str)
    for name in NAMES:
        assert bool(matcher.fullmatch(pattern, name)) == bool(re.fullmatch(pattern, name)), name
        assert bool(matcher.match(pattern, name)) == bool(re.match(pattern, name)), name
        assert matcher.ends_with(pattern, name) == bool(re.fullmatch(match_end(pattern), name)), name


@pytest.mark.parametrize("pattern", HOSTILE)
def test_no_pattern_takes_longer_than_its_time(pattern: str) -> None:
    begun, matcher = time.process_time(), Matcher(left=0.05)
    # Whatever is found out: an answer, that it is none, or that it takes too long.
    with suppress(InputError, ValueError):
        check_pattern(pattern, match_end)
        for name in ("a" * 60, "ab" * 30, "model.layers.10.self_attn.q_proj" * 3):
            matcher.ends_with(pattern, name)
    assert time.process_time() - begun < 2


def test_a_pattern_with_nested_quantifiers_is_answered_at_once() -> None:
    config = AdapterConfig(peft_type="LORA", r=1, lora_alpha=1.0, rank_pattern={"(a+)+b": 2})
    begun = time.process_time()
    assert (config.rank("a" * 40), config.rank("x." + "a" * 40 + "b")) == (1, 2)
    assert time.process_time() - begun < 1


def test_all_names_share_one_time() -> None:
    matcher = Matcher(left=0.05)
    hostile, name = "((.)|(..))*(?(1)[!]|[?])", "a" * 60
    for _ in range(3):
        with pytest.raises(InputError, match=r"the pattern '\(\(.*' takes too long to match 'aaa.*'; give the names"):
            matcher.fullmatch(hostile, name)
    assert matcher.left == 0.01
    # What takes no time is still answered.
    assert matcher.fullmatch(".*a", name) is not None


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a" * (LONGEST + 1), f"a pattern of {LONGEST + 1} characters, {LONGEST} are the most"),
        ("(q", "'(q' is not a regular expression (missing ), unterminated subpattern"),
        ("(q_proj){e<=1}", "has '{' or '[:' in it, which no name of a module has"),
        ("[[:alpha:]]", "has '{' or '[:' in it, which no name of a module has"),
        (r"\p{L}", "has '{' or '[:' in it"),
    ],
)
def test_patterns_that_are_none_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_pattern(pattern, match_end)
