"""Seconds from a click on a page's link to the last change of the page, in a real browser:
`python benchmarks/switches.py`.

Visits every page again and again in one session. The first round measures what the pages show; of the others, in which
everything is known, the median of each page counts. Both times are taken inside the page. The content of a canvas does
not count: nobody sees it, and a table writes its cells there for screen readers some time after it is drawn.
Prints JSON.
"""

from __future__ import annotations

import argparse
import statistics

import browser as pages
import measure
from playwright.sync_api import Page

PAGES = ("drift", "features", "cosines", "accuracy", "calibrate", "runs", "models", "verdict")
WATCH = """(() => {
  window.bench = {clicked: 0, changed: 0};
  addEventListener('click', () => { window.bench = {clicked: performance.now(), changed: 0}; }, true);
  new MutationObserver(records => {
    const main = document.querySelector('[data-testid="stMain"]');
    const seen = target => main?.contains(target) && !target.closest?.('canvas');
    if (records.some(record => seen(record.target))) window.bench.changed = performance.now();
  }).observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
})()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="clip-mini")
    parser.add_argument("--rounds", type=int, default=4)
    pages.arguments(parser)
    options = parser.parse_args()
    with pages.chromium(options.chromium) as chromium, pages.running_app() as app:
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"{app.address}/?suite={options.suite}")
        pages.settle(page)
        page.evaluate(WATCH)
        rounds = [{name: seconds_to(page, name) for name in PAGES} for _ in range(options.rounds)]
    known = {name: statistics.median(one[name] for one in rounds[1:]) for name in PAGES}
    measure.show(
        {
            "suite": options.suite,
            "first": rounds[0],
            "known": known,
            "median": statistics.median(known.values()),
            "worst": max(known, key=lambda name: known[name]),
            "machine": measure.machine(),
        }
    )


def seconds_to(page: Page, name: str) -> float:
    """Go to a page; return the seconds from the click to the last change of what the page shows."""
    pages.go(page, name)
    bench = page.evaluate("window.bench")
    seconds = float(bench["changed"] - bench["clicked"]) / 1000
    measure.say(f"{name}: {seconds:.2f} s")
    return seconds


if __name__ == "__main__":
    main()
