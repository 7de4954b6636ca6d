"""Whatever is wrong is said in one sentence, and nothing is lost or left half done.

A row of ``CASES`` is a subcommand, what is changed in its arguments that work (``GOOD``), and words
of the sentence. To cover a new subcommand, add its arguments and rows.
"""

import json
import shutil

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("cattrs", reason="the eval extra is not installed")

from holdfast import builtin
from holdfast.cli import main

MODEL = str(builtin.MODEL)
_TRAINING = ["--max-updates=1", "--batch-size=2"]
GOOD = {
    "compare": [
        f"--model={MODEL}", "--data=train.jsonl", "--target=train.jsonl", "--recipes", "standard",
        "--seeds", "0", "--context-free=0", "--jobs=1", "--out=out", *_TRAINING,
    ],
    "finetune": [f"--model={MODEL}", "--data=train.jsonl", "--out=out", *_TRAINING],
    "measure": [MODEL, MODEL, "--target=train.jsonl", "--context-free=0", "--out=out"],
    "merge": [MODEL, MODEL, "--out=out"],
    "methods": [],
    "report": ["results.json", "--out=out"],
    "score": [f"--model={MODEL}", "--data=train.jsonl", "--out=out"],
    "completion": ["bash"],
    "tune": [
        f"--model={MODEL}", "--data=train.jsonl", "--target=train.jsonl", "--trials=1",
        "--context-free=0", "--jobs=1", "--out=out", *_TRAINING,
    ],
}  # fmt: skip
SWEEP = ["--sweep=0.5", "--target=train.jsonl", "--context-free=0"]


def _settings(name):
    """Of all subcommands that read YAML and train or score."""
    return [
        (name, ["--data=gone.jsonl"], "no such file: gone.jsonl"),
        (name, ["--data=empty.jsonl"], "empty.jsonl is empty"),
        (name, ["--data=broken.jsonl"], "broken.jsonl, line 2 is not JSON"),
        (name, ["--data=folder"], "folder"),
        (name, ["--modell=x"], "unknown option --modell; did you mean '--model'"),
        (name, ["--max_length=9"], "unknown option --max_length; did you mean '--max-length'"),
        (name, ["--zzz=1"], "unknown option --zzz; known: "),
        (name, ["--json", "stray"], "unexpected argument 'stray'"),
        (name, ["--config=unknown.yaml"], "unknown.yaml: unknown option 'modle'; did you mean"),
        (name, ["--config=words.yaml"], "words.yaml: batch-size must be a whole number, got 'few'"),
        (name, ["--config=broken.yaml"], "broken.yaml is not valid YAML"),
        (name, ["--config=deep.yaml"], "deep.yaml is not valid YAML: it is nested too deeply"),
        (name, ["--config=bomb.yaml"], "bomb.yaml is not valid YAML: it has more than 100,000"),
        (name, ["--config=binary.yaml"], "binary.yaml is not valid YAML"),
        (name, ["--config=list.yaml"], "list.yaml must contain options such as"),
        (name, ["--config=gone.yaml"], "gone.yaml"),
        (name, ["--config=folder"], "folder"),
        (name, ["--out=train.jsonl"], "train.jsonl is a file"),
        (name, ["--out=train.jsonl/in"], "train.jsonl"),
        (name, ["--model=/no/model"], "no such model directory"),
        (name, ["--model=cut"], "incomplete metadata"),
        (name, ["--model=strange"], "zorg"),
        (name, ["--model=bare"], "bare has no config.json"),
    ]


