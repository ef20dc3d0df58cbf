"""Every command through every trouble with the Hub: one sentence, no traceback, and a second try goes on."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
import yaml
from clean_process import in_clean_process
from command_lines import run
from hub.box import Box, play
from hub.files import Shelf
from hub.server import Fault
from hub.session import Result, environment
from huggingface_hub import HfApi, constants
from lanes import pairs

from featcal.system.resources import ready_suites

SHIPPED = "gpt2-glue"
BASE, EXPERTS = "openai-community/gpt2", {"cola": "tanganke/gpt2_cola", "sst2": "tanganke/gpt2_sst2"}
COMMANDS = {
    "check": [],
    "drift": ["--eval-samples", "4"],
    "merge": ["--out", "written"],
    "calibrate": ["--samples", "8", "--out", "written"],
    "evaluate": ["--eval-samples", "4"],
    "diagnose": ["--eval-samples", "4"],
}
TOUCHES_NO_DATA = ("check", "merge")
AGAIN = "start again later: files that are whole are kept"


@dataclass(frozen=True)
class Trouble:
    """One trouble: how the Hub or the user behaves, and the sentence that tells of it."""

    sentence: str
    """Pattern of what is told; "" where the trouble passes by itself."""
    faults: tuple[Mapping[str, object], ...] = ()
    expert: str = ""
    """Repository that takes the place of an expert's, to be made with `rules`."""
    rules: Mapping[str, object] | None = None
    data: bool = False
    """Whether only commands that read samples meet it."""
    token: str = "hf_granted"
    patience: float = 20.0
    """Seconds that clients wait for an answer."""


def always(match: str, **how: object) -> tuple[Mapping[str, object], ...]:
    return ({"match": match, **how},)


WEIGHTS, DATA, ANY = "GET /_cdn/models/.*safetensors", "GET /_cdn/datasets/", "GET /(?!_cdn)"
TROUBLES = {
    "weights are cut": Trouble(rf"broke off in the middle of model\.safetensors.*{AGAIN}", always(WEIGHTS, cut=1000)),
    "data are cut": Trouble(
        rf"'nyu-mll/glue' cannot be fetched: the Hub broke off in the middle of \S+\.parquet; {AGAIN}",
        always(DATA, cut=1000),
        data=True,
    ),
    "503 passes": Trouble("", always(ANY, status=503, times=2)),
    "503 stays": Trouble(rf"the Hub fails with .*\(503\).*{AGAIN}", always(ANY, status=503)),
    "429 passes": Trouble("", always(ANY, status=429, times=2, headers={"Retry-After": "1"})),
    "429 stays": Trouble(
        r"the Hub limits how often it is asked \(429\).*start again in 400 s, with HF_TOKEN for a higher limit",
        always(ANY, status=429, headers={"Retry-After": "400"}),
    ),
    "storage refuses": Trouble(
        r"the Hub forbids to read model\.safetensors \(403\).*use a token that may read it", always(WEIGHTS, status=403)
    ),
    "no answer": Trouble(
        rf"the Hub does not answer in time for model\.safetensors.*{AGAIN}", always(WEIGHTS, delay=2), patience=0.5
    ),
    "no answer to a question": Trouble(
        rf"the Hub does not answer in time.*{AGAIN}", always("GET /api/", delay=2), patience=0.5
    ),
    "dropped": Trouble(rf"the Hub broke off in the middle of .*{AGAIN}", always("GET /api/models", drop=True)),
    "wrong token": Trouble(r"the Hub refuses your token \(401\).*renew the token in HF_TOKEN", token="hf_expired"),
    "gated": Trouble(
        r"'me/gated' is gated; accept its licence on the Hub and set HF_TOKEN",
        (),
        "me/gated",
        {"gated": "auto"},
        token="",
    ),
    "gated, no access": Trouble(
        r"'me/gated' is gated, and the account of your token has no access; ask for it on its page",
        (),
        "me/gated",
        {"gated": "auto"},
        token="hf_outsider",
    ),
    "private": Trouble(
        r"the Hub has no model 'me/private' \(private ones need HF_TOKEN\)",
        (),
        "me/private",
        {"private": True},
        token="",
    ),
    "renamed": Trouble("", (), "me/renamed", {"renamed_to": EXPERTS["sst2"]}),
}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with play(tmp_path_factory.mktemp("hub")) as played:
        played.stock(SHIPPED)
        shelf = Shelf(played.hub.root)
        for trouble in TROUBLES.values():
            if trouble.expert and not shelf.has("models", trouble.expert):
                shutil.copytree(shelf.root / "models" / EXPERTS["sst2"], shelf.root / "models" / trouble.expert)
                shelf.set_rules("models", trouble.expert, **(trouble.rules or {}))
        yield played


