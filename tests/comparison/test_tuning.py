"""``tune``: what it chooses, on which half, and that it goes on after a kill."""

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("optuna", reason="the cli extra is not installed")

import optuna
import torch

from comparison.small_plan import make_plan
from comparison.tiny import save_bert, save_images, save_resnet
from holdfast import Recipe, builtin
from holdfast.cli import main
from holdfast.cli.tune import Trials
from holdfast.comparison import processes, tuning
from holdfast.comparison import study as study_file
from holdfast.comparison.clock import Clock
from holdfast.comparison.crew import make_crew
from holdfast.comparison.goals import goals_in, hopeless
from holdfast.comparison.plan import Measuring, Plan, Training
from holdfast.comparison.results import Results
from holdfast.comparison.rungs import Rungs
from holdfast.comparison.search import TESTS, Search, Tuning
from holdfast.comparison.study import counted, open_study, place_of, revive
from holdfast.comparison.tuning import Tuned, _check_same, tune, tune_in, tuned_of
from holdfast.comparison.worker import Worker
from holdfast.io import codec
from report.sample_results import measured
from report.sample_results import run as sample

pytestmark = pytest.mark.usefixtures("forked_workers")
FEW = [
    "--trials=2", "--alphas", "1.0", "--max-updates=2", "--batch-size=2",
    "--limit=5", "--context-free=0", "--text", "old.txt", "--jobs=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "old.txt").write_text("It was the best of times, it was the worst of times.\n" * 20)


def test_a_search_and_what_it_leaves(tmp_path, capsys, monkeypatch):
    heard = []

    def listening(*given, on_progress, **options):
        def on_message(*message):
            heard.append(message)
            on_progress(*message)

        return tune_in(*given, on_progress=on_message, **options)

    monkeypatch.setattr("holdfast.cli.tune.tune_in", listening)
    assert main(["tune", "--out=out", *FEW]) == 0
    assert {(0, "training", 1, 2), (0, "training", 2, 2), (0, "testing", 0, 1)} <= {*heard}
    said = capsys.readouterr().out
    assert "Trials: 2 trained" in said or "pruned" in said
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert found["default"]["values"]["update.pull"] == 0.1
    assert len(found["frontier"]) >= 1
    # Chosen on one half, reported on the other: their values before differ.
    taken = found["taken"]
    assert taken["chosen"]["target"]["before"] != taken["reported"]["target"]["before"]
    # The recipe that it ends in is the taken point's, α and learning rate too.
    recipe = Recipe.from_yaml((tmp_path / "out" / "recipe.yaml").read_text())
    assert recipe.merging.alpha == pytest.approx(taken["values"]["merging.alpha"])
    assert recipe.update.lr == pytest.approx(taken["values"]["lr"])
    shown = Results.load(tmp_path / "out" / "results.json")
    assert shown.recommendation().label == taken["reported"]["recipe"] + "".join(
        f" {name}={value:g}" for name, value in taken["reported"]["values"].items()
    )
    assert 5e5 < (tmp_path / "out" / "report.html").stat().st_size < 1.5e6
    # Once more: nothing is trained, and what a killed process left is removed.
    unused = tmp_path / "out" / "trials" / "recadam-0-012345678901" / "seconds"
    unused.parent.mkdir(), unused.write_text("1.0")
    assert main(["tune", "--config=out/config.yaml", "--json"]) == 0
    assert not unused.parent.exists()
    assert json.loads(capsys.readouterr().out) == found
    # Another search is not put into the same study.
    shutil.copy("out/config.yaml", "search.yaml")
    assert main(["tune", "--config=search.yaml", "--recipe=mofo"]) == 2
    assert "holds another search" in capsys.readouterr().err


SEVERAL = ["--recipes", "standard", "wise-ft", "l2-sp", *FEW, "--trials=4", "--max-updates=4"]


# The only search over recipes in processes, with what the command writes: four trainings.
def test_a_search_over_recipes_and_what_it_leaves(tmp_path, capsys):
    assert main(["tune", "--out=out", *SEVERAL, "--budget=1h", "--jobs=2"]) == 0
    said = capsys.readouterr()
    assert "3 recipes: standard, wise-ft and l2-sp" in said.err
    assert "budget 60.0 min, 60.0 min left; 0 trials so far" in said.err
    assert "at 1/9 of the updates, target" in said.err
    assert said.out.startswith("Take ")
    assert "Next: holdfast finetune --model builtin --data builtin --recipe " in said.out
    assert "Recipe by recipe" in (tmp_path / "out" / "report.html").read_text()
    text = (tmp_path / "out" / "tune.json").read_text()
    found = Tuned.from_json(text)
    assert found.to_json() == text
    assert found.schema_version == 3
    assert [one.recipe for one in found.recipes] == ["standard", "wise-ft", "l2-sp"]
    assert found.taken.rung == 1
    assert {one.rung for one in found.frontier} == {1}
    assert sum(one.trials for one in found.recipes) == 4
    recipe = Recipe.from_yaml((tmp_path / "out" / "recipe.yaml").read_text())
    assert recipe.update.lr == pytest.approx(found.taken.values["lr"])
    # The same report again: which half the choice was made on, and the table of recipes.
    assert main(["report", "out"]) == 0
    assert capsys.readouterr().out == said.out
    assert "The recipe was chosen on one half of the tests." in said.out
    assert (tmp_path / "out" / "report.md").read_text() == found.to_markdown()
    # Once more: nothing is trained, but the time of this session counts.
    assert main(["tune", "--config=out/config.yaml", "--json"]) == 0
    said = capsys.readouterr()
    assert "in earlier sessions" in said.err
    again = Tuned.from_json(said.out)
    assert replace(again, seconds=0.0) == replace(found, seconds=0.0)
    # A search without a budget, or over other recipes, is another one.
    assert main(["tune", "--out=out", *SEVERAL, "--recipes", "standard", "wise-ft"]) == 2
    assert "holds another search (it differs in recipes)" in capsys.readouterr().err


@pytest.mark.soak
def test_a_budget_that_is_over_trains_nothing_more(tmp_path, capsys):
    assert main(["tune", "--out=out", *SEVERAL, "--budget=1h", "--trials=3"]) == 0
    study = open_study(str(tmp_path / "out" / "study.log"), "holdfast")
    before = [(t.number, t.state) for t in study.get_trials()]
    study.set_user_attr("session x", [0.0, 3600.0])
    capsys.readouterr()
    assert main(["tune", "--out=out", *SEVERAL, "--budget=1h", "--trials=9"]) == 0
    assert "budget 60.0 min, 0 s left" in capsys.readouterr().err
    study = open_study(str(tmp_path / "out" / "study.log"), "holdfast")
    assert [(t.number, t.state) for t in study.get_trials()] == before


def test_without_time_for_one_trial_there_is_no_result(tmp_path, capsys):
    study = open_study(str(tmp_path / "out" / "study.log"), "holdfast", objectives=1)
    study.set_user_attr("session x", [0.0, 3600.0])
    (tmp_path / "out" / ".holdfast").write_text("tune\n")
    assert main(["tune", "--out=out", *SEVERAL, "--budget=1h"]) == 2
    said = capsys.readouterr().err
    assert "no trial completed: there was no time for one: raise --budget" in said


@pytest.mark.soak
def test_one_recipe_within_a_budget(tmp_path, capsys):
    given = [*FEW, "--recipe=standard", "--budget=1h", "--max-updates=4", "--trials=3"]
    assert main(["tune", "--out=out", *given]) == 0
    found = Tuned.load(tmp_path / "out" / "tune.json")
    assert found.taken.rung == 1
    assert found.default is not None
    assert found.seconds > 0


def test_the_first_version_is_read():
    plan = Plan(model="m", data="d", target="t")
    found = tuned_of(study_of(((2.0, 10.0), (2.0, 10.0))), Tuning("recadam"), plan)
    old = json.loads(found.to_json())
    for name in ("recipes", "left_out", "seconds", "learn_at_least"):
        del old[name]
    for one in (old["taken"], old["default"], *old["frontier"]):
        del one["rung"], one["recipe"]
    again = Tuned.from_json(json.dumps({**old, "recipe": "recadam", "schema_version": 1}))
    assert [one.recipe for one in again.recipes] == ["recadam"]
    assert again.to_yaml() == found.to_yaml()
    assert "Take recadam: it is the only model on the frontier" in repr(again)
    second = {**json.loads(found.to_json()), "second": None, "schema_version": 2}
    assert Tuned.from_json(json.dumps(second)).to_json() == found.to_json()


def halving_search(folder, *, number=0, end=None, trials=4):
    plan = make_plan(folder, updates=9)
    plan = replace(plan, measuring=replace(plan.measuring, context_free=0))
    tuning = Tuning(("flow", "l2-sp", "lora"), trials=trials, alphas=())
    storage = str(folder / "study.log")
    return Search(plan, tuning, folder / "trials", storage, "one", number, end=end), plan, tuning


# Two searches of nine updates per training, because rungs of 1/9 and 1/3 must differ.
def test_a_search_that_was_killed_within_a_rung_goes_on(tmp_path, monkeypatch):
    """The first looks that are known are not repeated, and the training resumes."""
    search, plan, tuning = halving_search(tmp_path)
    do, stop = Search._train_and_test, []

    def killed(self, trial, *given):
        stop.append(trial)
        if len(stop) == 3:
            raise KeyboardInterrupt
        return do(self, trial, *given)

    monkeypatch.setattr(Search, "_train_and_test", killed)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    known = {t.params["recipe"]: t.user_attrs["rung 0"] for t in counted(search.study)[:2]}
    assert [t.state.name for t in counted(search.study)][1:] == ["RUNNING"] * 2
    revive(search.study, place_of(tmp_path / "trials"), alone=True)
    monkeypatch.setattr(Search, "_train_and_test", do)
    again, _, _ = halving_search(tmp_path)
    again.run()
    trials = counted(again.study)
    assert len(trials) == 4
    assert all(t.state.is_finished() for t in trials)
    assert [t.user_attrs.get("error") for t in trials] == [None] * 4
    for trial in trials:
        if "first_look" in trial.user_attrs and trial.params["recipe"] in known:
            assert trial.user_attrs["rung 0"] == known[trial.params["recipe"]]
    assert len([t for t in trials if "first_look" in t.user_attrs]) == 3
    assert tuned_of(again.study, tuning, plan).taken.rung == 1


# Forty trials without a training: it counts what the sampler draws.
def test_a_recipe_that_always_fails_is_not_drawn_again_and_again(tmp_path, monkeypatch):
    def trained(self, trial, contender, *_):
        if contender.name == "l2-sp":
            raise RuntimeError("it always fails")
        return {None: (run(2.0, 0.1), run(2.0, 0.1))}

    monkeypatch.setattr(Search, "_train_and_test", trained)
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / ".place").write_text("here")  # seeds the draws
    search, plan, tuning = halving_search(tmp_path, trials=40)
    search.run()
    found = tuned_of(search.study, tuning, plan)
    (failing,) = (one for one in found.recipes if one.recipe == "l2-sp")
    assert failing.error == "RuntimeError: it always fails"
    assert failing.failed == failing.trials == found.failed
    assert failing.trials < 10
    assert (found.trained, found.pruned) == (40 - failing.trials, 0)
    shown = Trials(tuning)
    assert shown._words(next(t for t in counted(search.study) if "error" in t.user_attrs)) == (
        "failed: RuntimeError: it always fails"
    )


