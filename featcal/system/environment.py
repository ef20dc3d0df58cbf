"""Describe a machine where it can change the last bits of a number, set how its torch waits, and silence needless
warnings."""

from __future__ import annotations

import os
import platform
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PROCESSORS = Path("/proc/cpuinfo")


def ignore_own_warnings_of_torch() -> None:
    """Ignore warnings that torch gives about its own code. Only the owner of a process calls this: the command line and
    the app."""
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # its rules for jvp


def hush_hub_clients() -> None:
    """Let the Hub's clients log errors only. The owner of a process calls this before they are imported, unless the
    environment sets it otherwise: featcal reports in a sentence when it tries again or reads their caches."""
    for name in ("HF_HUB_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")


def let_threads_sleep(spins: int = 1000) -> None:
    """Let a thread of torch that waits for another one sleep soon, unless the environment says how long it waits awake.

    To be called before torch is imported, whose OpenMP reads it then.

    Args:
        spins: number of times that it looks for its next product before it sleeps.
    """
    # GNU's own default is 300 times as long: beside other work a thread then spins through whole time slices of the
    # one that it waits for, and a command on small models takes ten times as long.
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = str(spins)


def machine_facts(device: torch.device) -> dict[str, str | int]:
    """Return the device, the processor, the instruction set that torch uses and the number of threads.

    Kernels depend on the processor and the order of sums on the threads; nothing here names a person, a host or a
    folder.
    """
    import torch

    graphics = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "device": f"{device.type}: {graphics}" if graphics else device.type,
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


@cache
def is_intel() -> bool:
    """Say whether the processor calls itself one of Intel's."""
    return "Intel" in _processor() + os.environ.get("PROCESSOR_IDENTIFIER", "")  # where Windows says it


def _processor() -> str:
    """Return the processor's own name if the system tells it, else its architecture."""
    try:
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return named[0] if named else platform.machine()
