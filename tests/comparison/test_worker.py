"""One run of a plan, for every kind of model."""

import json

import pytest

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.tiny import save_bert, save_images, save_vit  # noqa: E402
from holdfast.comparison.plan import Measuring, Plan, Training  # noqa: E402
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


def test_a_comparison_of_images(tmp_path):
    data, test = save_images(tmp_path / "train"), save_images(tmp_path / "test", n=2)
    (result,) = worked(tmp_path, save_vit(tmp_path / "vit"), data, test, "lp-ft+recadam")
    assert (result.target.metric, result.target.n) == ("accuracy", 6)
    assert result.target.after > 0.9


def test_a_target_with_a_class_that_training_did_not_have(tmp_path):
    data = write(tmp_path / "d.jsonl", CLASSES)
    target = write(tmp_path / "t.jsonl", [*CLASSES, {"text": "a log", "label": "log"}])
    with pytest.raises(ValueError, match="'log' is not one of the model's 2 classes: cat, dog"):
        worked(tmp_path, save_bert(tmp_path / "bert"), data, target, "standard")
