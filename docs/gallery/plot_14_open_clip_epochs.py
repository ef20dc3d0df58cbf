"""
Epochs of open_clip
===================

The ``epoch_N.pt`` that a training with open_clip writes is an expert as it is.

The CLIP of ``clip-mini``, which comes with featcal, written for open_clip and trained on two of its tasks.
"""

from pathlib import Path
from tempfile import mkdtemp

import open_clip
import torch

import featcal
from featcal.export.change_layout import convert
from featcal.figures import charts, tables

SUITE, RUNS = featcal.load_suite("clip-mini"), Path(mkdtemp())
convert(str(SUITE.root / "base"), RUNS / "base", "open_clip")
ARCH = RUNS / "base" / "open_clip_config.json"
family = featcal.open_family(SUITE)

# %%
# Train
# -----


def train(task):
    """Train the image tower on pictures of a task; return the file of its epoch."""
    drawn = family.samples(task, "calibration", 128, 0)
    pictures, labels = drawn.inputs["pixel_values"], torch.as_tensor(drawn.labels)
    model = open_clip.create_model(f"local-dir:{RUNS / 'base'}")
    classes = torch.nn.Linear(model.visual.output_dim, int(labels.max()) + 1)
    optimizer = torch.optim.AdamW([*model.visual.parameters(), *classes.parameters()])
    for step in range(10):
        part = slice(32 * (step % 4), 32 * (step % 4) + 32)
        scores = classes(model.encode_image(pictures[part]))
        torch.nn.functional.cross_entropy(scores, labels[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    # As open_clip's own training writes it, on several processes.
    state = {f"module.{name}": one for name, one in model.state_dict().items()}
    file = RUNS / task / "checkpoints" / "epoch_1.pt"
    file.parent.mkdir(parents=True)
    beside = {"epoch": 1, "name": task, "optimizer": optimizer.state_dict()}
    torch.save({**beside, "state_dict": state}, file)
    return file, pictures


trained = {task: train(task) for task in ("digits", "shapes")}
[str(file.relative_to(RUNS)) for file, _ in trained.values()]

# %%
# Merge, look, repair
# -------------------
# A model is named by its architecture, or the file that describes it, and the file of its weights.

suite = featcal.Suite.of(
    base=f"open_clip:{ARCH}:{ARCH.with_name('open_clip_model.safetensors')}",
    experts={task: f"open_clip:{ARCH}:{file}" for task, (file, _) in trained.items()},
    samples={task: pictures for task, (_, pictures) in trained.items()},
)
session = featcal.open_session(suite)
config = featcal.CalibrationConfig(samples=32)
lines = {
    name: tables.relative_drift_table(featcal.measure_drift(session, one, samples=32))
    for name, one in (("merged", "merged"), ("calibrated", config))
}
charts.compare_drift(lines)

# %%
# **What to keep:** the file of an epoch is read without running code in it, and its prefixes and optimizer are left out.
