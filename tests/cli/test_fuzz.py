"""Random bytes and random edits of valid files, for every subcommand.

Whatever a file holds: the exit code is 0 or 2, an error is one sentence without a traceback, no
control character reaches the terminal, no input changes, and nothing outside ``--out`` is written.
`make soak` runs all parts.
"""

import contextlib
import hashlib
import json
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
for package in ("cattrs", "optuna", "peft"):
    pytest.importorskip(package, reason="the cli extra is not installed")

from cli.damage import VALUES, damaged  # noqa: E402
from holdfast.cli import main  # noqa: E402
from holdfast.cli.main import COMMANDS  # noqa: E402
from holdfast.comparison import processes  # noqa: E402
from holdfast.io import hub  # noqa: E402
from matrices import sampled  # noqa: E402
from small import make_llama, make_tokenizer, noisy, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

PARTS, CASES = 24, 100
#: Seconds that one command may take.
LIMIT = 120

_TRAINING = ("--max-updates=1", "--batch-size=2", "--max-length=16", "--lr=1e-3")
_PLAN = (
    "--model=base", "--data=rows.jsonl", "--target=rows.jsonl", "--text", "text.txt",
    "--context-free=0", "--limit=4", "--jobs=1", *_TRAINING,
)  # fmt: skip
_TESTS = ("--text=text.txt", "--retained=choices.jsonl", "--target=rows.jsonl", "--limit=4")
#: Command lines that work.
GOOD = {
    "compare": ("compare", *_PLAN, "--recipes", "standard", "--seeds", "0"),
    "compare config": ("compare", "--config=plan.yaml"),
    "compare again": ("compare", *_PLAN, "--recipes", "standard", "--seeds", "0"),
    "data": ("data", "rows.jsonl", "--model=base"),
    "data chat": ("data", "chat.jsonl", "--model=base", "--json"),
    "data labels": ("data", "labels.jsonl", "--model=bert"),
    "draw": ("draw", "--model=base", "--texts=2"),
    "finetune": ("finetune", "--model=base", "--data=rows.jsonl", "--recipe=recipe.yaml",
                 *_TRAINING),
    "finetune labels": ("finetune", "--model=bert", "--data=labels.jsonl", "--recipe=standard",
                        *_TRAINING),
    "measure": ("measure", "base", "tuned", *_TESTS, "--context-free=2"),
    "measure adapter": ("measure", "base", "adapter", "--text=text.txt", "--context-free=0"),
    "merge": ("merge", "base", "tuned"),
    "merge adapter": ("merge", "base", "adapter"),
    "merge sweep": ("merge", "base", "tuned", "--sweep=0.5", "--text=text.txt",
                    "--context-free=0"),
    "plan": ("plan", "--model=base", "--recipe=recadam", "--max-length=8", "--gpus=2"),
    "report": ("report", "results.json"),
    "report measured": ("report", "report.json"),
    "report sweep": ("report", "sweep.json"),
    "score": ("score", "--config=score.yaml"),
    "score chat": ("score", "--model=base", "--data=chat.jsonl", "--max-length=32"),
    "tune": ("tune", *_PLAN, "--recipe=standard", "--trials=1"),
    "tune again": ("tune", *_PLAN, "--recipe=standard", "--trials=1"),
}  # fmt: skip
_MODEL = ("config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json",
          "generation_config.json")  # fmt: skip
_BASE, _TUNED, _BERT = ([f"{m}/{file}" for file in _MODEL] for m in ("base", "tuned", "bert"))
_ADAPTER = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
#: The files that are damaged for each command line; those in out are of an earlier run.
FILES = {
    "compare": [*_BASE, "rows.jsonl", "text.txt"],
    "compare config": ["plan.yaml"],
    "compare again": ["out/results.json", "out/config.yaml", "out/result.json"],
    "data": [*_BASE, "rows.jsonl"],
    "data chat": ["chat.jsonl"],
    "data labels": [*_BERT[:-1], "labels.jsonl"],
    "draw": _BASE,
    "finetune": [*_BASE, "rows.jsonl", "recipe.yaml"],
    "finetune labels": [*_BERT[:-1], "labels.jsonl"],
    "measure": [*_TUNED, *_BASE, "rows.jsonl", "choices.jsonl", "text.txt"],
    "measure adapter": _ADAPTER * 4 + _BASE,
    "merge": _TUNED + _BASE,
    "merge adapter": _ADAPTER,
    "merge sweep": _TUNED + _BASE,
    "plan": ["base/config.json"],
    "report": ["results.json"],
    "report measured": ["report.json"],
    "report sweep": ["sweep.json"],
    "score": ["score.yaml", *_BASE, "rows.jsonl"],
    "score chat": ["chat.jsonl"],
    "tune": [*_BASE, "rows.jsonl"],
    "tune again": ["out/study.log", "out/config.yaml"],
}


