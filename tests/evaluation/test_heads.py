"""The three heads against written-out formulas in float64, and their constants of Prop. 3."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from featcal.evaluation.heads import ClassificationHead, CosineHead, LinearHead
from featcal.evaluation.scoring_heads import check_classes
from featcal.models.model import Head
from featcal.samples.sources import Samples
from featcal.system.errors import InputError

NAMES = ("a", "b", "c", "d", "e")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(weight: Tensor) -> Head:
    return CosineHead(torch.nn.functional.normalize(weight, dim=1), 7.5, NAMES[: len(weight)])


def linear(weight: Tensor) -> Head:
    return LinearHead(lambda: weight, scale=-0.5)


def classification(weight: Tensor) -> Head:
    return ClassificationHead(weight, random(99, len(weight)))


HEADS = pytest.mark.parametrize("make", [cosine, linear, classification])


def test_scores_of_class_prompts() -> None:
    features, rows = random(0, 4, 3), torch.nn.functional.normalize(random(1, 5, 3), dim=1)
    found = CosineHead(rows, 7.5, NAMES).scores(features)
    for n in range(4):
        for c in range(5):
            h, w = features[n], rows[c]
            expected = 7.5 * sum(float(h[i] * w[i]) for i in range(3)) / float(h.square().sum().sqrt())
            assert float(found[n, c]) == pytest.approx(expected, rel=1e-12)


def test_scores_of_a_vocabulary() -> None:
    features, rows = random(0, 4, 3), random(1, 5, 3)
    found = LinearHead(lambda: rows, scale=-0.5).scores(features)
    for n in range(4):
        for c in range(5):
            expected = -0.5 * sum(float(features[n, i] * rows[c, i]) for i in range(3))
            assert float(found[n, c]) == pytest.approx(expected, rel=1e-12)


def test_a_vocabulary_is_read_when_it_is_needed() -> None:
    reads: list[int] = []

    def read() -> Tensor:
        reads.append(1)
        return torch.eye(3)

    head = LinearHead(read)
    assert not reads
    assert head.scores(random(0, 2, 3)).equal(random(0, 2, 3))
    assert len(reads) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_scores_of_a_classification_head(bias: bool) -> None:
    features, rows, shift = random(0, 4, 3), random(1, 5, 3), random(2, 5)
    found = ClassificationHead(rows, shift if bias else None).scores(features)
    for n in range(4):
        for c in range(5):
            expected = sum(float(features[n, i] * rows[c, i]) for i in range(3)) + bias * float(shift[c])
            assert float(found[n, c]) == pytest.approx(expected, rel=1e-12)


def test_a_head_follows_the_dtype_of_its_features() -> None:
    head = ClassificationHead(random(1, 5, 3).bfloat16(), random(2, 5).half())
    assert head.scores(random(0, 4, 3)).dtype is torch.float64
    assert head.lipschitz(random(0, 4, 3), random(1, 4, 3)).dtype is torch.float64


def test_classes_have_names_or_numbers() -> None:
    assert ClassificationHead(torch.ones(3, 2)).classes == ("0", "1", "2")
    assert ClassificationHead(torch.ones(2, 2), classes=("no", "yes")).classes == ("no", "yes")
    assert LinearHead(lambda: torch.ones(3, 2)).classes is None


def test_a_single_class_is_not_scored() -> None:
    """One folder too deep, the classes are taken for one class, of which every answer is right."""
    drawn = Samples("pets", "test", {}, torch.zeros(2, dtype=torch.int64), (0, 1), ("images",), None)
    with pytest.raises(InputError, match="task 'pets': 'images' is its only class, and every answer would be right"):
        check_classes(("images",), drawn)
    check_classes(("images", "others"), drawn)


@HEADS
def test_it_is_a_head(make: Callable[[Tensor], Head]) -> None:
    assert isinstance(make(random(0, 5, 3)), Head)


@HEADS
@given(seed=st.integers(0, 2**31), spread=st.floats(0.01, 10), rows=st.integers(2, 5))
@settings(max_examples=25)
def test_no_score_moves_faster_on_a_segment(
    make: Callable[[Tensor], Head], seed: int, spread: float, rows: int
) -> None:
    """Between any two points of the segment, not only between its ends."""
    head, expert = make(random(seed, rows, 4)), random(seed + 1, 20, 4)
    model = expert + spread * random(seed + 2, 20, 4)
    bound = head.lipschitz(expert, model)
    for start, end in ((0.0, 1.0), (0.2, 0.3), (0.5, 0.51), (0.9, 1.0)):
        one, two = expert + start * (model - expert), expert + end * (model - expert)
        moved = (head.scores(two) - head.scores(one)).norm(dim=1)
        assert bool((moved <= bound * (two - one).norm(dim=1) * (1 + 1e-9) + 1e-12).all())


@pytest.mark.parametrize(("make", "factor"), [(linear, 0.5), (classification, 1.0)])
def test_the_constant_of_a_linear_map_is_attained(make: Callable[[Tensor], Head], factor: float) -> None:
    """By a drift along the first right singular vector: ||dz|| = sigma_max ||e||; sigma_max is 3 by construction."""
    left, right = torch.linalg.qr(random(0, 6, 4)).Q, torch.linalg.qr(random(1, 4, 4)).Q
    head = make(left @ torch.diag(torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)) @ right.mT)
    expert = random(2, 5, 4)
    model = expert + 0.7 * right[:, 1]
    torch.testing.assert_close(head.lipschitz(expert, model), torch.full((5,), 3 * factor, dtype=torch.float64))
    moved = (head.scores(model) - head.scores(expert)).norm(dim=1)
    torch.testing.assert_close(moved, torch.full((5,), 0.7 * 3 * factor, dtype=torch.float64))


def test_the_constant_of_class_prompts_is_closed_form_and_attained() -> None:
    """Nearest to the origin in between (twice), at the start, at the end; a tiny turn there moves scores that fast."""
    expert = torch.tensor([[1.0, -2.0], [1.0, -3.0], [3.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    model = torch.tensor([[1.0, 2.0], [1.0, 1.0], [4.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    head = CosineHead(torch.eye(2, dtype=torch.float64), 6.0, ("a", "b"))
    found = torch.tensor([6.0, 6.0, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(head.lipschitz(expert, model), found)
    around = torch.tensor([[1.0, -1e-5]], dtype=torch.float64), torch.tensor([[1.0, 1e-5]], dtype=torch.float64)
    moved = (head.scores(around[1]) - head.scores(around[0])).norm(dim=1)
    torch.testing.assert_close(moved, 6.0 * (around[1] - around[0]).norm(dim=1), rtol=1e-8, atol=0)


def test_a_segment_through_the_origin_has_no_bound_for_class_prompts() -> None:
    expert = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert float(CosineHead(torch.eye(2, dtype=torch.float64), 6.0, ("a", "b")).lipschitz(expert, -expert)) == float(
        "inf"
    )


def test_shapes_that_do_not_belong_together() -> None:
    with pytest.raises(InputError, match=r"the weight has shape \[3\]"):
        ClassificationHead(torch.ones(3))
    with pytest.raises(InputError, match=r"a bias of shape \[2\] for 3 classes"):
        ClassificationHead(torch.ones(3, 2), torch.ones(2))
    with pytest.raises(InputError, match="1 names for 3 classes"):
        ClassificationHead(torch.ones(3, 2), classes=("a",))
