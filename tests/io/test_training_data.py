"""Training data by name, for every kind of model."""

import json
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.tiny import save_bert, save_images, save_llama, save_vit  # noqa: E402
from holdfast.evaluate.suite import Suite  # noqa: E402
from holdfast.hosts.job import Training, encode  # noqa: E402
from holdfast.io.encoding import TrainingData  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402
from small import make_tokenizer  # noqa: E402

CLASSES = [{"text": "the cat sat", "label": "cat"}, {"text": "a dog ran", "label": "dog"}] * 6


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def open_task(source, data, **more):
    return TrainingData.open(source, data, Loader(max_length=16), **more)


def test_images_are_decoded_when_they_are_asked_for(tmp_path, monkeypatch):
    data = save_images(tmp_path / "images")
    task = open_task(save_vit(tmp_path / "vit", num_labels=5), data)
    model, new = task.load()
    assert new == ("classifier",)
    samples = task.samples(model)
    (tmp_path / "images" / "red" / "0.png").write_text("not an image")
    assert (len(samples), samples[0]["labels"]) == (12, 0)  # blue, green, red
    assert samples[0]["pixel_values"].shape == (3, 16, 16)
    with pytest.raises(ValueError, match=r"red/0.png cannot be read as an image"):
        samples[8]
    (tmp_path / "images" / "red" / "0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"no such file: .*red/0.png"):
        samples[8]


def test_images_of_a_file_of_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    save_images(tmp_path / "images")
    files = sorted((tmp_path / "images").glob("*/*.png"))
    rows = [{"image": {"bytes": f.read_bytes(), "path": None}, "label": i % 2} for i, f in
            enumerate(files)]  # fmt: skip
    pyarrow.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    folder = open_task(save_vit(tmp_path / "vit"), str(tmp_path / "images"))
    table = open_task(save_vit(tmp_path / "vit"), str(tmp_path / "rows.parquet"))
    one, other = (task.samples(task.load()[0]) for task in (folder, table))
    assert torch.equal(one[5]["pixel_values"], other[5]["pixel_values"])
    assert [other[i]["labels"] for i in range(3)] == [0, 1, 0]


def test_a_decoder_with_a_new_head_pads_at_the_end(tmp_path):
    task = open_task(
        save_llama(tmp_path / "llama"), write(tmp_path / "d.jsonl", CLASSES), head="classification"
    )
    model, new = task.load()
    assert (new, model.config.pad_token_id) == (("score",), 0)
    assert task.samples(model)[1]["labels"] == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"x": 1}], "has no head for"),
        ([*CLASSES, {"text": "the cat"}], "1 rows have no label; the first is row 12"),
        ([{"text": "a", "label": [0, 1]}] * 2, r"text or a finite number, got \[0, 1\]"),
        (
            [{"image": "a.png", "label": 0}, {"image": "b.png", "label": 1}],
            "no image classifier",
        ),
    ],
)
def test_rows_that_do_not_fit(rows, words, tmp_path):
    data = write(tmp_path / "d.jsonl", rows)
    source = save_bert(tmp_path / "bert")

    def samples():
        task = open_task(source, data)
        return task.samples(task.load()[0])

    with pytest.raises(ValueError, match=words):
        samples()


ALPACA = [
    {"instruction": "two", "input": "plus three", "output": "five"},
    {"instruction": "a cat", "input": "", "output": "sat"},
]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def words_of(source, rows, tmp_path):
    """What a causal language model is trained on, as text."""
    task = open_task(source, write(tmp_path / "rows.jsonl", rows))
    model, _ = task.load()
    return [task.tokenizer.decode(sample["input_ids"]) for sample in task.samples(model)]


def test_a_prompt_is_the_same_in_training_and_in_tests(tmp_path):
    source = save_llama(tmp_path / "llama")
    trained = words_of(source, ALPACA, tmp_path)
    assert trained == ["two plus three five </s>", "a cat sat </s>"]
    test = Suite(data={"a": ALPACA}, context_free=0).build()[0][0]
    with Loader().open(source) as loaded:
        answers = [answer for (answer,) in test.answers(loaded)]
        tested = [loaded.tokenizer.decode([*a.context, *a.target]) for a in answers]
    assert [f"{text} </s>" for text in tested] == trained


def test_a_system_prompt_is_a_turn(tmp_path):
    tokenizer = make_tokenizer("system user assistant the cat sat is two")
    tokenizer.chat_template = TEMPLATE
    save_llama(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    rows = [{"system": "is two", "messages": turns}]
    (text,) = words_of(str(tmp_path / "llama"), rows, tmp_path)
    assert text == "system is two user the cat assistant sat"
    tokenizer.chat_template = "{{ raise_exception('no system prompts') }}"
    tokenizer.save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="row 0 does not fit the chat template: no system prompts"):
        words_of(str(tmp_path / "llama"), rows, tmp_path)


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "cat"}]
MORE = [{"role": "user", "content": "dog"}, {"role": "assistant", "content": "ran"}]


