"""What commands and options are called: the help, one meaning of every word, and what a shell completes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from command_line import Run, document

from featcal.cli import featcal_command
from featcal.suite.calibration_options import RECIPES

VERBS = (
    *("check", "drift", "diagnose", "app", "mcp", "merge", "calibrate", "select"),
    *("evaluate", "compare", "report", "export", "push", "replay"),
)
GROUPS = ("suite", "study", "history")
MEASURING = {"drift", "evaluate", "compare", "report", "diagnose", *(f"study {one}" for one in (
    "sweep", "budget", "corrupt", "schedule", "ablate", "tasks", "features", "paper"
))}  # fmt: skip
"""Commands that draw samples to measure or to score on."""
CALIBRATING = {"calibrate", "select", "compare", *(f"study {one}" for one in (
    "sweep", "corrupt", "schedule", "ablate", "tasks", "paper"
))}  # fmt: skip
"""Commands that draw samples to calibrate on."""


def every_command() -> Iterator[tuple[str, click.Command]]:
    for name, command in featcal_command.commands.items():
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", one) for below, one in command.commands.items())
        else:
            yield name, command


COMMANDS = dict(every_command())


def options(command: click.Command) -> dict[str, click.Option]:
    return {one.opts[0]: one for one in command.params if isinstance(one, click.Option)}


def completions(*args: str) -> list[str]:
    """Return what a shell is offered in the place of the last word."""
    shell = ShellComplete(featcal_command, {}, "featcal", "_FEATCAL_COMPLETE")
    return [one.value for one in shell.get_completions(list(args[:-1]), args[-1])]


def test_the_help_has_sections_of_verbs_and_the_groups_last() -> None:
    shown = CliRunner().invoke(featcal_command, ["--help"]).stdout
    lines = [
        line.split(None, 1) for line in shown[shown.index("Find what is wrong:") :].splitlines() if line[:2] == "  "
    ]
    assert [line[0] for line in lines] == [*VERBS, *GROUPS]
    assert all(len(line) == 2 and line[1].endswith(".") and "..." not in line[1] for line in lines)


def test_there_are_few_verbs_and_three_groups() -> None:
    assert len(VERBS) <= 14
    assert {name for name, one in featcal_command.commands.items() if isinstance(one, click.Group)} == set(GROUPS)
    assert {*featcal_command.commands} == {*VERBS, *GROUPS}
    for group in GROUPS:
        shown = CliRunner().invoke(featcal_command, [group, "--help"]).stdout
        assert "..." not in shown[shown.index("Commands:") :]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_says_what_it_does(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert command.help.splitlines()[0].endswith(".")
    for flag, one in options(command).items():
        assert one.help, flag
        told = one.is_flag or one.required or one.show_default or "[" in one.help
        assert told, f"{flag}: what holds without it?"


def test_samples_are_calibrated_on_and_eval_samples_are_measured() -> None:
    by_flag = {flag: {name: options(one)[flag] for name, one in COMMANDS.items() if flag in options(one)} for flag in (
        "--samples", "--eval-samples"
    )}  # fmt: skip
    assert {*by_flag["--samples"]} == CALIBRATING
    assert {*by_flag["--eval-samples"]} == MEASURING
    assert all(
        one.help and one.help.startswith("Calibration samples per task") for one in by_flag["--samples"].values()
    )
    for one in by_flag["--eval-samples"].values():
        assert one.help
        assert one.help.startswith("Samples per task")
        assert "alibrat" not in one.help.replace("on which every calibration is measured", "")


@pytest.mark.slow
def test_several_models_are_one_document_each_once(run: Run, tiny_suite_file: Path) -> None:
    twice = ("--model", "base", "--model", "merged", "--model", "base")
    for command in ("drift", "evaluate"):
        found = document(run(command, tiny_suite_file, "--eval-samples", 4, *twice, "--json"))["models"]
        alone = [
            document(run(command, tiny_suite_file, "--eval-samples", 4, "--model", m, "--json")) for m in twice[1:4:2]
        ]
        assert found == alone
        code, out, _ = run(command, tiny_suite_file, "--eval-samples", 4, *twice)
        assert code == 0
        assert [line for line in out.splitlines() if line in ("base:", "merged:")] == ["base:", "merged:"]


def test_a_shell_completes_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.yaml").touch()
    (tmp_path / "clip-of-mine").mkdir()
    (tmp_path / "clip-of-mine" / "suite.yaml").touch()
    (tmp_path / "clip.txt").touch()
    found = completions("drift", "cli")
    assert found[0] == "clip-mini"
    assert {"clip.yaml", str(Path("clip-of-mine", "suite.yaml"))} <= {*found}
    assert "clip.txt" not in found
    assert completions("study", "canary", "t5-") == ["t5-mini"]


def test_a_shell_completes_models_recipes_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert completions("drift", "clip-mini", "--model", "cal") == ["calibrated"]
    assert completions("evaluate", "clip-mini", "--model", "calibrated@ts") == ["calibrated@tsv-m"]
    assert completions("merge", "clip-mini", "--method", "reg") == ["regmean", "regmean++"]
    assert completions("calibrate", "clip-mini", "--recipe", "") == [*RECIPES]
    assert completions("study", "sw") == ["sweep"]
    assert completions("compare", "clip-mini", "--model", "al") == ["all"]
    assert completions("evaluate", "clip-mini", "--model", "al") == []
    assert "--model" in completions("study", "ablate", "clip-mini", "--mo")
    assert capsys.readouterr().err == ""
