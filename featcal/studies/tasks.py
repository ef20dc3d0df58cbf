"""Study methods on more and more tasks: on the suite's first tasks, merged again for every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from featcal.family.opening import Family
from featcal.session.session import Session
from featcal.studies.plan import StudyPlan
from featcal.studies.runner import place_points
from featcal.studies.study import Study, study_of
from featcal.suite.methods import EXPERT, PROPOSED
from featcal.suite.recipe import MergeRecipe
from featcal.system.errors import InputError

METHODS = ("merged", "regmean++", "calibrated", *PROPOSED)


def study_task_counts(session: Session, plan: StudyPlan, counts: Sequence[int] | None = None) -> Study:
    """Measure every method on the first tasks of a suite, for several numbers of them.

    Args:
        counts: numbers of tasks; by default doubled from 2 up to all.

    Raises:
        InputError: a suite whose merged model is a checkpoint of all tasks, or a number that it does not have.
    """
    most = len(session.tasks)
    rows = []
    for count in doubling_counts(most) if counts is None else dict.fromkeys(counts):
        if not 1 <= count <= most:
            raise InputError(f"counts: {count} tasks; the suite has {most}")
        part = session if count == most else Session(first_tasks(session.family, count))
        rows += plan.run(part, place_points(plan.points([EXPERT, *plan.methods]), tasks=count))
    return study_of("tasks", session, plan.on, rows)


def doubling_counts(most: int) -> list[int]:
    """Return powers of 2 from 2 up to `most`, and `most` itself.

    >>> doubling_counts(8), doubling_counts(6), doubling_counts(1)
    ([2, 4, 8], [2, 4, 6], [1])
    """
    return sorted({*(2**power for power in range(1, most.bit_length()) if 2**power <= most), most})


def first_tasks(family: Family, count: int) -> Family:
    """Return the family with its first tasks only, whose experts are merged by the suite's recipe.

    Raises:
        InputError: the merged model is a checkpoint, or the recipe has options for every task.
    """
    recipe = family.suite.merged
    if not isinstance(recipe, MergeRecipe):
        raise InputError("the merged model is a checkpoint of all tasks; give the suite a recipe under 'merged'")
    if recipe.options_by_task:
        raise InputError("the recipe has options by task; leave them out for this study")
    chosen = list(family.suite.tasks)[:count]
    suite = family.suite.model_copy(update={"tasks": {name: family.suite.tasks[name] for name in chosen}})
    part = replace(family, suite=suite, experts={name: family.experts[name] for name in chosen})
    return replace(part, merged=part.merge(recipe))
