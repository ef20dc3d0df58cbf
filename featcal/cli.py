"""The command line: every command prints a table, or with `--json` one document on stdout; progress goes to stderr.

Exit status: 0 done, 1 the input is wrong, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from featcal import __version__
from featcal.errors import FeatcalError, InputError
from featcal.progress import Progress, keep_memory
from featcal.resources import bundle_root, embedded_suites, ready_suites
from featcal.schema.model_name import GRAMMAR
from featcal.words import percent, points, printable, readable

if TYPE_CHECKING:
    from featcal.preflight import Preflight
    from featcal.runs import History
    from featcal.suite import Suite

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
DEVICE = click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
SEED = click.option("--seed", default=42, show_default=True, help="Decides which samples are drawn.")
SUITE = click.argument("suite")
MODEL = click.option("--model", default="merged", show_default=True, help=GRAMMAR)
SPLIT = click.Choice(["calibration", "validation", "test"])
MOST = 4000
"""Characters of one message."""
OUT = click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write; must not exist.")


class _Size(click.ParamType[int]):
    """Bytes, as a number with or without a unit: 8GiB, 800MB, 8.5G."""

    name = "size"
    _UNITS: Mapping[str, int] = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 2**10, "mi": 2**20, "gi": 2**30}

    def convert(self, value: Any, param: Any, context: Any) -> int:
        found = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kmg]?i?)b?", str(value).strip().lower())
        if found is None or found[2] not in self._UNITS:
            self.fail(f"'{value}' is not a size such as 8GiB or 800MB", param, context)
        size = int(Decimal(found[1]) * self._UNITS[found[2]])
        if size < 1:
            self.fail(f"'{value}' is less than a byte; give a size such as 8GiB or 800MB", param, context)
        return size


MAX_MEMORY = click.option("--max-memory", type=_Size(), help="Stay within this much memory, such as 8GiB.")


def main() -> None:
    """Entry point: maps every outcome to its exit status."""
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # torch's own rules for jvp
    try:
        sys.exit(commands.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FeatcalError as error:
        _say(f"featcal: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("featcal: interrupted; nothing half-written was left under the output name", err=True)
        sys.exit(130)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="featcal")
def commands() -> None:
    """See where a merged model went wrong, repair it in closed form, ship the checkpoint.

    SUITE is the name of an embedded suite or the path of a suite file.
    """


@commands.command()
@JSON
def suites(as_json: bool) -> None:
    """List the suites that come with featcal: embedded ones, and benchmarks whose models are on the Hub."""
    from featcal.suite import load_suite

    files = {"embedded": embedded_suites(), "hub": ready_suites()}
    loaded = [(where, load_suite(name)) for where, names in files.items() for name in names]
    document = {
        "suites": [
            {"name": s.name, "where": where, "description": s.description, "tasks": list(s.tasks)}
            for where, s in loaded
        ]
    }
    rows = [(s.name, where, len(s.tasks), s.description) for where, s in loaded]
    _show(document, as_json, rows, ("suite", "where", "tasks", "what it is"))


@commands.command()
@SUITE
@click.option("--probe/--no-probe", default=None, help="Score every expert on every task.  [where it takes seconds]")
@JSON
def check(suite: str, probe: bool | None, as_json: bool) -> int:
    """Report every problem of a suite at once, and what a calibration would take; exit 1 if there is a problem."""
    from featcal.preflight import check as preflight

    found = preflight(_load(suite), probe)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        _show_check(found)
    return 1 if found.problems else 0


def _show_check(found: Preflight) -> None:
    """Problems on stderr; sizes, estimates, downloads and notes as text."""
    if found.problems:
        title = f"{len(found.problems)} problem(s) in suite '{found.suite}':"
        for line in [title, *(f"  - {problem}" for problem in found.problems)]:
            _say(line, err=True)
    described = dict(found.description or {})
    described.pop("bytes_written", None)
    described["weights in memory at once"] = readable(described.pop("bytes_of_weights_in_memory", 0))
    rows = [(name, ", ".join(value) if isinstance(value, list) else value) for name, value in described.items()]
    if found.estimates is not None:
        one = found.estimates
        rows += [
            ("peak memory, estimated", readable(one.memory_bytes)),
            ("written to disk", readable(one.disk_bytes)),
            (
                "time on this processor, estimated",
                f"{one.seconds:.0f} s for {one.samples} samples per task, {one.start_seconds:.0f} s of them to start",
            ),
        ]
    if found.diagonal is not None:
        scored = found.diagonal
        rows.append(("every expert on every task", f"{scored.samples} samples of each, split {scored.scored_on}"))
    if rows:
        _show(None, False, rows, ("", ""))
    if found.downloads:
        click.echo(f"\nto be fetched from the Hub, {readable(found.download_bytes)}:")
        _show(None, False, [(one.kind, one.ref, readable(one.bytes)) for one in found.downloads], ("", "", ""))
    if found.notes:
        for line in ["\nnotes:", *(f"  - {note}" for note in found.notes)]:
            _say(line)
    if not found.problems:
        click.echo("\nno problems found")


@commands.command()
@SUITE
@click.option("--method", help="simple-averaging, linear, task-arithmetic or ties.  [the suite's own recipe]")
@click.option("--scale", type=float, help="Factor of the task vectors.  [the suite's, else 0.3; ties: 1]")
@OUT
@JSON
def merge(suite: str, method: str | None, scale: float | None, out: Path, as_json: bool) -> None:
    """Merge the experts of a suite into a checkpoint folder."""
    from featcal.merging import merge_to_folder

    document = merge_to_folder(_load(suite), method, scale, out)
    _say_notes(document)
    _show(document, as_json, [(document["out"], document["method"])], ("written", "method"))


@commands.command()
@SUITE
@MODEL
@click.option("--samples", default=64, show_default=True, help="Samples per task.")
@click.option("--split", type=SPLIT, help="Default: validation where every task has it, else calibration.")
@click.option(
    "--tokens", type=click.Choice(["all", "class"]), default="all", show_default=True, help="Tokens in norms."
)
@click.option("--sublayers", is_flag=True, help="Attention and MLP of every block as layers of their own (Prop. 4).")
@click.option("--attribution", is_flag=True, help="Book the final drift to the layers that caused it (Prop. 2).")
@click.option("--output", is_flag=True, help="Score drift, its bound and loss change (Props. 3 and 7).")
@click.option("--margins", is_flag=True, help="Which decisions cannot have changed, sample by sample (Eq. 44).")
@click.option("--per-sample", is_flag=True, help="Drift, cosine and distance to the expert, sample by sample.")
@click.option("--task-vectors", is_flag=True, help="Cosine of the model's task vector to each expert's (Fig. 2d).")
@click.option("--source", is_flag=True, help="What fitting on other feature sources would cost (Prop. 8).")
@MAX_MEMORY
@SEED
@DEVICE
@JSON
def drift(
    suite: str,
    model: str,
    samples: int,
    split: str | None,
    tokens: str,
    sublayers: bool,
    attribution: bool,
    output: bool,
    margins: bool,
    per_sample: bool,
    task_vectors: bool,
    source: bool,
    max_memory: int | None,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Split a model's feature drift into local mismatch and propagation, per layer and task."""
    from featcal.calibration.calibrate import config_for
    from featcal.family import open_family
    from featcal.measure import measure_drift
    from featcal.session import Session

    if source and max_memory is not None:
        raise click.UsageError("--source holds every calibrated block in memory; leave out --max-memory")
    if max_memory is None:
        keep_memory()
    progress = _progress()
    session = Session(open_family(_load(suite), device), one_shot=True, max_memory=max_memory)
    ledger = measure_drift(
        session,
        model,
        samples=samples,
        split=split,
        seed=seed,
        tokens=tokens,
        sublayers=sublayers,
        attribution=attribution,
        output=output or margins,
        progress=progress,
    )
    document = ledger.to_json()
    for name, task in ledger.tasks.items():
        entry = document["tasks"][name]
        entry |= {"margins": task.margins()} if margins else {}
        entry |= {"per_sample": task.per_sample()} if per_sample else {}
    if task_vectors:
        document["task_vector_cosines"] = session.vector_cosines(session.named(model))
    if source:
        own = config_for(session.family, samples=samples, seed=seed)
        calibrated = own if model == "merged" else session.named(model)
        document["sources"] = [asdict(one) for one in session.sources(calibrated, progress)]
    columns = ["layer", "relative_drift", "drift", "mismatch", "propagation"]
    columns += ["share", "contribution"] if attribution else []
    entries = [(task, layer) for task, entry in document["tasks"].items() for layer in entry["layers"]]
    _show(document, as_json, [(task, *(layer[key] for key in columns)) for task, layer in entries], ("task", *columns))
    if not as_json:
        _show_more(document)


