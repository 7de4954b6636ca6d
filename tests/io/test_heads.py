"""New heads: when a model gets one, of what size, and always the same."""

import importlib.util
import json
import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

import holdfast  # noqa: E402
from comparison.tiny import save_bert, save_llama, save_vit  # noqa: E402
from families import save_family  # noqa: E402
from holdfast.io.heads import (  # noqa: E402
    NewHead,
    head_for,
    head_like,
    mark_trained,
    model_kind,
    new_in,
    target_of,
)
from holdfast.io.models import Loader  # noqa: E402
from holdfast.io.rows import DatasetRows  # noqa: E402


def rows(*labels):
    return [{"text": "the cat", "label": label} for label in labels]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ((0, 1, 2), ("0", "1", "2")),
        (("1", "0"), ("0", "1")),
        ((10, 9, 9), ("9", "10")),
        (("b", "a", "b"), ("a", "b")),
        ((1.0, 0.0), ("0", "1")),
        ((True, False), ("0", "1")),
        ((0.5, 1.0), ()),
        (("4.75", "3"), ()),  # as a CSV file has them
    ],
)
def test_a_body_gets_what_the_labels_ask_for(labels, classes, tmp_path):
    assert head_for("auto", save_bert(tmp_path), rows(*labels), "d") == NewHead(classes)


def test_what_the_user_asks_for(tmp_path):
    bert = save_bert(tmp_path / "bert")
    assert head_for("regression", bert, rows(1, 2), "d") == NewHead(())
    assert head_for("classification", bert, rows(1, 2), "d") == NewHead(("1", "2"))
    assert head_for("none", bert, rows(1, 2), "d") is None
    assert head_for("auto", bert, [{"text": "the cat"}], "d") is None
    llama = save_llama(tmp_path / "llama")
    assert head_for("auto", llama, rows(0, 1), "d") is None
    assert head_for("classification", llama, rows(0, 1), "d") == NewHead(("0", "1"))
    with pytest.raises(ValueError, match="a regression needs numbers as labels, got 'red'"):
        head_for("regression", bert, rows(1, "red"), "d")
    with pytest.raises(ValueError, match="all rows have the label '1'"):
        head_for("auto", bert, rows(1, 1), "d")
    with pytest.raises(ValueError, match="needs rows with a text or an image and a label"):
        head_for("classification", bert, [{"prompt": "a", "completion": "b"}], "d")
    with pytest.raises(ValueError, match="head must be one of auto"):
        head_for("linear", bert, rows(1, 2), "d")


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        (("neg", "pos"), True),
        (("pos", "pos"), True),  # its own names
        ((0, 1), True),
        ((0, 1, 2), False),
        (("a", "b"), False),
        ((0.5, 1.5), False),
    ],
)
def test_a_head_is_kept_if_it_has_the_classes(labels, kept, tmp_path):
    names = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
    source = save_bert(tmp_path, transformers.BertForSequenceClassification, **names)
    assert (head_for("auto", source, rows(*labels), "d") is None) == kept


def test_a_regression_keeps_its_head_for_any_numbers(tmp_path):
    source = save_bert(tmp_path, transformers.BertForSequenceClassification, num_labels=1)
    assert head_for("auto", source, rows(1, 5), "d") is None
    assert head_for("auto", source, rows("a", "b"), "d") == NewHead(("a", "b"))


def test_the_names_that_a_dataset_has(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    table = DatasetRows(
        datasets.Dataset.from_list(rows(1, 0, 0), features=datasets.Features(features))
    )
    assert head_for("auto", save_bert(tmp_path / "a"), table, "d") == NewHead(("no", "yes"))
    counted = save_bert(tmp_path / "b", transformers.BertForSequenceClassification, num_labels=2)
    assert head_for("auto", counted, table, "d") is None


def test_a_label_is_a_name_before_it_is_a_number(tmp_path):
    model, _ = Loader().load_with_head(save_bert(tmp_path), NewHead(("1", "2", "4")))
    assert [target_of(model.config, label, "d") for label in (1, "4", 2.0)] == [0, 2, 1]
    for label in (0, 3, "red", 1.5, -1):
        with pytest.raises(ValueError, match=r"is not one of the model's 3 classes: 1, 2, 4"):
            target_of(model.config, label, "d")


@pytest.mark.parametrize("names", [("-1", "0", "1"), ("1", "2", "other"), ("0.5", "1.0", "2.0")])
def test_classes_of_a_dataset_of_which_some_are_numbers(names, tmp_path):
    datasets = pytest.importorskip("datasets")
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))}
    table = DatasetRows(
        datasets.Dataset.from_list(rows(0, 1, 2), features=datasets.Features(features))
    )
    head = head_for("auto", save_bert(tmp_path), table, "d")
    assert head == NewHead(names)
    model, _ = Loader().load_with_head(str(tmp_path), head)
    assert [target_of(model.config, row["label"], "d") for row in table] == [0, 1, 2]


