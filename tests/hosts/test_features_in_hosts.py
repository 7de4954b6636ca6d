"""Kept features in every host: the weights are those of finetune_loop with the same updates."""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
import accelerate  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

from holdfast import Features, Full, PretrainedHead, Recipe, Run, pad_collate  # noqa: E402
from holdfast.hosts.accelerate import AccelerateLoop  # noqa: E402
from holdfast.hosts.hf import HoldfastTrainer  # noqa: E402
from hosts import test_accelerate, test_hf  # noqa: E402
from loops import tune  # noqa: E402
from matrices import sampled  # noqa: E402
from ranks import run_on_ranks  # noqa: E402
from sharded import furthest, whole_state  # noqa: E402

SAMPLES, EPOCHS, LR, SEED = 16, 3, 0.01, 3
SETTINGS = {"lr": LR, "new": "classifier", "seed": SEED, "progress": False}
RECIPES = {
    "features": Recipe(recall=Features()),
    "target": Recipe(recall=Features(inputs="target")),
    "with others": Recipe.preset("lora+features+wise-ft"),
}


@pytest.fixture(autouse=True)
def _fresh():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_model(dropout=0.0):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=20, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


def make_rows(n=SAMPLES):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 40, (5 + i % 7,), generator=generator).tolist() for i in range(n)]
    return [{"input_ids": ids, "labels": i % 2} for i, ids in enumerate(rows)]


def in_finetune_loop(recipe, size=SAMPLES, **options):
    options = SETTINGS | {"epochs": EPOCHS, "collate": pad_collate, "batch_size": size} | options
    return tune(make_model(), recipe, make_rows(), **options)


def make_trainer(recipe, folder, size=SAMPLES, dropout=0.0, **options):
    given = {"per_device_train_batch_size": size, "num_train_epochs": EPOCHS, "seed": SEED}
    args = test_hf.make_args(folder, **(given | options))
    return HoldfastTrainer(
        model=make_model(dropout), recipe=recipe, args=args,
        data_collator=pad_collate, train_dataset=datasets.Dataset.from_list(make_rows()),
        new="classifier",
    )  # fmt: skip


@pytest.mark.parametrize("size", [4, 1])
def test_accumulation_in_the_loop(size):
    ours = in_finetune_loop(RECIPES["features"], size, accumulate=SAMPLES // size)
    theirs = in_finetune_loop(RECIPES["features"])
    assert furthest(whole_state(ours), whole_state(theirs)) <= 1e-9


@pytest.mark.parametrize("name", sampled(list(RECIPES), ["features"]))
def test_in_the_trainer(name, tmp_path):
    trainer = make_trainer(RECIPES[name], tmp_path, 4, gradient_accumulation_steps=4)
    trainer.train()
    theirs = in_finetune_loop(RECIPES[name])
    assert furthest(whole_state(trainer.model), whole_state(theirs)) <= 1e-6
    without = in_finetune_loop(replace(RECIPES[name], recall=Recipe().recall))
    assert furthest(whole_state(theirs), whole_state(without)) > 1e-3


def test_resume_in_the_trainer(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "dropout": 0.1, "size": 4}
    whole = make_trainer(RECIPES["features"], tmp_path / "whole", **options)
    whole.train()
    cut = make_trainer(RECIPES["features"], tmp_path / "cut", **options)
    cut.add_callback(test_hf.StopAt(5))
    with pytest.raises(test_hf.Stopped):
        cut.train()
    again = make_trainer(RECIPES["features"], tmp_path / "cut", **options)
    again.train(resume_from_checkpoint=True)
    assert furthest(whole_state(again.model), whole_state(whole.model)) == 0


def test_the_trainer_has_a_warm_up_where_it_is_needed(tmp_path):
    first = {}
    for held in (True, False):
        recipe = Recipe(trainable=Full(hold_statistics=held))
        options = {"lr_scheduler_type": "linear", "max_steps": 40, "logging_steps": 1}
        trainer = make_trainer(recipe, tmp_path / str(held), 1, **options)
        trainer.train()
        first[held] = [row["learning_rate"] for row in trainer.state.log_history[:3]]
    lr = SETTINGS["lr"]
    assert first[True] == pytest.approx([0, lr / 2, lr])
    assert first[False] == pytest.approx([lr, lr * 39 / 40, lr * 38 / 40])


def test_the_trainer_passes_the_old_head(tmp_path):
    model = make_model()
    old = PretrainedHead.of(model, "classifier")
    recipe = Recipe.from_dict({"recall": {"name": "distill", "head": "old", "inputs": "varied"}})
    trainer = HoldfastTrainer(
        model=model, recipe=recipe, args=test_hf.make_args(tmp_path), data_collator=pad_collate,
        train_dataset=datasets.Dataset.from_list(make_rows()), new="classifier", old_head=old,
    )  # fmt: skip
    assert trainer.run.old_head is old
    trainer.train()


def make_loop(accelerator, recipe, size):
    torch.manual_seed(0)
    run = Run(recipe, make_model(), make_rows(), collate=pad_collate, **SETTINGS)
    return AccelerateLoop(accelerator, run, epochs=EPOCHS, batch_size=size)


def test_with_accelerate():
    loop = make_loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4),
                     RECIPES["features"], 4)  # fmt: skip
    test_accelerate.train(loop)
    theirs = in_finetune_loop(RECIPES["features"])
    assert furthest(whole_state(loop.finish()), whole_state(theirs)) <= 1e-9


def on_ranks(kind, out):
    states = {}
    for name in ("features", "target"):
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        policy = {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["BertLayer"],
        }
        accelerator = test_accelerate.ranks_accelerator(kind, 2, **policy)
        loop = make_loop(accelerator, RECIPES[name], SAMPLES // 4)
        test_accelerate.train(loop)
        states[name] = whole_state(loop.finish())
    if torch.distributed.get_rank() == 0:
        torch.save(states, out)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks(kind, tmp_path):
    out = tmp_path / "out.pt"
    run_on_ranks(2, on_ranks, kind, out, folder=tmp_path)
    for name, state in torch.load(out, weights_only=True).items():
        assert furthest(state, whole_state(in_finetune_loop(RECIPES[name]))) <= 1e-9, name