@commands.command()
@SUITE
@OUT
@click.option("--lam", type=float, help="Ridge strength, >= 0.  [CLIP: 0.05, T5 and Llama: 1e-5]")
@click.option("--rho", type=float, help="Anchor = rho merged + (1 - rho) base.  [CLIP, T5: 2, Llama: 0.5]")
@click.option("--alpha", type=float, help="Share of expert features in the targets, 0-1.  [0.3, 0.6, 0.15]")
@click.option("--samples", type=int, help="Calibration samples per task.  [256]")
@click.option("--biases/--no-biases", default=None, help="Calibrate biases (Eq. 55).  [on]")
@click.option("--layernorms/--no-layernorms", default=None, help="Calibrate LayerNorms (Eq. 59).  [on]")
@click.option("--rmsnorms/--no-rmsnorms", default=None, help="Calibrate RMSNorm scales, our extension.  [off]")
@click.option(
    "--completion-only/--no-completion-only", default=None, help="Llama: count what predicts the answer alone.  [off]"
)
@click.option(
    "--blocks", multiple=True, help="Calibrate these alone ('block 0,block 3'), leave others as merged.  [all]"
)
@click.option("--maps", multiple=True, help="Calibrate these alone: attention, mlp, cross-attention.  [all]")
@click.option("--tasks", multiple=True, help="Calibrate on these tasks alone.  [all]")
@click.option("--batch-size", type=int, help="Samples per forward pass; time and memory only.  [64]")
@click.option("--precision", type=click.Choice(["exact", "fast"]), help="[exact]")
@MAX_MEMORY
@click.option("--resume", is_flag=True, help="Go on from the finished blocks of an interrupted run.")
@click.option("--seed", type=int, help="Decides which samples are drawn.  [42]")
@DEVICE
@JSON
def calibrate(
    suite: str,
    out: Path,
    lam: float | None,
    rho: float | None,
    alpha: float | None,
    samples: int | None,
    biases: bool | None,
    layernorms: bool | None,
    rmsnorms: bool | None,
    completion_only: bool | None,
    blocks: tuple[str, ...],
    maps: tuple[str, ...],
    tasks: tuple[str, ...],
    batch_size: int | None,
    precision: str | None,
    max_memory: int | None,
    resume: bool,
    seed: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Calibrate the merged model in closed form and write the checkpoint.

    Options in [brackets] are the paper's for the architecture; a suite file may set its own under `calibration`.
    The table gives, per block and task, how far the calibrated features on the calibration samples are from the
    expert's, over all of a block's own tokens: of a T5 decoder block the decoder's, without the encoder's output.
    """
    from featcal.calibration.calibrate import calibrate_to_folder, config_for
    from featcal.family import open_family

    if max_memory is None:
        keep_memory()
    loaded = _load(suite)
    family = open_family(loaded, device)
    config = config_for(
        family,
        lam=lam,
        rho=rho,
        alpha=alpha,
        samples=samples,
        biases=biases,
        layernorms=layernorms,
        rmsnorms=rmsnorms,
        completion_only=completion_only,
        blocks=blocks or None,
        maps=maps or None,
        tasks=tasks or None,
        batch_size=batch_size,
        precision=precision,
        seed=seed,
    )
    document = calibrate_to_folder(family, config, out, resume=resume, max_memory=max_memory, progress=_progress())
    _say_notes(document)
    rows = [
        (block, *(f"{value:.4f}" for value in drift.values())) for block, drift in document["relative_drift"].items()
    ]
    _show(document, as_json, rows, ("block, relative drift", *document["tasks"]))
    if not as_json:
        _say(f"written to {document['out']} in {document['seconds']['total']:.1f} s")


@commands.command()
@SUITE
@MODEL
@click.option("--split", type=SPLIT, default="test", show_default=True)
@click.option("--samples", type=int, help="Samples per task.  [default: all]")
@click.option("--answers", is_flag=True, help="With --json: what the model said and what is right, sample by sample.")
@click.option("--lm-eval", "harness", metavar="TASKS", help="Tasks of lm-evaluation-harness instead of the suite's.")
@click.option("--lm-eval-args", default="", help="Further options of the harness, in one string.")
@SEED
@DEVICE
@JSON
def evaluate(
    suite: str,
    model: str,
    split: str,
    samples: int | None,
    answers: bool,
    harness: str | None,
    lm_eval_args: str,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Score a model on every task of a suite, or on tasks of lm-evaluation-harness."""
    from featcal.family import open_family
    from featcal.recording import hash_of, looking
    from featcal.runs import History
    from featcal.session import Session
    from featcal.views import View

    if harness is not None:
        given = click.get_current_context().get_parameter_source
        ignored = [
            name
            for name in ("split", "samples", "answers", "seed", "device")
            if given(name) is not ParameterSource.DEFAULT
        ]
        if ignored:
            raise InputError(f"--{', --'.join(ignored)} mean nothing to lm-eval; put its own options in --lm-eval-args")
        _evaluate_with_harness(_load(suite), model, harness.split(","), shlex.split(lm_eval_args), as_json)
        return
    session, view = Session(open_family(_load(suite), device), one_shot=True), View(samples, split, seed)
    named, history = session.named(model), History()
    with looking(session, [named], view, "featcal evaluate", history):
        scores = session.scores(named, view, _progress())
    if split == "test":
        looks = history.looks(hash_of(session))
        _say(f"looks at this suite's test split so far: {looks.times}, at {looks.models} model(s)", err=True)
        _say_problems(history)
    rows = [(task, s.metric, percent(s.value), str(s.n)) for task, s in scores.tasks.items()]
    rows.append(("average", "", percent(scores.average), ""))
    document = scores.to_json()
    if answers:
        for task, one in scores.tasks.items():
            document["tasks"][task]["answers"] = one.answers()
    _show(document, as_json, rows, ("task", "metric", "%", "n"))


@commands.command()
@SUITE
@click.option("--lam", help="Values between commas, such as 0.01,0.05.  [the suite's own]")
@click.option("--rho", help="Values between commas.  [the suite's own]")
@click.option("--alpha", help="Values between commas.  [the suite's own]")
@click.option("--samples", type=int, help="Calibration samples per task.  [256]")
@click.option("--n", default=64, show_default=True, help="Samples per task to measure on.")
@click.option("--seed", type=int, help="Decides which calibration samples are drawn.  [42]")
@click.option("--biases/--no-biases", default=None, help="Calibrate biases (Eq. 55).  [on]")
@click.option("--layernorms/--no-layernorms", default=None, help="Calibrate LayerNorms (Eq. 59).  [on]")
@click.option("--rmsnorms/--no-rmsnorms", default=None, help="Calibrate RMSNorm scales, our extension.  [off]")
@click.option("--completion-only/--no-completion-only", default=None, help="Llama: count the answer alone.  [off]")
@DEVICE
@JSON
def sweep(
    suite: str,
    lam: str | None,
    rho: str | None,
    alpha: str | None,
    samples: int | None,
    n: int,
    seed: int | None,
    biases: bool | None,
    layernorms: bool | None,
    rmsnorms: bool | None,
    completion_only: bool | None,
    device: str,
    as_json: bool,
) -> None:
    """Calibrate with every combination of lam, rho and alpha and measure each on validation samples.

    Beside them stand baselines that need no calibration. Every point is kept in the history (`featcal runs`), so a
    sweep that was interrupted goes on where it stopped, and the app draws it.
    """
    from featcal.calibration.calibrate import config_for
    from featcal.family import open_family
    from featcal.figures import run_tables
    from featcal.runs import History
    from featcal.session import Session
    from featcal.sweep import Grid, front, numbers, run_sweep, sweep_json
    from featcal.views import View

    keep_memory()
    session, history = Session(open_family(_load(suite), device)), History()
    config = config_for(
        session.family,
        samples=samples,
        seed=seed,
        biases=biases,
        layernorms=layernorms,
        rmsnorms=rmsnorms,
        completion_only=completion_only,
    )
    given = {"lam": lam, "rho": rho, "alpha": alpha}
    values = {o: (getattr(config, o),) if text is None else numbers(text, o) for o, text in given.items()}
    view = View(n)
    points = run_sweep(session, Grid(**values, options=config), _progress(), on=view, history=history)
    table = run_tables.sweep_table(points, front(points))
    if session.split == "calibration":
        _say("note: the suite has no validation split; calibration samples flatter what was fitted on them", err=True)
    _say_problems(history)
    columns = ["run", "model", "mean", "worst", "worst task", "drift", "front"]
    shown = table.assign(front=["*" if one else "" for one in table["front"]])[columns].to_numpy()
    _show(sweep_json(session, points, view), as_json, shown.tolist(), columns)


@commands.group(invoke_without_command=True)
@click.option("--suite", help="Only runs of a suite of this name.")
@JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on stdout, with everything that was recorded.")
@click.pass_context
def runs(context: click.Context, suite: str | None, as_json: bool, as_csv: bool) -> None:
    """List what was measured, in the app and by sweeps; name, pin or delete it.

    Runs are kept in the user's cache folder, which FEATCAL_CACHE moves.
    """
    from featcal.figures import run_tables
    from featcal.runs import History

    if context.invoked_subcommand:
        return
    history = History()
    found = [run for run in history.runs() if suite in (None, run.suite)]
    _say_problems(history)
    if as_csv:
        click.echo(run_tables.run_export(found).to_csv(index=False), nl=False)
        return
    columns = ["run", "suite", "model", "name", "pinned", "measured on", "mean", "worst", "drift"]
    table = run_tables.run_table(found)
    table["pinned"] = ["*" if one else "" for one in table["pinned"]]
    _show({"runs": [run.to_json() for run in found]}, as_json, table[columns].to_numpy().tolist(), columns)


@runs.command()
@click.argument("run")
@click.argument("name")
def rename(run: str, name: str) -> None:
    """Give a run a name; "" takes it away."""
    from featcal.runs import History

    History().mark(run, "name", name)


@runs.command()
@click.argument("run")
@click.option("--off", is_flag=True, help="Unpin it.")
def pin(run: str, off: bool) -> None:
    """Keep a run from being deleted."""
    from featcal.runs import History

    History().mark(run, "pinned", not off)


@runs.command()
@click.argument("run", nargs=-1, required=True)
def delete(run: tuple[str, ...]) -> None:
    """Forget runs that are not pinned."""
    from featcal.runs import History

    for one in run:
        History().delete(one)


@commands.command()
@SUITE
@click.option("--model", "models", multiple=True, required=True, help="A, then once more B; as for evaluate.")
@click.option("--split", type=SPLIT, default="test", show_default=True)
@click.option("--samples", type=int, help="Samples per task.  [default: all]")
@SEED
@DEVICE
@JSON
def compare(
    suite: str, models: tuple[str, ...], split: str, samples: int | None, seed: int, device: str, as_json: bool
) -> None:
    """Score two models on the same samples: the difference B - A with its interval, and the samples that turned.

    The interval is of 95 % (bootstrap over samples, within tasks), p that of the exact McNemar test; both say nothing
    of other calibration seeds. Of a rank correlation there is the interval alone: no answer of it is right or wrong.
    """
    from featcal.family import open_family
    from featcal.recording import looking
    from featcal.runs import History
    from featcal.session import Session
    from featcal.views import View

    if len(models) != 2:
        raise click.UsageError("give --model twice: first A, then B")
    session, view, history = (
        Session(open_family(_load(suite), device), one_shot=True),
        View(samples, split, seed),
        History(),
    )
    a, b = map(session.named, models)
    with looking(session, (a, b), view, "featcal compare", history):
        found = session.compared(a, b, view, _progress()).to_json()
    _say_problems(history)
    rows = [_comparison(*row) for row in ({**found["tasks"], "average": found["average"]}).items()]
    header = ("task", "n", "A, %", "B, %", "B - A", "from", "to", "p", "fixed", "broken", "right", "wrong", "")
    _show(found, as_json, rows, header)
    if not as_json:
        _say(f"A {found['a']}, B {found['b']}; {found['split']} split; {found['draws']} bootstrap draws", err=True)


@commands.command()
@click.argument("folder")
@click.option("--format", "layout", type=click.Choice(["hf", "open_clip"]), default="hf", show_default=True)
@OUT
@JSON
def export(folder: str, layout: str, out: Path, as_json: bool) -> None:
    """Write a model for the library that will load it, and verify it there.

    hf: a folder that transformers 4.57 and 5 read alike, or a note that says which is needed. open_clip: a folder
    for `local-dir:`. FOLDER is any model reference: a folder, a Hub id, or open_clip:ARCH:FILE. `featcal convert` is
    the same command.
    """
    from featcal.export.change_layout import convert

    document = convert(folder, out, layout)
    _say_notes(document)
    rows = [(name, f"{value:.1e}") for name, value in document.get("parity", {}).items()]
    if as_json or rows:
        _show(document, as_json, rows, ("compared in both libraries", "largest difference"))
    if not as_json:
        _say(f"written to {document['out']}")


commands.add_command(export, "convert")


@commands.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--merged", help="Folder or Hub id of the merged model, for methods that featcal does not merge itself.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Suite file to write; must not exist.")
@JSON
def import_(file: Path, merged: str | None, out: Path, as_json: bool) -> None:
    """Make a suite file of a mergekit recipe or a FusionBench model pool."""
    from featcal.importers import import_to_file

    document = import_to_file(file, merged, out)
    lines = [("to be filled in", line) for line in document["missing"]]
    lines += [("not quite the recipe", line) for line in document["notes"]]
    _show(document, as_json, lines, ("", ""))
    if not as_json:
        _say(f"written to {document['out']}")


@commands.command("export-pool")
@SUITE
@click.option("--out", required=True, type=click.Path(path_type=Path), help="YAML file to write; must not exist.")
@JSON
def export_pool(suite: str, out: Path, as_json: bool) -> None:
    """Write a suite's base and experts as a model pool of FusionBench."""
    from featcal.importers import export_pool_to_file

    document = export_pool_to_file(_load(suite), out)
    _show(document, as_json, [("models", ", ".join(document["models"]))], ("", ""))
    if not as_json:
        _say(f"written to {document['out']}")


@commands.command()
@SUITE
@click.option("--model", "models", multiple=True, help=f"Once per model, the first is the reference: {GRAMMAR}.")
@click.option("--samples", default=64, show_default=True, help="Samples per task that drift is measured on.")
@click.option("--split", type=SPLIT, help="Of these samples. Default: validation where every task has it.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="report.html, or report.md.")
@SEED
@DEVICE
@JSON
def report(
    suite: str,
    models: tuple[str, ...],
    samples: int,
    split: str | None,
    out: Path,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Write a report: scores, drift, attribution, flips, features, settings, and the commands that reproduce them.

    report.html is one file that needs no other and asks no host for anything; report.md is Markdown with its figures
    as SVG beside it. Without --model the merged model and the calibrated one are compared.
    """
    from featcal.family import open_family
    from featcal.report.write import MODELS, write_report
    from featcal.session import Session
    from featcal.views import View

    keep_memory()
    session = Session(open_family(_load(suite), device))
    on = View(samples, split, seed)
    document = write_report(session, suite, out, models=models or MODELS, on=on, progress=_progress())
    _say_notes(document)
    _show(document, as_json, [(document["out"], readable(document["bytes"]))], ("written", "size"))


@commands.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--port", default=8501, show_default=True)
@click.pass_context
def app(context: click.Context, port: int) -> int:
    """Start the app on 127.0.0.1; further options go to streamlit."""
    from featcal.launch import start_app

    return start_app(bundle_root() / "app" / "main.py", port, context.args)


def _say_problems(history: History) -> None:
    for problem in history.problems:
        _say(f"warning: {problem}", err=True)


def _comparison(task: str, one: Mapping[str, Any]) -> list[str]:
    """One row of `featcal compare`: scores in %, their difference with its interval in points, test and counts."""
    counts = ("-" if one[name] is None else str(one[name]) for name in ("fixed", "broken", "both_right", "both_wrong"))
    return [
        task,
        str(one["n"]),
        *(percent(one[name]) for name in ("a", "b")),
        *(points(one[name]) for name in ("difference", "low", "high")),
        "-" if one["p"] is None else f"{one['p']:.2g}",
        *counts,
        "within noise" if one["within_noise"] else "",
    ]


def _evaluate_with_harness(suite: Suite, model: str, tasks: list[str], arguments: list[str], as_json: bool) -> None:
    from featcal.evaluation.lm_eval import run_lm_eval
    from featcal.formats.locate import checkpoint_folder

    if model == "merged" and not isinstance(suite.merged, str):
        raise InputError("the merged model is a recipe; write it with featcal merge and give the folder with --model")
    if model == "expert":
        raise InputError("lm-eval scores one model; give an expert's folder with --model")
    refs = {"base": suite.base, **({"merged": suite.merged} if isinstance(suite.merged, str) else {})}
    root = suite.root if model in refs else Path.cwd()
    document: dict[str, Any] = {"suite": suite.name, "model": model}
    document |= run_lm_eval(checkpoint_folder(refs.get(model, model), root, f"model '{model}'"), tasks, arguments)
    rows = [(task, s["metric"], percent(s["value"]), str(s["n"])) for task, s in document["tasks"].items()]
    _show(document, as_json, rows, ("task", "metric", "%", "n"))


def _load(suite: str) -> Suite:
    from featcal.suite import load_suite

    return load_suite(suite)


def _progress() -> Progress:
    """A bar with the time left on stderr; silent where stderr is not a terminal."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def show(label: str, done: int, total: int) -> None:
        if label not in bars:
            bars[label] = tqdm(total=total, desc=printable(label), file=sys.stderr, disable=None, leave=False)
        bars[label].update(done - bars[label].n)
        if done == total:
            bars.pop(label).close()

    return show


def _show(document: Any, as_json: bool, rows: Sequence[Sequence[Any]], header: Sequence[str]) -> None:
    """The document as JSON, or its rows as an aligned table."""
    if as_json:
        click.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    titled = [[printable(name) for name in header]] if any(header) else []
    cells = [*titled, *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _say_notes(document: Mapping[str, Any]) -> None:
    """What should be known of a written model, on stderr."""
    for kind in ("warning", "note"):
        for one in document.get(f"{kind}s", ()):
            _say(f"{kind}: {one}", err=True)


def _show_more(document: Mapping[str, Any]) -> None:
    """Tables of output drift, task vectors, samples and feature sources, where they were measured."""
    measured = {task: entry["output"] for task, entry in document["tasks"].items() if "output" in entry}
    if measured:
        click.echo()
        columns = list(next(iter(measured.values())))
        _show({}, False, [(task, *entry.values()) for task, entry in measured.items()], ("task", *columns))
    if "task_vector_cosines" in document:
        click.echo()
        _show({}, False, list(document["task_vector_cosines"].items()), ("task", "cosine of task vectors"))
    each = [{"task": t, **row} for t, entry in document["tasks"].items() for row in entry.get("per_sample", ())]
    if each:
        click.echo()
        _show({}, False, [list(row.values()) for row in each], list(each[0]))
    if "sources" in document:
        click.echo()
        columns = ["block", "modules", "source", "excess", "middle", "relative", "coupling"]
        _show({}, False, [[one[key] for key in columns] for one in document["sources"]], columns)


def _say(text: str, err: bool = False) -> None:
    """One message; names in it may come from files, so nothing in them reaches the terminal as a command."""
    click.echo(printable(text, MOST), err=err)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else printable(str(value))
