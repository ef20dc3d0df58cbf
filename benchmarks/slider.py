"""Seconds from releasing a slider to the preview and to all charts redrawn, in a real browser:
`python benchmarks/slider.py`.

Opens the Calibrate page, first changes the number of samples (the experts run anew), then drags rho again and again
(expert pass kept), always to a value that was not seen before, each time after the page has got ready for the next
preview. A release, the preview and every change of a chart are timed inside the page. Prints JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import browser as pages
import measure
import roofline
from playwright.sync_api import Page

WATCH = """(() => {
  const chart = '[data-testid="stPlotlyChart"]';
  const inChart = record => (record.target.closest || record.target.parentElement?.closest) &&
    ((record.target.closest ? record.target : record.target.parentElement).closest(chart) ||
     [...record.addedNodes].some(node => node.querySelector && (node.matches(chart) || node.querySelector(chart))));
  window.bench = {released: 0, previewed: 0, drawn: 0};
  const release = () => { window.bench = {released: performance.now(), previewed: 0, drawn: 0}; };
  const preview = () => document.querySelector('.st-key-previewed .js-plotly-plot:has(.main-svg)')
    ?._fullData?.some(trace => trace.name === 'preview');
  for (const kind of ['pointerup', 'keyup']) addEventListener(kind, release, true);
  new MutationObserver(records => {
    if (!window.bench.previewed && preview()) window.bench.previewed = performance.now();
    if (records.some(inChart)) window.bench.drawn = performance.now();
  })
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
    before = roofline.gemm_peaks("cpu")
    with pages.chromium(options.chromium) as chromium, pages.running_app() as app:
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"{app.address}/calibrate?suite={options.suite}&samples={options.samples // 2}")
        pages.settle(page)
        page.evaluate(WATCH)
        samples, rho = pages.Slider(page, "samples"), pages.Slider(page, "rho")
        ready(page)
        anew, _ = seconds_of(page, samples, samples.step)
        if samples.value != str(options.samples):
            raise SystemExit(f"the page calibrates on {samples.value} samples, not {options.samples}")
        shares = [0.5 + 0.025 * ((move // 2 + 1) * (-1) ** move) for move in range(options.moves)]
        kept = [seconds_of(page, rho, lambda share=share: rho.drag(share)) for share in shares]
    measure.show(
        {
            "suite": options.suite,
            "samples": options.samples,
            "experts_anew": anew,
            **spread("exact", [exact for exact, _ in kept]),
            **spread("preview", [preview for _, preview in kept if preview is not None]),
            "gflops_before_and_after": [before, roofline.gemm_peaks("cpu")],
            "machine": measure.machine(),
        }
    )


def spread(name: str, seconds: list[float]) -> dict[str, object]:
    """All values with their median, least and most."""
    return {name: seconds, f"{name}_median": statistics.median(seconds), f"{name}_range": [min(seconds), max(seconds)]}


def ready(page: Page) -> None:
    """Wait until the page has done what it does once it is complete: the browser asks for the next preview's inputs."""
    pages.settle(page)
    page.wait_for_timeout(1_500)
    pages.settle(page)


def seconds_of(page: Page, slider: pages.Slider, move: Callable[[], None]) -> tuple[float, float | None]:
    """Seconds from the release to the last change of a chart, and to the preview; None if the chart was faster."""
    before = slider.value
    move()
    page.wait_for_function("window.bench.drawn > window.bench.released", polling=20, timeout=300_000)
    pages.settle(page)
    if slider.value == before:
        raise SystemExit(f"the slider did not move from {before}")
    bench = page.evaluate("window.bench")
    exact = (bench["drawn"] - bench["released"]) / 1000
    preview = (bench["previewed"] - bench["released"]) / 1000 if bench["previewed"] else None
    shown = "none" if preview is None else f"{preview:.2f} s"
    measure.say(f"{before} to {slider.value}: preview {shown}, exact {exact:.2f} s")
    ready(page)
    return exact, preview


if __name__ == "__main__":
    main()
