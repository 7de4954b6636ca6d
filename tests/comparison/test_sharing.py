"""Runs that differ only in merging share one training, with the results of separate trainings."""

import json
import multiprocessing
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.small_plan import make_plan, what_must_agree
from holdfast.comparison.results import Results
from holdfast.comparison.scheduler import compare, run_group
from holdfast.comparison.sharing import trainings
from holdfast.comparison.worker import Worker
from holdfast.hosts import job
from holdfast.io.outputs import claim
from holdfast.io.storage import Place
from holdfast.recipe import Recipe
from holdfast.registry import methods
from holdfast.run import Run
from matrices import sampled

MERGINGS = [
    entry.name
    for entry in methods()
    if entry.stage == "merging" and entry.name != "keep" and entry.cls.least_models == 1
]
#: Of a language model: a stage 1 with adapters or hooks, and a recall that acts after merging.
TRAINED = ["lora", "hft", "recadam+flow", "ewc", "self-replay", "mixout", "osft"]


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def counted(monkeypatch):
    """The recipes that were trained."""
    found = []
    train = job.train

    def counting(model, recipe, *more, **options):
        found.append(recipe)
        return train(model, recipe, *more, **options)

    monkeypatch.setattr("holdfast.comparison.worker.train", counting)
    return found


def agreeing(results):
    found = what_must_agree(Results(runs=tuple(results)).to_json())["runs"]
    return sorted(found, key=lambda run: run["id"])


def apart(plan, folder):
    """The results of all runs, each trained alone."""
    worker = Worker(plan, folder)
    return [worker(spec) for spec in plan.runs]


def labels(groups):
    return [[f"{spec.label} {spec.seed}" for spec in group] for group in groups]


def test_runs_are_grouped_by_training(tmp_path):
    recipes = ("standard", "recadam", "wise-ft", "lines", "recadam+wise-ft")
    plan = make_plan(tmp_path, recipes=recipes)
    assert labels(trainings(plan.runs)) == [
        ["standard 0", "lines 0", "wise-ft 0"], ["recadam 0", "recadam+wise-ft 0"],
        ["standard 1", "lines 1", "wise-ft 1"], ["recadam 1", "recadam+wise-ft 1"],
    ]  # fmt: skip
    grid = {"lr": (1e-3, 2e-3), "merging.alpha": (0.3, 0.5)}
    swept = make_plan(tmp_path, recipes=("recadam+wise-ft",), seeds=(0,))
    groups = trainings(replace(swept, grid=grid).runs)
    assert [[s.values["merging.alpha"] for s in group] for group in groups] == [[0.5, 0.3]] * 2
    assert [{s.training.lr for s in group} for group in groups] == [{1e-3}, {2e-3}]


def test_a_recipe_that_depends_on_the_model_is_trained_alone(tmp_path):
    plan = make_plan(tmp_path, recipes=("holdfast", "holdfast+wise-ft"), seeds=(0,))
    assert [len(group) for group in trainings(plan.runs)] == [1, 1]


def test_all_mergings_of_one_training_equal_separate_trainings(tmp_path, counted):
    recipes = ("standard", *MERGINGS)
    plan = make_plan(tmp_path, recipes=recipes, seeds=(0,), updates=2)
    (group,) = trainings(plan.runs)
    ended = run_group(plan, group, Place.at(tmp_path / "together"))
    assert [error for _, error in ended] == [None] * len(recipes)
    assert len(counted) == 1
    together = [result for result, _ in ended]
    assert agreeing(together) == agreeing(apart(plan, tmp_path / "apart"))
    assert {result.shared for result in together} == {tuple(spec.label for spec in group)}
    assert len({result.target.after for result in together}) == len(recipes)
    left = {path.name for path in (tmp_path / "together" / "runs").glob("*/*")}
    assert left == {"result.json"}


@pytest.mark.parametrize("name", sampled(TRAINED, ["lora"]))
def test_every_kind_of_training_can_be_shared(name, tmp_path, counted):
    if name == "lora":
        pytest.importorskip("peft", reason="the peft extra is not installed")
    plan = make_plan(tmp_path, recipes=(name, f"{name}+wise-ft"), seeds=(0,), updates=2)
    (group,) = trainings(plan.runs)
    together = [result for result, _ in run_group(plan, group, Place.at(tmp_path / "together"))]
    assert len(counted) == 1
    assert agreeing(together) == agreeing(apart(plan, tmp_path / "apart"))


