"""Hold the finished site to two promises: it loads nothing from anywhere else, and its links lead somewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "video": "src", "link": "href"}
"""Elements that a browser loads by itself, and by which attribute. Links (`a`) wait until somebody follows them."""
_STYLE = re.compile(r"url\(\s*[\"']?((?:https?:)?//[^)\"']+)|@import\s+[\"']((?:https?:)?//[^\"']+)")


class _Page(HTMLParser):
    """Collect what a page loads, where its links lead, and the names that links to it may have."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in _LOADED and given.get("rel") != "canonical":
            self.loads.append(given.get(_LOADED[tag], ""))


def check(app: Sphinx, error: Exception | None) -> None:
    """Raise ExtensionError with all that is wrong with the site."""
    if error is not None or app.builder.format != "html":
        return
    root = Path(app.outdir)
    pages = {file: _read(file) for file in sorted(root.rglob("*.html")) if "_static" not in file.parts}
    wrong = [
        f"{file.relative_to(root)} loads {one}"
        for file, page in pages.items()
        for one in page.loads
        if _is_outside(one)
    ]
    for file in root.rglob("*.css"):
        wrong += [
            f"{file.relative_to(root)} loads {one}"
            for found in _STYLE.findall(file.read_text("utf-8"))
            for one in found
            if one
        ]
    wrong += [
        f"{file.relative_to(root)}: a link to {link}"
        for file, page in pages.items()
        for link in page.links
        if not _leads_somewhere(file, link, pages)
    ]
    if wrong:
        raise ExtensionError("\n".join(wrong))


def _read(file: Path) -> _Page:
    page = _Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page


def _is_outside(address: str) -> bool:
    return address.startswith(("http:", "https:", "//"))


def _leads_somewhere(file: Path, link: str, pages: dict[Path, _Page]) -> bool:
    """Say whether a link leads to a file of the site, and to a place in it if it names one; others are not followed."""
    if _is_outside(link) or link.startswith("mailto:"):
        return True
    address, name = urldefrag(link)
    there = (file.parent / unquote(address)).resolve() if address else file
    there = there / "index.html" if there.is_dir() else there
    if there not in pages:
        return there.is_file()
    return not name or unquote(name) in pages[there].names


def setup(app: Sphinx) -> dict[str, Any]:
    """Check when everything is written."""
    app.connect("build-finished", check, priority=900)
    return {"parallel_read_safe": True}
