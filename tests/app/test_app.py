"""The app without a browser: every page runs, says what is missing, and computes what its controls ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streamlit as st
import torch
import transformers
import yaml
from app_pages import (
    PAGES,
    button,
    charts,
    control,
    export_command,
    fields,
    final_drifts,
    go,
    headline,
    healthy,
    opened,
    shown_and_default,
    shown_model,
)
from clip_config import clip_config
from lanes import rows
from suite_edits import Edit
from tiny_text import TASKS as TEXT_TASKS
from tiny_text import write_text_suite

from app import downloads, export, jobs, state
from featcal.evaluation.evaluate import Scores, TaskScore
from featcal.export.merge import merge_to_folder
from featcal.family.opening import Family
from featcal.figures import tables
from featcal.figures.names import plain
from featcal.models.families.found_decoder import find_decoder
from featcal.server.orders import JobOrder, order
from featcal.session.fits import Fits
from featcal.session.measurements import Measurements
from featcal.session.model_ref import MERGED
from featcal.session.session import open_session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.command_lines import calibrate_line
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import NumericalError
from featcal.system.formatting import percent
from featcal.system.resources import bundle_root
from featcal.testing.trial import write_trial

WHOLE = EvaluationSamples(None, "test")
pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot

AT_ONCE = """
class UMAP:
    def __init__(self, **options): pass
    def fit_transform(self, features): return features[:, :2]
