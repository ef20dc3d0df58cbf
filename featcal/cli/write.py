"""Write models from the command line, and replay their records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import opening
from featcal.cli.completion import complete_model, complete_suite
from featcal.cli.foreign_recipe import RecipeOrder, calibrate_by_recipe, is_recipe, merge_by_recipe
from featcal.cli.hand_over import export_folder, say_where_to, target_options
from featcal.cli.options import JSON, OUT, NewPath, Size, note_folders
from featcal.cli.start import parse_tasks
from featcal.cli.terminal import bar, print_document, print_message, print_table, require_new, say_notes
from featcal.suite import methods
from featcal.suite.calibration_options import PAPER, RECIPES
from featcal.suite.methods import MODULES, is_baseline, method_names
from featcal.suite.name_grammar import model_name
from featcal.system.formatting import percent, printable, readable
from featcal.system.progress import keep_memory

if TYPE_CHECKING:
    from featcal.studies.replay.again import Replayed

_FLAGS = {"over": "--of"}
"""Options whose flag has another name."""
_ONE_FOR_ALL = "--task is for react, which has a map for every task"


@click.command()
@click.argument("suite", metavar="SUITE|RECIPE", shell_complete=complete_suite)
@click.option(
    "--method",
    callback=note_folders,
    shell_complete=complete_model,
    help=f"{', '.join(method_names())}; options as in ties:density=0.3, the model on which it acts as in "
    "react@calibrated.  [the suite's own recipe]",
)
@click.option("--scale", type=float, help="Factor of the task vectors.  [the suite's, else the method's own]")
@click.option(
    "--task", help="With react: write the model of this task alone, in a folder like that of its expert.  [all tasks]"
)
@click.option(
    "--max-memory", type=Size(), help="Verify the model block by block if it is larger than this.  [no limit]"
)
@click.option(
    "--calibrate",
    metavar="[" + "|".join(RECIPES) + "]",
    type=click.Choice(RECIPES),
    is_flag=False,
    flag_value=PAPER,
    help=f"With RECIPE: diagnose and calibrate the merge too, by this recipe; {PAPER} if none is named.  [merge alone]",
)
@click.option("--merged", help="With RECIPE and --calibrate: folder or Hub id of mergekit's merge.  [featcal merges]")
@click.option(
    "--base", help="With RECIPE: folder or Hub id of the model that the experts were fine-tuned from.  [the recipe's]"
)
@click.option(
    "--data",
    multiple=True,
    callback=parse_tasks,
    help="With RECIPE and --calibrate: TASK=SAMPLES, once per task, as diagnose takes them.  [texts that experts "
    "write]",
)
@OUT
@click.option("--device", help="auto, cpu or cuda. Mergers run on the CPU unless cuda is given.  [auto]")
@JSON
def merge_command(suite: str, out: Path, device: str | None, as_json: bool, **options: Any) -> int:
    """Merge the experts of a suite into a checkpoint.

    --method polished:steps=30@MODEL moves a model's final features closer to the experts' by a few steps of gradient
    descent, without labels, and prints the loss before and after. `react` multiplies a map per task into the heads: its
    folder holds the model and `heads`, one file per task; `featcal evaluate --model` reads both.

    RECIPE is a YAML file of mergekit in the place of a suite. With --calibrate the folder holds what `featcal diagnose`
    says (diagnosis.json), the suite (suite.yaml), and the models `merged` and `calibrated`. Of a method that featcal
    has not, run mergekit and name its folder with --merged. If the merge is to be put right first, nothing is
    calibrated and the exit status is 1.
    """
    given = {name: value for name, value in options.items() if value not in (None, {})}
    from_recipe = [f"--{name}" for name in ("calibrate", "merged", "base", "data") if name in given]
    if is_recipe(suite):
        return _merge_recipe(suite, out, device, as_json, given)
    if from_recipe:
        raise click.UsageError(f"{', '.join(from_recipe)}: only for a recipe of mergekit, and '{suite}' is not one")
    _merge_suite(suite, out, device, as_json, options)
    return 0


def _merge_recipe(recipe: str, out: Path, device: str | None, as_json: bool, given: Mapping[str, Any]) -> int:
    """Merge by a recipe of mergekit, and calibrate if that is asked for; return the exit status.

    Args:
        given: options of the command that were given, by name.
    """
    from featcal.system.paths import expand_home

    if idle := [f"--{name}" for name in ("method", "scale", "task") if name in given]:
        raise click.UsageError(
            f"{', '.join(idle)}: only for a suite; the recipe of mergekit '{recipe}' states this itself"
        )
    asked = RecipeOrder(expand_home(recipe), given.get("merged"), given.get("base"), given.get("data", {}), out)
    if "calibrate" in given:
        if "max_memory" in given:
            raise click.UsageError(
                "--max-memory: not with --calibrate; leave it out, or merge first and run featcal calibrate"
            )
        return calibrate_by_recipe(asked, given["calibrate"], device or "auto", as_json)
    if idle := [f"--{name}" for name in ("merged", "data") if name in given]:
        raise click.UsageError(f"{', '.join(idle)}: only with --calibrate")
    document = merge_by_recipe(asked, out, given.get("max_memory"), _merging_device(device))
    say_notes(document)
    print_document(document, as_json, [(document["out"], document["method"])], ("written", "method"))
    return 0


def _merging_device(device: str | None) -> str:
    # Sums on a GPU come in another order, so its bits differ: it is used where it is asked for.
    return "cpu" if device in (None, "auto") else str(device)


def _merge_suite(suite: str, out: Path, device: str | None, as_json: bool, options: Mapping[str, Any]) -> None:
    """Merge the experts of a suite by a method, or fit a baseline."""
    from featcal.baselines.common.fold_heads import locate_expert
    from featcal.export.merge import merge_to_folder

    method, scale, task = options["method"], options["scale"], options["task"]
    if method is not None and is_baseline(model_name(method).kind):
        if scale is not None:
            raise click.UsageError(f"{model_name(method).kind} has no --scale; leave it out")
        if task is not None and MODULES not in methods.method(model_name(method).kind).about.needs:
            raise click.UsageError(_ONE_FOR_ALL)
        if options["max_memory"] is not None:
            raise click.UsageError(f"{model_name(method).kind} cannot be kept within --max-memory")
        require_new(out)
        session = opening.open_suite_session(suite, device or "auto")
        if task is not None:  # as far as it can be known before the fit
            locate_expert(session.family, task)
        _show_baseline(session.fit.baseline(method, bar()).save(out, task), as_json)
        return
    if task is not None:
        raise click.UsageError(_ONE_FOR_ALL)
    document = merge_to_folder(
        opening.load(suite), method, scale, out, max_memory=options["max_memory"], device=_merging_device(device)
    )
    say_notes(document)
    print_document(document, as_json, [(document["out"], document["method"])], ("written", "method"))


def _show_baseline(document: Mapping[str, Any], as_json: bool) -> None:
    """Print what fitting a baseline gave, and where it was written."""
    say_notes(document)
    if "loss_before" in document and not as_json:
        print_table([("before", document["loss_before"]), ("after", document["loss"])], ("", "loss"))
        print_message(f"written to {document['out']} after {document['seconds']['total']:.1f} s")
        return
    if "leave_one_out_r2" in document and not as_json:
        step = "taken" if document["taken"] else "not taken"
        print_table([(f"{document['leave_one_out_r2']:.3f}", step)], ("leave-one-out R2", "step"))
    print_document(document, as_json, [(document["out"], document["model"])], ("written", "model"))


@click.command()
@click.argument("folder")
@click.option(
    "--format",
    "layout",
    type=click.Choice(["hf", "open_clip"]),
    help="Library that will load the model: transformers or open_clip.  [hf]",
)
@target_options("Add what the base has beside its weights and the folder lacks,", "nothing is added")
@click.option("--as", "kind", type=click.Choice(["model", "adapter"]), default="model", show_default=True,
              help="What to write: the model, or a LoRA adapter of peft over another model.")  # fmt: skip
@click.option("--of", "over", type=click.Choice(["merged", "base"]),
              help="With --as adapter: the model under the adapter.  [merged]")  # fmt: skip
@click.option(
    "--rank", type=int, help="With --as adapter: largest rank of every map.  [with --energy, that of the map]"
)
@click.option("--energy", type=float,
              help="With --as adapter: share of every map's change to keep, by its effect on the inputs, such as "
              "0.99, with the smallest sufficient rank.  [with --rank, as much as that allows]")  # fmt: skip
@click.option("--base-model", help="With --as adapter: name of the model under the adapter, for its users.  "
              "[the suite's, if it is on the Hub]")  # fmt: skip
@click.option("--suite", shell_complete=complete_suite,
              help="With --as adapter: the suite, if it does not come with featcal.  [the record's]")  # fmt: skip
@click.option("--device", help="With --as adapter: auto, cpu, cuda or mps.  [auto]")
@OUT
@JSON
def export_command(folder: str, layout: str | None, kind: str, out: Path, as_json: bool, **options: Any) -> None:
    """Write a model for the library that will load it; verify it.

    hf writes a folder that transformers 4.57 and 5 both read, or notes which one is needed; open_clip writes a folder
    for `local-dir:`. FOLDER is any model reference: a folder, a Hub id, or open_clip:ARCH:FILE.

    --as adapter takes a folder that `featcal calibrate` wrote, runs it once over its calibration samples, and writes
    its change from the merged model, or from the base, as a LoRA: for every linear map the part of the change that has
    most effect on the map's own inputs. It prints what every layer loses.

    --for writes a transformers folder with the files that another program needs beside the weights (tokenizer.model,
    chat template, generation options; for ollama a Modelfile), then checks it. That program's own tools do the
    conversion.
    """
    if kind == "adapter":
        if layout is not None:
            raise click.UsageError("--format does not apply to an adapter, which has the layout of peft")
        if options["targets"] or options["base"] is not None:
            raise click.UsageError("--for and --base do not apply to an adapter; give --base-model")
        _export_adapter(folder, out, as_json, options)
        return
    targets, base = options.pop("targets"), options.pop("base")
    if given := [name for name, value in options.items() if value is not None]:
        flags = ", ".join(_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in given)
        raise click.UsageError(f"{flags}: only with --as adapter")
    if targets:
        if layout == "open_clip":
            raise click.UsageError("--for writes the layout of transformers; leave --format out")
        export_folder(folder, targets, base, out, as_json)
        return
    if base is not None:
        raise click.UsageError("--base needs --for")
    from featcal.export.change_layout import convert

    document = convert(folder, out, layout or "hf")
    say_notes(document)
    rows = [(name, f"{value:.1e}") for name, value in document.get("parity", {}).items()]
    if as_json or rows:
        print_document(document, as_json, rows, ("compared in both libraries", "largest difference"))
    if not as_json:
        print_message(f"written to {document['out']}")
        say_where_to(document["out"])


def _export_adapter(
    folder: str,
    out: Path,
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    """Write the change of a calibration as an adapter.

    Args:
        options: those of an adapter by name; None for those that are not given.
    """
    from featcal.calibration.low_rank import Limits
    from featcal.session.model_names import recorded_suite

    require_new(out)
    limits = Limits(options["rank"], options["energy"])
    session = opening.open_suite_session(options["suite"] or recorded_suite(Path(folder)), options["device"] or "auto")
    # Absolute: a bare word such as "calibrated" would be the name of a model, not the folder.
    made = session.fit.repair(str(Path(folder).absolute()), options["over"] or "merged", limits, bar())
    document = made.save(out, options["base_model"])
    say_notes(document)
    rows = [(row["layer"], _ranks(*row["rank"]), percent(row["left_out"])) for row in document["layers"]]
    print_document(document, as_json, rows, ("layer", "rank", "left out, %"))
    if not as_json:
        left_out = percent(document["adapter"]["left_out"])
        print_message(
            f"written to {document['out']}, {readable(document['bytes'])}; {left_out} % of the change is left out"
        )


def _ranks(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("repo", metavar="OWNER/NAME")
@click.option("--private", is_flag=True, help="Make the repository private.")
@click.option(
    "--license", "licence", metavar="ID", help="The Hub's word for the licence, such as apache-2.0.  [the card's]"
)
@click.option("--dry-run/--yes", "dry_run", default=True, help="Only show what would be sent, or send it.  [dry run]")
@JSON
def push_command(folder: Path, repo: str, private: bool, licence: str | None, dry_run: bool, as_json: bool) -> None:
    """Upload a written folder to the Hub; without --yes show it.

    It shows all files with their sizes and the final card. It refuses a half-written folder, one without weights, and
    one without a known licence. The Hub's own client finds the token (`hf auth login`).
    """
    from featcal.export import push as sending

    parcel = sending.pack(folder, repo, licence)
    for one in parcel.warnings:
        print_message(f"warning: {one}", err=True, colour="red")
    address = None if dry_run else sending.push_parcel(parcel, private)
    rows = [(name, readable(size)) for name, size in parcel.files.items()]
    rows.append((f"{len(rows)} files", readable(sum(parcel.files.values()))))
    print_document({**parcel.to_json(), "private": private, "pushed": address}, as_json, rows, ("file", "size"))
    if as_json:
        return
    if address is None:
        click.echo(f"\n{printable(parcel.card)}\n")  # whole, which a message is not
        print_message(f"nothing was sent; add --yes to send this to {repo}")
    else:
        print_message(f"sent to {address}")


@click.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--suite", shell_complete=complete_suite, help="The suite, if it does not come with featcal.  [the record's]"
)
@click.option("--out", type=NewPath(), help="Keep the model in this folder; must not exist.  [not kept]")
@click.option("--device", help="cpu, cuda or mps.  [the record's]")
@JSON
def replay_command(record: Path, suite: str | None, out: Path | None, device: str | None, as_json: bool) -> None:
    """Run the command behind a featcal.json again; compare bit by bit.

    RECORD is the featcal.json of a calibration or a merge, or the folder that holds one. The result is compared with
    the weight files beside it, else with the hashes in it. If anything differs, the exit status is 1, and the inputs,
    samples, versions and tensors that differ are listed. The path of a calibrated model is relative to the current
    folder.
    """
    from featcal.studies.replay.again import replay_record as run_again

    keep_memory()
    found = run_again(record, suite, out, device=device, progress=bar())
    around = [(kind, line) for kind, lines in found.surroundings.items() for line in lines]
    causes = [("input", line) for line in found.inputs] + [("samples", line) for line in found.samples] + around
    if found.same:
        for kind, line in causes:
            print_message(f"note: {kind}: {line}", err=True)
        print_document(found.to_json(), as_json, [(f"same {found.tensors} tensors, bit for bit",)], ("",))
        _say_unchecked(found)
        return
    rows = [
        *causes,
        *(("file beside the record", f"{name} is missing there or not as it was written") for name in found.damaged),
    ]
    rows += [("tensor", f"{one.tensor}: {one.why}{_relative(one.relative)}") for one in found.different]
    print_document(found.to_json(), as_json, rows, ("differs", ""))
    _say_unchecked(found)
    raise SystemExit(1)


def _say_unchecked(found: Replayed) -> None:
    """Print what could not be checked of the new model, and exit with status 1 if there is anything."""
    for sentence in found.unchecked:
        print_message(f"warning: {sentence}", err=True, colour="red")
    if found.unchecked:
        raise SystemExit(1)


def _relative(difference: float | None) -> str:
    return "" if difference is None else f", relative difference {difference:.1e}"
