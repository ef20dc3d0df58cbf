"""Seconds from starting `featcal app` to the first chart and to the live page: `python benchmarks/coldstart.py`.

The browser runs already, with an empty profile for every round. The first round warms the disk cache (and the kept
measurement of the first chart) and is reported apart. Prints JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time

import browser as pages
import measure

FIRST_CHART = f"""!!document.querySelector('{pages.CHART} .main-svg .bars, {pages.CHART} .main-svg .scatterlayer')"""
LIVE = f"""!!document.querySelector('[data-testid="stSidebar"] [data-testid="stSelectbox"]') && {pages.READY}"""
"""The suite's selector is drawn by the page that has torch; before it there is only the kept chart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    pages.arguments(parser)
    options = parser.parse_args()
    warm_up, *rounds = (one(options.chromium) for _ in range(options.rounds + 1))
    medians = {key: statistics.median(found[key] for found in rounds) for key in warm_up}
    measure.show({"median": medians, "rounds": rounds, "warm_up": warm_up, "machine": measure.machine()})


def one(program: str) -> dict[str, float]:
    """Seconds to the answering server, to the first chart and to the live page, all from the start of the process."""
    with pages.chromium(program) as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        started = time.perf_counter()
        with pages.running_app() as app:
            found = {"server": time.perf_counter() - started}
            page.goto(app.address, wait_until="commit")
            for name, condition in (("first_chart", FIRST_CHART), ("live_page", LIVE)):
                page.wait_for_function(condition, polling=20, timeout=300_000)
                found[name] = time.perf_counter() - started
    measure.say(", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items()))
    return found


if __name__ == "__main__":
    main()
