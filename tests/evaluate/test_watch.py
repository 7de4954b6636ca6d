"""The figures of a report during training."""

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast import Loader, LoopSettings, LoRA, Recipe, Reference, finetune_loop
from holdfast.evaluate.watch import Watch, curves_of, effective_distance
from small import make_llama, make_tokenizer

TEXT = " ".join(["the cat sat on the mat . a dog ran and two plus three is five ."] * 5)
DATA = [{"input_ids": [2, 8, 9, 10 + i], "labels": [2, 8, 9, 10 + i]} for i in range(8)]


def train(watch=None, recipe=None, **options):
    model, history = make_llama(attention_dropout=0.1), []
    if watch is not None:
        watch = watch(model)
    model = finetune_loop(
        model, recipe or Recipe(), DATA, lr=1e-2, epochs=10, batch_size=4, progress=False,
        watch=watch, log=history.append, settings=LoopSettings(log_every=5), **options,
    )  # fmt: skip
    return model, history


def make_watch(model):
    return Watch(
        model, every=4, text={"t": TEXT}, target={"q": [{"prompt": "the", "completion": "cat"}]},
        context_free=4, loader=Loader(tokenizer=make_tokenizer(), max_length=512),
    )  # fmt: skip


def test_it_sees_what_happens_and_disturbs_nothing():
    base = Reference.of(make_llama())
    model, history = train(make_watch)
    plain, _ = train()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    rows = [row for row in history if "forgetting/distance" in row]
    assert [row["update"] for row in rows] == [0, 4, 8, 12, 16, 20]
    assert rows[-1]["forgetting/distance"] == pytest.approx(base.distance(model).total, rel=1e-5)
    names = {name for row in rows for name in row if name.startswith("forgetting/")}
    assert names == {
        "forgetting/distance", "forgetting/kl/context-free", "forgetting/kl/q",
        "forgetting/t/perplexity", "forgetting/q/nll", "forgetting/q/exact_match",
    }  # fmt: skip
    assert rows[0]["forgetting/distance"] == rows[0]["forgetting/kl/context-free"] == 0
    assert all(row["forgetting/kl/context-free"] > 0 for row in rows[1:])
    curves = {curve.name: curve for curve in curves_of(history)}
    assert curves["distance"].steps == (0, 4, 8, 12, 16, 20)
    assert set(curves["loss"].steps) == {4, 5, 8, 10, 12, 15, 16, 20}


def test_a_trainers_log():
    history = [{"loss": 1.0, "step": 5, "epoch": 1}, {"eval_loss": 2.0, "step": 5}, {"x": 1}]
    assert [(c.name, c.values) for c in curves_of(history)] == [("loss", (1,)), ("eval_loss", (2,))]


def test_the_distance_of_adapters_is_that_of_the_weights_that_act():
    pytest.importorskip("peft", reason="the peft extra is not installed")
    base = Reference.of(make_llama())
    model, history = train(
        lambda model: Watch(model, every=20), Recipe(trainable=LoRA(r=2, alpha=8))
    )
    merged = model.merge_and_unload()
    assert history[-1]["forgetting/distance"] == pytest.approx(
        base.distance(merged).total, rel=1e-4
    )
    assert effective_distance(merged, base) == base.distance(merged).total


def test_wrong_use():
    with pytest.raises(ValueError, match="pass log="):
        finetune_loop(make_llama(), Recipe(), DATA, lr=1e-2, watch=Watch(make_llama()))
    with pytest.raises(ValueError, match="every must be at least 1"):
        Watch(torch.nn.Linear(2, 2), every=0)
