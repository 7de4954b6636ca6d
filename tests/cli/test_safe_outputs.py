"""No command writes over its inputs, over foreign files, or over results of another run."""

import json
import shutil

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("cattrs", reason="the eval extra is not installed")

from cli.test_bad_input import contents
from comparison.tiny import save_llama
from holdfast.cli import main

ROWS = [{"prompt": "two plus two is", "completion": "four"}] * 8
FINETUNE = [
    "finetune", "--model=base", "--data=train.jsonl", "--recipe=standard", "--lr=1e-3",
    "--max-updates=2", "--batch-size=2",
]  # fmt: skip
SCORE = ["score", "--model=base", "--data=train.jsonl"]
MEASURE = ["measure", "base", "tuned", "--context-free=0", "--no-drift"]
MERGE = ["merge", "base", "tuned"]
DRAW = ["draw", "--model=base", "--texts=1"]
COMPARE = [
    "compare", "--model=base", "--data=train.jsonl", "--target=train.jsonl", "--recipes",
    "standard", "--seeds", "0", "--context-free=0", "--jobs=1", "--lr=1e-3", "--max-updates=1",
]  # fmt: skip
TUNE = [
    "tune", "--model=base", "--data=train.jsonl", "--target=train.jsonl", "--trials=1",
    "--context-free=0", "--jobs=1", "--lr=1e-3", "--max-updates=1", "--recipe=recadam",
]  # fmt: skip
ALL = [FINETUNE, SCORE, MEASURE, MERGE, DRAW, COMPARE, TUNE, ["report", "results.json"]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("base", "tuned"):
        save_llama(folder / name)
    return folder


@pytest.fixture(autouse=True)
def place(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    rows = "\n".join(map(json.dumps, ROWS))
    for file in ("train.jsonl", "x/weights.jsonl", "x/report.json", "x/report.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(rows)
    (tmp_path / "results.json").write_text('{"runs": [], "schema_version": 1}')
    return tmp_path


def check_refused(given, words, place, capsys):
    before = contents(place)
    assert main(given) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert words in last
    assert contents(place) == before


@pytest.mark.parametrize(
    "given",
    [
        [*SCORE, "--data=x/weights.jsonl", "--out=x"],
        [*SCORE, "--weighted=train.jsonl"],
        [*SCORE, "--weighted=base/rows.jsonl"],
        [*MEASURE, "--target=x/report.json", "--out=x"],
        [*MEASURE, "--retained=x/report.json", "--out=x"],
        [*MEASURE, "--text=x/report.md", "--out=x"],
        [*MEASURE, "--out=tuned"],
        [*MERGE, "--out=base", "--overwrite"],
        [*MERGE, "--out=.", "--overwrite"],
        [*MERGE, "--sweep=0.5", "--out=tuned"],
        [*DRAW, "--out=base"],
        [*FINETUNE, "--out=base"],
        [*FINETUNE, "--out=base/new"],
        [*FINETUNE, "--out=."],
        [*FINETUNE, "--old-data=x/report.json", "--out=x"],
        [*COMPARE, "--out=."],
        [*COMPARE, "--text", "x/report.md", "--out=x"],
        [*TUNE, "--data=x/report.json", "--out=x"],
        ["report", "results.md"],
    ],
    ids=" ".join,
)
def test_no_input_is_overwritten(given, place, capsys):
    (place / "x" / ".holdfast").write_text(f"{given[0]}\n")  # even where all is ours
    (place / "results.md").write_text('{"runs": [], "schema_version": 1}')
    (place / "report.md").symlink_to("results.md")
    check_refused(given, "the input", place, capsys)


@pytest.mark.parametrize("given", ALL, ids=lambda given: given[0])
@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("mine", "is not empty"),
        ("", "must name a place"),
        ("a\udcff", "must be valid UTF-8"),
        ("linked", "link"),
        ("elsewhere", "contains results of holdfast other"),
    ],
)
def test_no_foreign_directory_is_used(given, out, words, place, capsys):
    (place / "mine").mkdir()
    (place / "mine" / "config.yaml").write_text("a: 1\n")
    (place / "linked").mkdir()
    (place / "linked" / ".holdfast").symlink_to(place / "train.jsonl")
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / ".holdfast").write_text("other\n")
    check_refused([*given, f"--out={out}"], words, place, capsys)


def test_weighted_rows_replace_only_weighted_rows(place, capsys):
    check_refused([*SCORE, "--weighted=x/weights.jsonl"], "did not write it", place, capsys)
    for _ in range(2):
        assert main([*SCORE, "--weighted=rows.jsonl"]) == 0


