"""A Hub that misbehaves: every trouble is one sentence of its own, and what passes is waited for."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from hub.server import serve
from huggingface_hub import constants
from safetensors.torch import save_file

from featcal.formats.hub import bar_of, fetch_model, hub_model, look_up
from featcal.formats.hub_errors import Unreachable
from featcal.system.environment import hush_hub_clients
from featcal.system.errors import InputError

Faults = Callable[..., None]
WEIGHTS = "GET .*model.safetensors"
API = "GET /api/models"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("hub")
    folder = root / "models" / "me" / "m" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.zeros(50_000)}, folder / "model.safetensors")
    server = serve(root)
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def faults(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Play a Hub, with an empty cache and no time lost between tries, and return what makes it misbehave."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(constants, "HF_XET_CACHE", str(tmp_path / "xet"))
    # Clients wait a second or more between tries, the Hub played here less before an answer that comes late.
    sleep = time.sleep
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(seconds) if seconds < 1 else None)
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.close_session()

    def set_faults(*wanted: dict[str, Any]) -> None:
        send(address, "POST", wanted)

    yield set_faults
    send(address, "DELETE", None)
    huggingface_hub.close_session()


def send(address: str, method: str, content: Any) -> None:
    data = None if content is None else json.dumps(content).encode()
    urllib.request.urlopen(urllib.request.Request(f"{address}/_hub/faults", data=data, method=method)).close()


def fetch() -> Path:
    model = hub_model("me/m")
    assert model is not None
    return fetch_model(model)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"match": WEIGHTS, "cut": 1000},
            "broke off in the middle of model.safetensors; start again later: files that",
        ),
        ({"match": WEIGHTS, "delay": 0.6}, "does not answer in time for model.safetensors; start again later"),
        ({"match": WEIGHTS, "status": 403}, r"forbids to read model.safetensors \(403\); use a token that may read it"),
        ({"match": API, "status": 503}, r"fails with the request \(503\); start again later"),
        ({"match": API, "status": 429}, r"limits how often it is asked \(429\); start again"),
        ({"match": API, "drop": True}, "broke off in the middle of an answer; start again later"),
        ({"match": API, "delay": 0.6}, "does not answer in time; start again later.* HF_HUB_DOWNLOAD_TIMEOUT"),
    ],
)
def test_trouble_with_a_model_is_one_sentence(faults: Faults, fault: dict[str, Any], said: str) -> None:
    faults(fault)
    with pytest.raises(InputError, match=f"^'me/m' cannot be fetched: the Hub {said}"):
        fetch()
    faults()
    send(constants.ENDPOINT, "DELETE", None)
    assert (fetch() / "model.safetensors").stat().st_size > 200_000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_bar_where_fetching_takes_its_time(faults: Faults, monkeypatch: Any) -> None:
    huggingface_hub.utils.enable_progress_bars()
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    fetch()
    fetch()
    assert shown.getvalue() == ""
    for unit, about in (("it", "Fetching 9 files"), ("B", "Downloading bytes"), ("B", "Reconstructing")):
        with bar_of("me/m") as of_fetch:
            bar = of_fetch(total=4_000_000, unit=unit, desc=about)
            assert bool(bar.disable) is (about != "Reconstructing")
            bar.start_t, bar.last_print_t = (time.time() - 2,) * 2  # as if it had begun then
            bar.update(2_000_000)
    lines = [one for one in shown.getvalue().split("\r") if one.strip()]
    assert lines
    assert all(re.match(r"fetching me/m:  50%.* 2.00M/4.00M ", one) for one in lines), lines


def test_owners_of_a_process_let_the_clients_log_errors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_VERBOSITY", "debug")
    hush_hub_clients()
    assert (os.environ["HF_HUB_VERBOSITY"], os.environ["DATASETS_VERBOSITY"]) == ("debug", "error")
    assert datasets.utils.logging.log_levels["error"] == huggingface_hub.logging.log_levels["error"] == logging.ERROR


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": 429}, {"drop": True}])
def test_what_passes_is_waited_for(faults: Faults, fault: dict[str, Any]) -> None:
    faults({"match": API, "times": 2, **fault})
    assert look_up("me/m", "model", lambda api: api.model_info("me/m").id) == "me/m"
    faults({"match": API, "times": 2, **fault})
    assert (fetch() / "config.json").is_file()


def test_the_hub_says_how_long_to_wait(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    faults({"match": API, "status": 429, "times": 1})
    look_up("me/m", "model", lambda api: api.model_info("me/m"))
    assert [one for one in waited if one] == [1.0]


def test_a_token_that_is_not_valid_is_named(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(InputError, match=r"the Hub refuses your token \(401\); renew the token in HF_TOKEN or of"):
        fetch()


def test_no_network_and_no_wish_for_one(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        InputError, match=r"the Hub cannot be reached \(ConnectError\); connect, or give a local folder"
    ):
        fetch()
    with pytest.raises(Unreachable, match="cannot be reached"):
        look_up("me/m", "model", lambda api: api.model_info("me/m"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="the Hub is not asked, since HF_HUB_OFFLINE is set"):
        fetch()


def test_a_cache_that_cannot_be_written_is_named(faults: Faults, tmp_path: Path, monkeypatch: Any) -> None:
    refused = PermissionError(13, "Permission denied", "/cache/blobs")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: (_ for _ in ()).throw(refused))
    with pytest.raises(InputError, match=r"local cache cannot be written \(/cache/blobs\); set HF_HOME"):
        fetch()
