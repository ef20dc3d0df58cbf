"""Seconds from releasing a slider to all charts redrawn, in a real browser: `python benchmarks/slider.py`.

Opens the Calibrate page, first changes the number of samples (the experts run anew), then drags rho again and again
(expert pass kept), always to a value that was not seen before. A release and every change of a chart are timed inside
the page. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import browser as pages
import measure

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
SLIDER = """[...document.querySelectorAll('[data-testid="stSlider"]')].find(e => e.innerText.startsWith(%s))"""


class Slider:
    """One slider of the page, by the beginning of its label."""

    def __init__(self, browser: pages.Browser, label: str) -> None:
        self._browser = browser
        self._find = SLIDER % json.dumps(label)
        self._label = label

    @property
    def value(self) -> str:
        """What it shows."""
        return str(self._browser.js(f"({self._find}).innerText.split('\\n').filter(line => line.trim())[1]"))

    def drag(self, share: float) -> None:
        """Take the thumb to a share of the track and let it go."""
        y, start, left, width = self._browser.js(
            f"(() => {{ const s = {self._find}; s.scrollIntoView({{block: 'center'}});"
            "const t = s.querySelector('input[type=range]').closest('[style*=\"left\"]').getBoundingClientRect();"
            "const g = s.querySelector('[role=group] > div').getBoundingClientRect();"
            "return [t.y + t.height / 2, t.x + t.width / 2, g.x, g.width]; })()"
        )
        self._mouse("mousePressed", start, y)
        for step in (0.5, 1.0):
            self._mouse("mouseMoved", start + step * (left + share * width - start), y)
        self._mouse("mouseReleased", left + share * width, y)

    def step(self) -> None:
        """One value up, by the keyboard."""
        self._browser.js(f"({self._find}).querySelector('input[type=range]').focus()")
        for kind in ("keyDown", "keyUp"):
            key = {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}
            self._browser.call("Input.dispatchKeyEvent", type=kind, **key)

    def _mouse(self, kind: str, x: float, y: float) -> None:
        self._browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="clip-mini")
    parser.add_argument("--samples", type=int, default=64, help="per task; twice another step of the page's slider")
    parser.add_argument("--moves", type=int, default=8)
    pages.arguments(parser)
    options = parser.parse_args()
    with pages.chromium(options.chromium) as browser, pages.running_app() as address:
        browser.look("light")
        query = f"suite={options.suite}&samples={options.samples // 2}"
        browser.call("Page.navigate", url=f"{address}/calibrate?{query}")
        pages.settle(browser)
        browser.js(WATCH)
        samples, rho = Slider(browser, "Calibration samples"), Slider(browser, "ρ")
        anew = seconds_of(browser, samples, samples.step)
        if samples.value != str(options.samples):
            raise SystemExit(f"the page calibrates on {samples.value} samples, not {options.samples}")
        shares = [0.5 + 0.025 * ((move // 2 + 1) * (-1) ** move) for move in range(options.moves)]
        kept = [seconds_of(browser, rho, lambda share=share: rho.drag(share)) for share in shares]
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


def seconds_of(browser: pages.Browser, slider: Slider, move: Any) -> float:
    """Seconds from the release to the last change of a chart."""
    before = slider.value
    move()
    browser.wait("window.bench.drawn > window.bench.released", 300)
    pages.settle(browser)
    if slider.value == before:
        raise SystemExit(f"the slider did not move from {before}")
    seconds = float(browser.js("(window.bench.drawn - window.bench.released) / 1000"))
    measure.say(f"{before} to {slider.value}: {seconds:.2f} s")
    time.sleep(0.2)
    return seconds


if __name__ == "__main__":
    main()
