"""Every format of data in every command that reads data: docs/data.md lists the formats."""

import csv
import json
from itertools import product
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

from comparison.tiny import save_bert  # noqa: E402
from holdfast.cli import main  # noqa: E402
from holdfast.comparison import scheduler  # noqa: E402
from matrices import sampled  # noqa: E402
from small import make_llama, make_tokenizer, noisy  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
PAIRS = [("two plus two is", "four"), ("the cat sat", "on the mat"), ("a dog", "ran"), ("six", ".")]
TOOLS = [{"type": "function", "function": {"name": "plus", "parameters": {}}}]


def turns(question, answer, role="role", content="content", names=("user", "assistant")):
    pairs = zip(names, (question, answer), strict=True)
    return [{role: name, content: text} for name, text in pairs]


def completions(question, answer):
    return [{question: q, answer: a} for q, a in PAIRS]


def save(rows, name="rows.jsonl"):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def save_csv(rows):
    with open("rows.csv", "w", newline="") as file:
        written = csv.DictWriter(file, rows[0])
        written.writeheader()
        written.writerows(rows)
    return "rows.csv"


def save_table(rows, kind):
    table = datasets.Dataset.from_list(rows)
    if kind == "parquet":
        table.to_parquet("rows.parquet")
    elif kind == "arrow":
        table.save_to_disk("folder")
        return "folder/data-00000-of-00001.arrow"
    else:
        table.to_parquet("folder/data/train-00000-of-00001.parquet")
        return "folder:train"
    return "rows.parquet"


def save_dict(rows):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk("saved")
    return "saved:train"


def save_several(rows):
    return [save(rows[:2], "a.jsonl"), save(rows[2:], "b.jsonl")]


def save_shards(rows):
    save_several(rows)
    return "[ab].jsonl"


def save_text(rows):
    Path("rows.txt").write_text("\n\n".join(row["prompt"] for row in rows))
    return "rows.txt"


PLAIN = completions("prompt", "completion")
LABELED = [{"premise": q, "hypothesis": a, "label": i % 2} for i, (q, a) in enumerate(PAIRS)]
#: The columns of rows, by their name in the table: how the table shows them, rows, options.
FORMATS = {
    "Alpaca": (
        "`instruction`, `input`, `output`",
        [{"instruction": q, "input": "", "output": a} for q, a in PAIRS], [],
    ),
    "Dolly": (
        "`instruction`, `context`, `response`",
        [{"instruction": q, "context": "a log", "response": a} for q, a in PAIRS], [],
    ),
    "Prompt and completion": ("`prompt`, `completion`", PLAIN, []),
    "Question and answer": ("`question`, `answer`", completions("question", "answer"), []),
    "OpenAI": ("`messages`", [{"messages": turns(*pair)} for pair in PAIRS], []),
    "OpenAI with a system prompt and tools": (
        "`messages`, `system`, `tools`",
        [{"messages": turns(*pair), "system": "is", "tools": TOOLS} for pair in PAIRS], [],
    ),
    "ShareGPT": (
        "`conversations` (`from`, `value`)",
        [{"conversations": turns(*pair, "from", "value", ("human", "gpt"))} for pair in PAIRS], [],
    ),
    "TRL, conversational": (
        "`prompt`, `completion` (messages)",
        [{"prompt": turns(*pair)[:1], "completion": turns(*pair)[1:]} for pair in PAIRS], [],
    ),
    "Text": ("`text`", [{"text": f"{q} {a}"} for q, a in PAIRS], []),
    "Classification": (
        "`text`, `label`", [{"text": q, "label": i % 2} for i, (q, _) in enumerate(PAIRS)], [],
    ),
    "Pair classification": ("`premise`, `hypothesis`, `label`", LABELED, []),
    "Other columns, a language model": (
        "`--columns question=ask answer=reply`", completions("ask", "reply"),
        ["--columns", "question=ask", "answer=reply"],
    ),
    "Other columns, a classifier": (
        "`--columns text1=question text2=passage label=answer`",
        [{"question": q, "passage": a, "answer": i % 2} for i, (q, a) in enumerate(PAIRS)],
        ["--columns", "text1=question", "text2=passage", "label=answer"],
    ),
}  # fmt: skip
CLASSIFIED = ("Classification", "Pair classification", "Other columns, a classifier")
#: The files that hold rows: how they are written.
FILES = {
    "JSON lines": save,
    "CSV": save_csv,
    "Parquet": lambda rows: save_table(rows, "parquet"),
    "Arrow": lambda rows: save_table(rows, "arrow"),
    "Saved by `datasets`": save_dict,
    "Directory of a dataset": lambda rows: save_table(rows, "folder"),
    "Several files": save_several,
    "Pattern": save_shards,
    "Hub": lambda rows: "owner/name:train",
    "Text file": save_text,
}
COMMANDS = ("finetune", "score", "measure", "compare")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A language model and a classifier, and a tuned copy of each."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer(
        "the a cat dog sat ran on mat log plus two is four six . user assistant"
    )
    tokenizer.chat_template = TEMPLATE
    kinds = {
        "lm": make_llama(scale=0.02),
        "classifier": transformers.BertForSequenceClassification.from_pretrained(
            save_bert(folder / "bert", transformers.BertForSequenceClassification)
        ),
    }
    for name, model in kinds.items():
        for suffix, weights in (("", model), ("-tuned", noisy(model))):
            weights.save_pretrained(folder / f"{name}{suffix}")
            tokenizer.save_pretrained(folder / f"{name}{suffix}")
    return folder


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("holdfast.io.hub._is_reachable", lambda: True)
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset",
        lambda name, *more, **options: datasets.Dataset.from_list(PLAIN)
        if name == "owner/name" else load(name, *more, **options),
    )  # fmt: skip

    # A process per comparison would take most of the time.
    def run_here(plan, specs, out, on_finished, *_):
        for spec in specs:
            on_finished(spec, *scheduler.run_group(plan, [spec], out)[0])

    monkeypatch.setattr(scheduler, "_run_locally", run_here)