def test_a_config_in_the_directory_is_kept(place, capsys):
    """It may be the input of the run; with other settings, it would have to change."""
    assert main([*FINETUNE, "--out=out", "--print-config"]) == 0
    text = "# mine\n" + capsys.readouterr().out
    (place / "out").mkdir()
    (place / "out" / "config.yaml").write_text(text)
    given = ["finetune", "--config=out/config.yaml"]
    check_refused([*given, "--lr=1e-4"], "the input", place, capsys)
    assert main(given) == 0
    assert (place / "out" / "config.yaml").read_text() == text


@pytest.mark.parametrize("name", ["seconds", "history.jsonl", "run.pt", "config.json"])
def test_links_in_a_stopped_run_are_not_followed(name, place, capsys):
    (place / "out").mkdir()
    (place / "out" / ".holdfast").write_text("finetune\n")
    (place / "out" / name).symlink_to(place / "results.json")
    before = (place / "results.json").read_bytes()
    assert main([*FINETUNE, "--out=out"]) in (0, 2)
    assert (place / "results.json").read_bytes() == before


def test_changed_data_is_not_resumed(place, capsys):
    """Of many rows, one in the middle."""
    rows = [{"prompt": f"the cat {i}", "completion": "sat"} for i in range(3000)]
    (place / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    stop_in_training(place)
    rows[1001] = {"prompt": "the dog ran", "completion": "on the mat"}
    (place / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([*FINETUNE, "--out=out", "--save-seconds=0"]) == 2
    assert "run with other data" in capsys.readouterr().err


def stop_in_training(place):
    """Leave a run that was stopped after its last update."""
    from holdfast.cli import finetune

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "written_aside", lambda *_: 1 / 0)
        assert main([*FINETUNE, "--out=out", "--save-seconds=0"]) == 1
    assert (place / "out" / "run.pt").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.pt", b""),
        ("run.pt", b"no checkpoint"),
        ("run.pt", None),
        ("history.jsonl", b"\xff\xfe\n"),
        ("history.jsonl", b"[1]\n"),
        ("history.jsonl", b"{}\n"),
        ("history.jsonl", b"{\n" + b'{"update": 1, "loss": 1.0}\n'),
    ],
)
def test_damaged_files_of_a_stopped_run(name, text, place, capsys):
    stop_in_training(place)
    file = place / "out" / name
    if text is None:
        import torch

        torch.save({"settings": {}, "model": []}, file)
    else:
        file.write_bytes(text)
    capsys.readouterr()
    assert main([*FINETUNE, "--out=out", "--save-seconds=0"]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert f"out/{name}" in last
    assert "remove" in last
    assert "weights_only" not in last  # torch advises to run the code of the file


@pytest.mark.parametrize("damage", ["middle", "text", "shape", "bytes"])
def test_a_damaged_study(damage, place, capsys):
    pytest.importorskip("optuna", reason="the cli extra is not installed")
    from holdfast.comparison.study import open_study

    study = open_study(str(place / "out" / "study.log"), "holdfast")
    study.set_user_attr("search", 1 if damage == "shape" else {})
    (place / "out" / ".holdfast").write_text("tune\n")
    file = place / "out" / "study.log"
    first, *rest = file.read_bytes().splitlines(keepends=True)
    changed = {"middle": [first[:20], b"\n", *rest], "text": [b"hello\n", b"world\n"]}
    changed |= {"bytes": [b"\xff\xfe\n", first, *rest]}
    file.write_bytes(b"".join(changed.get(damage, [first, *rest])))
    assert main([*TUNE, "--out=out"]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert "out/study.log" in last
    assert "damaged" in last


def test_a_journal_that_was_cut_short(place):
    pytest.importorskip("optuna", reason="the cli extra is not installed")
    from holdfast.comparison.study import open_study

    file = place / "study.log"
    open_study(str(file), "one").set_user_attr("a", 1)
    with open(file, "ab") as journal:
        journal.write(b'{"op_code": 2, "stu')
    open_study(str(file), "one").set_user_attr("b", 2)
    assert open_study(str(file), "one").user_attrs == {"a": 1, "b": 2}


def test_a_full_disk_in_score(place, capsys, monkeypatch):
    from safetensors import SafetensorError

    from holdfast.scoring import scores

    def full(*_):
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(scores, "save_file", full)
    assert main([*SCORE, "--out=out"]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("holdfast: ")
    assert last.endswith("scores.safetensors: No space left on device")
