"""Runs as PEFT's method comparison has them: its reader needs this shape."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.comparison.peft_format import forgetting
from holdfast.comparison.results import Results
from holdfast.recipe import Recipe
from report.sample_results import measured, run, sample_results

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def an(kind, **more):
    return {"type": kind, **more}


def every(names, kind):
    return dict.fromkeys(names.split(), kind)


def has(properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT, NUMBER, WHOLE = an(["string", "null"]), an("number"), an("integer")
MAYBE = an(["number", "null"])
#: What PEFT's ``method_comparison/processing.py`` reads, and where null would stop it: it converts
#: whole numbers and times, and shows other missing values as NaN.
SHAPE = has(
    {
        "run_info": has(
            {
                **every("created_at peft_branch error_msg", TEXT),
                "experiment_name": an("string", pattern="^[^/]+/[^/]+$"),
                "total_time": NUMBER,
                "train_config": has({"model_id": an("string")}),
                "peft_config": {"oneOf": [an("null"), has({"peft_type": an("string")})]},
            }
        ),
        "train_info": has(
            {
                **every(
                    "accelerator_memory_reserved_avg accelerator_memory_max file_size "
                    "accelerator_memory_reserved_99th num_trainable_params",
                    WHOLE,
                ),
                "train_time": NUMBER,
                "status": {"const": "success"},
                "metrics": an(
                    "array",
                    minItems=1,
                    items=has(
                        {
                            **dict.fromkeys(("test accuracy", "train loss", "forgetting"), MAYBE),
                            **dict.fromkeys(("train samples", "train total tokens"), WHOLE),
                        }
                    ),
                ),
            }
        ),
        "meta_info": has(
            {
                "package_info": has(
                    every(
                        "transformers-version peft-version datasets-version torch-version "
                        "bitsandbytes-version",
                        TEXT,
                    )
                ),
                "system_info": an("object"),
            }
        ),
    }
)


@pytest.mark.parametrize("name", ["compare_default", "compare_smollm2_gsm8k", "compare_minilm_rte"])
def test_the_shape_that_its_reader_needs(name, tmp_path):
    jsonschema = pytest.importorskip("jsonschema", reason="the dev extra is not installed")
    results = Results.load(RESULTS / f"{name}.json")
    files = results.to_peft(tmp_path / "out")
    assert len(files) == len(results.runs)
    for file, one in zip(files, results.runs, strict=True):
        record = json.loads(file.read_text())
        jsonschema.validate(record, SHAPE)
        assert file.name == record["run_info"]["experiment_name"].replace("/", "--") + ".json"
        assert record["run_info"]["total_time"] == one.seconds
        adapters = record["run_info"]["peft_config"]
        assert (adapters and adapters["peft_type"]) == ("LORA" if one.recipe == "lora" else None)


def record_of(one, tmp_path, plan):
    (file,) = Results((one,), plan=plan).to_peft(tmp_path)
    return json.loads(file.read_text())


def test_the_figures_of_a_run(tmp_path):
    target = measured("GSM8K", "exact_match", 0.1, 0.4, lower=False)
    texts = measured("a", "perplexity", 10.0, 20.0), measured("b", "nll", 1.0, 1.5)
    settings = Recipe.preset("recadam+lora").to_dict()
    one = replace(run("mine"), target=target, retained=texts, settings=settings, values={"x.y": 2})
    plan = {"model": "org/Llama", "training": {"max_updates": 10, "batch_size": 4, "accumulate": 2}}
    record = record_of(one, tmp_path, plan)
    (metrics,) = record["train_info"]["metrics"]
    assert metrics["test accuracy"] == 0.4
    assert metrics["forgetting"] == pytest.approx((0.6931 + 0.5) / 2, abs=1e-4)
    assert metrics["train samples"] == 80
    assert metrics["train loss"] == one.curves[1].values[-1]
    assert record["run_info"]["peft_config"]["r"] == 16
    vera = replace(one, settings=Recipe.preset("vera").to_dict())
    assert record_of(vera, tmp_path, plan)["run_info"]["peft_config"]["peft_type"] == "VERA"
    assert record["run_info"]["experiment_name"] == "mine/Llama-y2-seed0"
    assert "train samples" not in record["meta_info"]["not_measured"]


def test_the_settings_of_a_run_replace_those_of_the_plan(tmp_path):
    training = {"max_updates": 10, "batch_size": 4, "max_length": 64, "clip_norm": 1.0}
    plan = {"training": training, "options": {"max_updates": 20, "merging.alpha": 0.5}}
    one = replace(run("mine"), values={"batch_size": 8, "update.gamma": 10.0})
    record = record_of(one, tmp_path, plan)
    used, (metrics,) = record["run_info"]["train_config"], record["train_info"]["metrics"]
    assert (used["max_steps"], used["batch_size"], used["max_seq_length"]) == (20, 8, 64)
    assert (metrics["step"], metrics["train samples"]) == (20, 160)


@pytest.mark.parametrize("more", [{"patience": 2}, {"max_updates": None}])
def test_a_run_whose_number_of_updates_was_not_fixed(tmp_path, more):
    plan = {"training": {"max_updates": 400, "batch_size": 4, **more}}
    record = record_of(run("mine"), tmp_path, plan)
    (metrics,) = record["train_info"]["metrics"]
    assert (metrics["step"], metrics["train samples"]) == (160, 640)
    plan["training"]["packing"] = True  # a row is several samples
    assert record_of(run("mine"), tmp_path, plan)["train_info"]["metrics"][0]["train samples"] == 0


def test_what_is_not_known_is_null(tmp_path):
    odd = measured("a", "perplexity", 10.0, float("inf"))
    one = replace(run("my recipe/../x"), retained=(odd,), curves=(), versions={})
    record = record_of(one, tmp_path, {})
    (metrics,) = record["train_info"]["metrics"]
    assert (metrics["test accuracy"], metrics["train loss"], metrics["forgetting"]) == (None,) * 3
    assert record["run_info"]["peft_config"]["peft_type"] == "unknown"  # settings are not known
    assert record["run_info"]["experiment_name"] == "my-recipe-..-x/model-seed0"
    assert "train samples" in record["meta_info"]["not_measured"]
    assert [file.parent for file in tmp_path.rglob("*.json")] == [tmp_path]
    assert forgetting(replace(one, retained=())) is None


def test_two_runs_of_one_name(tmp_path):
    with pytest.raises(ValueError, match=r"two runs have the name a-b--model-seed0\.json"):
        Results((run("a b"), run("a/b"))).to_peft(tmp_path)


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sample_results(seeds=(0,)).save("results.json")
    assert main(["report", "results.json", "--peft"]) == 2
    assert "--out DIR" in capsys.readouterr().err
    assert main(["report", "results.json", "--peft", "--out", "peft"]) == 0
    assert capsys.readouterr().err == "11 runs: peft\n"
    assert main(["report", "results.json", "--peft", "--out", "peft"]) == 0  # again
    assert len([*Path("peft").glob("*.json")]) == 11
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peft", "results.json"]
