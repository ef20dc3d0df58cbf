"""Diagnose a merged model that has no suite."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli.terminal import bar, print_json, print_message, say_notes
from featcal.system.extras import require_packages
from featcal.system.formatting import readable
from featcal.system.progress import keep_memory

if TYPE_CHECKING:
    from featcal.authoring.from_merge import Origins
    from featcal.authoring.from_paths import SuiteParts
    from featcal.figures.verdict.sentences import Verdict
    from featcal.preflight.check import Preflight
    from featcal.session.session import Session
    from featcal.suite.views import EvaluationSamples


@dataclass(frozen=True)
class DiagnosisOrder:
    """Request to diagnose a merged model; with None and {} the files of its folder decide.

    Args:
        models: further models of the report.
        out: the report; None for none.
        suite: the suite file where it is written without a report too; None for beside the report.
    """

    model: str
    base: str | None
    experts: Mapping[str, str]
    data: Mapping[str, str]
    models: Sequence[str]
    out: Path | None
    suite: Path | None = None

    @property
    def file(self) -> Path:
        """Return the path of the suite file: the requested one, else one beside the report, which may be a default."""
        return self.suite or (self.out or Path(f"{Path(self.model).resolve().name}.html")).with_suffix(".yaml")

    def command(self, on: EvaluationSamples) -> str:
        """Return the command line that writes report and suite with the same samples; "" if this run does."""
        named = [] if self.base is None else ["--base", self.base]
        named += [word for task, one in self.experts.items() for word in ("--expert", f"{task}={one}")]
        named += [word for task, one in self.data.items() for word in ("--data", f"{task}={one}")]
        named += [] if on == type(on)() else on.flags()
        words = ["featcal", "diagnose", self.model, *named, "--out", str(self.file.with_suffix(".html"))]
        return shlex.join(words) if self.out is None and self.suite is None else ""


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a merged model.

    Args:
        text: of the suite file about it.
        document: that of `featcal diagnose --json`, without a report.
        judged: its session and the verdict; None where base, experts or samples are not in order.
        failure: why its features could not be measured; "" where they were.
    """

    text: str
    document: dict[str, Any]
    judged: tuple[Session, Verdict] | None = None
    failure: str = ""


def diagnose_own(asked: DiagnosisOrder, on: EvaluationSamples, device: str, as_json: bool) -> int:
    """Print the verdict on a merged model, write its report if requested, and return the exit status."""
    if asked.out is not None:
        require_packages("plotly", "jinja2")
        from featcal.figures.report.write import free

        free(asked.out, asked.file)
    found = examine_own(asked, on, device, as_json)
    document = found.document
    if found.judged is None:
        if as_json:
            print_json(document)
        return 1
    session, verdict = found.judged
    lacks_report = asked.out is not None and bool(found.failure)
    if lacks_report:
        print_message(f"nothing is written to {asked.out}: there are no features to report", err=True)
    elif asked.out is not None:
        from featcal.authoring.from_form import write_draft

        report = _write(asked, asked.out, session, verdict.lines, on)
        write_draft(found.text, asked.file)
        document |= {"suite": str(asked.file), "report": report}
    if as_json:
        print_json(document)
        return int(lacks_report)
    for line in verdict.lines:
        print_message(line)
    if "report" in document:
        print_message(f"written to {asked.out} ({readable(document['report']['bytes'])}) and {asked.file}")
    return int(lacks_report)


def examine_own(asked: DiagnosisOrder, on: EvaluationSamples, device: str, as_json: bool) -> Diagnosis:
    """Examine a merged model and the models from which it was made; report on stderr what prevents a measurement."""
    from featcal.authoring.from_form import read_draft
    from featcal.authoring.from_paths import write_suite_text
    from featcal.figures.verdict.faults import judge_merge
    from featcal.figures.verdict.measure import attribution_options
    from featcal.figures.verdict.merge import MergeNames, Recipe, examine_merge
    from featcal.preflight.own_merge import check_parents, open_merge
    from featcal.session.session import Session

    origins = _find_origins(asked)
    begun = write_suite_text(_parts(asked, origins, on), asked.file)
    suite = read_draft(begun.text, asked.file)
    checked = check_parents(suite)
    document: dict[str, Any] = {
        "model": asked.model,
        "from": origins.where,
        "assumed": list(begun.assumed),
        "missing": list(begun.missing),
        "check": checked.to_json(),
    }
    if begun.missing or checked.problems:
        _say_problems(checked, begun.missing)
        return Diagnosis(begun.text, document)
    for line in begun.assumed if asked.data and not as_json else ():
        print_message(f"taken for granted: {line}", err=True)
    keep_memory()
    opened = open_merge(suite, device)
    session = Session(opened.family, one_shot=False)
    names = MergeNames(asked.model, str(asked.file), asked.command(on))
    found = examine_merge(session, opened, Recipe(**origins.facts()), names, on, bar())
    verdict = judge_merge(found)
    ledger = None if found.failure else session.measure.drift("merged", attribution_options(on))
    document |= {"differences": [one.to_json() for one in found.differences], "contents": found.contents.to_json()}
    document |= {"drift": ledger and ledger.to_json(), **verdict.to_json()}
    return Diagnosis(begun.text, document, (session, verdict), found.failure)


def _write(
    asked: DiagnosisOrder, out: Path, session: Session, lines: Sequence[str], on: EvaluationSamples
) -> dict[str, Any]:
    """Write the report and return its document; the suite file is written last, so that a failure leaves none."""
    require_packages("plotly", "jinja2")
    from featcal.figures.report.write import write_report

    models = ("merged", *asked.models)
    report = write_report(session, str(asked.file), out, models=models, on=on, about=lines, progress=bar())
    say_notes(report)
    return report


def _find_origins(asked: DiagnosisOrder) -> Origins:
    from featcal.authoring.from_merge import Origins, find_origins
    from featcal.formats.locate import checkpoint_folder

    if asked.base is not None and asked.experts and not Path(asked.model).is_dir():
        return Origins(asked.base, asked.experts)
    folder = checkpoint_folder(asked.model, Path.cwd(), "merged")
    return find_origins(folder, asked.base, asked.experts, asks_hub=True)


def _parts(asked: DiagnosisOrder, origins: Origins, on: EvaluationSamples) -> SuiteParts:
    """Return models and samples of the suite; without samples experts write texts."""
    from featcal.authoring.from_merge import sample_source
    from featcal.authoring.from_paths import SuiteParts

    texts = sample_source(on.samples)
    # Rows of a vocabulary that the base lacks are said to be there, and left out.
    return SuiteParts(origins.base, origins.experts, asked.data, asked.model, texts, {"vocabulary": "base"})


def _say_problems(checked: Preflight, missing: Sequence[str]) -> None:
    for line in checked.problems:
        print_message(line, err=True)
    for line in missing:
        print_message(f"not given: {line}", err=True)
    print_message(
        "Nothing was measured. --base REFERENCE and --expert NAME=REFERENCE say where models are, --data NAME=SAMPLES "
        "where samples are.",
        err=True,
    )
