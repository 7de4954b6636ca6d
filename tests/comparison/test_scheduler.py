"""Runs in processes of this machine: once each, whatever happens to the others.

The soak kills processes.
"""

import multiprocessing
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comparison.small_plan import make_plan, what_must_agree

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast import Recipe
from holdfast.comparison import processes, scheduler
from holdfast.comparison import worker as runs
from holdfast.comparison.crew import make_crew
from holdfast.comparison.gpus import Gpu
from holdfast.comparison.results import Results, read_result
from holdfast.comparison.scheduler import compare, run_group
from holdfast.io.outputs import claim
from holdfast.io.storage import Place

pytestmark = pytest.mark.usefixtures("forked_workers")


class Told:
    """Counts how often each run began and ended."""

    def __init__(self, then=None):
        self.begun, self.ended, self.errors, self.then = Counter(), Counter(), {}, then

    def under_way(self, spec, doing, done, total):
        assert doing in ("training", "testing")
        assert 0 <= done <= total
        self.begun[spec.id] += doing == "training" and done == 0
        if self.then:
            self.then(spec, doing, done)

    def finished(self, spec, result, error):
        self.ended[spec.id] += 1
        self.errors[spec.id] = error

    def run(self, plan, out, jobs):
        return compare(plan, out, jobs=jobs, on_progress=self.under_way, on_finished=self.finished)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return make_plan(tmp_path_factory.mktemp("plan"), seeds=(0,))


@pytest.fixture(scope="module")
def whole(plan, tmp_path_factory):
    """The results of two processes, their messages, and the folder."""
    told, out = Told(), tmp_path_factory.mktemp("whole")
    return told.run(plan, out, 2), told, out


def agrees(results, whole):
    """Whether the results equal those of the undisturbed plan, as far as they go."""
    runs = {run["id"]: run for run in what_must_agree(whole[0].to_json())["runs"]}
    ours = what_must_agree(results.to_json())["runs"]
    return ours == [runs[run["id"]] for run in ours]


def test_every_run_is_done_once(plan, whole):
    results, told, out = whole
    ids = [spec.id for spec in plan.runs]
    assert len(ids) == 2
    assert [run.id for run in results.runs] == ids
    assert told.begun == told.ended == Counter(ids)
    assert {path.name for path in out.glob("runs/*")} == set(ids)


