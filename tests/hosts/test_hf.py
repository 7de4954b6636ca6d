"""Recipes in the Hugging Face Trainer: the real one, on a small BERT."""

import copy
import itertools
import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

from transformers import Trainer, TrainingArguments  # noqa: E402

from holdfast import (  # noqa: E402
    L2SP,
    AdamWUpdate,
    FinchUpdate,
    Flow,
    LoRA,
    RecAdamUpdate,
    Recipe,
    Rehearsal,
    WiseFT,
    finetune_loop,
)
from holdfast.anneal import Constant  # noqa: E402
from holdfast.hosts.hf import HoldfastTrainer, WithRecipe, newest_complete  # noqa: E402
from holdfast.recipe import recipe_beside  # noqa: E402
from matrices import sampled  # noqa: E402


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def make_model(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, num_labels=3,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).to(dtype)


def make_data(n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (n, 6), generator=generator)
    rows = [{"input_ids": row.tolist(), "label": int(row[0]) % 3} for row in ids]
    return datasets.Dataset.from_list(rows)


def make_args(folder, **options):
    settings = {
        "output_dir": str(folder), "learning_rate": 1e-2, "num_train_epochs": 5,
        "per_device_train_batch_size": 12, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "seed": 3, "optim": "adamw_torch",
    }  # fmt: skip
    return TrainingArguments(**(settings | options))


def make_trainer(recipe, folder, model=None, data=None, cls=HoldfastTrainer, options=None, **more):
    return cls(
        model=make_model() if model is None else model,
        recipe=recipe,
        args=make_args(folder, **(options or {})),
        train_dataset=make_data() if data is None else data,
        **more,
    )


