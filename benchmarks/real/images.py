"""Suites of real pictures: `python benchmarks/real/images.py --data FOLDER --out FOLDER [--step base|names|…]`.

A small CLIP is trained on the training pictures of eight sets with captions out of a catalogue ("item gtsrb7"), whose
words no prompt uses (the step "base"). Its text tower then learns what the prompts mean from a few captioned pictures
of each class, some of which are wrong ("names"): so the base has good features and mediocre names, as CLIP has on such
sets. Every expert is the base with the blocks of its vision tower trained on one set ("experts"). What is written is a
suite like any other, with its own copy of the pictures. A killed run goes on where it was.

With `--base FOLDER` the base is that of another such suite, which has not seen the pictures of this one: of the sets in
the data folder (`debian_pictures.py`) it learns the names alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F
import yaml
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "data" / "clip-mini"))
import build  # noqa: E402
import pictures  # noqa: E402
import training  # noqa: E402
from pictures import PROMPT, TASKS, UNTUNED, Pictures, Split  # noqa: E402

WIDTH, BLOCKS, MLP, HEADS, PATCH, PROJECTION, POSITIONS = 128, 6, 256, 4, 6, 128, 24
SMOOTHING = 0.1
TEST_LIMIT = 500
"""Test pictures per set in the suite, evenly spread over those there are."""

BASE_STEPS, BASE_PER_TASK, BASE_MUON, BASE_ADAM, BASE_DECAY = 2000, 11, 2e-3, 1e-3, 0.05
BASE_WORKERS = 2
"""Processes with one thread each, which draw their own pictures and average their gradients."""
KEPT = 0.5
"""Share of the patches that a model sees until the rate falls, at half the cost of a step; then all."""
NAME_SHOTS, NAME_NOISE, NAME_STEPS, NAME_RATE = 4, 0.5, 200, 1e-3
EXPERT_STEPS, EXPERT_BATCH, EXPERT_RATE, EXPERT_DECAY, EXPERT_SCALE = 700, 64, 5e-4, 0.05, 30.0
EXPERT_WORKERS = 2
LONGER: Mapping[str, float] = {
    "mnist": 0.75,
    "fashion_mnist": 0.75,
    "hand_drawn_shapes": 0.75,
    "gtsrb": 1.5,
    "omniglot_alphabets": 1.5,
}
"""Sets whose experts are trained for longer, by which factor."""

Sets = Mapping[str, Pictures]


def make_model(vocabulary: int, seed: int) -> CLIPModel:
    """An untrained CLIP of the size of the suite."""
    torch.manual_seed(seed)
    text = {
        "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS, "vocab_size": vocabulary, "projection_dim": PROJECTION,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3,
    }  # fmt: skip
    vision = {
        "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "intermediate_size": MLP, "hidden_act": "gelu",
        "num_attention_heads": HEADS, "image_size": pictures.CROP, "patch_size": PATCH, "projection_dim": PROJECTION,
    }  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=PROJECTION))
    training.mimetic(model.vision_model, HEADS, torch.Generator().manual_seed(seed))
    return model


def read_sets(data: Path) -> Sets:
    """Read the sets of a folder: the eight of the first suite, or others that are named by their files."""
    others = sorted(file.stem for file in data.glob("*.npz") if file.stem not in TASKS)
    return {task: pictures.read(data, task) for task in others or TASKS}


def make_tokenizer(sets: Sets) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = build.make_tokenizer(catalogue(sets) + prompts(sets), POSITIONS)
    return tokenizer


def catalogue(sets: Sets) -> list[str]:
    """A caption per class of every set, in the order of the sets."""
    return [f"item {task}{index}" for task, one in sets.items() for index in range(len(one.classes))]


def prompts(sets: Sets) -> list[str]:
    return [PROMPT.format(name) for one in sets.values() for name in one.classes]


def class_range(sets: Sets, task: str) -> slice:
    """Where the classes of a set lie among those of all sets."""
    before = list(sets)[: list(sets).index(task)]
    start = sum(len(sets[other].classes) for other in before)
    return slice(start, start + len(sets[task].classes))


def image_features(model: CLIPModel, images: Tensor, kept: float = 1.0) -> Tensor:
    """Unit features [n, d]; below 1, of a share of the patches, drawn for every picture."""
    vision = model.vision_model
    states = vision.embeddings(images)
    if kept < 1:
        count, patches = len(images), states.shape[1] - 1
        chosen = torch.rand(count, patches).argsort(1)[:, : round(kept * patches)] + 1
        rows = torch.cat([torch.zeros(count, 1, dtype=torch.long), chosen], 1)
        states = states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))
    states = vision.pre_layrnorm(states)
    for block in vision.encoder.layers:
        states = block(states, None)
    pooled = vision.post_layernorm(states[:, 0])
    return F.normalize(model.visual_projection(pooled), dim=-1)


def draw(split: Split, task: str, count: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Varied training pictures [count, 3, 30, 30] of a step, and their classes."""
    place = TASKS.index(task) if task in TASKS else zlib.crc32(task.encode())
    source = 1_000_003 * (seed + 10 * place) + step
    rows = np.random.RandomState(source % 2**32).randint(0, len(split.labels), count)
    images = pictures.pixels(split.images[rows])
    generator = torch.Generator().manual_seed(source)
    return pictures.varied(images, task, generator), torch.from_numpy(split.labels[rows])


