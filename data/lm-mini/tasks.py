"""The texts of ``lm-mini``: two tasks of ``t5-mini`` as they are, and two whose answers are whole sentences.

Everything comes out of the templates of ``t5-mini`` (`texts.py` there). What one draw of them gives in two ways, with
and without a fault, in plain words and in others, is here question and answer.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "t5-mini"))

import texts
from texts import Row

PROMPTS = {
    "sentiment": texts.PROMPTS["sentiment"],
    "entailment": texts.PROMPTS["entailment"],
    "correct": "Write the sentence '{text}' without a mistake.",
    "rewrite": "Ask '{text}' in plain words.",
}
TASKS = tuple(PROMPTS)


def correct(draw: int, turn: int, plain: bool) -> Row:
    """A sentence, every other one with a verb of the wrong number, and how it should be."""
    said, right = (
        texts.grammar(random.Random(draw), label, plain)["text"]
        for label in (texts.LABELS["grammar"][turn % 2], "acceptable")
    )
    return {"text": said, "label": right}


def rewrite(draw: int, turn: int, plain: bool) -> Row:
    """A question and the same one in the plainest words."""
    said, right = (texts.paraphrase(random.Random(draw), "yes", one)["first"] for one in (plain, True))
    return {"text": said, "label": right}


MAKERS = {"correct": correct, "rewrite": rewrite}


def rows(task: str, count: int, seed: int, *, plain: bool = False, without: frozenset[str] = frozenset()) -> list[Row]:
    """``count`` different rows with their answers (``label``), none of whose prompts is in ``without``."""
    if task in texts.TASKS:
        return texts.rows(task, count, seed, plain=plain, without=without)
    rng = random.Random(f"{seed} {task} {plain}")
    found: dict[str, Row] = {}
    while len(found) < count:
        row = MAKERS[task](rng.getrandbits(64), len(found), plain)
        prompt = PROMPTS[task].format(**row)
        if prompt not in without and prompt not in found:
            found[prompt] = row
    return list(found.values())
