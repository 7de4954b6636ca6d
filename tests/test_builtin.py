"""The model and the data that come with holdfast."""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import builtin
from holdfast.cli import main
from holdfast.comparison.inputs import measure_options, paths_of
from holdfast.comparison.plan import Measuring, Plan, contents_of
from holdfast.evaluate.probes import Text
from holdfast.evaluate.suite import Suite
from holdfast.io.checkpoint import open_weights
from holdfast.io.models import Loader
from holdfast.io.rows import names_of, read_rows, read_text

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def corpus():
    """The script that gathers the corpus, as a module."""
    path = ROOT / "benchmarks" / "embedded" / "corpus.py"
    spec = importlib.util.spec_from_file_location("embedded_corpus", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def loaded():
    with Loader(device="cpu").open(builtin.MODEL) as loaded:
        yield loaded


def test_everything_is_there_and_small():
    folder = builtin.MODEL.parent
    named = [builtin.TRAIN, builtin.DEV, *builtin.RETAINED.values(), folder / "README.md"]
    named += [
        builtin.MODEL / name for name in ("config.json", "model.safetensors", "tokenizer.json")
    ]
    assert all(path.is_file() for path in named)
    size = sum(p.stat().st_size for p in folder.rglob("*") if "__pycache__" not in p.parts)
    assert size <= 8_000_000


def test_weights_are_bfloat16():
    from safetensors import safe_open

    with safe_open(builtin.MODEL / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_model_knows_its_three_kinds_of_text(loaded):
    assert loaded.kind == "causal_lm"
    for kind, path in builtin.RETAINED.items():
        text = read_text(path)
        assert 20_000 <= len(text) <= 32_000
        samples = Text(kind, text[:4000], metric="nll").run(loaded, progress=False)
        nats = sum(samples.values) / sum(samples.counts)
        assert nats < 3.5  # chance is log 2048 = 7.6


def test_the_names_stand_for_the_model_the_data_and_the_texts():
    assert builtin.located_model("builtin") == str(builtin.MODEL)
    assert names_of(["builtin", "builtin:dev"]) == [str(builtin.TRAIN), str(builtin.DEV)]
    assert [*open_weights("builtin")] == [*open_weights(builtin.MODEL)]
    assert Loader().config_of("builtin").num_hidden_layers == 5
    tests, targets = Suite(text="builtin", target="builtin:dev", limit=4).build()
    assert [test.name for test in tests] == ["prose", "verse", "code", "gsm8k-dev"]
    assert len(targets[0].rows) == 4


def test_another_name_in_builtin_is_an_error():
    for kind, name in (("data", "builtin:train"), ("text", "builtin:x")):
        with pytest.raises(FileNotFoundError, match="choose builtin"):
            builtin.located(name, kind)
    with pytest.raises(FileNotFoundError, match="choose builtin"):
        builtin.located_model("builtin:dev")


def test_a_local_path_of_this_name_comes_first(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(builtin.MODEL, "builtin")
    (tmp_path / "builtin" / "dev.jsonl").write_text('{"text": "mine"}\n')
    for kind in ("data", "text"):
        assert builtin.located("builtin", kind) == ["builtin"]
    assert builtin.located_model("builtin") == "builtin"
    (said,) = caplog.messages  # once
    assert str(tmp_path / "builtin") in said
    assert open_weights("builtin").path == Path("builtin")
    assert names_of("builtin:dev") == ["builtin:dev"]


def test_a_plan_knows_the_digests_of_what_the_names_stand_for(tmp_path, monkeypatch):
    plan = Plan(
        model="builtin", data="builtin", target="builtin:dev", recipes=("standard",),
        measuring=Measuring(text=("builtin",)),
    )  # fmt: skip
    paths = [builtin.MODEL, builtin.TRAIN, builtin.DEV, *builtin.RETAINED.values()]
    assert plan.contents == [contents_of(str(path)) for path in paths]
    assert None not in plan.contents
    assert measure_options(plan)["text"] == ("builtin",)
    assert {str(path) for path in paths[1:]} < set(paths_of(plan))
    # Ids do not depend on where holdfast is installed.
    ids = [spec.id for spec in plan.runs]
    moved = {"model": {"builtin": [tmp_path / "model"]}}
    for kind in ("data", "text"):
        named = builtin._PATHS[kind].items()
        moved[kind] = {name: [tmp_path / path.name for path in some] for name, some in named}
    shutil.copytree(builtin.MODEL.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(builtin, "_PATHS", moved)
    assert [spec.id for spec in replace(plan).runs] == ids


def test_the_contents_of_a_plan_are_in_the_order_of_earlier_versions(tmp_path):
    names = ("model", "train.jsonl", "dev.jsonl", "wiki.txt", "piqa.jsonl")
    for name in names:
        (tmp_path / name).write_text(name)
    model, data, target, text, rows = (str(tmp_path / name) for name in names)
    plan = Plan(
        model, data, target, recipes=("standard",), measuring=Measuring(text=(text,), data=(rows,))
    )
    assert plan.contents == [contents_of(path) for path in (model, data, target, text, rows)]


def test_the_command_line_takes_the_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--model=builtin", "--data=builtin", "--recipe=standard", "--max-updates=1"]
    assert main(["finetune", *words, "--validation=builtin:dev", "--out=tuned"]) == 0
    tests = "--target builtin:dev --text builtin"
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"holdfast measure builtin tuned {tests}"
    config = (tmp_path / "tuned" / "config.yaml").read_text()
    assert "model: builtin\ndata: builtin\n" in config
    less = ["--limit=2", "--context-free=0", "--json"]
    assert main(["measure", "builtin", "tuned", *tests.split(), *less]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["base"] == "builtin"
    assert found["settings"]["command"] == (
        f"holdfast measure builtin tuned {tests} --limit 2 --context-free 0"
    )
    assert [score["name"] for score in found["scores"][:3]] == ["prose", "verse", "code"]
    assert main(["merge", "builtin", "tuned", "--alpha=0.5", "--out=merged"]) == 0
    assert main(["data", "builtin", "--model=builtin", "--json"]) == 0
    assert main(["plan", "--model=builtin"]) == 0
    assert main(["score", "--model=builtin", "--data=builtin:dev", "--out=scores"]) == 0


def test_generates(loaded):
    tokenizer = loaded.tokenizer
    inputs = tokenizer("To be", return_tensors="pt")
    prompt = inputs["input_ids"]
    assert prompt[0, 0] == tokenizer.bos_token_id
    out = loaded.model.generate(
        prompt, attention_mask=inputs["attention_mask"], max_new_tokens=5, do_sample=False
    )
    assert prompt.shape[1] < out.shape[1] <= prompt.shape[1] + 5
    assert tokenizer.decode(out[0], skip_special_tokens=True).startswith("To be")


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # 1024\n", "Élève, “naïve” — 数学 🙂"])
def test_tokenizer_loses_nothing(loaded, text):
    ids = loaded.tokenizer(text)["input_ids"]
    assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_each_digit_is_a_token(loaded):
    assert loaded.tokenizer.tokenize("x 1024") == ["x", "Ġ1", "0", "2", "4"]


def test_problems_are_short_and_no_test_problem_is_learnt(loaded):
    train, dev = read_rows(builtin.TRAIN), read_rows(builtin.DEV)
    assert (len(train), len(dev)) == (1000, 200)
    texts = [f"{row['question']} {row['answer']}" for row in train + dev]
    assert len({row["question"] for row in train + dev}) == 1200
    assert all("####" in text and "<<" not in text for text in texts)
    assert max(len(ids) for ids in loaded.tokenizer(texts)["input_ids"]) <= 176


def test_held_out_chunks_are_not_in_the_training_part(corpus):
    poem = "\n\n".join(f"verse {i} of a poem\nwith a second line" for i in range(100)) + "\n"
    cut = corpus.chunks("verse", "poem", poem, size=200)
    assert "".join("".join(c.text.split()) for c in cut) == "".join(poem.split())
    assert all(len(chunk.text) <= 200 for chunk in cut)
    split = corpus.hold_out([*cut, cut[0]], 600)
    held = [chunk.text for chunk in split if chunk.held_out]
    train = "\n".join(chunk.text for chunk in split if not chunk.held_out)
    assert len(split) == len(cut)  # a repetition is dropped
    assert 600 <= sum(map(len, held)) < 800
    assert not any(text in train for text in held)
    backwards = corpus.hold_out(reversed(cut), 600)
    assert {c.text for c in backwards if c.held_out} == set(held)


def test_corpus_comes_back_from_its_file(corpus, tmp_path):
    chunks = corpus.hold_out(corpus.chunks("prose", "a", "é\n\nb\n" * 50, size=50), 100)
    corpus.write(tmp_path / "corpus.jsonl.xz", chunks)
    assert corpus.load(tmp_path / "corpus.jsonl.xz") == chunks


def test_paragraphs_are_unwrapped(corpus):
    assert corpus.unwrapped("a\n  b\n\nc\nd\n") == "a b\n\nc d\n"
    assert corpus.between("x start middle end y", "start", "end") == "start middle\n"
