import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.cli import main
from holdfast.evaluate.sweep import Sweep


def run(*arguments):
    return main(["merge", *map(str, arguments)])


@pytest.fixture
def pair(tmp_path):
    save_file({"a.weight": torch.ones(4), "b": torch.ones(5)}, tmp_path / "base.safetensors")
    save_file({"a.weight": 3 * torch.ones(4), "b": torch.ones(5)}, tmp_path / "tuned.safetensors")
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"


def test_writes_and_tells(tmp_path, pair, capsys):
    assert run(*pair, "--alpha", "0.25", "--out", tmp_path / "out") == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["a.weight"], torch.full((4,), 1.5))
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert f"wrote {tmp_path / 'out'}" in out
    assert "33 % from the base" in out  # ‖θ − θ*‖ = 1, ‖θ*‖ = 3


def test_not_finite_is_told(tmp_path, pair, capsys):
    save_file({"a.weight": torch.full((4,), torch.nan), "b": torch.ones(5)}, pair[1])
    run(*pair, "--out", tmp_path / "out")
    assert "1 tensors contain NaN or infinity, the first is a.weight" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--json"], ["--alpha", "2"]])
def test_names_control_no_terminal(tmp_path, pair, more, capsys):
    named = pair[1].rename(tmp_path / "\x1b[31mred\x9b2J.safetensors")
    run(pair[0], named, "--out", tmp_path / "\x1b[2Jout", *more)
    told = capsys.readouterr()
    assert "2Jout" in told.out or "alpha must be" in told.err
    assert not {"\x1b", "\x9b"} & {*told.out, *told.err}


def test_errors_are_one_line(tmp_path, pair, capsys):
    assert run(*pair, "--alpha", "2", "--out", tmp_path / "out") == 2
    assert "alpha must be in [0, 1]" in capsys.readouterr().err
    assert run(pair[0], tmp_path / "nowhere", "--out", tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert "no such file or directory" in err
    assert len(err.splitlines()) == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    out = capsys.readouterr().out
    assert "holdfast merge models/Llama-3.2-1B runs/my-tune --alpha 0.5" in out
    assert "holdfast merge models/Llama-3.2-1B runs/my-tune --sweep 0 0.25 0.5 0.75 1" in out


def test_methods_and_their_settings(tmp_path, pair, capsys):
    base, tuned = pair
    save_file({"a.weight": torch.tensor([1.0, 4, 1, 1]), "b": torch.zeros(5)}, tuned)
    out = tmp_path / "out"
    assert run(*pair, "--method", "ties", "--density", "0.25", "--out", out, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["method"], told["settings"]) == ("ties", {"density": 0.25, "lam": 1.0})
    merged = load_file(out / "model.safetensors")
    assert merged["a.weight"].tolist() == [1, 4, 1, 1]
    assert run(base, tuned, base, "--method", "model-stock", "--out", tmp_path / "stock") == 0
    assert "model-stock of" in capsys.readouterr().out
    other = shutil.copy(tuned, tmp_path / "other.safetensors")
    seeds = []
    for seed in ("0", "1"):
        place = tmp_path / f"dare{seed}"
        given = ("--method", "dare", "--drop", "0.5", "--seed", seed, "--out", place)
        assert run(base, tuned, other, *given) == 0
        assert f"dare (drop = 0.5, λ = 1, seed = {seed})" in capsys.readouterr().out
        seeds.append(load_file(place / "model.safetensors")["b"])
    assert not torch.equal(*seeds)
    assert run(base, tuned, tuned, "--method", "dare", "--out", tmp_path / "same") == 2
    assert "tuned.safetensors is given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--method", "fapm", "--beta", "1"], "fapm has no setting --beta: it has --keep"),
        (["--method", "model-stock", "--t", "1"], "model-stock has no setting --t and no other"),
        (["--method", "model-stock"], "ModelStock merges 2 or more tuned models, got 1"),
        (["--method", "lines"], "no tensor's name has a number"),
        (["--method", "keep"], "invalid choice: 'keep'"),
        (["--method", "slerp", "--t", "2"], "t must be in [0, 1], got 2.0"),
        (["--seed", "1"], "wise-ft draws nothing, and --seed of tests needs a sweep"),
        (["--sweep", "alpha", "0.5", "--sweep", "alpha", "0.7"], "alpha is given twice"),
        (["--retain-kl", "1"], "--retain-kl needs a sweep"),
        (["--retain", "99%"], "--retain needs a sweep"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path, pair, capsys, given, words):
    assert run(*pair, "--out", tmp_path / "out", *given) == 2
    said = capsys.readouterr().err
    assert words in said or "must be 'wise-ft'" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A base and a tuned model, and files to test them on."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from small import make_llama, make_tokenizer, noisy, save

    base = make_llama()
    save(base, tmp_path / "base", make_tokenizer())
    save(noisy(base), tmp_path / "tuned", make_tokenizer())
    (tmp_path / "text.txt").write_text("the cat sat on the mat . " * 40)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "two plus", "answer": "two ."}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_sweep(models, capsys):
    tests = ["--text", "text.txt", "--target", "rows.jsonl", "--context-free", "2"]
    assert run("base", "tuned", "--sweep", "0", "0.5", "1", "--out", "out", *tests) == 0
    told = capsys.readouterr()
    assert told.err.endswith("Sweep: out/sweep.html\n")
    found = Sweep.load("out/sweep.json")
    assert found.recommendation().headline in " ".join(told.out.split())
    assert "rows (target)" in told.out
    assert [point.settings["alpha"] for point in found.points] == [0, 0.5, 1]
    files = sorted(file.name for file in (models / "out").iterdir())
    assert files == [".holdfast", "sweep.html", "sweep.json", "sweep.md"]


