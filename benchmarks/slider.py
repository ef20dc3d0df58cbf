"""Seconds from releasing a slider to all charts redrawn, in a real browser: `python benchmarks/slider.py`.

Opens the Calibrate page, first changes the number of samples (the experts run anew), then drags rho again and again
(expert pass kept), always to a value that was not seen before. A release and every change of a chart are timed inside
the page. Prints JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import browser as pages
import measure
from playwright.sync_api import Page

WATCH = """(() => {
  const chart = '[data-testid="stPlotlyChart"]';
  const inChart = record => (record.target.closest || record.target.parentElement?.closest) &&
    ((record.target.closest ? record.target : record.target.parentElement).closest(chart) ||
     [...record.addedNodes].some(node => node.querySelector && (node.matches(chart) || node.querySelector(chart))));
  window.bench = {released: 0, drawn: 0};
  const release = () => { window.bench = {released: performance.now(), drawn: 0}; };
  for (const kind of ['pointerup', 'keyup']) addEventListener(kind, release, true);
  new MutationObserver(records => { if (records.some(inChart)) window.bench.drawn = performance.now(); })
    .observe(document.querySelector('[data-testid="stMainBlockContainer"]'),
             {subtree: true, childList: true, attributes: true, characterData: true});
})()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="clip-mini")
    parser.add_argument("--samples", type=int, default=64, help="per task; twice another step of the page's slider")
    parser.add_argument("--moves", type=int, default=8)
    pages.arguments(parser)
    options = parser.parse_args()
    with pages.chromium(options.chromium) as chromium, pages.running_app() as app:
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"{app.address}/calibrate?suite={options.suite}&samples={options.samples // 2}")
        pages.settle(page)
        page.evaluate(WATCH)
        samples, rho = pages.Slider(page, "samples"), pages.Slider(page, "rho")
        anew = seconds_of(page, samples, samples.step)
        if samples.value != str(options.samples):
            raise SystemExit(f"the page calibrates on {samples.value} samples, not {options.samples}")
        shares = [0.5 + 0.025 * ((move // 2 + 1) * (-1) ** move) for move in range(options.moves)]
        kept = [seconds_of(page, rho, lambda share=share: rho.drag(share)) for share in shares]
    measure.show(
        {
            "suite": options.suite,
            "samples": options.samples,
            "experts_anew": anew,
            "moves": kept,
            "median": statistics.median(kept),
            "min": min(kept),
            "max": max(kept),
            "machine": measure.machine(),
        }
    )


def seconds_of(page: Page, slider: pages.Slider, move: Callable[[], None]) -> float:
    """Seconds from the release to the last change of a chart."""
    before = slider.value
    move()
    page.wait_for_function("window.bench.drawn > window.bench.released", polling=20, timeout=300_000)
    pages.settle(page)
    if slider.value == before:
        raise SystemExit(f"the slider did not move from {before}")
    seconds = float(page.evaluate("(window.bench.drawn - window.bench.released) / 1000"))
    measure.say(f"{before} to {slider.value}: {seconds:.2f} s")
    time.sleep(0.2)
    return seconds


if __name__ == "__main__":
    main()
