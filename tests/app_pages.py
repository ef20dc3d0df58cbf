"""The app without a browser, for tests: open it on a page, go to another, find its controls."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from featcal.resources import bundle_root

sys.path.insert(0, str(bundle_root()))

from app import maps

MARKUP = "![x](http://127.0.0.2/a.png) <b>b</b> <a href='x'>l</a> **s** $q$ :smile: [l](http://e.x) `c` www.e.x a@b.cd"
MARKDOWN = ("![x](", "http://", "<b", "<a ", "**s", "$q", ":smile:", "[l](", "`c`", "www.e", "a@b")
HTML = ("<b>b", "<a href")
"""What stands in a text that was shown as Markdown or as HTML and not as text."""
PAGES = ("drift", "calibrate", "features", "cosines", "accuracy", "runs", "suite")


class InstantMaps:
    """Stands in for the process that runs UMAP, whose compilation takes long."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    start_when_quiet = wait

    def submit(self, clouds: Sequence[maps.Points]) -> Future[list[maps.Points]]:
        future: Future[list[maps.Points]] = Future()
        future.set_result([maps.pca_map(cloud) for cloud in clouds])
        return future


def opened(suite: Path | str, page: str = "drift", **query: str) -> AppTest:
    """The app on a suite, run once on a page."""
    app = AppTest.from_file(str(bundle_root() / "app" / "main.py"), default_timeout=180)
    for name, value in {"suite": str(suite), **query}.items():
        app.query_params[name] = value
    if page != "drift":
        app.switch_page(str(bundle_root() / "pages" / f"{page}.py"))
    return app.run()


def go(app: AppTest, page: str) -> AppTest:
    """The next page of the same session."""
    return app.switch_page(str(bundle_root() / "pages" / f"{page}.py")).run()


def charts(app: AppTest) -> int:
    """How many charts the page shows."""
    return len(app.get("plotly_chart"))


def button(app: AppTest, label: str) -> Any:
    """The first button with these words on it."""
    return next(one for one in app.button if label in one.label)


def control(app: AppTest, field: str) -> Any:
    """The control of a field of the selection on the page that is open."""
    (found,) = controls(app, field)
    return found


def controls(app: AppTest, field: str) -> list[Any]:
    """The controls of a field, but for what is typed; none where the page has none."""
    kinds = ("slider", "select_slider", "toggle", "selectbox", "button_group")
    return [one for kind in kinds for one in app.get(kind) if name_of(one).split("-", 1)[1:] == [field]]


def name_of(widget: Any) -> str:
    """A widget's key without the number of changes by something else."""
    return str(widget.key).split("--")[0]


def shown_and_default(app: AppTest) -> dict[str, tuple[list[str], list[str]]]:
    """Of every control its value, and the one of a browser that knows of it only what the server draws; in words."""
    kinds = ("select_slider", "toggle", "selectbox", "button_group", "multiselect", "number_input")
    found = {}
    for one in (one for kind in kinds for one in app.get(kind)):
        default = one.proto.default
        places = [default] if one.type == "selectbox" else default if hasattr(one, "options") else None
        words = [str(type(one.value)(default))] if places is None else [one.options[int(place)] for place in places]
        value = one.value if isinstance(one.value, list | tuple) else [one.value]
        called = getattr(one, "format_func", str)
        found[one.key] = [called(v) for v in value], words
    return found


def fields(app: AppTest, kind: str) -> set[str]:
    """The fields that have a control of this kind on the page that is open."""
    return {name_of(one).split("-", 1)[1] for one in app.get(kind)}


def shown_model(app: AppTest) -> str | None:
    """The line that says which calibrated model the page shows."""
    lines = [one.value for one in app.caption if one.value.startswith("calibrated: ")]
    assert len(lines) <= 1
    return lines[0].removeprefix("calibrated: ") if lines else None


def healthy(app: AppTest) -> bool:
    """Whether nothing failed."""
    return not app.exception and not app.error


def hostile(what: str) -> str:
    return f"{what} {MARKUP}"


def drawn_as_markdown(app: AppTest) -> list[str]:
    """Every text of a page that the browser reads as Markdown."""
    kinds = ("markdown", "caption", "header", "subheader", "title", "error", "info", "warning", "success")
    texts = [str(one.value) for kind in kinds for one in app.get(kind)]
    texts += [
        one.label for kind in ("metric", "expander", "button", "toggle", "download_button") for one in app.get(kind)
    ]
    texts += [str(one.value) for one in app.metric]
    return texts + [image.caption for group in app.get("image") for image in group.proto.imgs]


def drawn_by_plotly(app: AppTest) -> list[str]:
    """Every string of every chart of a page."""

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from strings(one)

    return [one for chart in app.get("plotly_chart") for one in strings(json.loads(chart.proto.spec))]


def assert_shown_as_text(app: AppTest) -> None:
    assert not app.exception
    for one in drawn_as_markdown(app):
        left = re.sub(r"\\.", "", one)  # without what a backslash protects
        assert not [fragment for fragment in MARKDOWN if fragment in left], one
    for one in drawn_by_plotly(app):
        assert not [fragment for fragment in HTML if fragment in one], one
