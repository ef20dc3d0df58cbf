"""Maps of feature clouds: how they are made, what is drawn of many samples, how far they are to be trusted."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from app import maps
from featcal.session.projection import draw_points, pca_map

AT_ONCE = Path(__file__).parents[1] / "fixtures" / "at_once"
"""Where a `umap` is that need not compile."""


def cloud(n: int, k: int, seed: int = 0) -> maps.Points:
    """Normal features, every direction of another size, so that the first two are the first two."""
    sizes = np.linspace(3, 0.1, k)
    return (np.random.default_rng(seed).normal(size=(n, k)) * sizes + 5).astype(np.float32)


@pytest.mark.parametrize(("n", "k"), [(30, 50), (40, 20), (300, 20), (1, 5), (9, 1)])
def test_pca_is_that_of_scikit_learn(n: int, k: int) -> None:
    from sklearn.decomposition import PCA

    features = cloud(n, k)
    found = pca_map(features)
    assert found.shape == (n, 2)
    if min(n, k) < 2:
        np.testing.assert_allclose(abs(found[:, 0]), abs(features - features.mean(0))[:, 0], atol=1e-6)
        assert not found[:, 1].any()
        return
    expected = PCA(2, svd_solver="full").fit_transform(features)
    signs = np.sign((found * expected).sum(0))
    np.testing.assert_allclose(found * signs, expected, atol=2e-4)


@pytest.mark.parametrize("n", [4, 15, 60, 300])
def test_trust_is_that_of_scikit_learn(n: int) -> None:
    from sklearn.manifold import trustworthiness

    features = cloud(n, 8)
    for flat in (pca_map(features), cloud(n, 2, seed=1)):
        expected = trustworthiness(features, flat, n_neighbors=min(maps.TRUST_NEIGHBOURS, (n - 1) // 2))
        assert maps.trust(features, flat) == pytest.approx(expected, abs=1e-9)


def test_trust_of_many_points_is_near_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    features = cloud(900, 8)
    flat = pca_map(features)
    whole = maps.trust(features, flat)
    monkeypatch.setattr(maps, "TRUST_POINTS", 300)
    assert maps.trust(features, flat) == pytest.approx(whole, abs=0.01)
    assert maps.trust(features, flat) == maps.trust(features, flat)
    assert 0.6 < whole < 0.99


def test_so_few_points_that_none_has_neighbours() -> None:
    assert np.isnan(maps.trust(cloud(3, 5), cloud(3, 2)))


def test_more_samples_than_a_map_holds_are_drawn_by_seed() -> None:
    assert draw_points(5000, 4) == list(range(5000))
    some = draw_points(5001, 4)
    assert len(some) == len(set(some)) == 5000
    assert some == sorted(some) == draw_points(5001, 4)
    assert len(draw_points(5001, 40)) == 500
    assert draw_points(7, 10**6) in [[i] for i in range(7)]


def test_the_map_process_waits_until_nobody_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    monkeypatch.setattr(maps.MapWorker, "_ensure_process", lambda _: started.set())
    monkeypatch.setattr(maps, "QUIET", 60.0)
    worker = maps.MapWorker()
    worker.start_when_quiet()
    first = worker._timer
    assert first is not None
    worker.start_when_quiet()
    assert first.finished.is_set()  # called off by the second
    worker.put_off_start()
    assert worker._timer is not None
    assert worker._timer.finished.is_set()
    monkeypatch.setattr(maps, "QUIET", 0.01)
    worker.start_when_quiet()
    assert started.wait(5)


def test_what_was_asked_last_is_mapped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever moves a slider need not wait for the maps of every position it passed."""
    worker, served = maps.MapWorker(), []
    futures: list[Future[list[maps.Points]]] = []

    def fail(_: maps.MapWorker) -> None:
        served.append([not future.done() for future in futures])
        raise OSError("no process here")

    monkeypatch.setattr(maps.MapWorker, "_ensure_process", fail)
    with worker._lock:  # somebody else's map is being made
        futures += [worker.submit([cloud(4, 2)]) for _ in range(3)]
    for future in futures:
        with pytest.raises(RuntimeError, match="map process ended"):
            future.result(timeout=60)
    assert served == [[True, True, True], [True, True, False], [True, False, False]]


@pytest.mark.slow
def test_the_map_process_survives_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(AT_ONCE), prepend=os.pathsep)
    worker, clouds = maps.MapWorker(), [cloud(60, 8), cloud(40, 3)]
    for _ in range(2):
        found = worker.submit(clouds).result(timeout=600)
        assert all(np.array_equal(one, whole[:, :2]) for one, whole in zip(found, clouds, strict=True))
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait()
    worker.close()


@pytest.mark.slow
def test_a_worker_that_is_let_go_takes_its_process_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(AT_ONCE), prepend=os.pathsep)
    worker = maps.MapWorker()
    process = worker._ensure_process()
    worker.start_when_quiet()  # what waits for a quiet moment keeps nothing alive for long
    assert process.poll() is None
    del worker
    gc.collect()
    assert process.wait(timeout=60) != 0
    assert process.stdin is not None
    assert process.stdin.closed


@pytest.mark.slow
def test_the_map_process_draws_umaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.sched_setscheduler = lambda *_: None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # else it has its turn last
    worker = maps.MapWorker()
    found = worker.submit([cloud(60, 8), cloud(40, 3)]).result(timeout=600)
    assert [flat.shape for flat in found] == [(60, 2), (40, 2)]
    worker.close()