def test_a_trial_that_cannot_end_in_time_does_not_start(tmp_path):
    search, plan, tuning = halving_search(tmp_path, trials=3)
    search.run()
    states = [t.state.name for t in search.study.get_trials()]
    late, _, _ = halving_search(tmp_path, trials=9, end=time.time() + 0.01)
    time.sleep(0.02)
    late.run()
    assert [t.state.name for t in late.study.get_trials()] == [*states, "FAIL"]
    assert len(counted(late.study)) == 3


def test_the_time_of_the_tests_at_the_end_is_that_of_those_before(tmp_path):
    search, plan, _ = halving_search(tmp_path, trials=1)
    flow = search.contenders["flow"]
    # Nothing is known: the base takes the tests too, and no test has more samples than at a rung.
    assert search.seconds_of_tests(flow, at_rung=1.0) == 2.0
    search.run()
    (trial,) = counted(search.study)
    assert trial.user_attrs[TESTS] > 0
    assert search.seconds_of_tests(flow, at_rung=99.0) == trial.user_attrs[TESTS]
    # Many rows: the first estimate is larger than at a rung.
    (row,) = (tmp_path / "dev.jsonl").read_text().splitlines()[:1]
    (tmp_path / "dev.jsonl").write_text(f"{row}\n" * 640)
    (tmp_path / "many").mkdir()
    tuning = Tuning(("flow", "l2-sp"), alphas=(0.5, 1.0))
    many = Search(plan, tuning, tmp_path / "many", str(tmp_path / "many" / "study.log"), "one")
    assert many.seconds_of_tests(flow, at_rung=1.0) == pytest.approx(2 * 321 / 33, rel=0.02)
    rungs = Rungs(
        many.study.ask(), time.monotonic(), time.time() + 60, judge=many._judge,
        last_tests=functools.partial(many.seconds_of_tests, flow), on_progress=many.on_progress,
    )  # fmt: skip
    assert rungs.has_time(1, 3, took=5.0, is_last=False)
    assert not rungs.has_time(1, 3, took=5.0, is_last=True)