def run(command, models, kind, data, options, capsys):
    """Run a command on the data, as a user would, and check that it has a result."""
    several = data if isinstance(data, list) else [data]
    model = f"--model={models / kind}"
    train = ["--max-updates=1", "--batch-size=2", "--lr=1e-3", "--max-length=32"]
    tests = ["--context-free=0", "--test-max-length=32"]
    words = {
        "finetune": [model, "--data", *several, *train, "--recipe=standard", "--out=out"],
        "score": [model, "--data", *several, "--max-length=32", "--out=out"],
        "measure": [
            str(models / kind), str(models / f"{kind}-tuned"), "--target", *several, *tests,
            "--no-drift", "--json",
        ],
        "compare": [
            model, "--data", *several, f"--target={several[0]}", *train, *tests,
            "--recipes", "standard", "--seeds", "0", "--jobs=1", "--out=out",
        ],
    }  # fmt: skip
    capsys.readouterr()
    assert main([command, *words[command], *options]) == 0
    if command == "measure":
        assert {score["role"] for score in json.loads(capsys.readouterr().out)["scores"]} == {
            "target"
        }
    else:
        result = {"finetune": "model.safetensors", "score": "weights.jsonl"}
        assert Path("out", result.get(command, "results.json")).is_file()


def in_commands(names):
    """All cases; the sample has every name in every other command, and every command."""
    cases = [*product(names, COMMANDS)]
    places = product(range(len(names)), range(len(COMMANDS)))
    return sampled(cases, [case for case, (i, j) in zip(cases, places, strict=True) if (i + j) % 2])


@pytest.mark.parametrize(("name", "command"), in_commands(FORMATS))
def test_every_format_in_every_command(name, command, models, capsys):
    _, rows, options = FORMATS[name]
    run(command, models, "classifier" if name in CLASSIFIED else "lm", save(rows), options, capsys)


@pytest.mark.parametrize(("name", "command"), in_commands(FILES))
def test_every_kind_of_file_in_every_command(name, command, models, capsys):
    run(command, models, "lm", FILES[name](PLAIN), [], capsys)


def test_the_page_lists_the_formats_that_are_tested():
    text = PAGE.read_text(encoding="utf-8")
    rows = [f"| {name} | {shown} |" for name, (shown, *_) in FORMATS.items()]
    assert "\n".join(rows) in text