STOPPING = ["--validation=0.5", "--patience=1"]
CASES = [
    *_settings("compare"),
    *_settings("finetune"),
    *_settings("score"),
    ("compare", ["--config=grid.yaml"], "grid.yaml: grid must have at least one value of lr"),
    ("compare", ["--grid", "{lr: []}"], "--grid expected a value after '{lr: []}'"),
    ("compare", ["--recipes", "recadm"], "did you mean 'recadam'"),
    ("compare", ["--recipes", "recadm+flow"], "'recadam'? (in the preset 'recadm+flow')"),
    ("compare", ["--recipes", "holdfst"], "unknown method 'holdfst'; did you mean 'holdfast'?"),
    ("compare", ["--method", "spd"], "unknown option --method; did you mean '--recipes'?"),
    ("tune", ["--method", "spd"], "unknown option --method; did you mean '--recipe'?"),
    ("compare", ["--seeds", "a"], "--seeds must be a whole number, got 'a'"),
    ("compare", ["--recipes"], "--recipes expected at least one argument"),
    ("compare", ["--engine=slurm"], "--engine must be 'local' or 'ray', got 'slurm'"),
    ("compare", ["--target=gone.jsonl"], "no such file: gone.jsonl"),
    ("compare", ["--text", "gone.txt"], "no such file: gone.txt"),
    ("compare", ["--text", "train.jsonl"], "must be a text file, or have the column text"),
    ("compare", ["--old-data=gone.jsonl"], "no such file: gone.jsonl"),
    ("compare", ["--model=adapter"], "merge BASE adapter --alpha 1 --out DIR"),
    ("compare", ["--tasks", "piqua"], "no task 'piqua'; did you mean 'piqa'"),
    ("finetune", ["--data=odd.jsonl"], "the columns x"),
    ("finetune", ["--model=wordless"], "needs a tokenizer"),
    ("finetune", ["--recipe=recadm"], "did you mean 'recadam'"),
    ("finetune", ["--old-data=odd.jsonl"], "odd.jsonl has the columns x"),
    ("finetune", ["--recipe=broken.yaml"], "broken.yaml"),
    ("finetune", ["--lr=fast"], "--lr must be a number or none, got 'fast'"),
    ("finetune", ["--learning_rate=1"], "unknown option --learning_rate; did you mean '--lr'?"),
    ("compare", ["--seed=3"], "unknown option --seed; did you mean '--seeds'"),
    ("finetune", ["--seeds=3"], "unknown option --seeds; did you mean '--seed'?"),
    ("finetune", ["--set", "update.rl", "1"], "no setting 'update.rl'; did you mean 'update.lr'"),
    ("compare", ["--set", "update.rl", "1"], "a setting 'update.rl'; did you mean 'update.lr'"),
    ("finetune", ["--recipe=sfa", *STOPPING], "SFA changes the weights after the last update"),
    ("compare", ["--recipes", "standard", "sfa", *STOPPING], "SFA changes the weights after the"),
    ("finetune", ["--patience=1"], "patience needs rows for validation"),
    ("finetune", ["--batch-size=1.5"], "--batch-size must be a whole number, got '1.5'"),
    ("measure", ["--target=gone.jsonl"], "no such file: gone.jsonl"),
    ("measure", ["--target=odd.jsonl"], "the columns x"),
    ("measure", ["--target=empty.jsonl"], "empty.jsonl is empty"),
    ("measure", ["--text=gone.txt"], "no such file: gone.txt"),
    ("measure", ["--targt=a"], "did you mean '--target'"),
    ("measure", ["--limit=few"], "--limit must be a whole number or none, got 'few'"),
    ("measure", ["--json", "more"], "unexpected argument 'more'"),
    ("measure", ["--out=train.jsonl"], "train.jsonl is a file"),
    ("measure", ["MODEL=/no/model"], "no such"),
    ("measure", ["MODEL=cut"], "cut/model.safetensors is not a readable safetensors file"),
    ("measure", ["MODEL=strange"], "zorg"),
    ("measure", ["MODEL=bare"], "bare has no config.json"),
    ("merge", ["--alpha=2"], "alpha must be in [0, 1]"),
    ("merge", ["--alpha=half"], "--alpha must be a number, got 'half'"),
    ("merge", ["--alfa=1"], "unknown option --alfa; did you mean '--alpha'"),
    ("merge", ["more"], "'more'"),
    ("merge", ["--out=train.jsonl"], "must be a directory"),
    ("merge", ["--out=folder"], "is not empty"),
    ("merge", ["MODEL=/no/model"], "no such file or directory"),
    ("merge", ["MODEL=cut"], "cut/model.safetensors is not a readable safetensors file"),
    ("merge", [*SWEEP, "--target=gone.jsonl"], "no such file: gone.jsonl"),
    ("merge", [*SWEEP, "--target=odd.jsonl"], "the columns x"),
    ("merge", [*SWEEP, "--target=empty.jsonl"], "empty.jsonl is empty"),
    ("merge", [*SWEEP, "MODEL=strange"], "zorg"),
    ("merge", [*SWEEP, "--out=train.jsonl"], "train.jsonl is a file"),
    ("methods", ["--jsn"], "unknown option --jsn; did you mean '--json'"),
    ("methods", ["spd", "more"], "unexpected argument 'more'"),
    ("report", ["gone.json"], "no such file or directory: gone.json"),
    ("report", ["empty.jsonl"], "empty.jsonl is not JSON"),
    ("report", ["folder"], "folder contains neither results.json"),
    ("report", ["other.json"], "other.json was not written by holdfast"),
    ("report", ["--markdwn"], "did you mean '--markdown'"),
    ("report", ["--json", "--markdown"], "not allowed with argument --json"),
    ("report", ["--out=train.jsonl"], "train.jsonl is a file"),
    ("score", ["--data=odd.jsonl"], "the columns x"),
    ("score", ["--model=wordless"], "needs a tokenizer"),
    ("score", ["--tau=hot"], "'running_median' or a number, got 'hot'"),
    ("score", ["--tau=-1"], "or a number > 0, got -1"),
    ("score", ["--level=word"], "--level must be 'sequence' or 'token', got 'word'"),
    ("score", ["--max-length=1"], "max_length must be"),
    ("score", ["--weighted=rows.csv"], "must end in .jsonl"),
    ("score", ["--weighted=train.jsonl"], "would overwrite the input train.jsonl"),
    ("score", ["--weighted=folder"], "folder"),
    ("score", ["--weighted=w.jsonl", "--level=token"], "one weight per row"),
    ("tune", ["--space", "update.lrr", "0.1", "1"], "has no setting 'update.lrr' to search"),
    ("tune", ["--space", "lr", "0.1"], "lr needs two ends, such as [0.01, 0.5], got [0.1]"),
    ("tune", ["--space", "lr", "1", "0.1"], "a search range needs low < high"),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    return make_place(tmp_path, monkeypatch)


def make_place(tmp_path, monkeypatch):
    """A directory with good and bad files, in which all is done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": "two plus two is", "completion": "four"}] * 4
    files = {
        "train.jsonl": "\n".join(map(json.dumps, rows)),
        "odd.jsonl": '{"x": 1}\n',
        "empty.jsonl": "\n",
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "unknown.yaml": "modle: a\n",
        "words.yaml": "batch-size: few\n",
        "broken.yaml": "model: [1\n",
        "list.yaml": "- model\n",
        "deep.yaml": f"model: {'[' * 3000}",
        "bomb.yaml": "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9 if i else 1}]\n" for i in range(9)),
        "binary.yaml": "model: \x00\x01",
        "grid.yaml": "grid: {lr: []}\n",
        "other.json": '{"a": 1}',
        "results.json": '{"runs": [], "schema_version": 1}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    return tmp_path


def make_model(place, kind):
    """The small model, broken."""
    folder = place / kind
    shutil.copytree(MODEL, folder)
    if kind == "cut":
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[:100_000])
    elif kind == "strange":
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "zorg", "architectures": ["ZorgForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
    elif kind == "bare":
        (folder / "config.json").unlink()
    elif kind == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    elif kind == "wordless":
        for file in folder.glob("tokenizer*"):
            file.unlink()


def contents(place):
    """Every file but those of the cache."""
    files = (f for f in place.rglob("*") if f.relative_to(place).parts[0] != "cache")
    return {f: f.read_bytes() if f.is_file() else None for f in files}


def arguments_of(name, change):
    """Those that work, and what is changed in them."""
    given = list(GOOD[name])
    for word in change:
        if word.startswith("MODEL="):  # the tuned one
            given[1] = word.removeprefix("MODEL=")
        elif not word.startswith("--") and name == "report":
            given[0] = word
        else:
            given.append(word)
    return given


def check_sentence(said, words):
    """One, on the last line; words of it are known."""
    *before, last = said.splitlines()
    assert last.startswith("holdfast: "), said
    assert words in last
    assert not any(line.startswith("holdfast: ") for line in before)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "change", "words"), CASES, ids=[f"{name} {' '.join(c)}" for name, c, _ in CASES]
)
def test_one_sentence_and_nothing_written(name, change, words, place, capsys):
    for kind in ("cut", "strange", "bare", "wordless", "adapter"):
        if any(word.endswith(f"={kind}") for word in change):
            make_model(place, kind)
    before = contents(place)
    assert main([name, *arguments_of(name, change)]) == 2
    check_sentence(capsys.readouterr().err, words)
    assert contents(place) == before


@pytest.mark.usefixtures("forked_workers")
def test_what_every_run_fails_of_is_said(place, capsys):
    assert main(["compare", *GOOD["compare"], "--lr=1e30", "--max-updates=3"]) == 2
    said = capsys.readouterr().err
    check_sentence(said, "first: DivergedError: the training diverged: the loss")
    assert said.count("warning: the target train.jsonl is training data: its score shows") == 1
    assert "Traceback" in next((place / "out" / "failed").iterdir()).read_text()


@pytest.mark.usefixtures("place")
def test_a_search_warns_of_a_target_that_is_training_data(capsys, monkeypatch):
    def stop(*_, **__):
        raise ValueError("the search has begun")

    monkeypatch.setattr("holdfast.comparison.study.open_study", stop)
    assert main(["tune", *GOOD["tune"]]) == 2
    assert capsys.readouterr().err.count("the target train.jsonl is training data") == 1


def test_measure_warns_of_a_target_that_config_yaml_names_as_training_data(place, capsys):
    (place / "tuned").mkdir()
    for data, count in (("train.jsonl", 1), ("[odd.jsonl, train.jsonl]", 1), ("odd.jsonl", 0)):
        (place / "tuned" / "config.yaml").write_text(f"data: {data}\n")
        assert main(["measure", MODEL, "tuned", "--target=train.jsonl"]) == 2  # there is no model
        said = capsys.readouterr().err
        assert said.count("warning: the target train.jsonl is training data") == count
    (place / "tuned" / "config.yaml").write_text("[1")
    assert main(["measure", MODEL, "tuned", "--target=train.jsonl"]) == 2
    said = capsys.readouterr().err
    check_sentence(said, "tuned")
    assert "YAML" not in said  # the file may be that of another tool


def test_wrong_columns_are_said_before_the_first_run(place, capsys):
    assert main(["compare", *GOOD["compare"], "--data=odd.jsonl"]) == 2
    check_sentence(capsys.readouterr().err, "odd.jsonl has the columns x, but training needs")
    assert not (place / "out" / "failed").exists()


@pytest.mark.parametrize("name", GOOD)
def test_help_teaches(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5
