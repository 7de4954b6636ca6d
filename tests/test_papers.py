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


def test_every_run_of_the_language_results_is_planned():
    """Collecting keeps the planned runs only."""
    pytest.importorskip("transformers")
    plans = load("language").plans(1e-3)
    planned = {f"{name}-s{seed}" for name, plan in plans.items() for seed in plan.seeds}
    assert {run["run"] for run in load("_summary").runs_of("language")} <= {"pretrained", *planned}


@pytest.mark.parametrize(
    ("settings", "adapters"),
    [({"top": 5}, False), ({"top": 5}, True), ({"top": None, "share": 0.75, "strength": 3}, False)],
)
def test_replay_of_fixed_shapes_is_the_librarys(settings, adapters):
    """Loss and gradients of an update, with texts that end early and two kinds of starts."""
    pytest.importorskip("peft" if adapters else "transformers")
    import torch

    from holdfast import LoRA, Recipe, Run, SelfReplay, pad_collate
    from small import make_llama, make_tokenizer, noisy

    replaying, training = load("_lm_replay"), load("_lm_train")
    model, tokenizer = make_llama(scale=0.3).double(), make_tokenizer()
    tokenizer.chat_template = "the user says {{ messages[0]['content'] }} ."
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(7, 30, (n,), generator=generator).tolist() for n in (9, 12, 7, 20)]
    samples = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]
    recall = SelfReplay(length=24, fewest=1, **settings)
    recipe = Recipe(recall=recall, **({"trainable": LoRA(r=4)} if adapters else {}))
    run = Run(
        recipe, model, samples, lr=1e-3, collate=pad_collate, tokenizer=tokenizer, visits=64,
        cache=False, progress=False,
    )  # fmt: skip
    assert len({*run.recall.pool.starts.tolist()}) == 2
    assert run.recall.pool.counts.min() < run.recall.pool.rest.shape[1] == 23
    tuned = noisy(run.model)  # now it differs from the base
    run.model.load_state_dict(tuned.state_dict())
    run.model.train()
    trained = [p for p in run.model.parameters() if p.requires_grad]

    batch = training._batch(samples, [1.0] * 4)
    replay = replaying.Replay(run, torch.device("cpu"))
    replay.add(batch, 3)
    ours = replay(batch)
    run.recall.plan(run.model, 3, 4, 4, micro_batches=1)
    with run.recall.beside(run.model) as recalled:
        theirs = recalled()
    assert ours.item() > 0.01
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for mine, library in zip(
        torch.autograd.grad(ours, trained), torch.autograd.grad(theirs, trained), strict=True
    ):
        assert torch.allclose(mine, library, rtol=1e-4, atol=1e-6)

    # Beside the target's loss: what all pieces leave is the gradient of the sum.
    run.recall.plan(run.model, 3, 4, 4, micro_batches=1)
    whole = run.loss(pad_collate(samples), float(batch["targets"]), 3)
    expected = torch.autograd.grad(whole, trained)
    total = training.loss_of(run.model, replay)(batch)
    total.backward()
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)
    for p, gradient in zip(trained, expected, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-4, atol=1e-6)


def test_better_points_are_better_in_every_field_and_of_another_recipe():
    summary = load("_summary")
    runs = [
        {"recipe": recipe, "points": {alpha: {"a_nll": a, "kept": kept, "kept_se": 9.0}}}
        for recipe, alpha, a, kept in (
            ("holdfast", "1", 0.6, 70.0), ("holdfast", "0.5", 0.5, 80.0), ("plain", "1", 0.5, 71.0),
            ("plain", "1", 0.6, 73.0), ("plain", "0.5", 0.7, 75.0), ("lora", "1", 0.5, 70.0),
        )
    ]  # fmt: skip
    points = summary.mean_points(runs)
    assert points["plain", "1"].seeds == 2
    assert points["plain", "1"].means == pytest.approx({"a_nll": 0.55, "kept": 72, "kept_se": 9})
    assert points["plain", "1"].errors["kept"] == pytest.approx(1.0)
    fields = ("a_nll", "kept")
    assert summary.better_points(points, ("holdfast", "1"), fields) == ["plain@1"]
    assert summary.better_points(points, ("holdfast", "0.5"), fields) == []
    text = summary.comparison(points, fields)
    assert "| plain | 1 | 2 | 0.5500 ± 0.0500 | 72.00 ± 1.00 |" in text
    assert "α = 1: 1 points are better in a_nll, kept: plain@1" in text
    assert "kept_se" not in text


def test_a_mean_over_tasks_needs_all_of_them():
    summary = load("_summary")
    runs = [
        {"recipe": "plain", "seed": seed, "task": task, "points": {"1": {"target": target}}}
        for seed, task, target in ((0, "a", 1.0), (0, "b", 3.0), (1, "a", 9.0))
    ]
    runs.append({"recipe": "pretrained", "points": {"0": {"kept": 1.0}}})
    (mean,) = summary.over_tasks(runs, ["target"])
    assert mean == {"recipe": "plain", "points": {"1": {"target": 2.0}}}


def test_a_graph_can_number_the_updates_of_variations():
    """The number of an update is a tensor there, and gives the same variation."""
    import torch

    from holdfast.methods._varied import varied

    loop = load("_loop")
    ids = torch.arange(1, 41).view(2, 20)
    batches = [*loop.counted([{"x": ids}] * 3, torch.device("cpu"))]
    seen = set()
    for number, batch in enumerate(batches, 1):
        theirs = varied({"input_ids": ids}, 5, batch["update"])["input_ids"]
        assert torch.equal(theirs, varied({"input_ids": ids}, 5, number)["input_ids"])
        seen.add(tuple(theirs.flatten().tolist()))
    assert len(seen) == 3


def test_the_last_images_of_each_class_are_split_off():
    import torch

    images = load("_images")
    labels = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    first, last = images.split(images.Images(torch.arange(7), labels), 2)
    assert first.pixels.tolist() == [0, 1, 3]
    assert last.pixels.tolist() == [2, 4, 5, 6]
