"""Seconds from starting `featcal app` to the first chart and to the live page: `python benchmarks/coldstart.py`.

The browser runs already, with an empty profile for every round. The first round warms the disk cache (and the kept
measurement of the first chart) and is reported apart. `--suite` opens another suite than the embedded one, of which
nothing is kept; the seconds to the drift of its first task and to the finished page are reported too. Prints JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping

import browser as pages
import measure

FIRST_CHART = f"""!!document.querySelector('{pages.CHART} .main-svg .bars, {pages.CHART} .main-svg .scatterlayer')"""
LIVE = f"""!!document.querySelector('[data-testid="stSidebar"] [data-testid="stSelectbox"]') && {pages.READY}"""
"""The suite's selector is drawn by the page that has torch; before it there is only the kept chart."""
TASK = "document.body.innerText.includes('tasks so far')"
WHOLE = f"document.body.innerText.includes('Own mismatch or inherited?') && {pages.READY}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--suite", help="file of a suite of large models")
    parser.add_argument("--samples", type=int, default=16, help="per task, with --suite")
    pages.arguments(parser)
    options = parser.parse_args()
    asked = f"/?suite={options.suite}&n={options.samples}" if options.suite else ""
    steps = {"first_chart": FIRST_CHART} | ({"first_task": TASK, "whole": WHOLE} if asked else {"live_page": LIVE})
    warm_up, *rounds = (one(options.chromium, asked, steps) for _ in range(options.rounds + 1))
    medians = {key: statistics.median(found[key] for found in rounds) for key in warm_up}
    measure.show({"median": medians, "rounds": rounds, "warm_up": warm_up, "machine": measure.machine()})


def one(program: str, asked: str, steps: Mapping[str, str]) -> dict[str, float]:
    """Seconds to the answering server and to every step, all from the start of the process."""
    with pages.chromium(program) as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        started = time.perf_counter()
        with pages.running_app() as app:
            found = {"server": time.perf_counter() - started}
            page.goto(app.address + asked, wait_until="commit")
            for name, condition in steps.items():
                page.wait_for_function(condition, polling=20, timeout=600_000)
                found[name] = time.perf_counter() - started
    measure.say(", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items()))
    return found


if __name__ == "__main__":
    main()