def test_a_training_that_runs_out_of_time_keeps_its_rung_and_is_put_back(tmp_path, monkeypatch):
    search, plan, tuning = halving_search(tmp_path, trials=3)
    monkeypatch.setattr("holdfast.comparison.rungs.Rungs.has_time", lambda *_, **__: False)
    search.run()
    trials = counted(search.study)
    assert sorted(t.state.name for t in trials) == ["PRUNED", "PRUNED", "RUNNING"]
    found = tuned_of(search.study, tuning, plan)
    assert found.taken.rung == pytest.approx(1 / 3)
    assert "No training was completed" in found.sentences()[0]
    assert (found.pruned, found.unfinished) == (2, 1)
    assert "Trials: 2 pruned, 1 unfinished" in " ".join(found.sentences())
    monkeypatch.undo()
    revive(search.study, place_of(tmp_path / "trials"), alone=True)
    again, _, _ = halving_search(tmp_path, trials=3)
    again.run()
    assert tuned_of(again.study, tuning, plan).taken.rung == 1


def test_the_default_of_a_recipe_is_not_lost_to_a_faster_process(tmp_path):
    search, _, _ = halving_search(tmp_path, trials=1)
    ask = search.study.ask
    search.study.ask = lambda: (ask(), ask())[1]  # another process has asked before
    search.run()
    waiting = [t for t in search.study.get_trials() if t.state.name == "WAITING"]
    wanted = [t.system_attrs["fixed_params"]["recipe"] for t in waiting]
    assert sorted(wanted) == ["l2-sp", "lora"]
    assert all(t.user_attrs == {"first_look": True} for t in waiting)


