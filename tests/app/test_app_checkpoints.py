"""What was written is kept in sight: on the page that wrote it, in the list of a later visit, as a zip."""

from __future__ import annotations

import io
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import streamlit as st
import torch
from app_pages import button, control, export_command, go, healthy, opened
from safetensors.torch import load, load_file
from streamlit.testing.v1 import AppTest

from app import zips
from featcal.export.card_parts import load_card
from featcal.figures.names import plain
from featcal.session.session import open_session
from featcal.studies import recording
from featcal.studies.checkpoints import Checkpoints
from featcal.suite.views import EvaluationSamples
from featcal.system import sandbox
from featcal.system.formatting import percent
from featcal.system.json_files import read_json
from featcal.system.sandbox import ServerRules

pytestmark = [pytest.mark.usefixtures("instant_maps", "own_list"), pytest.mark.filterwarnings("ignore")]
FEW = {"n": "8", "samples": "8"}
ON = EvaluationSamples(8)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


def write(app: AppTest, folder: Path) -> AppTest:
    """Write the calibration of the page to a folder."""
    app.text_input(key="folder").set_value(str(folder)).run()
    return button(app, "Write the checkpoint").click().run()


@pytest.mark.parametrize("a", ["merged", pytest.param("ties", marks=pytest.mark.slow)])
def test_a_checkpoint_is_found_again_in_a_new_visit(a: str, tiny_suite_file: Path, tmp_path: Path, run: Run) -> None:
    """Write, leave, come again: it is in the list, with its scores, and its tensors are the command's."""
    app = write(opened(tiny_suite_file, "calibrate", merge=a, rho="1.5", **FEW), tmp_path / "mine")
    assert not app.exception
    words = [*shlex.split(export_command(app))[1:-1], str(tmp_path / "command")]
    assert run(*words)[0] == 0
    st.cache_resource.clear()
    app = opened(tiny_suite_file, "runs", n="8")
    assert healthy(app)
    command, row = next(one.value for one in app.dataframe if "path" in one.value).to_dict("records")
    assert (command["path"], command["ρ"], command["measured on"]) == (str(tmp_path / "command"), 1.5, "")
    (mine,) = (one.id for one in Checkpoints().read_all() if one.folder == row["path"])
    app.selectbox(key="checkpoint").set_value(mine).run()
    session = open_session(tiny_suite_file, resident=True)
    model = session.resolve(f"calibrated:samples=8,rho=1.5@{a}")
    before, after = (recording.measure_model(session, one, ON) for one in (a, model))
    assert (row["path"], row["merge"], row["ρ"], row["n"]) == (str(tmp_path / "mine"), a, 1.5, 8)
    assert (row["before, %"], row["mean, %"]) == (100 * before.mean, 100 * after.mean)
    assert (row["drift before"], row["drift"]) == (before.mean_drift, after.mean_drift)
    assert f'from_pretrained("{(tmp_path / "mine").as_posix()}")' in "".join(one.value for one in app.code)
    page, command = (load_file(Path(place) / "model.safetensors") for place in (row["path"], tmp_path / "command"))
    assert page.keys() == command.keys()
    assert all(torch.equal(tensor, command[name]) for name, tensor in page.items())
    card = load_card(tmp_path / "mine").text
    assert card.strip() in "".join(one.value for one in app.code)
    assert f"{percent(before.mean)} | {percent(after.mean)} | " in card
    assert "on validation samples" in card
    assert a == "merged" or "ties" in card
    assert "out" not in read_json(tmp_path / "mine" / "featcal.json")
    # And where its options are looked at again.
    app = go(app, "calibrate")
    assert not app.success
    control(app, "rho").set_value(1.5)
    control(app, "samples").set_value(8).run()
    if a == "merged":
        assert plain(str(tmp_path / "command")) in app.success[0].value