@torch.no_grad()
def accuracy(model: CLIPModel, split: Split, texts: Tensor) -> float:
    """Share of right answers with the features of a set's captions [classes, d]."""
    right = 0
    for start in range(0, len(split.labels), 250):
        images = pictures.cropped(pictures.pixels(split.images[start : start + 250]))
        answers = (image_features(model, images) @ texts.T).argmax(1).numpy()
        right += int((answers == split.labels[start : start + 250]).sum())
    return right / len(split.labels)


@torch.no_grad()
def by_task(model: CLIPModel, sets: Sets, texts: Tensor) -> dict[str, float]:
    """Validation accuracy on the sets that may be looked at."""
    return {
        task: accuracy(model, one.validation, texts[class_range(sets, task)])
        for task, one in sets.items()
        if task not in UNTUNED
    }


def base_worker(rank: int, data: Path, work: Path, seed: int) -> None:
    """One of the processes that train the base together."""
    torch.set_num_threads(1)
    meeting = work / "meeting"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting.resolve()}", rank=rank, world_size=BASE_WORKERS
    )
    train_base(read_sets(data), seed, work / "base.pt", rank)
    torch.distributed.destroy_process_group()


def train_base(sets: Sets, seed: int, file: Path, rank: int) -> None:
    """All sets at once against the catalogue."""
    tokenizer = make_tokenizer(sets)
    model = make_model(len(tokenizer), seed)
    items = build.tokenise(tokenizer, catalogue(sets))
    inside = list(model.vision_model.encoder.parameters())
    ids = {id(p) for p in inside}
    outside = [p for p in model.parameters() if id(p) not in ids]

    def loss(step: int) -> Tensor:
        source = BASE_WORKERS * step + rank
        torch.manual_seed(seed + source)
        drawn = [draw(one.train, task, BASE_PER_TASK, source, seed) for task, one in sets.items()]
        target = torch.cat([labels + class_range(sets, t).start for t, (_, labels) in zip(sets, drawn, strict=True)])
        images = image_features(model, torch.cat([one for one, _ in drawn]), kept_at(step, BASE_STEPS))
        logits = model.logit_scale.exp() * images @ build.text_features(model, items).T
        return F.cross_entropy(logits, target, label_smoothing=SMOOTHING)

    optimizers = training.optimizers(inside, outside, BASE_MUON, BASE_ADAM, BASE_DECAY)
    training.train(model, optimizers, loss, BASE_STEPS, file)
    if rank == 0:
        with torch.no_grad():
            print(
                "catalogue, validation:", _percent(by_task(model, sets, build.text_features(model, items))), flush=True
            )