def search_with_little_memory(*given, **options):
    """A search in a worker process whose first training has too little memory beside another."""
    train, mark = Worker.train, Path("failed-once")

    def once(self, *args, **more):
        until = time.monotonic() + 30
        while processes._sharing.now < 2 and not mark.exists() and time.monotonic() < until:
            time.sleep(0.01)
        if not mark.exists():
            mark.touch()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(self, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "train", once)
        return tuning_search(*given, **options)


tuning_search = tuning._search


@pytest.mark.soak
def test_a_trial_without_memory_beside_others_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_search", search_with_little_memory)
    assert main(["tune", "--out=out", *FEW, "--jobs=2"]) == 0
    assert Path("failed-once").exists()
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert (found["failed"], found["trained"] + found["pruned"]) == (0, 2)
    assert found["default"] is not None  # the defaults are tried, although they failed once


def test_a_process_that_ends_with_the_time_leaves_no_lock(tmp_path, monkeypatch):
    storage = tmp_path / "study.log"
    study = open_study(str(storage), "one")

    def ended(*_, on_wait, **__):
        os.symlink(storage, tmp_path / "study.log.lock")  # as the process that holds it
        on_wait()
        yield

    monkeypatch.setattr("holdfast.comparison.processes.call_in_processes", ended)
    given = None, Tuning(budget="1s"), tmp_path, str(storage), "one"
    clock, begin = Clock(study, 1e-9), time.monotonic()
    clock.tick(now=True)
    unlock = functools.partial(study_file.unlock, str(storage))
    tuning._search_in_processes(
        study, make_crew([], jobs=1), given, clock, None, None, None, unlock
    )
    assert time.monotonic() - begin < 10  # else Optuna waits until the lock is old
    assert not (tmp_path / "study.log.lock").is_symlink()


@pytest.mark.parametrize("recipe", [pytest.param("mixout", marks=pytest.mark.soak), "self-replay"])
def test_a_test_at_a_rung_does_not_change_the_training(recipe, tmp_path, monkeypatch):
    """The weights at the end are those of a run without rungs, to the last bit."""
    plan = make_plan(tmp_path, recipes=(recipe,), seeds=(0,), updates=9)
    plan = replace(plan, options={"recall.length": 16} if recipe == "self-replay" else {})
    ends, last, measure = [], {}, Worker.measure

    def noted(self, name, model, recipe):
        last.update({n: p.detach().clone() for n, p in model.named_parameters()})
        return measure(self, name, model, recipe)

    monkeypatch.setattr(Worker, "measure", noted)
    for halving in (True, False):
        tuning = Tuning(recipe, trials=1, alphas=(), budget="1h" if halving else None)
        folder = tmp_path / str(halving)
        search = Search(plan, tuning, folder / "trials", str(folder / "study.log"), "one")
        search.run()
        (trial,) = counted(search.study)
        assert trial.state.name == "COMPLETE", trial.user_attrs.get("error")
        assert ("rung 1" in trial.user_attrs) == halving
        ends.append({**last})
    assert ends[0].keys() == ends[1].keys()
    for name, weights in ends[0].items():
        assert torch.equal(weights, ends[1][name]), name