"""


LANGUAGE_MODELS = ("t5", "llama")
DRAWN = {"verdict": 2, "drift": 3, "calibrate": 3, "features": 2, "cosines": 4, "accuracy": 1, "models": 0}
"""How many charts a page shows of a merge and its repair; the Runs page shows what was measured before."""


@pytest.fixture(scope="module", params=rows(LANGUAGE_MODELS, quick=["t5"]))
def sentences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite file of tiny language models whose samples are sentences with answers."""
    file = write_text_suite(tmp_path_factory.mktemp("sentences"), request.param)
    content = yaml.safe_load(file.read_text())
    for number, task in enumerate(TEXT_TASKS):
        lines = [
            {"split": split, "text": f"w{i % 9} w{(5 * i + number) % 27} * #", "answer": "yes" if i % 3 else "no"}
            for split in ("calibration", "validation", "test")
            for i in range(16)
        ]
        (file.parent / f"{task}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        for split in ("calibration", "validation", "test"):
            source = {"jsonl": f"{task}.jsonl", "split": split, "input": "w0 {text}", "target": "{answer}"}
            content["tasks"][task][split] = source
        content["tasks"][task] |= {"max_target_length": 3}
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.parametrize(("page", "drawn"), list(DRAWN.items()))
def test_every_page_shows_its_charts_from_a_link(tiny_suite_file: Path, page: str, drawn: int) -> None:
    app = opened(tiny_suite_file, page, beside="calibrated", rho="1.5")
    assert healthy(app)
    assert charts(app) == drawn
    files = {json.loads(one.proto.config)["toImageButtonOptions"]["filename"] for one in app.get("plotly_chart")}
    # on the test split when asked for; runs are many models
    model = "" if page == "accuracy" else "-lam0.05-rho1.5-alpha0.3-n64"
    assert len(files) == drawn
    alone = {one for one in files if one.startswith("attribution")}  # of the merge
    assert all(f"-tiny{model}" in one for one in files - alone), files


def test_a_table_is_written_when_it_is_asked_for(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    offered: dict[str, Callable[[], bytes]] = {}
    csv, button = downloads.Numbers.csv, st.download_button

    def recorded(numbers: downloads.Numbers) -> bytes:
        written.append(numbers.what)
        return csv(numbers)

    def noted(label: str, data: Callable[[], bytes], name: str, *args: Any, **kwargs: Any) -> bool:
        offered[name] = data
        return button(label, data, name, *args, **kwargs)

    monkeypatch.setattr(downloads.Numbers, "csv", recorded)
    monkeypatch.setattr(st, "download_button", noted)
    assert healthy(opened(tiny_suite_file, "calibrate"))
    assert (len(offered), written) == (4, [])
    assert all(data().startswith(b"layer,") == name.startswith("drift") for name, data in offered.items())
    assert written == ["drift before and after", "scores before and after", "change of drift", "anchor only"]


@pytest.mark.parametrize(
    ("page", "drawn"),
    [
        pytest.param(page, drawn, marks=pytest.mark.slow if page in ("verdict", "drift", "calibrate") else ())
        for page, drawn in DRAWN.items()
    ],
)
def test_every_page_shows_its_charts_for_text(sentences: Path, page: str, drawn: int) -> None:
    app = opened(sentences, page, beside="calibrated", lam="0.05", sources="true")
    assert healthy(app)
    assert charts(app) == drawn


@pytest.mark.parametrize("page", rows(PAGES, quick=["calibrate"], slow=PAGES))
def test_a_browser_that_lost_a_value_falls_back_to_what_is_shown(tiny_suite_file: Path, page: str) -> None:
    other = {"lam": "0.07", "rho": "0.7", "samples": "16", "n": "16", "recipe": "refined", "biases": "false"}
    app = opened(tiny_suite_file, page, beside="calibrated", task="signs", layer="block 1", picked="1,2", **other)
    assert not app.exception, app.exception
    assert not app.error, [e.value for e in app.error]
    drawn = shown_and_default(app)
    assert drawn
    assert {key: default for key, (_, default) in drawn.items()} == {key: shown for key, (shown, _) in drawn.items()}


@pytest.mark.parametrize(
    "sentences", rows(LANGUAGE_MODELS, quick=["t5"], slow=["llama"]), indirect=True, scope="module"
)
def test_language_models_have_their_own_options(tiny_suite_file: Path, sentences: Path) -> None:
    app = opened(sentences, "calibrate")
    is_t5 = '"t5"' in (sentences.parent / "base" / "config.json").read_text()
    assert (control(app, "rho").value, control(app, "alpha").value) == ((2.0, 0.6) if is_t5 else (0.5, 0.15))
    assert control(app, "lam").value == 1e-5
    shown = {"booked", "conditioning", "spread"}
    assert fields(app, "toggle") == shown | ({"rmsnorms"} if is_t5 else {"rmsnorms", "completion_only"})
    control(app, "rmsnorms").set_value(True).run()
    assert healthy(app)
    assert "--lam 1e-05" in export_command(app)
    assert "--rmsnorms --out" in export_command(app)
    control(app, "suite").options.append(str(tiny_suite_file))  # what is typed into the field
    control(app, "suite").set_value(str(tiny_suite_file)).run()
    assert healthy(app)
    assert fields(app, "toggle") == shown | {"biases", "layernorms"}
    assert "--lam 0.05 --rho 2 --alpha 0.3 --samples 64 --out" in export_command(app)


@pytest.mark.slow
def test_whole_answers_are_scored_where_options_are_chosen(sentences: Path) -> None:
    app = opened(sentences, "calibrate", lam="0.05", n="5")
    session, on = open_session(sentences), EvaluationSamples(5)
    merged, expert = (percent(session.measure.scores(model, on).average) for model in ("merged", "expert"))
    value, *_ = headline(app)["Exact match, validation"]
    assert value.startswith(f"{merged} → ")
    assert headline(app)["Gap closed"][1:] in (
        ("no gap to the experts", ""),
        (f"of {percent(float(expert) / 100 - float(merged) / 100)} points", f"to the experts' {expert} %"),
    )
    go(app, "accuracy")
    assert healthy(app)
    assert any("generated answers" in one.value for one in app.caption)


def test_first_tokens_stand_in_where_answers_take_long(sentences: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "is_long", lambda *_: True)
    app = opened(sentences, "calibrate", lam="0.05")
    assert "First-token accuracy, validation" in headline(app)
    assert any("can be right where the answer is wrong" in one.value for one in app.caption)


@pytest.mark.slow
def test_text_flips_show_both_answers(sentences: Path) -> None:
    app = opened(sentences, "accuracy", beside="calibrated", lam="0.06")  # a model that no other test has scored
    button(app, "test split").click().run()
    assert healthy(app)
    assert "wrong answers of merged became right in calibrated" in app.markdown[-1].value
    assert app.markdown[-1].value.startswith("Over all tasks **")
    go(app, "models")
    assert healthy(app)
    tasks = next(one.value for one in app.dataframe if "answers" in one.value)
    texts = next(one.value for one in app.dataframe if "text" in one.value)
    assert set(tasks["answers"]) == {"no, yes"}
    assert set(tasks["input"]) == {"w0 {text}"}
    assert texts["text"].str.startswith("w0 w").all()


@pytest.mark.slow
def test_tokens_without_answers_still_show_drift(tmp_path: Path) -> None:
    app = opened(write_text_suite(tmp_path / "tokens", "llama"), lam="0.05", tab="Decisions")
    assert healthy(app)
    assert any("Scores need answers" in one.value for one in app.info)
    go(app, "models")
    assert healthy(app)
    assert any("no answers" in one.value for one in app.info)
    go(app, "accuracy")
    assert not app.exception
    assert "no answers" in app.error[0].value


def test_first_token_scores_are_those_of_the_ledger(sentences: Path) -> None:
    session = open_session(str(sentences))
    ledger = session.measure.drift("merged", DriftOptions(16, output=True))
    for task, score in session.measure.quick_scores("merged", EvaluationSamples(16)).tasks.items():
        output = ledger.tasks[task].output
        assert output is not None
        assert score.metric == "first_token"
        assert score.value == float(output.correct.double().mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sentences", rows(LANGUAGE_MODELS, quick=["t5"], slow=["llama"]), indirect=True, scope="module"
)
def test_a_text_calibration_is_written(sentences: Path, tmp_path: Path) -> None:
    out = tmp_path / "repaired"
    app = opened(sentences, "calibrate", lam="0.05")
    app.text_input(key="folder").set_value(str(out)).run()
    button(app, "Write").click().run()
    assert not app.exception
    warned = json.loads((out / "featcal.json").read_text())["warnings"]
    said = [f"Warnings in the checkpoint's record and card:\n{chr(10).join(f'- {one}.' for one in warned)}"]
    assert [one.value for one in app.warning] == said * bool(warned)  # a random model may babble
    assert (out / "model.safetensors").is_file()
    loading = "".join(block.value for block in app.code if "from_pretrained" in block.value)
    assert ("T5ForConditionalGeneration" in loading) != ("LlamaForCausalLM" in loading)


@pytest.mark.slow
def test_the_app_opens_on_the_embedded_suite_with_a_chart() -> None:
    app = opened("clip-mini", "verdict", n="16")
    assert healthy(app)
    assert control(app, "suite").value == "clip-mini"
    assert control(app, "suite").options == ["clip-mini", "lm-mini", "t5-mini"]
    assert charts(app) == 2


def test_a_slider_calibrates_anew(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    before = final_drifts(app)
    control(app, "rho").set_value(0.5).run()
    assert healthy(app)
    assert final_drifts(app)[0] == before[0]
    assert final_drifts(app)[1] != before[1]
    assert "--rho 0.5" in export_command(app)


def test_a_calibration_follows_to_other_pages(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    control(app, "alpha").set_value(0.6).run()
    go(app, "drift")
    assert healthy(app)
    assert (control(app, "merge").value, control(app, "beside").value) == ("merged", "calibrated")
    assert shown_model(app) == "λ 0.05 · ρ 2 · α 0.6 · n 64"


@pytest.mark.slow
def test_norms_over_the_class_token_are_chosen_where_they_act(tiny_suite_file: Path) -> None:
    def drawn(tokens: str) -> dict[str, Any]:
        app = opened(tiny_suite_file, tokens=tokens, tab="Growth")
        assert healthy(app)
        assert "Norms over" in [one.label for one in app.get("button_group")]
        data = [json.loads(chart.proto.spec)["data"] for chart in app.get("plotly_chart")]
        return dict(zip(("attribution", "layers", "growth", "response"), data, strict=True))

    everything, alone = drawn("all tokens"), drawn("class token")
    assert {name for name, data in alone.items() if data != everything[name]} == {"growth", "response"}


def test_the_tab_says_page_and_featcal_and_nothing_is_fetched_for_it() -> None:
    main = (bundle_root() / "app" / "main.py").read_text(encoding="utf-8")
    assert "· featcal" in main
    assert 'page_icon=":material' not in main
    assert "icon=icon" not in main  # a material icon of st.Page becomes a favicon from fonts.gstatic.com


def test_more_samples_than_there_are_are_brought_down(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "cosines", n="99999999")
    assert healthy(app)
    assert control(app, "n").value == 12
    assert app.warning[0].value.replace("\\", "") == (
        "The address asks for n = 99999999; a task has 12 validation samples, so it is 12."
    )
    assert not opened(tiny_suite_file, "cosines", n="12").warning


def test_a_run_that_is_not_there_is_told(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "cosines", n="8", run="deadbeef")
    assert healthy(app)
    assert "run = 'deadbeef', which this suite does not have; left out" in app.warning[0].value


def test_the_title_of_a_job_names_what_makes_it_long() -> None:
    numbers = {"recipe": "paper", "lam": 1e-7, "rho": 2.0, "alpha": 0.3, "beta": 0.0, "samples": 64}
    for copies, said in ((1_000_000, " · copies 1000000"), (0, "")):
        one = order("calibrate", "clip-mini", {"options": {**numbers, "augment": copies}})
        assert jobs.job_title(one) == f"Calibrate · clip-mini · paper · λ 1e-07 · ρ 2 · α 0.3 · n 64{said}"


@pytest.mark.parametrize(
    ("file", "said"),
    [("mine/suite.yaml", "mine"), ("mine/b32.all.yaml", "b32.all"), ("checked/ties-0a1b.yaml", "ties-0a1b")],
)
def test_the_title_of_a_job_names_the_suite_and_not_its_folder(tmp_path: Path, file: str, said: str) -> None:
    one = JobOrder("evaluate", str(tmp_path / file), {}, str(tmp_path), "key")
    assert jobs.job_title(one).split(" · ")[1] == said


@pytest.mark.parametrize("page", rows(["verdict", "calibrate"], quick=["calibrate"], slow=["verdict"]))
def test_a_decoder_whose_blocks_were_found_has_one_recipe(tmp_path: Path, page: str) -> None:
    """The other recipes would be refused: none is offered, and the page does not end at one."""
    size = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    places = {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1}
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**size, **places))
    facts = find_decoder({**model.config.to_dict(), "architectures": [type(model).__name__]})
    assert facts is not None
    app = opened(write_trial(model, facts, tmp_path).root / "suite.yaml", page, n="4", samples="4")
    assert healthy(app)
    if page == "calibrate":
        assert not any("informed" in one.label for one in app.button)
        assert control(app, "recipe").options == ["paper"]
        assert any("featcal calibrate" in one.value for one in app.code)


def test_back_to_the_defaults(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="0.5", lam="1")
    assert "--lam 1 --rho 0.5" in export_command(app)
    button(app, "Defaults").click().run()
    assert "--lam 0.05 --rho 2 --alpha 0.3" in export_command(app)


def test_a_page_shows_the_merge_and_its_repair_unless_the_merge_alone_is_wanted(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "cosines", n="8")
    assert charts(app) == 4
    control(app, "beside").set_value("nothing").run()
    assert healthy(app)
    assert charts(app) == 2
    assert shown_model(app) is None
    assert headline(app)["Final drift"][1] == "of the expert feature's norm"


def test_the_test_split_is_scored_on_demand(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "accuracy", beside="calibrated", rho="1.7")  # which no other test has scored
    assert headline(app)["Gap closed"][1] == "not measured"
    button(app, "test split").click().run()
    assert healthy(app)
    session = open_session(tiny_suite_file, resident=True)
    calibrated = session.resolve("calibrated:rho=1.7,samples=64")
    merged, repaired = (percent(session.measure.scores(one, WHOLE).average) for one in ("merged", calibrated))
    assert headline(app)["Accuracy, test"][0] == f"{merged} → {repaired} %"


@pytest.mark.parametrize("page", rows(PAGES, quick=PAGES[:1], slow=PAGES))
def test_a_suite_that_is_not_there_is_one_message_and_one_way_out(page: str) -> None:
    app = opened("/nowhere/suite.yaml", page)
    assert not app.exception
    assert ["no suite '/nowhere/suite.yaml'" in one.value for one in app.error] == [True]
    assert len(app.button) == 1


@pytest.mark.parametrize("page", rows(PAGES, quick=PAGES[:1], slow=PAGES))
def test_a_broken_suite_is_explained(edit_suite: Edit, page: str) -> None:
    app = opened(edit_suite(lambda content: content.update(base="gone")), page)
    assert not app.exception
    assert "gone" in app.error[0].value


@pytest.mark.parametrize("page", rows(PAGES, quick=["cosines"], slow=PAGES))
def test_every_page_opens_without_a_base(edit_suite: Edit, tiny: Family, tmp_path: Path, page: str) -> None:
    merge_to_folder(tiny, "ties", 1.0, tmp_path / "ties")
    suite = edit_suite(lambda content: content.update(base=None, merged=str(tmp_path / "ties")))
    app = opened(suite, page, n="8", samples="8")
    assert healthy(app)
    if page == "cosines":
        assert charts(app) == 3
        assert ["the base, which this suite does not name" in one.value for one in app.info] == [True]


@pytest.mark.slow
def test_a_suite_without_labels_still_shows_drift(
    edit_suite: Edit,
) -> None:
    def drop_labels(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            for split in ("calibration", "validation", "test"):
                del task[split]["labels"]

    app = opened(edit_suite(drop_labels))
    assert healthy(app)
    go(app, "calibrate")
    assert healthy(app)
    assert "no labels" in app.info[0].value
    go(app, "accuracy")
    assert not app.exception
    assert "no labels" in app.error[0].value


@pytest.mark.slow
def test_export_writes_once_and_says_how_to_load(tiny_suite_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "repaired"
    app = opened(tiny_suite_file, "calibrate")
    app.text_input(key="folder").set_value(str(out)).run()
    button(app, "Write").click().run()
    assert healthy(app)
    assert (out / "model.safetensors").is_file()
    assert plain(str(out)) in app.success[0].value
    assert any(f'CLIPModel.from_pretrained("{out.as_posix()}")' in block.value for block in app.code)
    button(app, "Write").click().run()
    assert healthy(app)
    assert any("exists already; nothing was written" in one.value for one in app.info)


def test_an_impossible_calibration_is_a_message(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NumericalError("not positive definite; raise lam")

    monkeypatch.setattr(Fits, "calibrate", fail)
    app = opened(tiny_suite_file, "calibrate")
    assert not app.exception
    assert app.error[0].value == "not positive definite; raise lam"


@pytest.mark.parametrize(
    ("page", "step"),
    [
        ("verdict", (Measurements, "drift")),
        ("drift", (Measurements, "drift")),
        ("drift", (Fits, "calibrate")),
        ("calibrate", (Measurements, "features")),
        ("features", (Measurements, "features")),
        ("cosines", (Measurements, "features")),
        ("accuracy", (Fits, "calibrate")),
    ],
)
def test_a_failure_is_a_message(
    tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch, page: str, step: tuple[type, str]
) -> None:
    def fail(*_: object) -> None:
        raise NumericalError("task 'a': final features are not finite")

    monkeypatch.setattr(*step, fail)
    app = opened(tiny_suite_file, page, beside="calibrated")
    assert not app.exception
    assert [error.value for error in app.error] == ["task 'a': final features are not finite"]


def test_score_table_shares_of_the_gap() -> None:
    def scores(model: str, *values: float) -> Scores:
        none = torch.zeros(0, dtype=torch.int64)
        tasks = {f"t{i}": TaskScore("accuracy", value, none, none) for i, value in enumerate(values)}
        return Scores("s", model, "test", tasks)

    frame = tables.score_table(
        {"merged": scores("m", 0.5, 0.9), "calibrated": scores("c", 0.6, 0.8), "expert": scores("e", 0.9, 0.9)},
        ("merged", "calibrated"),
    ).set_index("task")
    assert frame.loc["t0", "gap closed, %"] == pytest.approx(25)
    assert np.isnan(frame.loc["t1", "gap closed, %"])
    assert frame.loc["average", "calibrated − merged"] == pytest.approx(0)


def test_the_command_line_repeats_the_sliders() -> None:
    config = CalibrationConfig(lam=1e-6, rho=0.0, alpha=1.0, samples=8, biases=False)
    line = calibrate_line("my suite.yaml", config, CalibrationConfig(rmsnorms=True), "out")
    assert line == (
        "featcal calibrate 'my suite.yaml' --lam 1e-06 --rho 0 --alpha 1 --samples 8 "
        "--no-biases --no-rmsnorms --out out"
    )


def test_the_command_line_takes_back_what_a_suite_chose() -> None:
    suites_own = clip_config(tasks=("digits",), maps=("mlp",))
    line = calibrate_line("mine.yaml", clip_config(maps=("attention",)), suites_own, "out")
    assert "--maps attention --tasks all" in line
    assert "--blocks" not in line


def test_the_command_line_keeps_names_with_commas_apart() -> None:
    config = clip_config(tasks=("a", "a,b"), blocks=("block 0", "block 1"))
    line = calibrate_line("mine.yaml", config, clip_config(), "out")
    assert "--blocks 'block 0,block 1' --tasks a --tasks a,b --out out" in line


def test_a_switch_that_was_turned_is_in_every_name(tiny_suite_file: Path) -> None:
    session = open_session(str(tiny_suite_file))
    configs = [clip_config(samples=8, biases=biases) for biases in (True, False)]
    scores = session.measure.scores("merged")
    made = "tiny-lam0.05-rho2-alpha0.3-n8"
    for config, switch in zip(configs, ("", "-no-biases"), strict=True):
        models = {"merged": MERGED, "calibrated": session.resolve(config)}
        words = downloads.model_words("calibrated", models["calibrated"], session)
        assert export.default_name("tiny", words) == made + switch
        origin = downloads.sample_origin(session, EvaluationSamples(4), models)
        assert downloads.download_name("drift", origin) == f"drift-{made}{switch}-4-validation"
        assert (
            downloads.download_name("x", downloads.score_origin(session, scores, models)) == f"x-{made}{switch}-12-test"
        )
