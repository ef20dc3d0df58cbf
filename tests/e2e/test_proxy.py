"""The app behind nginx, below a path of two parts, as docs/serving.md has it: pages, websockets, uploads, downloads."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import browser
import pytest
from playwright.sync_api import Browser, Response

from e2e.conftest import VISIT
from e2e.visitor import QUICK, QUICK_LINK, Visitor

pytestmark = pytest.mark.e2e
PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
BASE = "/merges/featcal"
AROUND = """daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  scgi_temp_path {folder}/scgi;
  uwsgi_temp_path {folder}/uwsgi;
  server {{
    listen 127.0.0.1:{port};
    location = /_proxy {{ return 200 "ok"; }}
{location}
  }}
}}
"""


def write_nginx(folder: Path, port: int, app: str) -> Path:
    """Write a configuration that has the page's own lines, for this base path and this app."""
    (location,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert location.count("/featcal") == 1
    location = location.replace("/featcal", BASE).replace("http://127.0.0.1:8501", app)
    file = folder / "nginx.conf"
    file.write_text(AROUND.format(folder=folder, port=port, location=location))
    return file


@pytest.fixture(scope="module")
def proxied(cheap_apps: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an app below a base path, through nginx."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("no nginx on this machine: install Debian's package nginx-light")
    folder, port = tmp_path_factory.mktemp("proxied"), browser.free_port()
    with browser.running_app(folder, base=BASE) as server:
        file = write_nginx(folder, port, server.address.removesuffix(BASE))
        process = subprocess.Popen([nginx, "-c", file, "-p", folder, "-e", "stderr"])
        try:
            browser.wait_for_answer(f"http://127.0.0.1:{port}/_proxy")
            yield f"http://127.0.0.1:{port}{BASE}"
        finally:
            process.terminate()
            process.wait()


def is_wrong(answer: Response, proxied: str) -> bool:
    """Say whether an answer is an error or of another place; streamlit's script asks below the page first."""
    asks_for_base = re.search(r"/calibrate/_stcore/(health|host-config)$", answer.url)
    inside = answer.url.startswith((proxied, "data:", "blob:"))
    return not inside or (answer.status >= 400 and not asks_for_base)


def test_every_page_and_the_download_of_a_checkpoint_go_through_a_proxy(
    proxied: str, chromium: Browser, tmp_path: Path
) -> None:
    with chromium.new_context(**VISIT) as context:
        page = context.new_page()
        wrong: list[str] = []
        page.on("response", lambda one: wrong.append(one.url) if is_wrong(one, proxied) else None)
        visitor = Visitor(page, proxied)
        visitor.open("/")
        for place in ("verdict", "drift", "calibrate", "features", "accuracy"):
            assert visitor.place == place
            if place != "accuracy":
                page.locator(".st-key-tour-next button").click()
                visitor.settle()
        visitor.open(f"/calibrate?{QUICK_LINK}")  # a link, typed
        assert visitor.model == QUICK
        visitor.step("rho")
        assert visitor.model is not None
        assert visitor.model.rho == 2.1
        visitor.click("Write the checkpoint")
        # Leaving the page would end what is still being written.
        page.get_by_test_id("stAlertContentSuccess").last.wait_for()
        for name in browser.PAGES:
            visitor.go(name)
            assert visitor.place == name
            assert page.url.startswith(f"{proxied}/")
        visitor.go("runs")
        with page.expect_download() as begun:
            page.get_by_role("link", name="Download as a zip").click()
        begun.value.save_as(tmp_path / "checkpoint.zip")
    assert any(name.endswith("model.safetensors") for name in ZipFile(tmp_path / "checkpoint.zip").namelist())
    assert wrong == []
