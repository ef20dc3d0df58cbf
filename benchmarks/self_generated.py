"""Calibrate on real text and on text that experts wrote: ``python benchmarks/self_generated.py t5-mini|lm-mini``.

Every row is a suite file whose `calibration` sources are others, calibrated with both recipes and calibration seeds
42, 43 and 44 on 64 texts per task out of 256; scores are of the whole test split, in %.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from featcal import Session, load_suite, open_family
from featcal.samples.sources import preview_samples
from featcal.suite.schema import suite_from_dict
from featcal.suite.template import fill_template
from featcal.suite.views import EvaluationSamples
from featcal.system.resources import data_path, embedded_suites

SEEDS, RECIPES = (42, 43, 44), ("paper", "refined")
COUNT, TOKENS = 256, {"t5-mini": 8, "lm-mini": 48}
Sources = Mapping[str, dict[str, Any]]


def real_prompts(suite: str) -> dict[str, list[str]]:
    """The prompts of the calibration texts, without their answers."""
    opened = load_suite(suite)
    return {task: [*(preview_samples(opened, task, "calibration", None, 42).texts or ())] for task in opened.tasks}


def plain_prompts(suite: str) -> dict[str, list[str]]:
    """Prompts that somebody who knows the task may make up: its template over the plain sentences of the base."""
    sys.path.insert(0, str(data_path(suite)))
    rows: Callable[..., list[dict[str, str]]]
    if suite == "t5-mini":
        from texts import rows
    else:
        from tasks import rows
    made = {task: rows(task, COUNT, seed=5, plain=True) for task in load_suite(suite).tasks}
    return {task: [fill_template(template, row) for row in made[task]] for task, template in templates(suite).items()}


def templates(suite: str) -> dict[str, str]:
    """The prompt of every task with its fields."""
    return {task: str(one.calibration and one.calibration.input) for task, one in load_suite(suite).tasks.items()}


def beginnings(suite: str) -> dict[str, list[str]]:
    """The words of every task's template before its first field."""
    return {task: [text.partition("{")[0].rstrip(" '")] * COUNT for task, text in templates(suite).items()}


def variants(suite: str) -> dict[str, dict[str, Any] | None]:
    """Calibration sources by what a row is called; None for the suite's own."""
    tokens = TOKENS[suite]

    def after(prompts: Mapping[str, list[str]]) -> Sources:
        return {task: {"self_generated": {"prompts": some, "tokens": tokens}} for task, some in prompts.items()}

    found: dict[str, Any] = {"real text": None, "real prompts, the experts' answers": after(real_prompts(suite))}
    found["plain prompts, the experts' answers"] = after(plain_prompts(suite))
    if suite == "lm-mini":
        found["the first words of the prompts alone"] = after(beginnings(suite))
        nothing = {"self_generated": {"prompts": COUNT, "tokens": tokens}}
        found["the start token alone"] = dict.fromkeys(load_suite(suite).tasks, nothing)
    return found


def session_on(suite: str, sources: Sources | None) -> Session:
    """The suite with these sources of calibration text."""
    file = embedded_suites()[suite]
    content = copy.deepcopy(yaml.safe_load(file.read_text()))
    for task, source in (sources or {}).items():
        content["tasks"][task]["calibration"] = source
    return Session(open_family(suite_from_dict(content, file.parent), device="cpu").resident())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=TOKENS)
    suite = parser.parse_args().suite
    print("| calibration text | recipe | " + " | ".join(map(str, SEEDS)) + " | mean |")
    print("|---|---|" + "---|" * (len(SEEDS) + 1))
    for name, sources in variants(suite).items():
        session = session_on(suite, sources)
        for recipe in RECIPES:
            models = [f"calibrated:recipe={recipe},samples=64,seed={seed}" for seed in SEEDS]
            scores = [
                100 * session.measure.scores(session.resolve(one), EvaluationSamples(None, "test")).average
                for one in models
            ]
            cells = [f"{score:.1f}" for score in [*scores, sum(scores) / len(scores)]]
            print(f"| {name} | {recipe} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
