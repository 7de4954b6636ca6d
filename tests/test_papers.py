"""The scripts that repeat the papers' experiments: job sharing, results, summaries."""

import doctest
import importlib
import json
import os
import subprocess
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


def test_a_process_waits_for_the_runs_that_others_have_claimed(tmp_path, monkeypatch):
    jobs, waited = load("_jobs"), []
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name, process in {"a": os.getppid(), "b": os.getppid(), "d": gone.pid}.items():
        (tmp_path / f"{name}.claim").write_text(str(process))
    (tmp_path / "b.error").touch()  # another process has tried

    def sleep(seconds):
        waited.append(seconds)
        (tmp_path / "a.json").touch()

    monkeypatch.setattr(jobs.time, "sleep", sleep)
    jobs.wait_for_others("abcd", tmp_path)  # c is nobody's, and the process of d has ended
    assert len(waited) == 1


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


def test_a_plan_has_a_learning_rate_or_a_multiple_of_its_recipes_default():
    from holdfast import AdamWUpdate, Recipe

    learning_rate, recipe = load("_rates").learning_rate, Recipe(update=AdamWUpdate(lr=2e-3))
    assert learning_rate(recipe, None, None, None) is None
    assert learning_rate(recipe, None, 0.1, None) == 0.1
    assert learning_rate(recipe, None, None, 0.5) == 1e-3
    with pytest.raises(ValueError, match=r"a plan has lr 0\.1 and times 2: give one of them"):
        learning_rate(recipe, None, 0.1, 2)


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

    assert doctest.testmod(training).failed == 0
    batch = training._batch(samples, [1.0] * 4)
    replay = replaying.Replay(run, torch.device("cpu"))
    replay.add(batch, 3)
    ours = replay(batch)
    run.recall.plan(run.model, 3, 4, micro_batches=1)
    with run.recall.beside(run.model) as recalled:
        theirs = recalled()
    assert ours.item() > 0.01
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for mine, library in zip(
        torch.autograd.grad(ours, trained), torch.autograd.grad(theirs, trained), strict=True
    ):
        assert torch.allclose(mine, library, rtol=1e-4, atol=1e-6)

    # Beside the target's loss: what all pieces leave is the gradient of the sum.
    run.recall.plan(run.model, 3, 4, micro_batches=1)
    whole = run.loss(pad_collate(samples), float(batch["targets"]), 3)
    expected = torch.autograd.grad(whole, trained)
    total = training.loss_of(run.model, replay)(batch)
    total.backward()
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)
    for p, gradient in zip(trained, expected, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-4, atol=1e-6)


def run_of(recipe, alpha="1", *, settings=None, **figures):
    return {"recipe": recipe, "settings": settings, "points": {alpha: figures}}


REPLAY = {"recall": {"name": "self-replay", "strength": 1.0}}


def test_better_points_are_better_in_every_field_and_of_another_recipe():
    summary = load("_summary")
    runs = [
        run_of(recipe, alpha, settings=settings, a_nll=a, kept=kept)
        for recipe, alpha, settings, a, kept in (
            ("holdfast", "1", REPLAY, 0.6, 70.0), ("holdfast", "0.5", REPLAY, 0.5, 80.0),
            ("plain", "1", {}, 0.5, 71.0), ("plain", "1", {}, 0.6, 73.0),
            ("plain", "0.5", {}, 0.7, 75.0), ("lora", "1", {}, 0.5, 70.0),
            ("flow+self-replay", "1", REPLAY, 0.4, 90.0), ("pretrained", "1", None, 2.0, 99.0),
        )
    ]  # fmt: skip
    points = summary.mean_points([*runs, run_of("pretrained", "0", kept=99.0)])
    assert points["plain", "1"].seeds == 2
    assert points["plain", "1"].means == pytest.approx({"a_nll": 0.55, "kept": 72})
    assert points["plain", "1"].errors["kept"] == pytest.approx(1.0)
    fields = ("a_nll", "kept")
    others, kin = summary.better_points(points, ("holdfast", "1"), fields)
    assert others == ["plain@1"]
    assert kin == ["flow+self-replay@1 (one seed)"]
    assert summary.better_points(points, ("holdfast", "0.5"), fields) == ([], kin)
    text = summary.comparison(points, fields)
    assert "| plain | 1 | 2 | 0.5500 ± 0.0500 | 72.00 ± 1.00 |" in text
    assert "α = 1: 1 point is better in a_nll, kept: plain@1. With the same recall: flow" in text
    assert "α = 0.5: 0 points are better in a_nll, kept. With" in text


