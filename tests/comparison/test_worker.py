"""One run of a plan, for every kind of model."""

import gc
import json
import weakref
from dataclasses import replace

import pytest

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.small_plan import make_plan  # noqa: E402
from comparison.tiny import save_bert, save_images, save_vit  # noqa: E402
from holdfast.comparison.plan import Measuring, Plan, Training  # noqa: E402
from holdfast.comparison.rates import with_rates  # noqa: E402
from holdfast.comparison.results import Results, RunResult  # noqa: E402
from holdfast.comparison.worker import Worker  # noqa: E402

CLASSES = [{"text": "the cat sat", "label": "cat"}, {"text": "a dog ran", "label": "dog"}] * 6
NUMBERS = [{"text": "two plus two is four", "label": 4.5}, {"text": "a dog", "label": -1}] * 6
PAIRS = [
    {"sentence1": "the cat", "sentence2": "a cat", "score": 4.0},
    {"sentence1": "the cat", "sentence2": "two plus two", "score": 1.0},
    {"sentence1": "a dog ran", "sentence2": "the dog sat", "score": 3.0},
] * 3


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def worked(tmp_path, source, data, target, *recipes, **more):
    plan = Plan(
        model=source, data=data, target=target, recipes=recipes, seeds=(0,),
        training=Training(lr=0.02, max_updates=25, batch_size=4, max_length=16), **more,
    )  # fmt: skip
    worker = Worker(plan, tmp_path / "runs")
    return [worker(spec) for spec in plan.runs]


def test_a_comparison_of_classes_that_are_new(tmp_path):
    data = write(tmp_path / "d.jsonl", CLASSES)
    pairs = write(tmp_path / "pairs.jsonl", PAIRS)
    results = worked(
        tmp_path, save_bert(tmp_path / "bert"), data, data, "standard", "lp-ft+flow", "lora",
        measuring=Measuring(similarity=(pairs,)),
    )  # fmt: skip
    befores = {result.target.before for result in results}
    assert befores == {0.5}  # the same head for all
    for result in results:
        assert (result.target.metric, result.target.after) == ("accuracy", 1.0)
        assert result.kl == {}
        (test,) = result.retained
        assert (test.name, test.metric) == ("pairs", "spearman")


def test_a_comparison_of_numbers(tmp_path):
    data = write(tmp_path / "d.jsonl", NUMBERS)
    (result,) = worked(tmp_path, save_bert(tmp_path / "bert"), data, data, "standard")
    assert (result.target.metric, result.target.lower_is_better) == ("mse", True)
    assert result.target.before > 9
    assert result.target.after < 1


def test_a_new_head_is_no_drift(tmp_path):
    data = write(tmp_path / "d.jsonl", CLASSES)
    body, head = worked(
        tmp_path, save_bert(tmp_path / "bert"), data, data, "standard", "linear-probe"
    )
    assert body.drift.relative > 0
    assert (head.drift.distance, head.drift.relative) == (0.0, 0.0)
    (curve,) = (curve for curve in head.curves if curve.name == "distance")
    assert set(curve.values) == {0.0}


def test_a_comparison_of_images(tmp_path):
    data, test = save_images(tmp_path / "train"), save_images(tmp_path / "test", n=2)
    (result,) = worked(tmp_path, save_vit(tmp_path / "vit"), data, test, "lp-ft+recadam")
    assert (result.target.metric, result.target.n) == ("accuracy", 6)
    assert result.target.after > 0.9