def test_other_columns_and_early_stopping(tmp_path, capsys):
    for name, said in (("train", "four"), ("dev", "five"), ("valid", "none at all")):
        rows = [{"problem": f"two and {i}", "solution": said, "id": i} for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = [
        f"--model={builtin.MODEL}", "--data=train.jsonl", "--target=dev.jsonl", "--recipe=recadam",
        *FEW, "--trials=1", "--lr=1e-3", "--max-updates=30",
    ]  # fmt: skip
    stopping = ["--validation=valid.jsonl", "--patience=1", "--evaluate-every=2"]
    assert main(["tune", "--out=out", *given, *stopping]) == 2
    assert "train.jsonl has the columns problem, solution, id" in capsys.readouterr().err
    columns = ["--columns", "question=problem", "answer=solution"]
    assert main(["tune", "--out=out", *given, *stopping, *columns]) == 0
    (result,) = Results.load("out/results.json").runs
    (loss,) = (c for c in result.curves if c.name == "validation/nll")
    assert loss.steps[-1] < 30
    assert result.target.name == "dev"


def a_second_is_under_way(file):
    with contextlib.suppress(ValueError, KeyError):  # a line that is half written
        trials = counted(open_study(str(file), "holdfast"))
        states = [trial.state.name for trial in trials]
        return states.count("COMPLETE") == 1 and bool(trials[-1].params) and "RUNNING" in states
    return False


@pytest.mark.soak
def test_it_goes_on_after_a_kill(tmp_path):
    # So many updates that the second trial is seen while it runs, on a busy machine too.
    command = [sys.executable, "-m", "holdfast", "tune", "--out=out", *FEW]
    command += ["--max-updates=100", "--trials=2", "--alphas", "1"]
    killed = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    study_file = tmp_path / "out" / "study.log"
    deadline = time.monotonic() + 300
    try:
        while not (study_file.exists() and a_second_is_under_way(study_file)):
            assert killed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    except BaseException:
        os.killpg(killed.pid, signal.SIGKILL)
        raise
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    study = open_study(str(study_file), "holdfast")
    before = [t.number for t in counted(study) if t.state.name == "COMPLETE"]
    running = [t for t in counted(study) if t.state.name == "RUNNING"]
    assert before
    assert len(running) == 1
    assert main(command[3:]) == 0
    study = open_study(str(study_file), "holdfast")
    after = counted(study)
    assert len(after) == 2
    assert {t.number for t in after} >= set(before)
    assert all(t.state.is_finished() for t in after)
    # What was under way was done again, with the same settings, as far as they were drawn.
    assert any(running[0].params.items() <= t.params.items() for t in after)


def a_recipe_is_seen(file):
    with contextlib.suppress(ValueError, KeyError):  # a line that is half written
        trials = counted(open_study(str(file), "holdfast"))
        return (
            any("rung 0" in t.user_attrs for t in trials) and "rung 0" not in trials[-1].user_attrs
        )
    return False


@pytest.mark.soak
def test_a_search_over_recipes_goes_on_after_a_kill(tmp_path):
    command = [sys.executable, "-m", "holdfast", "tune", "--out=out", *SEVERAL]
    command += ["--max-updates=90", "--budget=1h", "--jobs=2"]
    killed = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    study_file = tmp_path / "out" / "study.log"
    deadline = time.monotonic() + 300
    try:
        while not (study_file.exists() and a_recipe_is_seen(study_file)):
            assert killed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    study = open_study(str(study_file), "holdfast")
    seen = {t.number: t.user_attrs["rung 0"] for t in counted(study) if "rung 0" in t.user_attrs}
    assert main(command[3:]) == 0
    study = open_study(str(study_file), "holdfast")
    after = {t.number: t for t in counted(study)}
    assert len(after) == 4
    assert all(t.state.is_finished() for t in after.values())
    assert all(after[number].user_attrs["rung 0"] == known for number, known in seen.items())
    looks = [t.params["recipe"] for t in after.values() if "first_look" in t.user_attrs]
    assert sorted(looks) == ["l2-sp", "standard", "wise-ft"]


def test_the_lock_of_a_study_leads_to_it_so_that_a_dead_processs_can_be_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    locks, symlink = [], os.symlink

    def noted(target, link, *rest):
        locks.append(target)
        symlink(target, link, *rest)

    monkeypatch.setattr(os, "symlink", noted)
    open_study("folder/study.log", "one")
    assert set(locks) == {str(tmp_path / "folder" / "study.log")}


def test_only_what_was_stopped_in_this_folder_is_done_again(tmp_path):
    study = open_study(str(tmp_path / "study.log"), "one")
    for place in (place_of(tmp_path), "another-machine:/folder"):
        trial = study.ask()
        trial.suggest_float("lr", 0.0, 1.0)
        trial.set_user_attr("place", place)
    revive(study, place_of(tmp_path))
    states = [trial.state.name for trial in study.get_trials()]
    assert states == ["FAIL", "RUNNING", "WAITING"]
    assert study.ask().suggest_float("lr", 0.0, 1.0) == study.trials[0].params["lr"]


def test_a_process_that_dies_twice_takes_its_trial_with_it(tmp_path):
    study = open_study(str(tmp_path / "study.log"), "one")
    study.enqueue_trial({"lr": 0.25})
    for deaths in (1, 2):
        trial = study.ask()
        trial.set_user_attr("place", place_of(tmp_path))
        trial.set_user_attr("worker", 0)
        # Killed before it has drawn anything: what it was told to take is not lost.
        revive(study, place_of(tmp_path), worker=0)
        assert len(counted(study)) == deaths - 1
    assert "died twice" in counted(study)[0].user_attrs["error"]
    assert study.ask().suggest_float("lr", 0.5, 1.0) != 0.25


def test_another_folder_draws_other_numbers(tmp_path):
    assert place_of(tmp_path / "a") != place_of(tmp_path / "b")
    assert place_of(tmp_path / "a") == place_of(tmp_path / "a")


def with_looks(*looks):
    study = optuna.create_study(directions=["minimize", "minimize"])
    for look in looks:
        trial = study.ask()
        trial.set_user_attr("looks", {"10": look})
        study.tell(trial, (1.0, 1.0))
    return study


def test_hopeless_is_worse_in_both_than_half_of_the_others():
    study = with_looks((1, 1), (1, 1), (3, 3), (3, 3))
    assert hopeless(study, 10, (2, 2))
    assert not hopeless(study, 10, (2, 1))  # as good as they in one
    assert not hopeless(study, 10, (0.5, 9))  # a place of its own on the frontier
    assert not hopeless(study, 20, (2, 2))  # nobody was looked at then
    assert not hopeless(with_looks((1, 1), (1, 1), (1, 1)), 10, (2, 2))  # too few to tell
    assert not hopeless(with_looks((1, 1), (3, 3), (3, 3), (3, 3)), 10, (2, 2))


def run(target, lost):
    """A result with this loss on the target, and so much lost elsewhere."""
    kept = measured("wiki", "nll", 10.0, 10.0 * (1 + lost))
    return replace(
        sample("x"), target=measured("t", "nll", 5.0, target), retained=(kept,), curves=()
    )


def study_of(*rows):
    """A study of models: (target, lost) on the half to choose on, and on the other."""
    study = optuna.create_study(directions=["minimize", "minimize"])
    for number, (chosen, reported) in enumerate(rows):
        trial = study.ask()
        trial.suggest_float("lr", 1e-4, 1e-1)
        trial.set_user_attr("default", number == 0)
        halves = {"chosen": run(*chosen), "reported": run(*reported)}
        told = {name: codec.encode(half) for name, half in halves.items()}
        trial.set_user_attr("halves", told)
        study.tell(trial, chosen)
    return study


def test_the_frontier_is_chosen_on_one_half_and_reported_on_the_other():
    plan = Plan(model="m", data="d", target="t")
    study = study_of(
        ((2.0, 10.0), (2.0, 10.0)),  # the defaults
        ((1.9, 8.0), (2.1, 12.0)),  # better where it is chosen, worse where it is not
        ((1.0, 30.0), (1.0, 30.0)),
        ((2.5, 20.0), (0.1, 0.1)),  # beaten where it is chosen: not on the frontier
    )
    found = tuned_of(study, Tuning("recadam"), plan)
    assert [point.trial for point in found.frontier] == [3, 2]
    assert found.default.trial == 1
    assert found.taken.trial == 3  # the best on the target, none learned 95 % as much
    assert found.sentences()[-1].startswith("With the defaults: perplexity 7.389 on t (2.000 nats ")
    assert repr(found).startswith("<Tuned recadam: Take recadam trial=3: no other model on the fro")
    assert found.sentences()[0].startswith("Found (recadam trial=3): lr = ")
    assert "<table>" in found._repr_html_()
    labels = [one.label for one in found.results().runs]
    assert labels == ["recadam", "recadam trial=3", "recadam trial=2"]
    assert {*found.to_pandas()["recipe"]} == {"recadam"}
    assert Tuned.from_json(found.to_json()).to_json() == found.to_json()


def study_of_recipes(tuning=None, reported=None, **rows):
    """A study of recipes: (target, lost) of models trained to the end, the defaults first.

    All have the result ``reported`` on the other half, by default the same as on the first.
    """
    study = optuna.create_study(direction="maximize")
    names = [name.replace("_", "-") for name in rows]
    for name, models in zip(names, rows.values(), strict=True):
        for number, model in enumerate(models):
            study.enqueue_trial({"recipe": name})
            trial = study.ask()
            trial.suggest_categorical("recipe", names)
            trial.suggest_float(f"{name}:lr", 1e-4, 1e-1)
            trial.set_user_attr("default", number == 0)
            halves = {"chosen": run(*model), "reported": run(*(reported or model))}
            trial.set_user_attr("halves", codec.encode(halves))
            study.tell(trial, 5.0 - model[0])
    tuning = tuning or Tuning(tuple(names), budget="1h")
    return tuned_of(study, tuning, Plan(model="m", data="d", target="t"))


def test_the_rule_is_that_of_a_comparison():
    """Of those that learned at least 95 % as much as the best, the one that forgot least."""
    rows = {"l2_sp": [(1.55, 0.01)], "lora": [(1.5, 0.3), (4.0, 0.0)]}
    found = study_of_recipes(standard=[(1.6, 0.1), (2.2, 0.09)], **rows)
    assert found.taken.recipe == "l2-sp"
    assert found.standard.chosen.label == "standard"
    said = str(found.document().answer)
    assert said.startswith(
        "Take l2-sp: of the 2 models on the frontier that learned at least 95 % as much as the "
        "best (lora), it forgot least.\nWith another share: the same at 90 and 98 %, lora at 99 %."
    )
    assert "Standard fine-tuning learned 97.1 % as much as the best and forgot more (lost " in said
    assert found.results().recommendation().label == "l2-sp"
    assert found.recommendation().at == {0.9: "l2-sp", 0.98: "l2-sp", 0.99: "lora"}
    # Another share, which is saved.
    found = study_of_recipes(Tuning(("standard", "l2-sp", "lora"), learn_at_least=0.99), **rows)
    assert found.taken.recipe == "lora"
    assert Tuned.from_json(found.to_json()).recommendation().label == "lora"
    with pytest.raises(ValueError, match="learn_at_least must be"):
        Tuning(learn_at_least=95)


def test_a_search_whose_halves_disagree_does_not_contradict_itself():
    """The headline, the badge, the stars and the next command are of the half that chose."""
    found = study_of_recipes(reported=(9.0, 0.1), standard=[(2.0, 0.1)], lora=[(1.5, 0.05)])
    shown = found.document()
    assert shown.answer.headline.startswith("Take lora")
    assert (shown.badge, shown.tone) == ("lora", "good")
    assert "--recipe lora" in shown.answer.next
    assert "lora: perplexity" in str(shown.answer)  # its figures, though the other half is worse
    assert "★" in str(shown.sections)
    found = study_of_recipes(reported=(1.0, 0.1), standard=[(9.0, 0.1)], lora=[(9.0, 0.05)])
    shown = found.document()
    assert shown.answer.headline.startswith("Keep the pretrained model")
    assert (shown.badge, shown.tone, shown.answer.next) == ("No recommendation", "info", "")
    assert "★" not in str(shown.sections)


def test_a_merge_that_kept_more_is_taken():
    """α = 0.8 with 99.6 % of the gain, not α = 1 that lost ten times as much."""
    found = study_of_recipes(standard=[(4.0, 0.0)], wise_ft=[(2.0, 0.036), (2.012, 0.003)])
    assert found.taken.trial == 3


def test_the_table_of_recipes_has_the_model_of_the_recipe_found():
    found = study_of_recipes(
        standard=[(2.0, 0.1)],
        # The rule takes the second, though the first learned most.
        lora=[(1.5, 0.05), (1.55, 0.04)],
        # Of its own, the one that forgot least of those that learned enough.
        l2_sp=[(1.98, 0.095), (1.99, 0.09), (4.0, 0.01)],
    )
    best = {one.recipe: one.best for one in found.recipes}
    assert best["lora"] == found.taken
    assert best["lora"].trial == 3
    assert best["l2-sp"].trial == 5
    (table,) = found.document().sections[0].tables
    assert table.rows[0][:3] == ("lora ★", "1.550", "2.75")


def test_a_study_with_objectives_of_an_earlier_version_is_refused(tmp_path):
    plan, tuning = Plan(model="m", data="d", target="t"), Tuning("lora")
    study = optuna.create_study(directions=["minimize", "minimize"])
    _check_same(study, plan, tuning)
    _check_same(study, plan, tuning)
    known = study.user_attrs["search"]
    study.set_user_attr("search", {n: v for n, v in known.items() if n != "objectives"})
    with pytest.raises(ValueError, match="an earlier version"):
        _check_same(study, plan, tuning)


def test_no_trial_at_all_says_why():
    study = optuna.create_study(directions=["minimize", "minimize"])
    trial = study.ask()
    trial.set_user_attr("error", "Traceback\nRuntimeError: out of memory")
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    with pytest.raises(ValueError, match="RuntimeError: out of memory"):
        tuned_of(study, Tuning(), Plan(model="m", data="d", target="t"))


def test_a_learning_rate_of_the_recipe_is_searched_too(tmp_path):
    (tmp_path / "own.yaml").write_text("update: {name: recadam, lr: 1.0e-3}\n")
    plan = Plan("m", "d", "t", recipes=("own.yaml",))
    spec = plan.spec("own.yaml", 0, {"lr": 5e-4})
    assert spec.settings["update"]["lr"] == spec.training.lr == 5e-4


def test_a_gamma_may_be_asked_for_where_the_pull_is_the_default(tmp_path):
    (tmp_path / "own.yaml").write_text("update: {name: recadam, pull: 0.2}\n")
    grid = {"update.gamma": (5.0,), "update.t0": (0.1, 0.4)}
    first, second = Plan("m", "d", "t", recipes=("recadam",), seeds=(0,), grid=grid).runs
    assert (first.settings["update"]["gamma"], first.settings["update"]["pull"]) == (5.0, None)
    assert (first.settings["update"]["t0"], second.settings["update"]["t0"]) == (0.1, 0.4)
    assert first.values == {"update.gamma": 5.0, "update.t0": 0.1}
    with pytest.raises(ValueError, match="give one of them"):
        Plan("m", "d", "t", recipes=("own.yaml",), grid=grid)
    with pytest.raises(ValueError, match="give one of them"):
        Plan("m", "d", "t", recipes=("recadam",), grid={**grid, "update.pull": (0.1,)})


def test_a_new_head_is_merged_as_a_run_merges_it(tmp_path, monkeypatch):
    rows = [{"text": f"w{i % 20}", "label": i % 2} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plan = Plan(
        save_bert(tmp_path / "bert"), "rows.jsonl", "rows.jsonl", recipes=("lp-ft+flow+wise-ft",),
        training=Training(lr=0.01, max_updates=2), measuring=Measuring(context_free=0),
    )  # fmt: skip
    seen = []
    measure = Worker.measure
    monkeypatch.setattr(
        Worker,
        "measure",
        lambda self, name, model, recipe: (
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()}),
            measure(self, name, model, recipe),
        )[1],
    )
    tuning = Tuning("lp-ft+flow+wise-ft", trials=1, alphas=(), prune=False)
    search = Search(plan, tuning, tmp_path / "trials", str(tmp_path / "study.log"), "one")
    (contender,) = search.contenders.values()
    assert "objective.tau" not in contender.space  # a new head has no losses yet
    search.run()
    (trial,) = counted(search.study)
    assert trial.state.name == "COMPLETE", trial.user_attrs.get("error")
    worker = Worker(plan, tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    model = worker.train(plan.runs[0], tmp_path / "runs").model  # α = 0.5, as by default
    for name, p in model.named_parameters():
        assert torch.equal(p, seen[0][name]), name


def test_a_trial_that_diverges_is_pruned(tmp_path):
    rows = [{"text": "the cat", "label": "a"}, {"text": "a dog ran", "label": "b"}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plan = Plan(
        save_bert(tmp_path / "bert"), "rows.jsonl", "rows.jsonl", recipes=("standard",),
        training=Training(lr=1e30, max_updates=3), measuring=Measuring(context_free=0),
    )  # fmt: skip
    tuning = Tuning("standard", trials=1, prune=False)
    search = Search(plan, tuning, tmp_path / "trials", str(tmp_path / "study.log"), "one")
    search.run()
    (trial,) = counted(search.study)
    assert trial.state.name == "PRUNED", trial.user_attrs.get("error")


def image_plan(tmp_path):
    return Plan(
        save_resnet(tmp_path / "resnet"), save_images(tmp_path / "train"),
        save_images(tmp_path / "test"), recipes=("holdfast",), seeds=(0,),
        training=Training(max_updates=2, batch_size=4), measuring=Measuring(context_free=0),
    )  # fmt: skip


def test_methods_that_are_chosen_for_the_model_are_searched_too(tmp_path):
    tuning = Tuning("holdfast", trials=2, alphas=(1.0,), space={"merging.alpha": (0.3, 1.0)})
    plan = image_plan(tmp_path)
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / ".place").write_text("here")  # seeds the draws: α is not almost 1
    search = Search(plan, tuning, tmp_path / "trials", str(tmp_path / "study.log"), "one")
    (contender,) = search.contenders.values()
    assert sorted(contender.space) == ["lr", "merging.alpha", "recall.strength"]
    search.run()
    trials = counted(search.study)
    assert [t.user_attrs.get("error") for t in trials] == [None, None]
    found = tuned_of(search.study, tuning, plan)
    assert found.candidates == 4  # each model also at α = 1
    recipe = Recipe.from_yaml(found.to_yaml())
    assert [m.__class__.__name__ for m in (recipe.trainable, recipe.recall, recipe.merging)] == [
        "LPFT", "Auto", "WiseFT",
    ]  # fmt: skip
    assert recipe.merging.alpha == found.taken.values["merging.alpha"]
    labels = [run.label for run in found.results().runs]
    assert len(set(labels)) == len(labels)
    # Another process searches the same.
    again = Search(plan, tuning, tmp_path / "trials", str(tmp_path / "study.log"), "one", 1)
    assert again.contenders == search.contenders


def test_a_setting_that_nothing_has_for_this_model(tmp_path):
    tuning = Tuning("holdfast", space={"merging.alfa": (0.3, 1.0)})  # it depends on the model
    with pytest.raises(
        ValueError, match=r"'merging\.alfa' to search; did you mean 'merging\.alpha'"
    ):
        Search(image_plan(tmp_path), tuning, tmp_path, str(tmp_path / "study.log"), "one")


def test_goals_are_less_is_better():
    good, bad = run(1.0, 1.0), run(2.0, 5.0)
    assert all(a < b for a, b in zip(goals_in(good), goals_in(bad), strict=True))
    assert all(map(math.isfinite, goals_in(good)))


def wrong(*_, **__):
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def test_an_error_of_the_plan_is_sent_as_text(monkeypatch):
    monkeypatch.setattr(Search, "__init__", wrong)
    kind, text = tuning._search()
    assert tuning._PLAN_ERRORS[kind] is ValueError
    assert "invalid start byte" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--recipe=recadm"], "did you mean 'recadam'"),
        (["--trials=0"], "trials must be at least 1"),
        (["--alphas", "2"], "alphas"),
        (["--storage=nowhere://x"], "nowhere"),
        (["--target=gone.jsonl"], "gone.jsonl"),
        (["--limit=0"], "limit must be at least 1"),
        (["--budget=soon"], "budget must be a duration above 0 in days, hours, minutes"),
        (["--recipes", "flow", "flow"], "recipes contains 'flow' twice"),
        (["--recipe=lora", "--recipes", "spd"], "not allowed with argument --recipe"),
        (["--recipes", "flow", "rehearsal"], "Rehearsal needs data of the old task"),
    ],
)
def test_bad_input_is_one_sentence(given, words, capsys):
    assert main(["tune", "--out=out", *FEW, *given]) == 2
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1]
    assert "Traceback" not in said


def test_tasks_alone_cannot_be_halved(tmp_path):
    plan = Plan("model", "data", "target", measuring=Measuring(tasks=("piqa",)))
    with pytest.raises(ValueError, match="cannot be halved"):
        tune(plan, Tuning(), tmp_path / "out")
