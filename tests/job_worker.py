"""A worker whose jobs take steps and compute nothing: `python job_worker.py FOLDER ID`."""

import sys
import time
from typing import Any

from featcal.errors import InputError
from featcal.jobs import worker
from featcal.jobs.kinds import Work


def steps(work: Work) -> dict[str, Any]:
    """`args`: `blocks`, `seconds` of each, and how it `ends`."""
    (work.folder / "half-written.partial").mkdir(parents=True, exist_ok=True)
    for block in range(work.args["blocks"]):
        work.progress("stepping", block, work.args["blocks"])
        time.sleep(work.args["seconds"])
    work.progress("stepping", work.args["blocks"], work.args["blocks"])
    if work.args.get("ends") == "refused":
        raise InputError("blocks: there is no such number; take another")
    if work.args.get("ends") == "broken":
        raise ZeroDivisionError
    (work.folder / "half-written.partial").rmdir()
    return {"blocks": work.args["blocks"]}


if __name__ == "__main__":
    worker.KINDS = {"steps": steps}
    worker.FIRST_NEEDED = ()
    worker.require_current = lambda *_: None  # its orders are of no suite
    worker.OFTEN = 0.0
    sys.exit(worker.main(*sys.argv[1:]))