class TooLong(BaseException):
    """A command that does not end."""


def in_this_process(function, calls, **options):
    """Stand in for the worker processes of compare and tune."""
    while calls:
        call = calls.popleft()
        value, error, _ = processes.attempt(function, call)
        yield processes.Ended(call, value, error)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A directory with valid files for every command line, and the results of valid runs."""
    place = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("HOLDFAST_CACHE", str(place / "cache"))
        patch.setattr(hub, "_is_reachable", lambda: False)
        patch.setattr(processes, "call_in_processes", in_this_process)
        patch.setattr(processes, "report_progress", lambda *_: None)
        make_files()
        for name in ("compare", "measure", "merge sweep", "tune"):
            assert main([*GOOD[name], f"--out={name}"]) == 0
        (run,) = Path("compare/runs").iterdir()
        shutil.move("compare", "compare again")
        shutil.move("tune", "tune again")
        shutil.copy("compare again/results.json", "results.json")
        shutil.copy("measure/report.json", "report.json")
        shutil.copy("merge sweep/sweep.json", "sweep.json")
        yield place, {"out/result.json": f"out/runs/{run.name}/result.json"}


def make_files():
    import peft

    base = make_llama(scale=0.3)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
    )
    save(base, "base", tokenizer)
    save(noisy(base), "tuned", tokenizer)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], alpha_pattern={"0.*q_proj": 3})
    peft.get_peft_model(base, adapter).save_pretrained("adapter")
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = "base"
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    bert = transformers.BertConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    save(transformers.BertForSequenceClassification(bert), "bert", tokenizer)
    text = "the cat sat on the mat and the dog ran on the log"
    rows = {
        "rows.jsonl": {"prompt": text, "completion": "two plus two is four"},
        "labels.jsonl": {"text": text, "label": 1},
        "choices.jsonl": {"question": text, "choices": ["four", "five"], "label": 0},
        "chat.jsonl": {"messages": [{"role": "user", "content": text},
                                    {"role": "assistant", "content": "four"}]},
    }  # fmt: skip
    for name, row in rows.items():
        Path(name).write_text("".join(json.dumps({**row, "id": i}) + "\n" for i in range(6)))
    Path("text.txt").write_text(f"{text}\n" * 8)
    Path("recipe.yaml").write_text(
        "update: {name: recadam, pull: 0.1, k: 0.5}\nobjective: {name: flow, tau: median}\n"
        "penalties: [{name: l2-sp, alpha: 0.1}]\nmerging: {name: wise-ft, alpha: 0.5}\n"
    )
    Path("plan.yaml").write_text(
        "model: base\ndata: rows.jsonl\ntarget: rows.jsonl\ntext: [text.txt]\ncontext_free: 0\n"
        "limit: 4\njobs: 1\nmax_updates: 1\nbatch_size: 2\nmax_length: 16\nlr: 0.001\n"
        "recipes: [standard]\nseeds: [0]\ngrid: {batch_size: [2]}\nset: {update.lr: 0.001}\n"
    )
    Path("score.yaml").write_text(
        "model: base\ndata: rows.jsonl\ntau: 0.5\nlevel: sequence\nnormalize: true\nbatch_size: 2\n"
        "max_length: 16\n"
    )


def snapshot(place):
    """The contents of everything but the output and the cache."""
    return {
        str(file): hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        for file in place.rglob("*")
        if file.relative_to(place).parts[0] not in ("out", "cache")
    }


@contextlib.contextmanager
def limited(seconds):
    def stop(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(place, arguments, capsys):
    """Run a command line; return what is wrong with how it ends, or None."""
    before = snapshot(place)
    capsys.readouterr()
    try:
        with limited(LIMIT):
            status = main(arguments)
    except SystemExit as ended:  # --help and --version
        status = ended.code
    except TooLong:
        return f"takes longer than {LIMIT} seconds"
    shown = capsys.readouterr()
    sentences = [line for line in shown.err.splitlines() if line.startswith("holdfast: ")]
    if status not in (0, 2):
        return f"exit code {status}: {sentences}"
    if len(sentences) != (status == 2) or "Traceback" in shown.err + shown.out:
        return f"not one sentence: {shown.err}"
    if any(c in shown.err + shown.out for c in "\x1b\x9b\x00"):
        return f"a control character: {shown.err + shown.out!r}"
    if (after := snapshot(place)) != before:
        changed = {f for f in before.keys() | after.keys() if before.get(f) != after.get(f)}
        return f"changed or wrote {changed}"
    return None


def damage_and_check(place, moved, name, file, rng, capsys):
    """Damage one file, run a command line that reads it, and restore the file."""
    shutil.rmtree(place / "out", ignore_errors=True)
    if file.startswith("out/"):
        shutil.copytree(place / name, place / "out")
    path = place / moved.get(file, file)
    whole = path.read_bytes()
    content = damaged(whole, file, rng)
    path.write_bytes(content)
    try:
        out = [] if GOOD[name][0] in ("data", "plan") else ["--out=out"]  # they write nothing
        wrong = check(place, [*GOOD[name], *out], capsys)
    finally:
        if not file.startswith("out/"):
            path.write_bytes(whole)
    return wrong and f"{name}, {file} = {content[:600]!r}: {wrong}"


@pytest.mark.skipif(sys.platform == "win32", reason="needs alarms")
@pytest.mark.parametrize("part", sampled(range(PARTS), [0]))
def test_damaged_files(part, world, capsys, monkeypatch, request):
    place, moved = world
    monkeypatch.chdir(place)
    count = CASES if request.config.getoption("markexpr") != "not soak" else 36
    names = list(FILES)
    found = []
    for i in range(count):
        rng = random.Random(f"{part} {i}")
        name = names[i % len(names)]
        file = rng.choice(FILES[name])
        wrong = damage_and_check(place, moved, name, file, rng, capsys)
        found += [f"case {part} {i}: {wrong}"] if wrong else []
    assert not found, "\n\n".join(found)


#: Words that no option expects. Numbers are small, because a large one may be meant.
WORDS = ("", "-", "--", "-1", "0", "0.5", "nan", "-inf", "none", "true", "x", "a=b", "é\x1b[31m",
         "[1, 2]", "{a: 1}", "no/such", "text.txt", "base", "\ud800")  # fmt: skip


@pytest.mark.parametrize("part", sampled(range(4), [0]))
def test_wrong_words(part, world, capsys, monkeypatch, request):
    """Options with values of another kind, and words where none are expected."""
    place, _ = world
    monkeypatch.chdir(place)
    count = CASES if request.config.getoption("markexpr") != "not soak" else 24
    found = []
    for i in range(count):
        rng = random.Random(f"words {part} {i}")
        line = list(GOOD[rng.choice(list(GOOD))])
        if rng.random() < 0.2:
            line = [rng.choice([*COMMANDS, "nosuch"]), rng.choice(WORDS)]
        elif rng.random() < 0.5:
            option = rng.choice([word for word in line if "=" in word] or ["--json="])
            line.append(f"{option.partition('=')[0]}={rng.choice(WORDS)}")
        else:
            line.insert(rng.randrange(1, len(line) + 1), rng.choice(WORDS))
        shutil.rmtree(place / "out", ignore_errors=True)
        needs_out = line[0] not in ("methods", "completion", "nosuch")
        wrong = check(place, [*line, *(["--out=out"] if needs_out else [])], capsys)
        found += [f"case {part} {i}: {line}: {wrong}"] if wrong else []
    assert not found, "\n\n".join(found)


def test_a_damaged_file_is_another_one():
    rng = random.Random(0)
    data = json.dumps({"a": [1, {"b": "c"}], "d": None}).encode()
    found = {damaged(data, "a.json", rng) for _ in range(200)}
    assert len(found) > 150
    assert any(json.dumps(VALUES[9]).encode() in content for content in found)
