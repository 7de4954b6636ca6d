"""The inputs of a plan are checked before the first run."""

import json

import pytest

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.tiny import save_bert, save_images, save_llama, save_vit  # noqa: E402
from holdfast.cli import main  # noqa: E402
from holdfast.comparison.inputs import (  # noqa: E402
    check_inputs,
    half_of_text,
    measure_options,
    warn_of_known_target,
)
from holdfast.comparison.plan import Measuring, Plan  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402

CLASSES = [{"text": "the cat sat", "label": "cat"}, {"text": "a dog ran", "label": "dog"}]
NUMBERS = [{"text": "the cat sat", "label": 4.5}, {"text": "a dog ran", "label": -1}]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def plan_of(model, train, target, **measuring):
    return Plan(model=model, data=train, target=target, recipes=("standard",), seeds=(0,),
                measuring=Measuring(**measuring))  # fmt: skip


def test_a_target_that_is_training_data_is_warned_of(tmp_path, caplog):
    train, dev = (write(tmp_path / f"{n}.jsonl", [{"text": n}]) for n in ("train", "dev"))
    (tmp_path / "link.jsonl").symlink_to(train)
    warn_of_known_target([dev, f"{tmp_path}/trai?.jsonl"], train)
    warn_of_known_target(train, str(tmp_path / "link.jsonl"))
    said = "is training data: its score shows what a model has memorized, not what it has learned"
    assert [said in message for message in caplog.messages] == [True, True]
    assert f"the target {tmp_path}/link.jsonl is" in caplog.text
    caplog.clear()
    warn_of_known_target(train, dev)
    assert not caplog.messages


def test_an_adapter_is_to_be_merged_first(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    model = Loader().load(save_llama(tmp_path / "base"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained("adapter")
    data = write(tmp_path / "d.jsonl", [{"text": "the cat sat on the mat"}])
    with pytest.raises(ValueError, match="adapter is an adapter, but training") as told:
        check_inputs(plan_of("adapter", data, data))
    # The command that it names makes a model that can be tuned.
    _, _, command = str(told.value).partition("with holdfast ")
    assert command == "merge BASE adapter --alpha 1 --out DIR"
    assert main(["base" if word == "BASE" else word for word in command.split()]) == 0
    check_inputs(plan_of("DIR", data, data))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_a_task_that_the_harness_does_not_have(tmp_path):
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "ours.yaml").write_text("task: our_choice\noutput_type: loglikelihood\n")
    model = save_llama(tmp_path / "llama")
    data = write(tmp_path / "d.jsonl", [{"text": "the cat sat on the mat"}])
    own = str(tmp_path / "tasks")
    check_inputs(plan_of(model, data, data, tasks=("our_choice", "piqa"), include_path=own))
    with pytest.raises(ValueError, match="no task 'our_choise'; did you mean 'our_choice'"):
        check_inputs(plan_of(model, data, data, tasks=("piqa", "our_choise"), include_path=own))


@pytest.mark.parametrize(
    ("rows", "wrong", "words"),
    [
        (CLASSES, "log", "the label 'log' is not one of the model's 2 classes: cat, dog"),
        (NUMBERS, "log", "the model predicts a number, but the label is 'log'"),
    ],
)
def test_a_label_that_training_does_not_have(rows, wrong, words, tmp_path):
    model, data = save_bert(tmp_path / "bert"), write(tmp_path / "d.jsonl", rows)
    other = write(tmp_path / "t.jsonl", [*rows, {"text": "a log", "label": wrong}])
    check_inputs(plan_of(model, data, data))
    check_inputs(plan_of(model, data, other, limit=2))  # which is not asked for it
    with pytest.raises(ValueError, match=f"t: {words}"):
        check_inputs(plan_of(model, data, other))
    with pytest.raises(ValueError, match=f"t: {words}"):
        check_inputs(plan_of(model, data, data, data=(other,)))


def test_a_folder_of_images_that_training_does_not_have(tmp_path):
    model = save_vit(tmp_path / "vit")
    data = save_images(tmp_path / "train", classes=("red", "green"))
    target = save_images(tmp_path / "test")
    for image in (tmp_path / "test").glob("*/*"):
        image.write_text("never decoded")
    with pytest.raises(ValueError, match="the label 'blue' is not one of the model's 2 classes"):
        check_inputs(plan_of(model, data, target))


@pytest.mark.parametrize("text", ["a\nb\nc\nd", "one line only", "", "\n\n", "x\nyyyyyyyyyyyyyyyy"])
def test_the_halves_of_a_text_are_all_of_it(text):
    assert half_of_text(text, 0) + half_of_text(text, 1) == text


def test_the_halves_share_nothing_and_are_all(tmp_path):
    rows = [{"prompt": f"{i}", "completion": "x"} for i in range(7)]
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "wiki.txt").write_text("\n".join(map(str, range(100))))
    halves = [
        measure_options(
            Plan("m", "d", str(tmp_path / "dev.jsonl"),
                 measuring=Measuring(text=(str(tmp_path / "wiki.txt"),), half=half))
        )
        for half in (0, 1)
    ]  # fmt: skip
    both = [row["prompt"] for half in halves for row in half["target"]["dev"]]
    assert sorted(both) == [str(i) for i in range(7)]
    assert "".join(half["text"]["wiki"] for half in halves) == "\n".join(map(str, range(100)))
