"""Photograph every page of the app in both themes: `python docs/screenshots.py [--suite SUITE --out DIR]`.

Whole pages lie in `build/screenshots` then; of clip-mini, what the documents show is cut out of them into
`docs/images`, and a newcomer's tour of five steps becomes the moving picture of README (`tour.webp`). A page is ready
when streamlit has finished running, every chart is drawn and nothing on it changes any more.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import browser

THEMES = ("light", "dark")
WIDTH, HEIGHT = 1400, 900
STEADY = 1.0
ROOT = Path(__file__).resolve().parents[1]
SHOWN = {"verdict": 1290, "drift": 860, "calibrate": 860, "features": 1225, "accuracy": 740}
"""Page → pixels from its top that the documents show."""
TOUR = {"width": 1280, "height": 800}
READING = 12_000
"""Milliseconds for a step of the tour, long enough to read what it says."""


def photograph(page: Page, file: Path) -> None:
    """Write a PNG of the whole page: the window grows to its content."""
    content = page.get_by_test_id("stMainBlockContainer").evaluate("place => Math.ceil(place.scrollHeight)")
    page.set_viewport_size({"width": WIDTH, "height": max(HEIGHT, content + 20)})
    browser.settle(page, steady=0.7)
    file.parent.mkdir(parents=True, exist_ok=True)
    few_colours(Image.open(BytesIO(page.screenshot())).convert("RGB")).save(file, optimize=True)
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})


def few_colours(shot: Image.Image) -> Image.Image:
    """256 colours, a third of the bytes: the most frequent ones as they are, each other one by its nearest."""
    pixels = np.asarray(shot).reshape(-1, 3)
    colours, place, count = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    rest = np.array(shot.quantize(192, dither=Image.Dither.NONE).getpalette()).reshape(-1, 3)[:192]
    palette = np.concatenate([colours[np.argsort(-count)[: 256 - len(rest)]], rest])
    parts = np.array_split(colours.astype(np.int32), len(colours) // 4096 + 1)
    nearest = np.concatenate([((part[:, None] - palette) ** 2).sum(2).argmin(1) for part in parts])
    few = Image.fromarray(nearest[place].reshape(shot.height, shot.width).astype(np.uint8), "P")
    few.putpalette(palette.astype(np.uint8).tobytes())
    return few


def tour(page: Page, address: str, suite: str, theme: str, out: Path) -> None:
    """Visit every page as a user would: the first one, then calibrate, so that the others have something to compare."""
    page.goto(f"{address}/verdict?suite={suite}")
    browser.settle(page, steady=STEADY)
    first, *others = browser.PAGES
    photograph(page, out / f"{first}-{theme}.png")
    browser.go(page, "calibrate", steady=STEADY)
    for name in others:
        browser.go(page, name, steady=STEADY)
        if name == "accuracy":
            score = page.get_by_role("button", name="Score calibrated")
            if score.count():
                score.click()
            page.get_by_text("What calibrated gains over merged").wait_for(timeout=240_000)
        if name == "features":
            page.get_by_text("Trustworthiness of this map").wait_for(timeout=90_000)
            page.get_by_text("Showing PCA while").wait_for(state="hidden", timeout=240_000)
        browser.settle(page, steady=STEADY)
        photograph(page, out / f"{name}-{theme}.png")


def film_tour(page: Page, address: str, file: Path) -> None:
    """Take the tour that the app offers to newcomers, and write its steps as one moving picture."""
    page.goto(address)
    following = page.locator(".st-key-tour-next button")
    steps = []
    while True:
        browser.settle(page, steady=STEADY)
        page.get_by_text("Showing PCA while").wait_for(state="hidden", timeout=240_000)
        browser.settle(page, steady=STEADY)
        steps.append(Image.open(BytesIO(page.screenshot())).convert("RGB"))
        if not following.count():
            break
        following.click()
    steps[0].save(file, save_all=True, append_images=steps[1:], duration=READING, loop=0, lossless=True, method=6)


def show(out: Path) -> None:
    """Cut what the documents show out of whole pages."""
    for name, height in SHOWN.items():
        for theme in THEMES:
            with Image.open(out / f"{name}-{theme}.png") as whole:
                whole.crop((0, 0, WIDTH, height)).save(ROOT / "docs" / "images" / f"{name}-{theme}.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "screenshots")
    parser.add_argument("--suite", default="clip-mini")
    browser.arguments(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEATCAL_CACHE"] = cache  # else the pictures would show what whoever takes them has measured
        take(options)
    if options.suite == "clip-mini":
        show(options.out)
    print(f"pictures in {options.out}")


def take(options: argparse.Namespace) -> None:
    with browser.running_app() as app, browser.chromium(options.chromium) as chromium:
        for theme in THEMES:
            page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme)
            tour(page, app.address, options.suite, theme, options.out)
            page.close()
        if options.suite == "clip-mini":
            page = chromium.new_page(viewport=TOUR, color_scheme="light")
            film_tour(page, app.address, ROOT / "docs" / "images" / "tour.webp")


if __name__ == "__main__":
    main()
