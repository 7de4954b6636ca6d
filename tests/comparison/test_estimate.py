"""What a comparison says before its first run: the amount of work, and about how long it takes."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.small_plan import make_plan
from holdfast.comparison.crew import make_crew
from holdfast.comparison.estimate import overview
from holdfast.comparison.gpus import Gpu
from holdfast.evaluate.amount import Amount


def test_the_overview_says_which_trainings_are_repeated(tmp_path):
    plan = make_plan(tmp_path, recipes=("standard", "wise-ft", "recadam"))
    crew = make_crew([Gpu(0)], jobs=2)
    assert [*overview(plan, plan.runs, crew)] == ["6 runs of 4 trainings, 2 at a time"]
    left = [spec for spec in plan.runs if (spec.recipe, spec.seed) != ("standard", 0)]
    first, second = overview(plan, left, crew)
    assert first == "5 runs of 4 trainings, 2 at a time"
    assert second.startswith("1 training is repeated, from the last checkpoint if there is one")
    left = [spec for spec in plan.runs if spec.recipe == "wise-ft"]
    assert [*overview(plan, left, crew)][1].startswith("2 trainings are repeated")
    left = [spec for spec in plan.runs if spec.recipe == "recadam"]
    assert [*overview(plan, left, crew)] == ["2 runs, 2 at a time"]


@pytest.mark.parametrize(
    ("jobs", "threads", "expected"), [(1, 4, "10 s"), (2, 2, "5.0 s"), (8, 1, "5.0 s")]
)
def test_the_time_is_measured_as_a_worker_runs(jobs, threads, expected, tmp_path, monkeypatch):
    plan = make_plan(tmp_path, recipes=("standard", "spd"), seeds=(0,))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    used, before = [], torch.get_num_threads()

    def measured(plan, runs):
        used.append(torch.get_num_threads())
        return 6.0, Amount([], base=0.0, other=2.0, is_part=False)

    monkeypatch.setattr("holdfast.comparison.estimate._measured", measured)
    first, *_ = overview(replace(plan, device="cpu"), plan.runs, make_crew([], jobs=jobs))
    assert f", about {expected} and what recipes add" in first
    assert used == [threads]
    assert torch.get_num_threads() == before