def try_once(address: str, home: Path, trouble: Trouble, words: list[str]) -> Result:
    """Run a command line as a user with caches below a folder would: the clients read the environment anew."""
    where = environment(address, home, HF_TOKEN=trouble.token)
    os.environ.clear()
    os.environ.update({name: value for name, value in where.items() if value})
    for module in (constants, datasets.config):
        importlib.reload(module)
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        setattr(constants, name, trouble.patience)
    # A default that was bound to the constant's value when its module was read.
    reading = inspect.unwrap(HfApi.parse_safetensors_file_metadata)
    reading.__kwdefaults__ = {**reading.__kwdefaults__, "timeout": trouble.patience}
    sleep = time.sleep
    time.sleep = lambda length: sleep(length) if length < 1 else None  # time between tries
    return run(words)


def write_suite(file: Path, expert: str) -> None:
    shipped = yaml.safe_load(ready_suites()[SHIPPED].read_text("utf-8"))
    tasks = {name: {**shipped["tasks"][name], "expert": ref} for name, ref in {**EXPERTS, "sst2": expert}.items()}
    file.write_text(yaml.safe_dump({**shipped, "name": "two", "tasks": tasks}))


def sentences(result: Result) -> list[str]:
    """Return what a command tells of problems: the line of its error, or the lines below the count of `check`."""
    lines = [line.rpartition("\r")[2] for line in result[2].splitlines()]
    count = next((place for place, line in enumerate(lines) if "problem(s) in suite" in line), None)
    if count is not None:
        return [line for line in lines[count + 1 :] if line.startswith("  - ")]
    return [line for line in lines if line.startswith("featcal: ")]


def fetched_whole(box: Box) -> list[str]:
    """Return the large files that were sent to their end."""
    sizes = {one.as_posix(): one.stat().st_size for one in box.hub.root.rglob("*.*") if one.is_file()}
    found = []
    for asked in box.hub.requests:
        path = asked["path"].partition("?")[0].removeprefix("/_cdn/")
        name = re.sub(r"^((?:models|datasets)/[^/]+/[^/]+)/[0-9a-f]{40}/", r"\1/main/", path)
        if asked["bytes"] == sizes.get(f"{box.hub.root.as_posix()}/{name}"):
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("name", "command"), pairs(TROUBLES, COMMANDS, quick=[], slow=[(one, by) for one in TROUBLES for by in COMMANDS])
)
def test_a_trouble_is_told_and_a_second_try_goes_on(
    name: str, command: str, box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trouble = TROUBLES[name]
    write_suite(tmp_path / "two.yaml", trouble.expert or EXPERTS["sst2"])
    words = [command, "two.yaml", *COMMANDS[command]]
    box.hub.requests.clear()
    box.hub.faults = [Fault(**fault) for fault in trouble.faults]  # type: ignore[arg-type]
    try:
        first = in_clean_process(try_once, box.address, tmp_path, trouble, words)
    finally:
        box.hub.faults = []
    assert "Traceback" not in first[1] + first[2]
    if trouble.sentence and not (trouble.data and command in TOUCHES_NO_DATA):
        assert first[0] == 1, first[2][-2000:]
        (sentence,) = sentences(first)
        assert re.search(trouble.sentence, sentence), sentence
        assert "unset HF_HUB_OFFLINE" not in sentence
        second = in_clean_process(try_once, box.address, tmp_path, Trouble(""), words)
        assert second[0] == 0, second[2][-2000:]
    else:
        assert (first[0], sentences(first)) == (0, []), first[2][-2000:]
    whole = fetched_whole(box)
    assert len(whole) == len({*whole})  # what was whole is kept
    assert command == "check" or whole