def chat_model(folder, template):
    tokenizer = make_tokenizer("user assistant tool : the a cat dog sat ran on mat plus")
    tokenizer.chat_template = template
    save_llama(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


#: Only the last answer is marked, as templates of reasoning models do.
REWRITING = (
    "{% for m in messages %}{{ m['role'] }} "
    "{% if loop.last and m['role'] == 'assistant' %}: {% endif %}{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def trained_parts(source, rows, tmp_path):
    task = open_task(source, write(tmp_path / "rows.jsonl", rows))
    decode = task.tokenizer.decode
    samples = task.samples(task.load()[0])
    parts = [[i for i in sample["labels"] if i >= 0] for sample in samples]
    return [(decode(s["input_ids"]), decode(p)) for s, p in zip(samples, parts, strict=True)]


def test_each_answer_is_learned_after_what_the_template_shows_before_it(tmp_path):
    source = chat_model(tmp_path / "one", TEMPLATE)
    rows = [{"messages": [*TURNS, *MORE]}]
    # The template has no prompt for an answer, so that the name of the role is learned too.
    whole = "user a assistant cat user dog assistant ran"
    assert trained_parts(source, rows, tmp_path) == [(whole, "assistant cat assistant ran")]
    source = chat_model(tmp_path / "other", REWRITING)
    assert trained_parts(source, rows, tmp_path) == [
        ("user a assistant : cat", ": cat"),
        ("user a assistant cat user dog assistant : ran", ": ran"),
    ]
    first = [{"messages": [TURNS[1], *MORE]}]  # it starts with the assistant
    assert trained_parts(source, first, tmp_path) == [("assistant cat user dog assistant : ran",
                                                       ": ran")]  # fmt: skip


def test_tools_are_passed_to_the_chat_template(tmp_path):
    shown = "{% for t in tools or [] %}tool {{ t['function']['name'] }} {% endfor %}"
    source = chat_model(tmp_path / "llama", shown + REWRITING)
    tools = [{"type": "function", "function": {"name": "plus"}}]
    rows = [{"messages": TURNS, "tools": tools}, {"messages": TURNS, "tools": None}]
    assert [text for text, _ in trained_parts(source, rows, tmp_path)] == [
        "tool plus user a assistant : cat", "user a assistant : cat",
    ]  # fmt: skip


def test_a_template_that_ignores_tools(tmp_path):
    tools = [{"type": "function", "function": {"name": "plus"}}]
    rows = [{"messages": TURNS}, {"messages": TURNS, "tools": tools}]
    ignoring = chat_model(tmp_path / "llama", REWRITING)
    with pytest.warns(UserWarning, match="the chat template ignores the tools of the rows"):
        trained_parts(ignoring, rows, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained_parts(ignoring, rows[:1], tmp_path)


def test_conversations_are_tested_as_they_are_trained(tmp_path):
    source = chat_model(tmp_path / "llama", REWRITING)
    rows = [{"messages": [*TURNS, *MORE]}, {"messages": TURNS}]
    test = Suite(target={"t": rows}).build()[0][0]
    with Loader().open(source) as loaded:
        decode = loaded.tokenizer.decode
        tested = [
            (decode([*a.context, *a.target]), decode(a.target))
            for answers in test.answers(loaded)
            for a in answers
        ]
        assert tested == trained_parts(source, rows, tmp_path)
        losses, matches = test.run(loaded, progress=False)
    assert (len(losses.values), list(losses.counts)) == (2, [4, 2])
    assert set(matches.values) <= {0.0, 1.0}
    with pytest.raises(ValueError, match="t: row 1 has no turn of the assistant"):
        Suite(target={"t": [*rows[:1], {"messages": TURNS[:1]}]}).build()


def test_a_column_map(tmp_path):
    source = save_llama(tmp_path / "llama")
    data = write(tmp_path / "d.jsonl", [{"ask": "two plus", "say": "three", "text": "no"}])
    old = write(tmp_path / "old.jsonl", [{"text": "a cat"}])
    task = open_task(source, [data], columns={"question": "ask", "answer": "say"})
    model, _ = task.load()
    (sample,), (other,) = task.samples(model), task.samples(model, other=old)
    assert task.tokenizer.decode(sample["input_ids"]) == "two plus three </s>"
    assert task.tokenizer.decode(other["input_ids"]) == "a cat"  # without the columns of the map
    pairs = [{"q": "the cat", "p": "a dog", "a": label} for label in (True, False)]
    columns = {"text1": "q", "text2": "p", "label": "a"}
    task = open_task(
        save_bert(tmp_path / "bert"), write(tmp_path / "p.jsonl", pairs), columns=columns
    )
    assert task.head.classes == ("0", "1")
    first = task.samples(task.load()[0])[0]
    assert (task.tokenizer.decode(first["input_ids"]), first["labels"]) == ("the cat a dog", 1)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": "a cat"}, {"text": None}], "text of row 1 must be text, got null"),
        ([{"text": "a cat"}, {"prompt": "a"}], "row 1 needs one of the columns text, sentence"),
        ([{"prompt": "a", "completion": "b"}, {"text": "a"}], "row 1 needs one of the columns"),
        (
            [{"messages": TURNS}, {"text": "a"}],
            "row 1 needs one of the columns messages, conversations, but",
        ),
        ([{"messages": TURNS}, {"messages": None}], "messages of row 1 must be a list of turns"),
        ([{"messages": "a cat"}], "messages of row 0 must be a list of turns"),
        ([{"sentence1": "a", "sentence2": "cat"}], "but training needs messages"),
    ],
)
def test_rows_without_words(rows, words, tmp_path):
    source = save_llama(tmp_path / "llama")
    with pytest.raises(ValueError, match=rf"rows.jsonl.* {words}"):
        words_of(source, rows, tmp_path)


def test_words_that_are_left_out_are_named(tmp_path):
    source = save_llama(tmp_path / "llama")
    with pytest.warns(UserWarning, match=r"rows.jsonl: columns that are not used: topic"):
        words_of(source, [{"text": "a cat sat", "topic": "dog"}], tmp_path)
    with pytest.warns(UserWarning, match=r"t: columns that are not used: topic"):
        Suite(data={"t": [{"text": "a cat", "topic": "dog"}]}).build()


def test_a_text_without_tokens_is_refused(tmp_path):
    source = save_bert(tmp_path / "bert")
    make_tokenizer().save_pretrained(source)  # adds no special tokens
    task = open_task(source, write(tmp_path / "d.jsonl", [*CLASSES, {"text": "", "label": "cat"}]))
    model, _ = task.load()
    with pytest.raises(ValueError, match=r"d.jsonl: row 12 has no tokens: its text is empty"):
        task.samples(model)


def test_huge_labels_are_names_of_classes(tmp_path):
    rows = [{"text": "a cat", "label": label} for label in (10**23, 10**23 + 1, 10**400)]
    task = open_task(save_bert(tmp_path / "bert"), write(tmp_path / "d.jsonl", rows))
    assert task.head.classes == tuple(str(row["label"]) for row in rows)
    assert [sample["labels"] for sample in task.samples(task.load()[0])] == [0, 1, 2]


def test_rows_for_validation_by_path(tmp_path):
    source, data = save_llama(tmp_path / "llama"), write(tmp_path / "d.jsonl", [{"text": "two"}])
    other = write(tmp_path / "v.jsonl", [{"text": "plus"}])
    for given in (str(other), Path(other)):
        assert list(open_task(source, data, validation=given).validation) == [{"text": "plus"}]
        assert Training(validation=given).validation_file == str(other)


def test_rows_that_are_cut_are_said(tmp_path, caplog):
    source = save_llama(tmp_path / "llama")
    long = " ".join(["two"] * 40)
    rows = [
        {"prompt": p, "completion": c} for p, c in (("two", "two"), ("two", long), (long, "two"))
    ]
    task = open_task(source, write(tmp_path / "d.jsonl", rows))
    with caplog.at_level("INFO", "holdfast"):
        assert len(task.samples(task.load()[0])) == 2
    assert "2 of 3 rows are cut to 16 tokens; 1 of them have no target left" in caplog.text


@pytest.mark.parametrize(
    "rows", [[{"x": "a"}], [{"text": "a cat"}, {"text": None}], [{"messages": "a cat"}]]
)
def test_rows_are_refused_before_a_model_is_loaded(rows, tmp_path):
    source = save_llama(tmp_path / "llama")
    (tmp_path / "llama" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"d.jsonl.*(training needs|of row)"):
        encode(open_task(source, write(tmp_path / "d.jsonl", rows)), [], Training())


def test_a_class_without_a_text(tmp_path):
    source = save_bert(tmp_path / "bert")
    task = open_task(
        source, write(tmp_path / "d.jsonl", [*CLASSES, {"text": None, "label": "cat"}])
    )
    model, _ = task.load()
    with pytest.raises(ValueError, match="row 12 needs a text and a label, but it has label"):
        task.samples(model)
