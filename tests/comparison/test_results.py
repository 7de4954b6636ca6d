"""Results as data: JSON and back, medians over seeds."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from holdfast.comparison.plan import Plan
from holdfast.comparison.results import Results, RunResult, collect, together
from report.sample_results import every_results, measured, run, sample_results, simple


def test_the_shape_of_the_json():
    value = json.loads(sample_results(seeds=(0,), failed={"a-0-1": "ValueError: no"}).to_json())
    first = value["runs"][0]
    assert (first["recipe"], first["seed"]) == ("standard", 0)
    assert {"name", "metric", "lower_is_better", "before", "after"} <= first["target"].keys()
    assert [test["name"] for test in first["retained"]] == ["WikiText-2", "PIQA", "LAMBADA"]
    assert {"drift", "kl", "seconds", "peak_memory", "versions"} <= first.keys()
    assert value["failed"] == {"a-0-1": "ValueError: no"}


def test_there_and_back(tmp_path):
    found = sample_results(failed={"a": "b"})
    found.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == found


@pytest.mark.parametrize("name", ["default", "minilm_rte", "smollm2_gsm8k"])
def test_the_record_of_a_benchmark_is_read(name):
    found = Results.load(Path(__file__).parents[2] / f"benchmarks/results/compare_{name}.json")
    assert found.recommendation().label


@settings(max_examples=50)
@given(every_results)
def test_everything_goes_to_json_and_back(found):
    once = Results.from_json(found.to_json())
    assert Results.from_json(once.to_json()).to_json() == once.to_json()
    for one in once.runs:
        assert RunResult.from_json(one.to_json()).to_json() == one.to_json()
    for summary in once.summaries():
        assert summary.loss >= 0
        assert len(summary.runs) == summary.seeds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not the JSON of a comparison"),
        ("[]", "it has no schema_version"),
        ('{"runs": [], "plan": 1, "schema_version": 1}', "plan: must be an object"),
        ('{"runs": 1, "schema_version": 1}', "runs: must be a list"),
        ('{"runs": [{"id": "1"}], "schema_version": 1}', "the key 'recipe' is missing"),
        ('{"runs": [], "schema_version": 99}', "update holdfast"),
    ],
)
def test_what_is_no_comparison_is_refused(tmp_path, text, said):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"results\.json: ") as refused:
        Results.load(tmp_path / "results.json")
    assert said in str(refused.value)


def test_a_whole_number_stays_one():
    found = run("recadam", values={"lr": 1e-3, "max_updates": 2_000_000, "update.nesterov": True})
    assert found.label == "recadam lr=0.001 max_updates=2000000 update.nesterov=True"
    assert RunResult.from_json(found.to_json()).label == found.label


def test_medians_and_the_best_over_seeds():
    (one,) = simple({"flow": ([1.0, 1.4, 1.1], 12.0)}).summaries()
    assert (one.recipe, one.seeds, one.target.after, one.target.best) == ("flow", 3, 1.1, 1.0)
    assert (one.target.low, one.target.high) == pytest.approx((-1.0, -0.6))
    (other,) = simple({"flow": ([0.5, 0.6], 9.0)}, 0.1, lower=False).summaries()
    assert other.target.best == pytest.approx(0.6)


def test_what_was_lost():
    found = run("flow", retained=(measured("a", "nll", 2.0, 3.0), measured("b", "nll", 2.0, 1.0)))
    assert found.loss == pytest.approx(2.875)  # much is 2, at 0.25 nats
    broken = replace(found, retained=(measured("a", "nll", 2.0, math.nan),))
    assert broken.loss == math.inf
    nothing = replace(found, retained=())
    assert nothing.loss == 0.0


def test_seeds_may_differ_in_what_was_measured():
    a = run("flow", 0, retained=(measured("a", "nll", 2.0, 3.0),), kl={"x": 1.0}, drift=None)
    b = run("flow", 1, retained=(measured("b", "nll", 2.0, 3.0),), kl={"y": 3.0})
    (one,) = Results(runs=(a, b)).summaries()
    assert [test.name for test in one.retained] == ["a", "b"]
    assert one.kl == {"x": 1.0, "y": 3.0}
    assert one.relative_drift == 0.06


def test_runs_of_other_resolved_settings_are_not_put_together():
    def found(seed, lr):
        resolved = {"update": {"name": "adamw", "lr": lr}, "penalties": []}
        return Results((replace(run("holdfast", seed), resolved=resolved),))

    assert len(together({"a": found(0, 1e-3), "b": found(1, 1e-3)}).runs) == 2
    with pytest.raises(ValueError, match=r"different settings \(update\.lr is 0\.001 and 0\.002\)"):
        together({"a": found(0, 1e-3), "b": found(1, 2e-3)})


def test_default_learning_rates_are_put_together():
    one, other = (
        replace(Results((run(name),)), plan={"recipes": [name], "rates": {name: lr}})
        for name, lr in (("standard", 1e-3), ("lora", 6e-3))
    )
    assert together({"a": one, "b": other}).plan["rates"] == {"standard": 1e-3, "lora": 6e-3}


def test_no_command_is_shown_if_comparisons_were_trained_with_different_settings():
    first = sample_results()
    other = replace(first, plan={**first.plan, "training": {"batch_size": 64}})
    label = first.runs[0].label
    assert together({"a": first, "b": first}).command(label) == first.command(label) != ""
    joined = together({"a": first, "b": other})
    assert joined.command(label) == ""
    assert not {"data", "training"} & joined.plan.keys()


def test_runs_are_in_the_order_of_a_plan_that_does_not_know_its_learning_rates():
    plan = Plan("m", "d", "t", recipes=("sfa", "lora"), seeds=(0, 1))
    runs = {f"{spec.recipe}-{spec.seed}": run(spec.recipe, spec.seed) for spec in plan.runs}
    found = collect(dict(sorted(runs.items())), {}, plan)
    assert [(one.recipe, one.seed) for one in found.runs] == [
        ("sfa", 0), ("lora", 0), ("sfa", 1), ("lora", 1),
    ]  # fmt: skip