@pytest.mark.parametrize(
    ("classes", "label"), [(("-1", "1"), 0), (("1", "2", "other"), 0), (("1.0", "2.0"), 1.0)]
)
def test_a_label_is_no_index_beside_a_number(classes, label, tmp_path):
    model, _ = Loader().load_with_head(save_bert(tmp_path), NewHead(classes))
    with pytest.raises(ValueError, match=f"the label {label} is not one of the model's"):
        target_of(model.config, label, "d")


def make(kind, folder):
    if kind == "bert":
        return save_bert(folder), NewHead(("a", "b", "c")), ("classifier",)
    if kind == "masked":
        source = save_bert(folder, transformers.BertForMaskedLM)
        return source, NewHead(("a", "b", "c")), ("bert.pooler.dense", "classifier")
    if kind == "other classes":
        source = save_bert(folder, transformers.BertForSequenceClassification, num_labels=2)
        return source, NewHead(("a", "b", "c")), ("classifier",)
    if kind == "the same size":
        source = save_bert(folder, transformers.BertForSequenceClassification, num_labels=3)
        return source, NewHead(("a", "b", "c")), ("classifier",)
    if kind == "llama":
        return save_llama(folder), NewHead((), pad=0), ("score",)
    source = save_vit(folder, transformers.ViTModel if kind == "vit body" else
                      transformers.ViTForImageClassification)  # fmt: skip
    return source, NewHead(("a", "b", "c"), images=True), ("classifier",)


@pytest.mark.parametrize(
    "kind", ["bert", "masked", "other classes", "the same size", "llama", "vit body", "vit"]
)
def test_the_body_is_the_pretrained_one_and_the_head_is_drawn_alike(kind, tmp_path):
    source, head, parts = make(kind, tmp_path)
    pretrained = Loader().load(source)
    torch.manual_seed(1)
    model, new = Loader().load_with_head(source, head)
    torch.manual_seed(2)
    again, _ = Loader().load_with_head(source, head)
    assert new == parts
    assert model.config.num_labels == max(1, len(head.classes))
    assert dict(model.config.id2label) == (dict(enumerate(head.classes)) or {0: "LABEL_0"})
    body, known = model.base_model.state_dict(), pretrained.base_model.state_dict()
    assert all(torch.equal(body[n], known[n]) for n in body if n in known)
    state, same = model.state_dict(), again.state_dict()
    assert all(torch.equal(state[n], same[n]) for n in state)
    for part in new:  # not what the checkpoint had
        weight = model.get_submodule(part).weight
        assert 0.5 * 0.02 < weight.std() < 2 * 0.02
        old = dict(pretrained.named_parameters()).get(f"{part}.weight")
        assert old is None or old.shape != weight.shape or not torch.equal(old, weight)


def test_transformers_tells_which_head_is_new(tmp_path):
    source = save_bert(tmp_path, transformers.BertForMaskedLM)
    model = transformers.BertForSequenceClassification.from_pretrained(source)
    assert new_in(model) == ("bert.pooler.dense", "classifier")
    assert new_in(transformers.BertForMaskedLM.from_pretrained(source)) == ()
    made = transformers.BertForSequenceClassification(model.config)
    assert new_in(made) == ()  # nothing is known of a model that was not loaded
    assert new_in(torch.nn.Linear(2, 2)) == ()
    mark_trained(model.classifier)
    assert new_in(model) == ("bert.pooler.dense",)


def test_a_run_finds_the_new_head_and_fits_it_before_its_predictions_are_used(tmp_path):
    model = transformers.BertForSequenceClassification.from_pretrained(save_bert(tmp_path))
    samples = [{"input_ids": [5, 7, 8, 6], "labels": i % 2} for i in range(4)]
    run = holdfast.Run("recadam+flow", model, samples, lr=1e-3, progress=False, cache=False)
    assert run.new == ("classifier",)
    assert run.recipe.trainable == holdfast.LPFT()
    assert "classifier.weight" not in run.anchors
    run.finish()
    again = holdfast.Run("recadam", model, samples, lr=1e-3, progress=False)
    assert again.new == ()
    assert "classifier.weight" in again.anchors
    named = holdfast.Run("recadam", model, samples, lr=1e-3, progress=False, new="classifier")
    assert named.new == ("classifier",)


