"""Run lm-evaluation-harness on a checkpoint, in a separate process, and read its results file."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from featcal.system.errors import InputError

_PREFERRED = ("exact_match", "pass@1", "acc_norm", "acc", "prompt_level_strict_acc", "f1")
"""Main metrics of a task: the first of these that its results have; otherwise its first number."""


def run_lm_eval(model: Path, tasks: Sequence[str], arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Score a checkpoint folder on tasks of lm-evaluation-harness.

    It uses the harness of this environment, else the command `lm-eval` (which may have an environment of its own).
    Progress goes to stderr.

    Args:
        tasks: names that `lm-eval ls tasks` knows.
        arguments: further options of the harness, for example `["--num_fewshot", "8", "--apply_chat_template"]`.

    Returns:
        `{"tasks": {task: {"metric", "value", "n", "metrics": {…}}}, "average", "lm_eval": {versions, config}}`; the
        average is that of the tasks whose metric is a share, better when higher; None if there are none.

    Raises:
        InputError: the harness is not installed, fails, or writes no results.
    """
    with tempfile.TemporaryDirectory(prefix="featcal-lm-eval-") as folder:
        command = [
            *_command(), "--model", "hf", "--model_args", f"pretrained={model}", "--tasks", ",".join(tasks),
            "--output_path", folder, *arguments,
        ]  # fmt: skip
        # stdout is featcal's own document (`--json`), so the harness's tables go to stderr.
        status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        if status != 0:
            raise InputError(f"lm-eval ended with status {status} (see above); the command was: {' '.join(command)}")
        files = sorted(Path(folder).rglob("results*.json"))
        if not files:
            raise InputError("lm-eval wrote no results file; try its command by hand: " + " ".join(command))
        return read_results(files[-1])


def read_results(file: Path) -> dict[str, Any]:
    """Read the document of `run_lm_eval` from a results file of lm-evaluation-harness.

    Raises:
        InputError: the file is not a results file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = {task: dict(numbers) for task, numbers in content["results"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{file} is not a results file of lm-eval ({error})") from error
    counts = content.get("n-samples", {})
    tasks, lower = {}, set[str]()
    for task, numbers in found.items():
        metrics = {name: value for name, value in numbers.items() if _is_metric(name, value)}
        if not metrics:
            continue
        metric = _main(list(metrics))
        count = counts.get(task, {}).get("effective")
        tasks[task] = {"metric": metric, "value": metrics[metric], "n": count, "metrics": metrics}
        if not content.get("higher_is_better", {}).get(task, {}).get(metric.partition(",")[0], True):
            lower.add(task)
    if not tasks:
        raise InputError(f"{file} holds no numbers")
    # A group stands for its members, if it has a number: some of lm-eval's have none.
    groups = {name: members for name, members in content.get("group_subtasks", {}).items() if name in tasks}
    inside = {name for members in groups.values() for name in members}
    # A perplexity is no share, nor is a score of 0 to 100: neither is averaged with shares.
    outer = [one["value"] for task, one in tasks.items() if task not in inside | lower and abs(one["value"]) <= 1]
    average = sum(outer) / len(outer) if outer else None
    kept = {name: content[name] for name in ("lm_eval_version", "transformers_version", "config") if name in content}
    return {"tasks": tasks, "average": average, "lm_eval": kept}


def _command() -> list[str]:
    if importlib.util.find_spec("lm_eval") is not None:
        return [sys.executable, "-m", "lm_eval"]
    found = shutil.which("lm-eval") or shutil.which("lm_eval")
    if found is None:
        raise InputError('lm-eval was not found; install it with: pip install "lm-eval[hf]"')
    return [found]


def _is_metric(name: str, value: Any) -> bool:
    """Say whether an entry of a task is a metric, `metric,filter`; the harness also writes the number of samples."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and "," in name and "stderr" not in name


def _main(names: Sequence[str]) -> str:
    """Return a task's main metric; names are `metric,filter`."""
    for preferred in _PREFERRED:
        for name in names:
            if name.partition(",")[0] == preferred:
                return name
    return names[0]