def test_only_unfinished_runs_are_done_and_a_run_that_raises_has_failed(plan, whole, tmp_path):
    plan = replace(plan, recipes=(*plan.recipes, "l2-sp"))
    finished, cut, wrong = (spec.id for spec in plan.runs)
    shutil.copytree(whole[2], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "runs" / cut / "result.json"
    file.write_text(file.read_text()[:100])
    (tmp_path / "runs" / wrong / "seconds").mkdir(parents=True)  # the log cannot write this file
    told = Told()
    results = told.run(plan, tmp_path, 1)
    assert told.ended == Counter([cut, wrong])
    assert told.begun[finished] == 0
    assert list(results.failed) == [wrong]
    assert "Traceback" in (tmp_path / "failed" / f"{wrong}.txt").read_text()
    assert [run.id for run in results.runs] == [finished, cut]
    assert agrees(results, whole)


def test_a_finished_comparison_does_not_read_the_model(plan, whole, monkeypatch):
    monkeypatch.setattr("holdfast.comparison.crew.gpus_for", lambda device: [Gpu(0, 9)])
    monkeypatch.setattr("holdfast.comparison.crew._size_of", lambda plan: pytest.fail("it is read"))
    assert compare(plan, whole[2]) == whole[0]


def test_processes_share_the_cores_with_those_that_run(plan, tmp_path, monkeypatch):
    """On a GPU, memory may admit fewer of them than there are workers."""
    given = []

    def none_runs(*_, jobs, **__):
        given.append(jobs)
        yield from ()

    monkeypatch.setattr(processes, "call_in_processes", none_runs)
    for crew in (
        make_crew([Gpu(0, 24 << 30)], parameters=10**8, need=20 << 30, cores=16),
        make_crew([Gpu(0, 80 << 30)], parameters=3_000_000, need=None, cores=32),
        make_crew([], cores=3),
    ):
        scheduler._run_locally(plan, plan.runs, Place.at(tmp_path), pytest.fail, crew, None)
    assert given == [1] * 3 + [5] * 3 + [3] * 3


def test_a_result_that_was_changed_is_not_used(plan, whole):
    """Another id, recipe, score or setting, also with a digest that fits."""
    one, other = plan.runs
    place = Place.at(whole[2]) / "runs"
    kept = place / one.id / "result.json"
    text, found = kept.read_text(), read_result(kept, one)
    assert found is not None
    assert read_result(place / other.id / "result.json", one) is None
    changed = [
        text.replace('"seed": 0', '"seed": 1'),
        text.replace(f'"before": {found.target.before}', '"before": 0.5'),
        text.replace('"digest"', '"seconds2"'),
        replace(found, recipe="mofo").to_json(),
        replace(found, settings={}).to_json(),
        "[" * 100_000,
    ]
    try:
        for row in changed:
            assert row != text
            kept.write_text(row)
            assert read_result(kept, one) is None
    finally:
        kept.write_text(text)


def test_another_model_in_the_same_place_is_another_run(plan, tmp_path):
    """Its weights have the same names and sizes, and its files the same times."""
    model = tmp_path / "model"
    shutil.copytree(plan.model, model)
    before = replace(plan, model=str(model))
    file = model / "model.safetensors"
    about = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    after = replace(plan, model=str(model))
    assert file.stat().st_size == about.st_size
    assert not {spec.id for spec in before.runs} & {spec.id for spec in after.runs}


def test_a_result_holds_all_settings_of_its_recipe(plan, whole):
    for spec, run in zip(plan.runs, whole[0].runs, strict=True):
        assert Recipe.from_dict(run.settings) == Recipe.from_dict(spec.settings)
    assert whole[0].runs[1].settings["merging"]["alpha"] == 0.5


def test_a_second_plan_in_the_same_folder_is_refused(plan, tmp_path):
    with (
        claim(tmp_path, "compare"),
        pytest.raises(ValueError, match=f"another holdfast process is writing to {tmp_path}"),
    ):
        compare(plan, tmp_path, config="model: x")
    assert list(tmp_path.iterdir()) == []


def out_of_memory_once(plan, group, out, **options):
    """Runs; the first attempt at the second recipe has too little memory beside the other."""
    mark, until = out.folder / "failed-once", time.monotonic() + 30
    if plan.runs[1] in group and not mark.exists():
        while processes._sharing.now == 1 and time.monotonic() < until:
            time.sleep(0.01)
        mark.touch()
        raise torch.OutOfMemoryError("CUDA out of memory")
    return run_group(plan, group, out, **options)


def test_a_run_without_memory_beside_others_is_repeated_alone(
    plan, whole, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(scheduler, "run_group", out_of_memory_once)
    told = Told()
    results = told.run(plan, tmp_path, 2)
    assert agrees(results, whole)
    assert told.ended == Counter(spec.id for spec in plan.runs)
    assert not any(told.errors.values())
    assert results.runs[1].at_a_time == 1
    assert caplog.messages == [
        "recadam+wise-ft, seed 0, failed beside other runs and is repeated alone: "
        "OutOfMemoryError: CUDA out of memory"
    ]


def test_a_run_says_how_many_shared_the_cpu(whole):
    assert {run.at_a_time for run in whole[0].runs} == {2}


@pytest.mark.soak
def test_a_process_that_dies_takes_no_other_with_it(plan, whole, tmp_path):
    killed = []

    def kill_one(spec, doing, done):
        if not killed and done == 3:
            killed.append(spec.id)
            multiprocessing.active_children()[0].kill()

    told = Told(kill_one)
    results = told.run(plan, tmp_path, 2)
    assert len(results.runs) == 2
    assert agrees(results, whole)
    assert told.ended == Counter(spec.id for spec in plan.runs)
    assert sum(told.begun.values()) <= 3  # it goes on, or begins again if there was nothing yet


@pytest.mark.soak
def test_a_run_that_kills_its_process_has_failed(plan, whole, tmp_path):
    victim, other = (spec.id for spec in plan.runs)

    def kill(spec, doing, done):
        if spec.id == victim:
            for process in multiprocessing.active_children():
                process.kill()

    told = Told(kill)
    results = told.run(plan, tmp_path, 1)
    assert told.ended == Counter([victim, other])
    assert results.failed == {victim: "the worker process died twice, possibly out of memory"}
    assert [run.id for run in results.runs] == [other]
    again = Told().run(plan, tmp_path, 1)
    assert [run.id for run in again.runs] == [victim, other]
    assert agrees(again, whole)
    assert list((tmp_path / "failed").iterdir()) == []


@pytest.mark.soak
def test_two_attempts_at_once_are_both_right(plan, whole, tmp_path):
    """As when a node was thought dead, and was not."""
    spec = plan.runs[0]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        both = pool.starmap(run_group, [(plan, [spec], Place.at(tmp_path))] * 2, chunksize=1)
    for ((result, _),) in both:
        assert agrees(Results(runs=(result,)), whole)
    assert [path.name for path in tmp_path.glob("runs/*/*")] == ["result.json"]


def test_results_that_cannot_be_written_are_a_sentence(plan, whole, tmp_path):
    results, _, out = whole
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    (tmp_path / "results.json").unlink()
    (tmp_path / "results.json").mkdir()
    with pytest.raises(OSError, match=r"results\.json"):
        compare(plan, tmp_path)
    (tmp_path / "results.json").rmdir()
    told = Told()
    assert told.run(plan, tmp_path, 1).runs == results.runs
    assert not told.ended


SCRIPT = """
import sys
from pathlib import Path

from holdfast import Plan, Training, Tuning, compare, tune

with open("begun", "a") as file:
    print(__name__, file=file)
here = Path("{folder}")
plan = Plan(
    model="{model}", data=str(here / "train.jsonl"), target=str(here / "dev.jsonl"),
    recipes=("standard",), training=Training(lr=1e-3, max_updates=1, batch_size=2),
)
{call}
"""
COMPARE, TUNE = 'compare(plan, "out", jobs=2)', 'tune(plan, Tuning(trials=2), Path("out"))'
FAILING = f"if __name__ != '__main__':\n    sys.exit(1)\n{COMPARE}"


@pytest.mark.parametrize(
    "call",
    [
        COMPARE,
        pytest.param(TUNE, marks=pytest.mark.soak),
        pytest.param(FAILING, marks=pytest.mark.soak),
    ],
    ids=["compare", "tune", "another failure"],
)
def test_a_script_without_the_guard_is_told_so(call, plan, tmp_path):
    if "tune" in call:
        pytest.importorskip("optuna", reason="the cli extra is not installed")
    script = SCRIPT.format(folder=Path(plan.data).parent.as_posix(), model=plan.model, call=call)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    begun = (tmp_path / "begun").read_text().split()
    assert begun[0] == "__main__"
    assert 1 <= begun.count("__mp_main__") <= 2  # one for each process, and no second try
    assert done.returncode == 1
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("RuntimeError: ")
    assert 'put the call under `if __name__ == "__main__":`' in last


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets it")
def test_the_peak_is_of_one_run():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system keeps the peak of the process")
    large = torch.ones(40_000_000)
    with_it = runs.peak_memory()
    del large
    runs.reset_peak_memory()
    assert runs.peak_memory() < with_it - 100e6
