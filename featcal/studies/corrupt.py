"""Study the effect of corrupted calibration pictures: Table 6 and Fig. 4 of the paper. Test pictures stay clean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from featcal.session.session import Session
from featcal.studies.method_lists import OF_SAMPLES
from featcal.studies.plan import StudyPlan
from featcal.studies.requirements import needs
from featcal.studies.runner import place_points
from featcal.studies.study import Study, study_of
from featcal.suite.methods import EXPERT, SAMPLES
from featcal.suite.schema import Suite
from featcal.suite.source import CORRUPTIONS, Corruption
from featcal.system.errors import InputError
from featcal.system.formatting import some

METHODS = OF_SAMPLES
SEVERITIES = (3,)
CLEAN = "clean"


def study_corruption(
    session: Session, plan: StudyPlan, kinds: Sequence[str] = CORRUPTIONS, severities: Sequence[int] = SEVERITIES
) -> Study:
    """Measure every method on clean calibration pictures, then on every kind of corruption at every severity.

    Raises:
        InputError: samples are not raw pictures, the suite's own samples are already corrupted, or kinds or severities
            are missing or unknown.
    """
    if not (kinds and severities):
        raise InputError("no kind or severity of corruption is named; leave the option out for the usual ones")
    sources = {task: one.calibration for task, one in session.family.suite.tasks.items()}
    if spoilt := [task for task, source in sources.items() if source is not None and source.corruption is not None]:
        raise InputError(
            f"the suite's own calibration pictures of {some(spoilt)} are corrupted, so that none would be clean; leave "
            "'corruption' out of the suite file"
        )
    points = place_points(plan.points([EXPERT, *plan.methods]), corruption=CLEAN, severity=0)
    seeing, modality = plan.points(), session.family.adapter.modality
    for kind, severity in product(dict.fromkeys(kinds), dict.fromkeys(severities)):
        family = replace(session.family, suite=corrupt_suite(session.family.suite, kind, severity))
        # Its hash is another, since the corruption is a part of the suite file, so its rows are kept apart.
        other = Session(family, one_shot=True)
        points += [
            # A method that reads no samples makes one and the same model: its clean row is found again.
            replace(point, of=other) if SAMPLES in needs(point.model, modality) else point
            for point in place_points(seeing, corruption=kind, severity=severity)
        ]
    return study_of("corrupt", session, plan.on, plan.run(session, points))


def corrupt_suite(suite: Suite, kind: str, severity: int) -> Suite:
    """Return the suite with its calibration pictures corrupted.

    Raises:
        InputError: a task's samples are not raw pictures, or kind or severity is unknown.
    """
    if kind not in CORRUPTIONS or severity not in range(1, 6):
        raise InputError(f"{kind}, severity {severity}: kinds are {', '.join(CORRUPTIONS)}, severities 1 to 5")
    tasks = {}
    for name, task in suite.tasks.items():
        source = task.calibration
        if source is None or not source.pictures:
            raise InputError(f"task '{name}': only raw pictures can be corrupted, not text or preprocessed tensors")
        worse = source.model_copy(
            update={"corruption": Corruption.model_validate({"kind": kind, "severity": severity})}
        )
        tasks[name] = task.model_copy(update={"calibration": worse})
    return suite.model_copy(update={"tasks": tasks})
