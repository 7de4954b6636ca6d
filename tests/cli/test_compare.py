"""``holdfast compare`` on the small model that comes with the package."""

import json
import re

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")

import yaml

from holdfast.cli import main
from holdfast.comparison.results import Results
from holdfast.io.storage import Place
from report.sample_results import sample_results

pytestmark = pytest.mark.usefixtures("forked_workers")
FEW = [
    "--recipes", "standard", "recadam+wise-ft", "--seeds", "0", "--max-updates=2",
    "--batch-size=2", "--limit=5", "--context-free=0", "--text", "old.txt", "--jobs=1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "old.txt").write_text("It was the best of times, it was the worst of times.\n")


def test_without_a_model_it_takes_the_one_in_the_package(capsys):
    assert main(["compare", "--print-config", "--lr=0.5"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    named = (shown["model"], shown["data"], shown["target"], shown["text"])
    assert named == ("builtin", "builtin", "builtin:dev", ["builtin"])
    assert shown["lr"] == 0.5
    assert shown["max_updates"] == 40
    assert main(["compare", "--print-config", "--model=mine"]) == 2
    assert "--data and --target must be given" in capsys.readouterr().err


def test_a_comparison_and_once_more(tmp_path, capsys):
    assert main(["compare", "--out=out", *FEW]) == 0
    told = capsys.readouterr()
    assert "recadam+wise-ft" in told.out
    each = r"\(\S+ s per training and \S+ s of tests per run\)"
    runs = rf"^2 runs, 1 at a time, about \S+ s and what recipes add {each}\n2 tests, about "
    assert re.search(runs, told.err, re.MULTILINE)
    results = Results.load(tmp_path / "out" / "results.json")
    assert [(run.recipe, run.seed) for run in results.runs] == [
        ("standard", 0), ("recadam+wise-ft", 0),
    ]  # fmt: skip
    assert [m.name for m in results.runs[0].retained] == ["old"]
    assert results.learn_at_least == 0.95
    assert 5e5 < (tmp_path / "out" / "report.html").stat().st_size < 1.5e6
    # What is finished is not done again; the config that was written says the same.
    assert main(["compare", "--out=out", *FEW, "--learn-at-least=90%"]) == 0
    assert Results.load(tmp_path / "out" / "results.json").learn_at_least == 0.9
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["learn_at_least"] == 0.9
    assert main(["compare", "--out=out", *FEW]) == 0
    capsys.readouterr()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("runs/*/result.json")}
    assert main(["compare", "--config=out/config.yaml", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == json.loads(results.to_json())
    assert "at a time" not in told.err
    assert "All 2 runs are finished, nothing is left to run.\n" in told.err
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_without_a_learning_rate_all_recipes_train_alike(tmp_path, capsys):
    recipes = ["--recipes", "standard", "holdfast", *FEW[3:]]
    assert main(["compare", "--out=out", "--lr=none", *recipes]) == 0
    told = capsys.readouterr()
    assert "Default learning rates for this model: 0.00045 (standard and holdfast)." in " ".join(
        told.out.split()
    )
    assert "note:" not in told.err
    results = Results.load(tmp_path / "out" / "results.json")
    assert results.plan["rates"] == {"standard": 4.5e-4, "holdfast": 4.5e-4}
    assert [run.resolved["update"]["lr"] for run in results.runs] == [4.5e-4, 4.5e-4]
    # The same command finds its results.
    assert main(["compare", "--config=out/config.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(results.to_json())


def test_failed_runs_are_an_error(tmp_path, capsys, monkeypatch):
    found = sample_results(seeds=(0,), failed={"mofo-0-1": "ValueError: no"})
    monkeypatch.setattr("holdfast.cli.compare.compare_in", lambda *_, **__: found)
    assert main(["compare", "--out=out", *FEW]) == 1
    told = capsys.readouterr()
    assert found.recommendation().headline.partition(":")[0] in told.out
    total = len(found.runs) + 1
    assert told.err.splitlines()[-1] == (
        f"holdfast: 1 of {total} runs failed; the first: ValueError: no (out/failed)"
    )
    assert (tmp_path / "out" / "report.html").exists()


def test_an_address_of_results(tmp_path, capsys):
    out = f"dir::file://{tmp_path}/there"
    assert main(["compare", f"--out={out}", "--recipes", "standard", *FEW[3:]]) == 0
    said = capsys.readouterr().err
    assert "[1/1] standard, seed 0: done" in said
    assert f"Report: {out}/report.html" in said
    place = Place.at(out)
    assert (place / "report.html").read_text().startswith("<!")
    assert "standard" in (place / "report.md").read_text()
    assert "recipes:" in (place / "config.yaml").read_text()
    assert len(Results.from_json((place / "results.json").read_text()).runs) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--recipes", "recadm"], "did you mean 'recadam'"),
        (["--recipes", "standard", "standard"], "recipes contains 'standard' twice"),
        (["--grid", "lrr", "1"], "setting 'lrr'; did you mean 'lr'"),
        (["--grid", "update.pul", "1", "--recipes", "recadam"], "did you mean 'update.pull'"),
        (["--grid", "updat.pull", "1", "--recipes", "recadam"], "did you mean 'update.pull'"),
        (["--jobs=0"], "jobs must be at least 1"),
        (["--learn-at-least=95"], "learn-at-least must be in (0, 1], such as 0.95 or 95%"),
    ],
)
def test_bad_input_is_one_sentence(given, words, capsys):
    assert main(["compare", *FEW[3:], *given]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