def test_early_stopping_by_rows_of_their_own(tmp_path):
    write(tmp_path / "wrong.jsonl", [{"prompt": "Two and two", "completion": "none at all"}])
    plan = make_plan(tmp_path, recipes=("standard",), seeds=(0,), updates=24)
    stopping = replace(
        plan.training, validation=str(tmp_path / "wrong.jsonl"), patience=2, evaluate_every=2
    )
    stopped, whole = replace(plan, training=stopping), replace(plan, training=plan.training)
    (one,), (other,) = (
        [Worker(p, tmp_path / "runs")(spec) for spec in p.runs] for p in (stopped, whole)
    )
    assert one.id != other.id
    curves = {curve.name: curve for curve in one.curves}
    loss = curves["validation/nll"]
    last = loss.steps[loss.values.index(min(loss.values[1:]))] + 2 * 2
    assert loss.steps[-1] == curves["loss"].steps[-1] == last < 24
    assert one.drift.distance < other.drift.distance
    with pytest.raises(ValueError, match=r"validation and target are both .*dev.jsonl"):
        replace(plan, training=replace(stopping, validation=plan.target))
    write(tmp_path / "wrong.jsonl", [{"prompt": "Two and two", "completion": "other rows"}])
    assert replace(stopped).runs[0].id != one.id


def test_a_result_says_what_auto_chose(tmp_path):
    plan = make_plan(tmp_path, recipes=("standard", "holdfast"), seeds=(0,), updates=2)
    plan = with_rates(replace(plan, training=replace(plan.training, lr=None)))
    worker = Worker(plan, tmp_path / "runs")
    standard, ours = results = [worker(spec) for spec in plan.runs]
    assert standard.resolved == {**standard.settings, "update": standard.resolved["update"]}
    assert ours.settings["recall"] == {"name": "auto", "strength": 1.0}
    assert ours.resolved["recall"]["name"] == "self-replay"
    assert [run.resolved["update"]["lr"] for run in results] == [4.5e-4, 4.5e-4]
    assert [run.trained_on for run in results] == [(), ("context-free",)]
    shown = Results(tuple(results)).to_markdown()
    assert "holdfast was resolved to self-replay." in shown
    assert "† The KL was a training signal of this recipe: it is no evidence" in shown
    assert RunResult.from_json(ours.to_json()) == ours


def test_data_of_an_old_task(tmp_path):
    plan = make_plan(tmp_path, recipes=("rehearsal",), seeds=(0,), updates=2)
    with pytest.raises(ValueError, match="--old-data on the command line"):
        Worker(plan, tmp_path / "runs")(plan.runs[0])
    with_old = replace(plan, old_data=plan.measuring.text[0])
    assert with_old.runs[0].id != plan.runs[0].id
    assert Worker(with_old, tmp_path / "runs")(with_old.runs[0]).target.after > 0


def test_a_run_of_another_version_is_another_run(tmp_path, monkeypatch):
    plan = make_plan(tmp_path, recipes=("standard", "holdfast"), seeds=(0,))
    monkeypatch.setattr("holdfast.comparison.plan.__version__", "9.9")
    assert not {spec.id for spec in plan.runs} & {spec.id for spec in replace(plan).runs}


def test_a_target_with_a_class_that_training_did_not_have(tmp_path):
    data = write(tmp_path / "d.jsonl", CLASSES)
    target = write(tmp_path / "t.jsonl", [*CLASSES, {"text": "a log", "label": "log"}])
    with pytest.raises(ValueError, match="'log' is not one of the model's 2 classes: cat, dog"):
        worked(tmp_path, save_bert(tmp_path / "bert"), data, target, "standard")


def test_a_run_begins_without_the_weights_of_the_run_before(tmp_path, monkeypatch):
    plan = make_plan(tmp_path, recipes=("recadam",), seeds=(0, 1, 2), updates=1)
    worker, trained, left = Worker(plan, tmp_path / "runs"), [], []
    train = worker.train

    def watched(*args, **options):
        left.extend(model for model in trained if model() is not None)
        model, *rest = train(*args, **options)
        trained.append(weakref.ref(model))
        return model, *rest

    monkeypatch.setattr(worker, "train", watched)
    gc.disable()  # what cycles keep is freed only if the worker asks for it
    try:
        for spec in plan.runs:
            worker(spec)
    finally:
        gc.enable()
    assert len(trained) == 3
    assert not left