def test_what_is_no_head_may_not_be_missing(tmp_path):
    model = transformers.BertModel.from_pretrained(save_bert(tmp_path / "a"))
    state = model.state_dict()
    state.pop("embeddings.word_embeddings.weight")
    model.save_pretrained(tmp_path / "a", state_dict=state)
    with pytest.raises(ValueError, match="is missing weights of BertForSequenceClassification"):
        Loader().load_with_head(str(tmp_path / "a"), NewHead(("a", "b")))


def test_a_model_that_has_no_such_classifier(tmp_path):
    with pytest.raises(ValueError, match="no text classifier for vit"):
        Loader().load_with_head(save_vit(tmp_path), NewHead(("a", "b")))


def test_the_base_of_a_tuned_classifier_gets_the_head_that_was_tuned(tmp_path):
    base = save_bert(tmp_path / "base")
    head = NewHead(("x", "y", "z"))
    model, _ = Loader().load_with_head(base, head)
    model.save_pretrained(tmp_path / "tuned")
    found = head_like(base, str(tmp_path / "tuned"))
    assert found is not None
    assert found.classes == head.classes
    assert head_like(base, base) is None
    assert head_like(str(tmp_path / "tuned"), str(tmp_path / "tuned")) is None


def test_a_base_with_as_many_other_classes_gets_the_head_that_was_tuned(tmp_path):
    names = ("contradiction", "neutral", "entailment")
    base = save_bert(
        tmp_path / "base", transformers.BertForSequenceClassification, **NewHead(names).settings()
    )
    data = [{"text": "the cat", "label": label} for label in ("red", "green", "blue")]
    head = head_for("auto", base, data, "d")
    model, _ = Loader().load_with_head(base, head)
    model.save_pretrained(tmp_path / "tuned")
    found = head_like(base, str(tmp_path / "tuned"))
    assert found is not None
    assert found.classes == ("blue", "green", "red")
    report = holdfast.measure(
        base, tmp_path / "tuned", target=data, drift=False, context_free=0, progress=False
    )
    assert any("new, untrained head (3 classes)" in note for note in report.notes)


def test_a_regression_is_like_another(tmp_path):
    base, tuned = (
        save_bert(tmp_path / name, transformers.BertForSequenceClassification, **settings)
        for name, settings in (
            ("base", {"id2label": {0: "score"}, "label2id": {"score": 0}}),
            ("tuned", NewHead(()).settings()),
        )
    )
    assert head_like(base, tuned) is None


@pytest.mark.parametrize("kind", ["llama", "classifier"])
def test_an_adapter_beside_a_copy_of_its_bases_configuration(kind, tmp_path):
    peft = pytest.importorskip("peft")
    if kind == "llama":
        base, target = save_llama(tmp_path / "base"), ["q_proj"]
    else:
        base = save_bert(tmp_path / "base", transformers.BertForSequenceClassification)
        target = ["query"]
    model = Loader().load(base)
    task = "CAUSAL_LM" if kind == "llama" else None
    config = peft.LoraConfig(r=2, target_modules=target, task_type=task)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "adapter")
    known, found = (Loader().load(str(tmp_path / n), base) for n in ("base", "adapter"))
    assert type(found) is type(known)
    state = found.state_dict()
    # An adapter that was not trained changes nothing, and the head is the base's own.
    assert all(torch.equal(state[n], v) for n, v in known.state_dict().items())


def test_a_model_of_timm_without_timm(tmp_path):
    if importlib.util.find_spec("timm") and importlib.util.find_spec("torchvision"):
        pytest.skip("timm is installed")
    settings = {"model_type": "timm_wrapper", "architecture": "resnet18"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is a model of timm: install "):
        Loader().config_of(tmp_path)


def test_a_multimodal_model_is_a_language_model(tmp_path):
    source = save_family("LLaVA", tmp_path)
    model = Loader().load(source)
    assert model_kind(model) == model_kind(model.config) == "causal_lm"
    before = {name: p.clone() for name, p in model.named_parameters()}
    samples = [{"input_ids": [2, 7, 8, 9, 3], "labels": [2, 7, 8, 9, 3]}] * 4
    holdfast.finetune_loop(model, "recadam+flow", samples, lr=1e-2, progress=False)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("language_model" in name or "lm_head" in name for name in moved)
