"""Study how many calibration samples a method needs: Fig. 3 and Table 12 of the paper."""

from __future__ import annotations

from collections.abc import Sequence

from featcal.session.session import Session
from featcal.studies.method_lists import OF_SAMPLES, takes_samples
from featcal.studies.plan import StudyPlan
from featcal.studies.runner import place_points
from featcal.studies.study import Study, study_of
from featcal.suite.methods import EXPERT
from featcal.system.errors import InputError

COUNTS = (8, 16, 32, 64, 128, 256, 512)
METHODS = OF_SAMPLES


def study_budget(session: Session, plan: StudyPlan, counts: Sequence[int] = COUNTS) -> Study:
    """Measure every method with every number of samples per task; a task with fewer samples gives all of them.

    Raises:
        InputError: there is no number, one is below 1, or a name is invalid or has its own number of samples.
    """
    if not counts or min(counts) < 1:
        raise InputError("counts: give numbers of samples, at least 1 each")
    if fixed := [name for name in plan.methods if not takes_samples(name)]:
        raise InputError(
            *(
                f"method '{name}' sets its own number of samples; leave it out, since the counts set it"
                for name in fixed
            )
        )
    points = [
        point
        for count in dict.fromkeys(counts)
        for point in place_points(plan.points([EXPERT, *plan.methods], count), n=count)
    ]
    return study_of("budget", session, plan.on, plan.run(session, points))