def test_a_sweep_without_tests_shows_the_distance(models, capsys):
    arguments = ["base", "tuned", "--sweep", "0.5", "1", "--out", "out", "--context-free", "2"]
    assert run(*arguments, "--keep-models") == 0
    out = capsys.readouterr().out
    assert "No α is recommended" in out
    assert "predictions, context-free" in out
    assert "weights" in out
    assert (models / "out" / "alpha-0.5" / "model.safetensors").is_file()
    assert run(*arguments, "--keep-models") == 2
    assert "not empty" in capsys.readouterr().err
    assert run(*arguments, "--keep-models", "--overwrite") == 0


def test_a_grid(models, capsys):
    grid = ["--sweep", "alpha", "0", "0.5", "--sweep", "beta", "0", "0.5"]
    given = ["--method", "lines", *grid, "--out", "out", "--context-free", "2", "--keep-models"]
    assert run("base", "tuned", *given) == 0
    found = Sweep.load("out/sweep.json")
    assert [(*point.settings.values(), point.kind) for point in found.points] == [
        (0, 0, "base"), (0, 0.5, "merged"), (0.5, 0, "merged"), (0.5, 0.5, "merged"),
    ]  # fmt: skip
    kept = sorted(file.name for file in (models / "out").glob("alpha*"))
    assert kept == ["alpha-0.0-beta-0.5", "alpha-0.5-beta-0.0", "alpha-0.5-beta-0.5"]
    assert "| α 0.5, β 0.5 |" in (models / "out" / "sweep.md").read_text()


def test_the_best_within_a_limit_is_written(models, capsys):
    tests = ["--text", "text.txt", "--target", "rows.jsonl", "--context-free", "2"]
    sweep = ["base", "tuned", "--sweep", "0.3", "0.6", "1", *tests]
    assert run(*sweep, "--retain", "1%", "--learn-at-least", "100%", "--out", "out") == 0
    found, told = Sweep.load("out/sweep.json"), capsys.readouterr()
    targets = {
        p.settings["alpha"]: next(s.after.value for s in p.report.scores if s.role == "target")
        for p in found.points
    }
    best = min(targets, key=targets.get)
    assert (found.retain, found.learn_at_least) == (0.01, 1.0)
    assert found.recommendation().settings == {"alpha": best}
    headline = found.recommendation().headline
    assert "it keeps 1 % of every retained score, and no other α within the limit" in headline
    assert " ".join(told.out.split()).startswith(headline)
    written = [file.name for file in (models / "out").glob("alpha*")]
    assert written == ([] if best == 1 else [f"alpha-{best}"])


def test_nothing_is_within_a_limit(models, capsys):
    sweep = ["base", "tuned", "--sweep", "0.5", "1", "--context-free", "2", "--out", "out"]
    assert run(*sweep, "--retain-kl", "0") == 1
    told = capsys.readouterr()
    no = "No α has a context-free divergence of at most 0 nats per token: keep the base"
    assert no in " ".join(told.out.split())
    assert no in told.err
    assert run(*sweep, "--retain-kl", "100") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "it is farthest from the base (no target was tested)" in told
    assert not list((models / "out").glob("alpha*"))  # the tuned model itself


def test_bare_weights_can_be_swept(tmp_path, pair, capsys):
    assert run(*pair, "--sweep", "0", "0.5", "1", "--out", tmp_path / "out") == 0
    moved = [p.report.drift.total.distance for p in Sweep.load(tmp_path / "out/sweep.json").points]
    assert moved == [0, 2, 4]
    assert "No context-free divergence" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--sweep", "0", "1", "--alpha", "0.5"], "give one of the two"),
        (["--sweep", "0", "2"], "alpha must be in [0, 1], got 2.0"),
        (["--sweep", "0", "half"], "--sweep must be a number, got 'half'"),
        (["--sweep", "nan"], "got nan"),
        (["--sweep"], "expected at least one argument"),
        (["--sweep", "0.5", "--text", "nothing.txt"], "no such file: nothing.txt"),
        (["--sweep", "0.5", "--out", "text.txt"], "must be a directory"),
        (["--sweep", "0.5", "--out", "base/in"], "must be outside the input"),
        (["--text", "text.txt"], "--text needs a sweep"),
        (["--context-free", "2"], "--context-free needs a sweep"),
        (["--keep-models"], "--keep-models needs a sweep"),
        (["--sweep", "alpha"], "expected values after 'alpha'"),
        (["--sweep", "gamma", "1"], "WiseFT has no setting 'gamma'; known: alpha"),
        (["--sweep", "1", "--retain", "99%"], "--retain needs tests of what to keep"),
        (["--sweep", "1", "--retain", "101%", "--text", "text.txt"], "retain must be in (0, 1]"),
        (["--sweep", "1", "--retain", "most"], "must be a number, got 'most'"),
        (["--sweep", "1", "--learn-at-least", "0"], "learn-at-least must be in (0, 1]"),
        (["--learn-at-least", "99%"], "--learn-at-least needs a sweep"),
        (["--sweep", "1", "--retain-kl", "1", "--context-free", "0"], "leave out --context-free 0"),
        (["--sweep", "1", "--method", "model-stock"], "model-stock has no setting to sweep"),
    ],
)
def test_bad_sweeps_are_one_sentence_and_leave_nothing(models, capsys, change, words):
    assert run("base", "tuned", "--out", "out", *change) in (1, 2)
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (models / "out").exists()
    assert not (models / "base" / "in").exists()