def test_a_run_that_cannot_share_is_done_alone(tmp_path, monkeypatch, counted, caplog):
    plan = make_plan(tmp_path, recipes=("standard", "wise-ft", "lines"), seeds=(0,), updates=2)
    (group,) = trainings(plan.runs)
    assert group[1].recipe == "lines"
    copied = iter([None, MemoryError("no memory for a copy")])

    def finished_copy(run, merging, original=Run.finished_copy):
        if error := next(copied):
            raise error
        return original(run, merging)

    monkeypatch.setattr(Run, "finished_copy", finished_copy)
    results, errors = zip(*run_group(plan, group, Place.at(tmp_path / "out")), strict=True)
    assert errors == (None, None, None)
    assert [recipe.name for recipe in counted] == ["wise-ft", "lines"]
    assert [bool(result.shared) for result in results] == [True, False, True]
    assert "lines cannot share the training of another run (MemoryError: no mem" in caplog.text
    assert agreeing(results) == agreeing(apart(plan, tmp_path / "apart"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A plan of two runs that share a training, and their results apart."""
    folder = tmp_path_factory.mktemp("two")
    plan = make_plan(folder, recipes=("standard", "wise-ft"), seeds=(0,), updates=4)
    plan = replace(plan, training=replace(plan.training, save_seconds=0.0))
    return plan, agreeing(apart(plan, folder / "apart"))


class Killed(BaseException):
    """As if the process had been killed."""


WHEN = ["training", "after the first result"]


@pytest.mark.parametrize("when", sampled(WHEN, WHEN[1:]))
@pytest.mark.usefixtures("forked_workers")
def test_a_killed_group_goes_on(when, two, tmp_path):
    plan, expected = two
    (group,) = trainings(plan.runs)
    out = Place.at(tmp_path / "out")

    def kill(number, doing, done, total):
        if (doing, done) == (("training", 2) if when == "training" else ("testing", 0)):
            raise Killed

    with pytest.raises(Killed), claim(out, "compare"):
        run_group(plan, group, out, progress=kill)
    found = {path.parent.name for path in tmp_path.glob("out/runs/*/result.json")}
    assert found == (set() if when == "training" else {group[0].id})
    told = []
    results = compare(plan, tmp_path / "out", on_finished=lambda spec, *_: told.append(spec.id))
    assert {*told} == {spec.id for spec in group} - found
    assert agreeing(results.runs) == expected
    assert {p.name for p in tmp_path.glob("out/runs/*/*")} == {"result.json"}


@pytest.mark.usefixtures("forked_workers")
def test_a_run_is_reported_when_its_result_is_written(two, tmp_path):
    plan, expected = two
    told = []

    def finished(spec, result, error):
        assert (tmp_path / "runs" / spec.id / "result.json").exists()
        told.append(("done", spec.recipe))

    def under_way(spec, doing, *_):
        if doing == "testing":
            told.append((doing, spec.recipe))

    results = compare(plan, tmp_path, on_finished=finished, on_progress=under_way)
    assert told == [("done", "standard"), ("testing", "wise-ft"), ("done", "wise-ft")]
    assert agreeing(results.runs) == expected


def test_a_process_that_dies_after_a_result_tells_it_once(two, tmp_path):
    plan, expected = two
    told, killed = [], []

    def finished(spec, result, error):
        told.append((spec.recipe, error))
        if not killed:
            killed.extend(multiprocessing.active_children())
            for process in killed:
                process.kill()

    results = compare(plan, tmp_path, on_finished=finished)
    assert len(killed) == 1
    assert told == [("standard", None), ("wise-ft", None)]
    assert agreeing(results.runs) == expected


def test_the_report_says_that_a_training_was_shared(two, tmp_path):
    plan, _ = two
    (group,) = trainings(plan.runs)
    results = Results(tuple(r for r, _ in run_group(plan, group, Place.at(tmp_path))))
    shown = results.to_markdown()
    said = "Shared one training per seed, which counts in the time of each: standard and wise-ft."
    assert said in shown
    alone = Results(tuple(replace(run, shared=()) for run in results.runs))
    assert "Shared one training" not in alone.to_markdown()
    assert json.loads(results.runs[0].to_json())["shared"] == ["standard", "wise-ft"]
    assert Recipe.from_dict(results.runs[1].resolved).merging.alpha == 0.5
