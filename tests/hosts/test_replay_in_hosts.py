"""Self-replay in every host: the weights are those of finetune_loop with the same updates."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
import accelerate  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from holdfast import (  # noqa: E402
    Flow,
    LoopSettings,
    LoRA,
    Recipe,
    Run,
    SelfReplay,
    WiseFT,
    finetune_loop,
    pad_collate,
)
from holdfast._torch import ride  # noqa: E402
from holdfast._torch.replace import replaced  # noqa: E402
from holdfast.hosts.accelerate import AccelerateLoop  # noqa: E402
from holdfast.hosts.hf import HoldfastTrainer  # noqa: E402
from hosts import test_accelerate, test_hf  # noqa: E402
from matrices import sampled  # noqa: E402
from ranks import run_on_ranks  # noqa: E402
from sharded import furthest, whole_state  # noqa: E402
from small import make_llama, make_tokenizer  # noqa: E402

SAMPLES, EPOCHS, LR, SEED = 16, 3, 0.01, 3
CHAT = (
    "{% for m in messages %}{{ '[CLS] ' + m['role'] + ' ' + m['content'] + ' [SEP] ' }}{% endfor %}"
)


def replay(**settings):
    return SelfReplay(**({"share": 0.5, "top": 8, "fewest": 1} | settings))


RECIPES = {
    "alone": Recipe(recall=replay()),
    "one text": Recipe(recall=replay(share=0.01)),
    "flow+wise-ft": Recipe(objective=Flow(), recall=replay(), merging=WiseFT()),
    "lora": Recipe(trainable=LoRA(r=2), recall=replay(top=None)),
    "budget": Recipe(recall=replay(budget=1e-3)),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(autouse=True)
def rides(monkeypatch):
    """Whether texts rode along in a call of the host, each time; however much padding it takes."""
    found, end = [], ride._Ride.end
    monkeypatch.setattr(ride, "_PADDING", 9.0)

    def recording(self):
        found.append(self.found is not None)
        return end(self)

    monkeypatch.setattr(ride._Ride, "end", recording)
    return found


def make_model(**options):
    return make_llama(**({"limit": 10, "scale": 0.2} | options)).double()


def make_chat_tokenizer():
    tokenizer = make_tokenizer("user assistant the cat sat")
    tokenizer.chat_template = CHAT
    return tokenizer


def make_rows(n=SAMPLES):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 30, (3 + i % 4,), generator=generator).tolist() for i in range(n)]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in rows]


def in_finetune_loop(recipe, rows=None, size=SAMPLES, **options):
    """All of a run's samples in one call per update, and the texts in another."""
    options = {"tokenizer": make_chat_tokenizer(), "model": make_model()} | options
    with replaced(ride, "_PADDING", -1.0):
        return finetune_loop(
            options.pop("model"), recipe, make_rows() if rows is None else rows, lr=LR,
            epochs=EPOCHS, batch_size=size, seed=SEED, progress=False, **options,
        )  # fmt: skip


def assert_close(ours, theirs, tolerance):
    assert furthest(whole_state(ours), whole_state(theirs)) <= tolerance


def make_trainer(
    recipe, folder, size=SAMPLES, sharded=False, rows=None, cls=HoldfastTrainer,
    compute_loss_func=None, **options,
):  # fmt: skip
    given = {"per_device_train_batch_size": size, "num_train_epochs": EPOCHS, "seed": SEED}
    args = test_hf.make_args(folder, **(given | options))
    if sharded:  # Accelerate ignores FSDP on CPUs
        assert args.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return cls(
        model=make_model(), recipe=recipe, args=args, data_collator=pad_collate,
        train_dataset=datasets.Dataset.from_list(rows or make_rows()),
        processing_class=make_chat_tokenizer(), compute_loss_func=compute_loss_func,
    )  # fmt: skip


EVERYWHERE = sampled(
    [*((name, 4) for name in RECIPES), ("alone", 1), ("alone", 16)],
    [("alone", 4), ("flow+wise-ft", 4)],
)


@pytest.mark.parametrize(("name", "size"), EVERYWHERE)
def test_in_the_trainer(name, size, tmp_path, rides):
    steps = SAMPLES // size
    trainer = make_trainer(RECIPES[name], tmp_path, size, gradient_accumulation_steps=steps)
    assert trainer.run.recall.pool.starts.unique().tolist() == [1, 2]  # BOS, and the user's turn
    trainer.train()
    assert set(rides) == {True}
    assert_close(trainer.model, in_finetune_loop(RECIPES[name]), 1e-6)
    assert trainer.state.log_history[1]["kl"] > 0


def test_the_log_has_the_loss_of_the_samples_and_the_recall_beside_it(tmp_path):
    recipe, model = Recipe(recall=replay(strength=50.0)), make_model()
    batch, rows, after = pad_collate(make_rows()), [], []

    def log(row):
        rows.append(row)
        with torch.no_grad():  # an update has all samples: this is the loss of the next one
            after.append(float(model(**batch).loss))

    in_finetune_loop(recipe, model=model, log=log, settings=LoopSettings(log_every=1))
    assert [row["loss"] for row in rows[1:]] == pytest.approx(after[:-1])
    assert [row["recall"] for row in rows] == pytest.approx([50 * row["kl"] for row in rows])
    trainer = make_trainer(recipe, tmp_path, logging_steps=1)
    trainer.train()
    theirs = [row for row in trainer.state.log_history if "loss" in row]
    for name in ("loss", "recall"):
        assert [row[name] for row in theirs] == pytest.approx([r[name] for r in rows], abs=1e-4)