@pytest.mark.slow
def test_a_second_click_says_that_it_is_written_already(tiny_suite_file: Path, tmp_path: Path) -> None:
    app = write(opened(tiny_suite_file, "calibrate", **FEW), tmp_path / "mine")
    said, code = app.success[0].value, [one.value for one in app.code]
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "mine").iterdir()}
    button(app, "Write the checkpoint").click().run()
    assert healthy(app)
    assert any("exists already; nothing was written" in one.value for one in app.info)
    assert (app.success[0].value, [one.value for one in app.code]) == (said, code)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "mine").iterdir()} == files
    (tmp_path / "other").mkdir()
    write(app, tmp_path / "other")
    assert "exists already" in app.error[0].value
    assert len(Checkpoints().read_all()) == 1


@pytest.mark.slow
def test_a_written_model_that_was_not_checked_is_shown_with_the_reason(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("too little")

    app = opened(tiny_suite_file, "calibrate", **FEW)
    monkeypatch.setattr("featcal.export.write.verify_reload", fail)
    write(app, tmp_path / "mine")
    assert not app.exception
    assert not app.success
    assert [one.value.split(":")[0] for one in app.warning[:2]] == ["Written, but not verified", "Not checked"]
    assert any("too little" in one.value for one in app.warning)
    assert any("from_pretrained" in one.value for one in app.code)
    assert [one.folder for one in Checkpoints().read_all()] == [str(tmp_path / "mine")]


@pytest.mark.slow
def test_a_list_that_cannot_be_kept_does_not_hide_what_was_written(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "file"))
    app = write(opened(tiny_suite_file, "calibrate", **FEW), tmp_path / "mine")
    assert healthy(app)
    assert app.success
    assert any("list of checkpoints is not kept" in one.value for one in app.warning)


@pytest.mark.slow
def test_a_checkpoint_is_taken_off_the_list_and_stays_on_disk(tiny_suite_file: Path, tmp_path: Path) -> None:
    app = write(opened(tiny_suite_file, "calibrate", **FEW), tmp_path / "mine")
    go(app, "runs")
    button(app, "Take off the list").click().run()
    assert healthy(app)
    assert any("No checkpoint yet" in one.value for one in app.info)
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def test_a_zip_is_the_folder_and_is_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zips, "PIECE", 1000)
    folder = tmp_path / "a model"
    (folder / "1_Pooling").mkdir(parents=True)
    content = {"weights.bin": bytes(range(256)) * 100, "1_Pooling/config.json": b"{}", "empty": b""}
    for name, data in content.items():
        (folder / name).write_bytes(data)
    pieces = [*zips.zip_pieces(folder, [Path(name) for name in content])]
    assert max(map(len, pieces)) < 2000
    with zipfile.ZipFile(io.BytesIO(b"".join(pieces))) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(f"a model/{name}") for name in content} == content


def test_the_server_sends_what_is_on_the_list_alone(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Route
    from starlette.testclient import TestClient

    from app import server

    client = TestClient(Starlette(routes=[Route("/checkpoint/{id}", server.send_checkpoint)]))
    write(opened(tiny_suite_file, "calibrate", **FEW), tmp_path / "mine")
    (written,) = Checkpoints().read_all()
    link = zips.link(written.id, "")
    assert (link, zips.link(written.id, "/a/b/")) == (f"/checkpoint/{written.id}", f"/a/b/checkpoint/{written.id}")
    sent = client.get(link)
    assert sent.headers["content-disposition"].endswith("mine.zip")
    with zipfile.ZipFile(io.BytesIO(sent.content)) as archive:
        tensors = load(archive.read("mine/model.safetensors"))
        assert len(archive.namelist()) == len(written.files)
    expected = load_file(tmp_path / "mine" / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert client.get("/checkpoint/..%2F..%2Fetc").status_code == 404
    assert client.get(f"/checkpoint/{'0' * 32}").status_code == 404
    monkeypatch.setenv(sandbox.VARIABLE, "")
    try:
        ServerRules((str(tmp_path / "elsewhere"),), 2**40).to_environment()
        assert client.get(link).status_code == 404
    finally:
        monkeypatch.undo()
        sandbox.server_rules.cache_clear()