def test_errors_combine_seeds_and_rows_of_a_test():
    summary = load("_summary")
    runs = [run_of("plain", kept=kept, kept_se=2.0, other=1.0) for kept in (71.0, 74.0)]
    (point,) = summary.mean_points(runs).values()
    assert point.errors["kept"] == pytest.approx((1.5**2 + 2.0**2) ** 0.5)
    (alone,) = summary.mean_points(runs[:1]).values()
    assert alone.errors["kept"] == 2.0
    text = summary.comparison(summary.mean_points(runs[:1]), ["kept"])
    assert "| plain | 1 | 1 | 71.00 ± 2.00 | 1.0000 |" in text
    assert "kept_se" not in text
    assert "All points share these rows" in text


def test_the_divergence_on_texts_of_the_training_is_marked():
    summary = load("_summary")
    own = {"recall": {"name": "self-replay", "texts": "mine.txt"}}
    settings = {"holdfast": REPLAY, "own-texts": own, "plain": {}, "pretrained": None}
    runs = [
        run_of(name, settings=found, a_nll=1.0, kl_context_free=0.5)
        for name, found in settings.items()
    ]
    assert [name for name, found in settings.items() if summary.rehearses(found)] == ["holdfast"]
    text = summary.comparison(summary.mean_points(runs), ["a_nll"])
    assert text.count("0.5000 †") == 1
    assert "is a training signal, no evidence" in text
    assert "†" not in summary.comparison(summary.mean_points(runs[1:]), ["a_nll"])


def test_goals_of_holdfast_are_told_one_by_one():
    summary = load("_summary")

    def run(name, settings, gsm8k, wikitext, mbpp, piqa):
        figures = {"gsm8k_nll": gsm8k, "wikitext_nll": wikitext, "mbpp_nll": mbpp}
        return run_of(name, settings=settings, **figures, piqa=piqa, piqa_se=0.02)

    before = run("pretrained", None, 1.4, 3.0, 1.4, 0.64)
    plain = [run("slow", {}, 0.61, 3.1, 1.5, 0.6), run("fast", {}, 0.60, 3.3, 1.6, 0.6)]
    good = run("holdfast", REPLAY, 0.59, 3.02, 1.39, 0.63)
    text = summary.goals(summary.mean_points([before, *plain, good]), ["piqa"])
    assert "GSM8K at most 0.6000" in text
    assert "| 0.5900 | met" in text
    assert "WikiText-2 at most 1 % above 3.0000" in text
    assert "| 3.0200 (+0.7 %) | met" in text
    assert text.count("| met |") == 5
    bad = run("holdfast", REPLAY, 0.62, 3.12, 1.6, 0.60)
    text = summary.goals(summary.mean_points([before, *plain, bad]), ["piqa"])
    assert "piqa -4.0 points (± 2.0) | **missed**" in text
    assert "slow@1 (one seed) | **missed**" in text
    assert text.count("**missed**") == 5
    assert "need runs of holdfast" in summary.goals(summary.mean_points([before]), ["piqa"])


def test_runs_may_have_fewer_points_of_wise_ft_than_others(monkeypatch):
    """Earlier runs were tested at fewer α."""
    summary = load("_summary")

    def run(recipe, seed, *alphas):
        figures = {"gsm8k_nll": 0.6 + seed, "wikitext_nll": 3.0}
        return {"recipe": recipe, "seed": seed, "points": dict.fromkeys(alphas, figures)}

    runs = [run("plain", 0, "1", "0.5"), run("plain", 1, "1", "0.5", "0.3")]
    runs.append(run("pretrained", 0, "1"))
    monkeypatch.setattr(summary, "read", lambda name: {"runs": runs})
    medians = summary.Medians("language")
    assert [point.seeds for point in medians.path("plain")] == [2, 2]
    assert medians.point("plain@0.3").seeds == 1
    points = summary.mean_points(runs)
    assert {a: points["plain", a].seeds for a in ("1", "0.5", "0.3")} == {
        "1": 2,
        "0.5": 2,
        "0.3": 1,
    }
    tasks = [{**run, "task": task, "seed": 0} for task, run in zip("ab", runs[:2], strict=True)]
    (mean,) = summary.over_tasks(tasks, ["gsm8k_nll"])
    assert mean["points"] == {a: {"gsm8k_nll": pytest.approx(1.1)} for a in ("1", "0.5")}


