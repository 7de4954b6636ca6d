"""``holdfast report``: what was saved, drawn again."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("cattrs", reason="the eval extra is not installed")

from holdfast.cli import main
from holdfast.comparison.results import Results
from holdfast.evaluate.report import ForgettingReport
from holdfast.evaluate.sweep import Sweep, SweepPoint
from report.sample_report import sample
from report.sample_results import measured, run, sample_results


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def results():
    return sample_results(seeds=(0,))


def test_a_comparison_by_file_and_folder(results, tmp_path, capsys):
    (tmp_path / "one").mkdir()
    results.save("one/results.json")
    assert main(["report", "one"]) == 0
    told = capsys.readouterr()
    assert results.recommendation().headline.partition(":")[0] in told.out
    assert told.err == "Report: one/report.html\n"
    assert (tmp_path / "one/report.html").read_text() == results.to_html()
    assert main(["report", "one/results.json", "--out=other", "--markdown"]) == 0
    assert capsys.readouterr().out == results.to_markdown()
    assert sorted(f.name for f in (tmp_path / "other").iterdir()) == [
        ".holdfast", "report.html", "report.md",
    ]  # fmt: skip


def test_a_forgetting_report(tmp_path, capsys):
    report = sample()
    report.save("mine.json")
    assert main(["report", "mine.json", "--json"]) == 0
    assert ForgettingReport.from_json(capsys.readouterr().out) == report
    assert (tmp_path / "report.md").read_text() == report.to_markdown()
    assert main(["report", "mine.json"]) == 0
    assert report.verdict().headline in " ".join(capsys.readouterr().out.split())


def test_a_sweep_keeps_its_names(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    points = (SweepPoint({"alpha": 0.0}, sample()), SweepPoint({"alpha": 1.0}, sample()))
    Sweep("base", "tuned", points).save("out/sweep.json")
    assert main(["report", "out"]) == 0
    assert capsys.readouterr().err == "Sweep: out/sweep.html\n"
    names = sorted(f.name for f in (tmp_path / "out").iterdir())
    assert names == ["sweep.html", "sweep.json", "sweep.md"]


def test_a_folder_with_two_kinds_asks_which(results, capsys):
    results.save("results.json")
    sample().save("report.json")
    assert main(["report", "."]) == 2
    assert "contains results.json and report.json: name the file" in capsys.readouterr().err


def test_several_comparisons_are_one(results, tmp_path, capsys):
    first, rest = results.runs[:4], results.runs[4:]
    old = replace(first[0], seconds=1.0)
    replace(results, runs=(*rest, old), failed={first[1].id: "died"}).save("a.json")
    replace(results, runs=first, plan={**results.plan, "seeds": [9]}).save("b.json")
    assert main(["report", "a.json", "b.json", "--out=both"]) == 0
    both = Results.load("both/results.json")
    assert {run.id: run for run in both.runs} == {run.id: run for run in results.runs}
    assert both.failed == {}
    assert both.plan["seeds"] == [0, 1, 2, 9]
    assert (tmp_path / "both/report.html").exists()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (run("flow", target=0.6, share=0.5), None),
        (replace(run("flow"), target=measured("GSM8K", "acc", 1.396, 0.6)), "targets differ"),
        (replace(run("flow"), target=measured("MATH", "nll", 1.396, 0.6)), "targets differ"),
        (replace(run("flow"), target=measured("GSM8K", "nll", 1.5, 0.6)), "base models differ"),
        (replace(run("flow"), target=measured("GSM8K", "nll", 1.3961, 0.6)), None),
    ],
)
def test_only_of_one_base_and_target(results, other, words, capsys, tmp_path):
    results.save("a.json")
    elsewhere = {**results.plan, "model": "/mnt/models/SmolLM2-135M"}
    Results((other,), plan=elsewhere).save("b.json")
    assert main(["report", "a.json", "b.json", "--out=both"]) == (2 if words else 0)
    said = capsys.readouterr().err
    if words:
        assert f"a.json and b.json cannot be put together: their {words}" in said
        assert not (tmp_path / "both").exists()


def test_another_base_that_does_nearly_as_well_is_another(results, capsys):
    results.save("a.json")
    near = replace(run("flow"), target=measured("GSM8K", "nll", 1.3961, 0.6))
    Results((near,), plan={**results.plan, "model": "SmolLM2-360M"}).save("b.json")
    assert main(["report", "a.json", "b.json", "--out=both"]) == 2
    assert "their base models differ" in capsys.readouterr().err


def test_several_need_a_place_and_a_kind(results, capsys):
    results.save("a.json")
    sample().save("b.json")
    assert main(["report", "a.json", "a.json"]) == 2
    assert "--out DIR" in capsys.readouterr().err
    assert main(["report", "a.json", "b.json", "--out=both"]) == 2
    assert "b.json is not a comparison: show it alone" in capsys.readouterr().err


def unfinished(results, folder, runs):
    for one in runs:
        place = folder / "runs" / one.id
        place.mkdir(parents=True)
        (place / "result.json").write_text(one.to_json())


def test_a_comparison_at_work(results, tmp_path, capsys):
    unfinished(results, tmp_path / "work", results.runs[:3])
    (tmp_path / "work" / "failed").mkdir()
    (tmp_path / "work" / "failed" / "lora-0-1.txt").write_text("Traceback\nValueError: no peft\n")
    assert main(["report", "work", "--json"]) == 0
    told = capsys.readouterr()
    assert "unfinished: 3 of" in told.err
    found = Results.from_json(told.out)
    assert {one.id for one in found.runs} == {one.id for one in results.runs[:3]}
    assert found.failed == {"lora-0-1": "ValueError: no peft"}
    assert not (tmp_path / "work" / "results.json").exists()  # it is not finished


def test_the_plan_at_work_gives_the_order(tmp_path, capsys):
    yaml = pytest.importorskip("yaml", reason="the hf extra is not installed")
    from holdfast.comparison.plan import Plan

    names = ("wise-ft", "flow", "standard")
    plan = Plan("model", "train.jsonl", "dev.jsonl", recipes=names, seeds=(0,))
    specs = plan.runs
    done = [run(spec.recipe, id=spec.id) for spec in specs[:2]]
    unfinished(None, tmp_path, done)
    config = {"model": "model", "data": "train.jsonl", "target": "dev.jsonl", "seeds": [0]}
    config |= {"recipes": [*names], "jobs": 2, "learn_at_least": 0.8}
    (tmp_path / "config.yaml").write_text(yaml.dump(config))
    assert main(["report", ".", "--json"]) == 0
    told = capsys.readouterr()
    assert "unfinished: 2 of 3 runs" in told.err
    assert json.loads(told.out)["learn_at_least"] == 0.8
    assert [one["recipe"] for one in json.loads(told.out)["runs"]] == ["wise-ft", "flow"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "was not written by holdfast"),
        ('{"runs": 3, "schema_version": 1}', "a.json: the comparison.runs: must be a list"),
        ('{"tuned": 1}', "a.json: this is not a forgetting report"),
        ('{"points": []}', "a.json: this is not a sweep"),
        ('{"runs": [], "schema_version": 99}', "update holdfast"),
        ("\x00", "a.json is not JSON"),
    ],
)
def test_what_cannot_be_read_is_named(text, words, tmp_path, capsys):
    (tmp_path / "a.json").write_text(text)
    assert main(["report", "a.json"]) == 2
    assert words in capsys.readouterr().err
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"]