def learn_names(model: CLIPModel, sets: Sets, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Teach the text tower the prompts on `NAME_SHOTS` pictures of each class, a share of them with the caption of
    another class of their set; nothing else moves."""
    rng = np.random.RandomState(seed)
    images, target = [], []
    for task, one in sets.items():
        labels = one.train.labels
        rows = np.concatenate([rng.permutation(np.flatnonzero(labels == k))[:NAME_SHOTS] for k in np.unique(labels)])
        wrong = (labels[rows] + rng.randint(1, len(one.classes), len(rows))) % len(one.classes)
        said = np.where(rng.rand(len(rows)) < NAME_NOISE, wrong, labels[rows])
        with torch.no_grad():
            images.append(image_features(model, pictures.cropped(pictures.pixels(one.train.images[rows]))))
        target.append(torch.from_numpy(said) + class_range(sets, task).start)
    seen, named = torch.cat(images), torch.cat(target)
    tokens = build.tokenise(tokenizer, prompts(sets))
    model.requires_grad_(False)
    text = [
        *model.text_model.requires_grad_(True).parameters(),
        *model.text_projection.requires_grad_(True).parameters(),
    ]
    scale = model.logit_scale.exp()
    for _ in build.steps([text], [NAME_RATE], NAME_STEPS, 0.05, 20):
        F.cross_entropy(
            scale * seen @ build.text_features(model, tokens).T, named, label_smoothing=SMOOTHING
        ).backward()


def with_words(base: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> CLIPModel:
    """Return the base of another suite with the words of a tokenizer; those that it does not know are untrained."""
    known, old = CLIPModel.from_pretrained(base).state_dict(), PreTrainedTokenizerFast.from_pretrained(base).get_vocab()
    model, words = make_model(len(tokenizer), seed), "text_model.embeddings.token_embedding.weight"
    vectors = model.state_dict()[words].clone()
    for word, place in tokenizer.get_vocab().items():
        if word in old:
            vectors[place] = known[words][old[word]]
    model.load_state_dict({**known, words: vectors})
    return model


def kept_at(step: int, count: int) -> float:
    return KEPT if step < (1 - training.COOLING) * count else 1.0


def train_expert(base: CLIPModel, one: Pictures, texts: Tensor, task: str, seed: int, file: Path) -> CLIPModel:
    """The base with its vision blocks trained on one set, against the prompts that it has; all else stays."""
    model = copy.deepcopy(base).requires_grad_(False)
    blocks = list(model.vision_model.encoder.requires_grad_(True).parameters())
    groups = [
        {"params": [p for p in blocks if p.ndim > 1], "weight_decay": EXPERT_DECAY},
        {"params": [p for p in blocks if p.ndim == 1], "weight_decay": 0.0},
    ]
    count = round(EXPERT_STEPS * LONGER.get(task, 1.0))

    def loss(step: int) -> Tensor:
        torch.manual_seed(seed + step)
        images, labels = draw(one.train, task, EXPERT_BATCH, step, seed + 1)
        logits = EXPERT_SCALE * image_features(model, images, kept_at(step, count)) @ texts.T
        return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)

    training.train(model, [torch.optim.AdamW(groups, lr=EXPERT_RATE, betas=(0.9, 0.98))], loss, count, file)
    return model


def write_base(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build.write_base(model, tokenizer, folder)
    file = folder / "preprocessor_config.json"
    crop = {"do_resize": False, "crop_size": {"height": pictures.CROP, "width": pictures.CROP}}
    build.write_json(file, json.loads(file.read_text()) | crop)


def write_suite(sets: Sets, out: Path) -> None:
    """Pictures beside the models, and the suite file."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    tasks: dict[str, object] = {}
    for task, one in sets.items():
        entry: dict[str, object] = {"expert": f"experts/{task}", "templates": [PROMPT]}
        for name, split in (("calibration", one.calibration), ("validation", one.validation), ("test", one.test)):
            part = "test" if name == "test" else "train"
            file = f"data/{task}-{name}.npz"
            arrays = {f"{part}_x": split.images, f"{part}_y": split.labels}
            np.savez_compressed(out / file, class_names=np.array(one.classes), **arrays)
            entry[name] = {"arrays": file, "split": part}
        entry["test"] = {"arrays": f"data/{task}-test.npz", "split": "test", "limit": TEST_LIMIT}
        tasks[task] = entry
    content = {
        "name": f"real-{out.resolve().name.replace('_', '-')}",
        "description": "A small CLIP and eight vision experts on real pictures of 32 x 32 pixels.",
        "base": "base",
        "merged": {"method": "task-arithmetic", "scale": 0.3},
        "tasks": tasks,
    }
    (out / "suite.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def _percent(scores: Mapping[str, float]) -> str:
    average = sum(scores.values()) / len(scores)
    return ", ".join(f"{task} {100 * value:.1f}" for task, value in scores.items()) + f"; average {100 * average:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with one .npz per set")
    parser.add_argument("--out", type=Path, required=True, help="folder of the suite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=Path, help="folder of a suite that was written before, whose base this one has")
    parser.add_argument("--step", choices=("base", "names", "experts", "suite"), action="append", help="these alone")
    options = parser.parse_args()
    wanted = options.step or ["base", "names", "experts", "suite"]
    work = options.out / "training"
    work.mkdir(parents=True, exist_ok=True)
    sets = read_sets(options.data)
    if "base" in wanted and options.base is None:
        (work / "meeting").unlink(missing_ok=True)
        torch.multiprocessing.spawn(base_worker, (options.data, work, options.seed), BASE_WORKERS)
    if "names" in wanted:
        tokenizer = make_tokenizer(sets)
        if options.base is None:
            model = make_model(len(tokenizer), options.seed)
            if training.restore(model, [], work / "base.pt") < BASE_STEPS:
                raise SystemExit("the base is not trained to its end; run --step base again")
        else:
            model = with_words(options.base / "base", tokenizer, options.seed)
        learn_names(model, sets, tokenizer, options.seed)
        write_base(model, tokenizer, options.out / "base")
    if "suite" in wanted:
        write_suite(sets, options.out)
    if "experts" in wanted:
        write_experts(options.data, options.out, options.seed)


def expert_worker(work: tuple[Path, Path, str, int]) -> float | None:
    """Train and write one expert in a process of its own; its validation accuracy, where that may be looked at."""
    data, out, task, seed = work
    torch.set_num_threads(1)
    sets = read_sets(data)
    base, texts = base_and_texts(sets, out)
    own = texts[class_range(sets, task)]
    model = train_expert(base, sets[task], own, task, seed, out / "training" / f"{task}.pt")
    build.write_expert(model, out / "experts" / task)
    return accuracy(model, sets[task].validation, own) if task not in UNTUNED else None


def base_and_texts(sets: Sets, out: Path) -> tuple[CLIPModel, Tensor]:
    """The base that was written, and the features of all prompts [classes, d]."""
    base = CLIPModel.from_pretrained(out / "base", dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "base")
    with torch.no_grad():
        return base, build.text_features(base, build.tokenise(tokenizer, prompts(sets)))


def write_experts(data: Path, out: Path, seed: int) -> None:
    """Train all experts, two at a time; what an earlier run finished is only written again."""
    sets = read_sets(data)
    base, texts = base_and_texts(sets, out)
    print("base, validation:", _percent(by_task(base, sets, texts)), flush=True)
    with torch.multiprocessing.get_context("spawn").Pool(EXPERT_WORKERS) as workers:
        found = workers.map(expert_worker, [(data, out, task, seed) for task in sets], chunksize=1)
    scores = {task: score for task, score in zip(sets, found, strict=True) if score is not None}
    print("experts, validation:", _percent(scores), flush=True)


if __name__ == "__main__":
    main()
