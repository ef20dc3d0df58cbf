"""Every method that featcal knows, at its defaults, on one suite: `python benchmarks/field.py clip-mini`.

Test score, worst task, final relative drift and cosine to the experts on validation samples, and the seconds of making
the model, experts' own passes included where it needs them. One after the other in one process. Prints JSON.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import measure

from featcal.errors import FeatcalError
from featcal.schema.recipe import METHODS
from featcal.session import Session, open_session
from featcal.views import View

ON = View(64)


def names(samples: int, seed: int) -> list[str]:
    """Mergers, then what uses samples, then what comes after a merge."""
    own = f"samples={samples},seed={seed}"
    fitted = [f"{one}:{own}" for one in ("regmean", "regmean++")]
    calibrated = [f"calibrated:{own}", f"calibrated:recipe=refined,{own}"]
    after = [f"polished:steps=30,{own}@{one}" for one in ("merged", *calibrated)]
    surgery = [f"{one}:{own}@{model}" for one in ("surgery", "probsurgery") for model in ("merged", calibrated[1])]
    return ["base", "merged", *METHODS, *fitted, "svc", *calibrated, *after, *surgery, "expert"]


def row(suite: str, name: str) -> dict[str, Any]:
    """One model, made anew."""
    session: Session = open_session(suite, resident=True)
    started, busy = time.perf_counter(), time.process_time()
    try:
        if name != "expert":  # of a merge all is computed when it is read
            session.weights(session.named(name)).read(session.family.adapter.tower)
        seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - busy}
        scores = session.scores(session.named(name))
        features = None if name == "expert" else session.features(session.named(name), ON)
    except FeatcalError as error:
        return {"model": name, "refused": str(error)}
    by_task = {task: one.value for task, one in scores.tasks.items()}
    found = {"model": name, "average": scores.average, "worst": min(by_task.values()), "tasks": by_task, **seconds}
    if features is None:
        return found
    drift = [one.layers[-1].relative_drift for one in features.tasks.values()]
    return {**found, "drift": sum(drift) / len(drift), "cosine": features.macro_cosine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--model", action="append", help="these alone")
    options = parser.parse_args()
    rows = []
    for name in options.model or names(options.samples, options.seed):
        rows.append(row(options.suite, name))
        measure.say(f"{name}: {rows[-1].get('average', rows[-1].get('refused'))}")
        gc.collect()  # the session goes with its last user, so that the next model finds nothing made
    measure.show({"suite": options.suite, "samples": options.samples, "rows": rows, "machine": measure.machine()})


if __name__ == "__main__":
    main()
