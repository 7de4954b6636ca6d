"""The scripts that repeat the papers' experiments: job sharing, results, summaries."""

import importlib
import json
import sys
from pathlib import Path

import pytest

PAPERS = Path(__file__).parents[1] / "benchmarks" / "papers"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PAPERS), str(PAPERS.parent), *sys.path])


def load(name):
    return importlib.import_module(name)


def test_all_runs_are_made_once_and_a_failed_one_stops_none(tmp_path, capsys):
    jobs, made = load("_jobs"), []

    def job(name):
        def run():
            made.append(name)
            if name == "b":
                raise RuntimeError("no")
            return {"figure": 1.0}

        return run

    all_of_them = {name: job(name) for name in "abcd"}
    assert jobs.work(all_of_them, tmp_path, seconds=60) == ["b"]
    assert jobs.work(all_of_them, tmp_path, seconds=60) == []  # b is claimed, the others are done
    assert made == list("abcd")
    assert jobs.failed(tmp_path, all_of_them) == ["b"]
    assert set(jobs.records(tmp_path)) == set("acd")


def test_results_can_be_put_back_and_name_what_is_missing(tmp_path, capsys):
    jobs = load("_jobs")
    jobs.work({"a": lambda: {"figure": 1.5}}, tmp_path / "runs")
    jobs.collect(tmp_path / "runs", ["a", "b"], tmp_path / "all.json", {"about": "a test"})
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["missing"] == ["b"]
    assert record["runs"][0]["figure"] == 1.5
    jobs.restore(tmp_path / "all.json", tmp_path / "again")
    assert jobs.records(tmp_path / "again") == jobs.records(tmp_path / "runs")


def test_what_is_kept_at_a_target_is_the_best_of_the_path():
    summary = load("_summary")
    path = [
        summary.Point("a", 1, {"target": target, "imagenet": kept})
        for target, kept in ((94.0, 10.0), (95.0, 50.0), (90.0, 70.0))
    ]
    # Between 95 and 90 the path passes (92, 62); it never reaches 96.
    assert summary.kept_at(path, "target", 92.0, "imagenet") == pytest.approx(62.0)
    assert summary.kept_at(path, "target", 96.0, "imagenet") is None
    losses = [summary.Point("a", 1, {"x_nll": x, "y_nll": y}) for x, y in ((0.6, 3.6), (1.4, 3.0))]
    assert summary.kept_at(losses, "x_nll", 0.8, "y_nll") == pytest.approx(3.45)


def test_glues_metrics_are_sklearns():
    np = pytest.importorskip("numpy")
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    score = load("_glue").score
    rng = np.random.default_rng(0)
    said, labels = rng.normal(size=(50, 2)), rng.integers(0, 2, 50)
    chosen = said.argmax(1)
    assert score("matthews", said, labels) == pytest.approx(
        metrics.matthews_corrcoef(labels, chosen)
    )
    assert score("f1", said, labels) == pytest.approx(metrics.f1_score(labels, chosen))
    assert score("accuracy", said, labels) == metrics.accuracy_score(labels, chosen)