def assert_same_bits(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert [n for n in theirs if not torch.equal(ours[n], theirs[n])] == []


@pytest.mark.parametrize(
    ("optim", "steps"),
    sampled(
        itertools.product(["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"], [1, 2]),
        [("adamw_torch_fused", 2), ("sgd", 1)],
    ),
)
def test_the_neutral_recipe_is_the_trainer_to_the_bit(tmp_path, optim, steps):
    options = {
        "optim": optim, "gradient_accumulation_steps": steps, "per_device_train_batch_size": 3,
        "weight_decay": 0.1, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine",
    }  # fmt: skip
    ours = make_trainer(Recipe(), tmp_path, make_model(torch.float32, 0.1), options=options)
    ours.train()
    theirs = Trainer(
        model=make_model(torch.float32, 0.1),
        args=make_args(tmp_path, **options),
        train_dataset=make_data(),
    )
    theirs.train()
    assert_same_bits(ours.model, theirs.model)


@pytest.mark.parametrize(
    "names",
    sampled(
        [
            "recadam", "flow", "l2-sp", "mofo", "lora", "ewc", "mas", "l1-sp", "sfa", "hft",
            "distill", "gradual-unfreezing", "linear-probe", "wise-ft", "sgd", "lp-ft+flow",
            "random-init+recadam", "lora+recadam+flow+l2-sp+wise-ft", "dft", "talr", "eaft",
            "spd", "finch", "finch+l2-sp", "osft", "hra+l2-sp", "vera+recadam+wise-ft",
        ],
        ["ewc", "finch", "gradual-unfreezing", "lp-ft+flow", "lora+recadam+flow+l2-sp+wise-ft"],
    ),
)  # fmt: skip
def test_a_recipe_in_the_trainer_is_the_raw_loop(tmp_path, names):
    recipe = Recipe.preset(names)
    trainer = make_trainer(recipe, tmp_path)
    trainer.train()
    data = [{**row, "label": int(row["label"])} for row in make_data()]
    raw = finetune_loop(
        make_model(), recipe, data, lr=1e-2, epochs=5, batch_size=12, seed=3, progress=False
    )
    for (name, p), q in zip(trainer.model.named_parameters(), raw.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6, name


@pytest.mark.parametrize("update", [RecAdamUpdate(t0=0.1), FinchUpdate()], ids=["recadam", "finch"])
def test_accumulation_does_not_matter(tmp_path, update):
    recipe = Recipe(objective=Flow(), update=update)
    models = []
    for size, steps in [(12, 1), (4, 3)]:
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer = make_trainer(recipe, tmp_path, options=options)
        trainer.train()
        models.append(trainer.model)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6


def test_rehearsal(tmp_path):
    recipe = Recipe(recall=Rehearsal(ratio=0.5, anneal=Constant(0.7)))
    trainer = make_trainer(recipe, tmp_path, old_data=make_data(8, seed=1))
    assert len(trainer.train_dataset) == 18
    trainer.train()


def test_the_log_contains_the_values_of_the_methods(tmp_path):
    recipe = Recipe(update=RecAdamUpdate(), penalties=[L2SP()])
    trainer = make_trainer(recipe, tmp_path)
    trainer.train()
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert {"lam", "pull", "distance", "penalty/L2SP"} <= last.keys()


def test_evaluation_is_the_trainers_own(tmp_path):
    trainer = make_trainer(Recipe(objective=Flow()), tmp_path, eval_dataset=make_data(6, seed=2))
    plain = Trainer(model=make_model(), args=make_args(tmp_path), eval_dataset=make_data(6, seed=2))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"])


def test_merging_keeps_the_best_model(tmp_path):
    options = {
        "save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True,
        "learning_rate": 0.1, "num_train_epochs": 9,
    }  # fmt: skip
    recipe = Recipe(merging=WiseFT(0.5))
    base = make_model()
    trainer = make_trainer(
        recipe, tmp_path, copy.deepcopy(base), eval_dataset=make_data(6, seed=2), options=options,
        callbacks=[transformers.EarlyStoppingCallback(1)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step < trainer.state.max_steps
    best = transformers.BertForSequenceClassification.from_pretrained(
        trainer.state.best_model_checkpoint, dtype=torch.float64
    )
    for p, q, b in zip(
        trainer.model.parameters(), best.parameters(), base.parameters(), strict=True
    ):
        assert torch.allclose(p, (q + b) / 2)


class Stopped(Exception):
    pass


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Stopped


@pytest.mark.parametrize(
    "names",
    sampled(
        [
            "standard", "recadam", "flow+l2-sp", "mofo", "lora+wise-ft", "mixout", "sfa", "ewc",
            "osft", "dora", "oft+recadam", "ia3", "hra", "vera+l2-sp+wise-ft",
        ],
        ["recadam", "flow+l2-sp", "vera+l2-sp+wise-ft"],
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`")
def test_resume_is_exact(tmp_path, names):
    recipe = Recipe.preset(names)
    options = {
        "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear",
    }  # fmt: skip

    def fresh(folder, **more):
        model = make_model(torch.float32, 0.1)
        return make_trainer(recipe, folder, model, options=options, **more)

    whole = fresh(tmp_path / "whole")
    whole.train()
    with pytest.raises(Stopped):
        fresh(tmp_path / "cut", callbacks=[StopAt(7)]).train()
    (tmp_path / "cut" / "checkpoint-8").mkdir()  # of which the kill left a beginning
    again = fresh(tmp_path / "cut")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 15
    assert_same_bits(again.model, whole.model)


def test_resume_of_another_run_is_refused(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    recipe = Recipe(update=RecAdamUpdate())
    make_trainer(recipe, tmp_path, options=options).train()
    with pytest.raises(ValueError, match="another recipe"):
        make_trainer(Recipe(merging=WiseFT()), tmp_path, options=options).train(True)
    other = make_model()
    other.bert.pooler.dense.weight.data += 1
    with pytest.raises(ValueError, match="other pretrained weights"):
        make_trainer(recipe, tmp_path, other, options=options).train(True)


def test_the_newest_complete_checkpoint(tmp_path):
    assert newest_complete(str(tmp_path)) is None
    for step, text in [(2, "{}"), (10, "{}"), (12, '{"cut')]:
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    assert newest_complete(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    shutil.rmtree(tmp_path / "checkpoint-10")
    assert newest_complete(str(tmp_path)) == str(tmp_path / "checkpoint-2")


def test_any_trainer_can_have_a_recipe(tmp_path):
    class Mine(Trainer):
        def get_train_dataloader(self):
            self.called = True
            return super().get_train_dataloader()

    class Both(WithRecipe, Mine):
        pass

    trainer = make_trainer(Recipe(objective=Flow()), tmp_path, cls=Both)
    trainer.train()
    assert trainer.called


def test_wrong_use_raises_helpful_errors(tmp_path):
    with pytest.raises(TypeError, match="the pretrained model itself"):
        HoldfastTrainer(recipe=Recipe(), model_init=make_model, args=make_args(tmp_path))
    with pytest.raises(ValueError, match="smoothing does not work with the recipe flow"):
        make_trainer(Recipe(objective=Flow()), tmp_path, options={"label_smoothing_factor": 0.1})
    with pytest.raises(ValueError, match="in one place"):
        make_trainer(Recipe(update=AdamWUpdate(lr=0.5)), tmp_path)
    trainer = make_trainer(Recipe(objective=Flow()), tmp_path)
    trainer.train_dataset = trainer.train_dataset.remove_columns("holdfast_weight")
    with pytest.raises(ValueError, match="weight"):
        trainer.train()


def test_the_recipes_learning_rate(tmp_path):
    args = {"learning_rate": 5e-5}  # the default: not set
    trainer = make_trainer(Recipe(update=AdamWUpdate(lr=0.5)), tmp_path, options=args)
    assert trainer.args.learning_rate == 0.5


def test_lora_saves_adapters(tmp_path):
    trainer = make_trainer(Recipe(trainable=LoRA(r=2)), tmp_path)
    trainer.train()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "recipe.yaml").write_text("of the user")
    trainer.save_model(str(tmp_path / "adapters"))
    assert (tmp_path / "adapters" / "recipe.yaml").read_text() == "of the user"
    assert recipe_beside(tmp_path / "adapters") == trainer.run.full_recipe
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"bf16": True},
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.soak
        ),
        {"save_strategy": "epoch", "save_only_model": True},
        pytest.param({"dataloader_num_workers": 1}, marks=pytest.mark.soak),
        {"group_by_length": True} if "group_by_length" in TrainingArguments.__dataclass_fields__
        else {"train_sampling_strategy": "group_by_length"},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_the_trainers_own_options(tmp_path, options):
    plain = make_trainer(Recipe.preset("flow+recadam"), tmp_path, make_model(torch.float32))
    trainer = make_trainer(
        Recipe.preset("flow+recadam"), tmp_path, make_model(torch.float32), options=options
    )
    plain.train()
    trainer.train()
    tolerance = 5e-2 if "bf16" in options else 1e-4
    for p, q in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert (p - q).abs().max() < tolerance


def test_columns_that_the_model_does_not_take(tmp_path):
    data = make_data().add_column("text", ["some words"] * 12)
    tokenizer_free = transformers.DefaultDataCollator()
    for names in ("flow", "ewc", "lp-ft"):
        trainer = make_trainer(
            Recipe.preset(names), tmp_path, data=data, data_collator=tokenizer_free
        )
        trainer.train()


def test_evaluation_without_training_data(tmp_path):
    trainer = HoldfastTrainer(model=make_model(), recipe=Recipe(), args=make_args(tmp_path))
    assert trainer.evaluate(make_data(6, seed=2))["eval_loss"] > 0


def test_a_model_whose_task_is_not_known(tmp_path):
    model = make_model()
    body = transformers.BertForMaskedLM(model.config).double()
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    trainer = make_trainer(Recipe(), tmp_path, body, datasets.Dataset.from_list(rows))
    trainer.train()
    with pytest.raises(ValueError, match="task"):
        make_trainer(Recipe(objective=Flow()), tmp_path, body, datasets.Dataset.from_list(rows))


def test_second_losses_and_optimizers_are_refused(tmp_path):
    class Mine(Trainer):
        def __init__(self, *args, extra=1, **kwargs):
            super().__init__(*args, **kwargs)

        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class Both(WithRecipe, Mine):
        pass

    make_trainer(Recipe(), tmp_path, cls=Both, extra=2).train()
    with pytest.raises(ValueError, match=r"Mine\.compute_loss"):
        make_trainer(Recipe(objective=Flow()), tmp_path, cls=Both)
    with pytest.raises(ValueError, match="two optimizers"):
        make_trainer(
            Recipe(update=RecAdamUpdate()), tmp_path,
            optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        )  # fmt: skip
    with pytest.raises(TypeError, match="a preset name such as"):
        make_trainer(["recadam"], tmp_path)
    trainer = make_trainer(Recipe(merging=WiseFT()), tmp_path)
    trainer.train()
    with pytest.raises(RuntimeError, match="a new trainer"):
        trainer.train()


def test_a_checkpoint_without_a_recipe_is_refused(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    plain = Trainer(
        model=make_model(), args=make_args(tmp_path, **options), train_dataset=make_data()
    )
    plain.train()
    with pytest.raises(ValueError, match="without a recipe"):
        make_trainer(Recipe(objective=Flow()), tmp_path, options=options).train(True)


def test_a_stream_is_trained_on(tmp_path):
    rows = [dict(row) for row in make_data()]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    options = {"max_steps": 3, "per_device_train_batch_size": 4}
    make_trainer(Recipe(), tmp_path, data=stream, options=options).train()


def test_a_model_of_adapters_resumes_with_another_draw_of_a(tmp_path):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")

    def trainer(seed):
        model = make_model()
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
        options = {"save_strategy": "steps", "save_steps": 2}
        return make_trainer(
            Recipe.preset("flow"), tmp_path, peft.get_peft_model(model, config), options=options
        )

    whole = trainer(1)
    whole.train()
    again = trainer(2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_bits(again.model, whole.model)


def test_auto_find_batch_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="auto_find_batch_size changes the number"):
        make_trainer(Recipe.preset("recadam"), tmp_path, options={"auto_find_batch_size": True})


def test_a_checkpoint_without_an_optimizer_is_refused(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    make_trainer(Recipe.preset("recadam"), tmp_path, options=options).train()
    with pytest.raises(ValueError, match="holds only a model"):
        make_trainer(Recipe.preset("recadam"), tmp_path, options=options).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )


def test_a_run_that_diverges_is_an_error(tmp_path):
    """The Trainer's own log hides a loss that is NaN."""
    model = make_model()
    with torch.no_grad():
        model.classifier.bias[0] = torch.nan
    with pytest.raises(ValueError, match="the training diverged: there is NaN or infinity in"):
        make_trainer(Recipe(), tmp_path, model, options={"num_train_epochs": 1}).train()