def test_a_mean_over_tasks_needs_all_of_them():
    summary = load("_summary")
    runs = [
        {"recipe": "plain", "seed": seed, "task": task, "settings": {},
         "points": {"1": {"target": target}}}
        for seed, task, target in ((0, "a", 1.0), (0, "b", 3.0), (1, "a", 9.0))
    ]  # fmt: skip
    pretrained = {"recipe": "pretrained", "points": {"0": {"kept": 1.0}}}
    assert summary.over_tasks([*runs, pretrained], ["target"]) == [
        pretrained, {"recipe": "plain", "settings": {}, "points": {"1": {"target": 2.0}}}
    ]  # fmt: skip


def test_the_default_learning_rate_is_the_one_that_the_rule_chose():
    from holdfast.methods.auto import default_lr
    from holdfast.stages import TrainingSize

    rule = load("_epochs")
    assert doctest.testmod(rule).failed == 0
    record = json.loads((PAPERS / "results" / "language_epochs.json").read_text())
    root, power = rule.chosen(rule.losses({run["run"]: run for run in record["runs"]}))
    for _, samples, epochs in (*rule.CASES, ("", 9000, 4), ("", 1000, 2)):
        wanted = rule.LR * rule.factor_of(samples, epochs, root, power)
        found = default_lr(135_000_000, size=TrainingSize(samples, epochs))
        assert found == pytest.approx(wanted, rel=0.05)  # it has two digits


def test_the_learning_rate_of_a_larger_model_is_the_one_that_the_rule_chose():
    from holdfast.methods.auto import default_lr
    from holdfast.stages import TrainingSize

    rule = load("_sizes")
    assert doctest.testmod(rule).failed == 0
    record = json.loads((PAPERS / "results" / "language_sizes.json").read_text())
    done = {run["run"]: run for run in record["runs"]}
    rate = rule.chosen({case: rule.figures(done, case) for case in rule.CASES})
    for case in rule.CASES:
        found = default_lr(494_032_768, size=TrainingSize(*case[1:]))
        assert found == pytest.approx(rule.lr_of(case, rate), rel=0.05)  # it has two digits
        assert done[rule.name_of(case, rate)]["lr"] == pytest.approx(rule.lr_of(case, rate))


def test_tables_share_no_runs():
    """Data for choosing settings must not be reported."""
    pytest.importorskip("transformers")
    from types import SimpleNamespace as Args

    vision, encoders, rates = load("vision"), load("encoders"), load("language_rates")
    names = [
        set(vision.jobs_of(Args(args=Args(table=table), run=print, probe=print)))
        for table in vision.TABLES
    ]
    lab = Args(pretrained=print, tune=print)
    names += [set(encoders.jobs_of(lab, t)) for t in (encoders.reported(), encoders.choices())]
    assert sum(map(len, names)) == len(set.union(*names))
    assert {run["run"] for run in load("_summary").runs_of("vision")} <= names[0]
    language = load("language").plans(1e-3)
    assert language["self-replay-share-1"].lr == 0.5
    assert language["lora+self-replay"].lr == 3.0
    assert len(rates.plans()) == 13


def test_settings_are_chosen_on_other_images_than_those_of_the_table():
    images, vision = load("_images"), load("vision")

    def rows(per_class):
        return [(label, bytes([n])) for n in range(per_class) for label in range(2)]

    sets = {"train": rows(20), "test": rows(7), "imagenet": rows(5)}
    choose, table, methods = (
        images.chosen(sets, vision.PARTS[name]) for name in ("choose", "holdfast", "methods")
    )
    assert choose["imagenet"] == [(0, b"\0"), (1, b"\0")]
    assert table["imagenet"] == [(n, file) for n in (0, 1) for file in (b"\3", b"\4")]
    assert (len(choose["train"]), len(choose["test"])) == (32, 8)
    assert not {*choose["train"]} & {*choose["test"]}
    assert {*choose["train"], *choose["test"]} == {*table["train"]} == {*sets["train"]}
    assert {name: {*some} for name, some in methods.items()} == {n: {*s} for n, s in sets.items()}
    with pytest.raises(ValueError, match="imagenet must have 5 images, but the tars have 3: pass"):
        images.chosen(sets | {"imagenet": rows(3)}, vision.PARTS["choose"])


def test_the_numbers_of_images_are_those_that_runs_recorded():
    vision = load("vision")
    run = {"images": {"train": 1632, "test": 408, "imagenet": 1000}}
    assert "(1000 validation images) to Flowers102 (1632 training, 408" in vision.data_of([run])
    assert "(5000 validation" in vision.data_of([{}])
    with pytest.raises(ValueError, match="needs runs with the same images"):
        vision.data_of([run, {}])
    with pytest.raises(ValueError, match="--runs has none"):
        vision.data_of([])


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