class OwnLoss(HoldfastTrainer):
    """A mean over a micro-batch, which the Trainer divides by the number of micro-batches."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**{n: x for n, x in inputs.items() if n != "labels"}).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        )


def cross_entropy(outputs, labels, num_items_in_batch):
    found = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return found / num_items_in_batch


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("kind", ["method", "function"])
def test_the_loss_of_the_trainer_may_be_the_users(kind, size, tmp_path, rides):
    ids = torch.randint(4, 30, (SAMPLES, 6), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = {"cls": OwnLoss} if kind == "method" else {"compute_loss_func": cross_entropy}
    steps = SAMPLES // size
    trainer = make_trainer(
        RECIPES["alone"], tmp_path, size, rows=rows, gradient_accumulation_steps=steps, **options
    )
    trainer.loss_is_scaled_for_ga = kind == "function"
    trainer.train()
    assert set(rides) == {True}
    assert_close(trainer.model, in_finetune_loop(RECIPES["alone"], rows), 1e-6)


def test_split_batches_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(HoldfastTrainer, "get_tp_size", lambda self: 2)
    with pytest.raises(ValueError, match="not work with tensor parallelism: use Distributed"):
        make_trainer(RECIPES["alone"], tmp_path)


@pytest.mark.parametrize(("name", "size"), EVERYWHERE)
def test_with_accelerate(name, size, rides):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=SAMPLES // size)
    loop = make_loop(accelerator, RECIPES[name], size)
    test_accelerate.train(loop)
    assert set(rides) == {True}
    assert_close(loop.finish(), in_finetune_loop(RECIPES[name]), 1e-8)


def test_accelerates_precision_must_be_that_of_the_predictions():
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ValueError, match=r"build the run with Run\(autocast=torch.bfloat16\)"):
        make_loop(accelerator, RECIPES["alone"], 4)


def make_loop(accelerator, recipe, size):
    options = {"lr": LR, "collate": pad_collate, "progress": False, "seed": SEED, "cache": False}
    tokenizer = make_chat_tokenizer()
    torch.manual_seed(SEED)
    run = Run(
        recipe, make_model(), make_rows(), tokenizer=tokenizer, visits=EPOCHS * SAMPLES, **options
    )
    return AccelerateLoop(accelerator, run, epochs=EPOCHS, batch_size=size)


def in_lightning(recipe, folder, size, accumulate, rows):
    lightning = pytest.importorskip("lightning", reason="the lightning extra is not installed")
    from hosts import test_lightning

    module = test_lightning.Mine(
        recipe, make_model(), rows, size, task=None, seed=SEED, tokenizer=make_chat_tokenizer()
    )
    assert isinstance(module, lightning.LightningModule)
    torch.manual_seed(SEED)
    options = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulate}
    test_lightning.make_trainer(folder, **options).fit(module)
    return module.holdfast.run.model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "size"), EVERYWHERE)
def test_in_lightning(name, size, tmp_path, rides):
    ours = in_lightning(RECIPES[name], tmp_path, size, SAMPLES // size, make_rows())
    assert set(rides) == {True}
    assert_close(ours, in_finetune_loop(RECIPES[name]), 1e-6)  # the loss is in float32


@pytest.mark.filterwarnings("ignore")
def test_in_lightning_an_epoch_may_end_within_an_update(tmp_path):
    rows, recipe = make_rows(18), RECIPES["alone"]
    ours = in_lightning(recipe, tmp_path, 4, 2, rows)
    raw = in_finetune_loop(recipe, rows, 4, settings=LoopSettings(accumulate=2))
    assert_close(ours, raw, 1e-6)


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    sampled(
        [*((kind, "alone", 3) for kind in ("completions", "texts")), ("completions", "lora", 12),
         ("completions", "flow+wise-ft", 3), ("texts", "one text", 12)],
        [("completions", "alone", 3)],
    ),
)  # fmt: skip
def test_in_trl(kind, name, size, tmp_path, rides):
    pytest.importorskip("trl", reason="the trl extra is not installed")
    from hosts import test_trl

    rows = test_trl.QUESTIONS
    if kind == "texts":
        rows = [{"text": row["prompt"] + row["completion"]} for row in rows]
    options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 12 // size}
    trainer = test_trl.make_trainer(RECIPES[name], tmp_path, rows, options=options)
    assert trainer.run.tokenizer is test_trl.TOKENIZER
    rows = test_trl.tokenized(trainer)
    trainer.train()
    assert set(rides) == {True}
    theirs = in_finetune_loop(
        RECIPES[name], rows, 12, model=test_trl.make_model(), tokenizer=test_trl.TOKENIZER
    )
    assert_close(trainer.model, theirs, 1e-5)  # of a step of 1e-2: TRL's loss is in float32


def test_in_trl_with_packing(tmp_path, rides):
    """An update of three packs replays as many texts as one of their twelve samples."""
    options = {"packing": True, "max_length": 64, "per_device_train_batch_size": 3}
    pytest.importorskip("trl", reason="the trl extra is not installed")
    from hosts import test_trl

    plain = test_trl.tokenized(test_trl.make_trainer(Recipe(), tmp_path))
    trainer = test_trl.make_trainer(Recipe(recall=replay(share=0.25)), tmp_path, options=options)
    assert len(trainer.train_dataset) == 3
    trainer.train()
    assert set(rides) == {False}  # samples of a pack have position ids
    theirs = in_finetune_loop(
        Recipe(recall=replay(share=0.25)), plain, 12, model=test_trl.make_model(),
        tokenizer=test_trl.TOKENIZER,
    )  # fmt: skip
    # At θ* the gradients of the divergence are rounding errors, which Adam amplifies.
    assert_close(trainer.model, theirs, 1e-5)


class TestLearningRate:
    """The preset holdfast has a learning rate of its own, if the user sets none."""

    def trainer(self, folder, recipe="holdfast", **options):
        args = transformers.TrainingArguments(
            str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **options
        )
        return HoldfastTrainer(
            model=make_model(), recipe=recipe, args=args, data_collator=pad_collate,
            train_dataset=datasets.Dataset.from_list(make_rows()),
        )  # fmt: skip

    def test_of_the_preset(self, tmp_path, caplog):
        trainer = self.trainer(tmp_path)
        own = 1.5e-4  # 1e-3 · √(600 / 3000) / 3
        assert trainer.args.learning_rate == trainer.run.lr == own
        assert "learning_rate" in caplog.text
        assert f"{own:g}" in caplog.text
        trainer.create_optimizer()
        assert trainer.optimizer.param_groups[0]["lr"] == own

    def test_of_the_user(self, tmp_path, caplog):
        trainer = self.trainer(tmp_path, learning_rate=1e-4)
        assert trainer.args.learning_rate == trainer.run.lr == 1e-4
        assert "learning_rate" not in caplog.text

    def test_of_the_trainer_for_other_recipes(self, tmp_path):
        assert self.trainer(tmp_path, "self-replay").run.lr == 5e-5


FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
#: The recipe, micro-batches per rank and update.
ON_RANKS = {
    "ddp": [("alone", 1), ("one text", 4), ("budget", 1)],
    "fsdp2": [("one text", 1), ("alone", 4), ("flow+wise-ft", 1), ("budget", 1)],
}


def with_accelerate_on_ranks(kind, out):
    ride._PADDING = 9.0
    states = {}
    for name, accumulate in ON_RANKS[kind]:
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        policy = {
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
        }
        accelerator = test_accelerate.ranks_accelerator(kind, accumulate, **policy)
        loop = make_loop(accelerator, RECIPES[name], SAMPLES // 2 // accumulate)
        assert (kind == "fsdp2") == any(hasattr(p, "full_tensor") for p in loop.model.parameters())
        test_accelerate.train(loop)
        states[name] = whole_state(loop.finish())
    if torch.distributed.get_rank() == 0:
        torch.save(states, out)


def in_the_trainer_on_ranks(kind, folder, out):
    ride._PADDING = 9.0
    states = {}
    for name, accumulate in ON_RANKS[kind]:
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        options = {"ddp_find_unused_parameters": False} if kind == "ddp" else FSDP2
        trainer = make_trainer(
            RECIPES[name], folder, SAMPLES // 2 // accumulate, kind == "fsdp2",
            gradient_accumulation_steps=accumulate, **options,
        )  # fmt: skip
        trainer.train()
        parameters = list(trainer.model.parameters())
        assert (kind == "fsdp2") == any(hasattr(p, "full_tensor") for p in parameters)
        states[name] = whole_state(trainer.model)
    if torch.distributed.get_rank() == 0:
        torch.save(states, out)


@pytest.mark.parametrize("kind", sampled(ON_RANKS, ["fsdp2"]))
def test_two_ranks_with_accelerate(kind, tmp_path):
    """One rank draws the texts, which the other one reads: it learns later what the head does."""
    out = tmp_path / "out.pt"
    run_on_ranks(2, with_accelerate_on_ranks, kind, out, folder=tmp_path)
    for name, state in torch.load(out, weights_only=True).items():
        assert furthest(state, whole_state(in_finetune_loop(RECIPES[name]))) <= 1e-8, name


@pytest.mark.soak
@pytest.mark.parametrize("kind", ON_RANKS)
def test_two_ranks_in_the_trainer(kind, tmp_path):
    out = tmp_path / "out.pt"
    run_on_ranks(2, in_the_trainer_on_ranks, kind, tmp_path / "two", out, folder=tmp_path)
    for name, state in torch.load(out, weights_only=True).items():
        assert furthest(state, whole_state(in_finetune_loop(RECIPES[name]))) <= 1e-6, name
