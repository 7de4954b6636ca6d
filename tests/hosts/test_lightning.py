"""Recipes in Lightning: the real Trainer, on small networks."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="the lightning extra is not installed")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from holdfast import (
    L2SP,
    FinchUpdate,
    Flow,
    LoopSettings,
    RecAdamUpdate,
    Recipe,
    Rehearsal,
    WiseFT,
    finetune_loop,
)
from holdfast.hosts.lightning import RecipeCallback, ResumableLoader
from holdfast.optim import slanted_triangular

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    # Lightning's own use of what torch and Python no longer recommend
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def make_model(dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def make_data(n=12, dtype=torch.float64):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


class Mine(LightningModule):
    def __init__(self, recipe, model=None, data=None, batch_size=12, schedule=None, **options):
        super().__init__()
        settings = {"lr": 0.01, "task": "classification", "seed": 3, "progress": False}
        self.holdfast = RecipeCallback(
            recipe,
            make_model() if model is None else model,
            make_data() if data is None else data,
            **(settings | options),
        )
        self.model = self.holdfast.model
        self.batch_size, self.schedule = batch_size, schedule

    def configure_callbacks(self):
        return [self.holdfast]

    def train_dataloader(self):
        return self.holdfast.train_dataloader(self.batch_size)

    def training_step(self, batch, batch_idx):
        return self.holdfast.loss(batch)

    def configure_optimizers(self):
        return self.holdfast.configure_optimizers(self.schedule)


class Plain(LightningModule):
    """The same without holdfast."""

    def __init__(self, model, data, batch_size):
        super().__init__()
        self.model, self.data, self.batch_size = model, data, batch_size

    def train_dataloader(self):
        collate = torch.utils.data.default_collate
        return ResumableLoader(self.data, self.batch_size, collate, seed=3, shuffle=True)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        # One group, as without weight decay; the norm to clip is summed up in its order.
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0)


def make_trainer(folder, **options):
    settings = {
        "default_root_dir": folder, "max_epochs": 5, "accelerator": "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**(settings | options))


def assert_same_bits(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert [n for n in theirs if not torch.equal(ours[n], theirs[n])] == []


def assert_close(ours, theirs, tolerance=1e-6):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p - q).abs().max() <= tolerance, name


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_neutral_recipe_is_the_plain_module_to_the_bit(tmp_path, accumulate, clip):
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    data = make_data(dtype=torch.float32)
    ours = Mine(Recipe(), make_model(torch.float32, 0.1), data, batch_size=3)
    torch.manual_seed(5)
    make_trainer(tmp_path, **options).fit(ours)
    theirs = Plain(make_model(torch.float32, 0.1), data, batch_size=3)
    torch.manual_seed(5)
    make_trainer(tmp_path, **options).fit(theirs)
    assert not torch.equal(ours.model[0].weight, make_model(torch.float32)[0].weight)
    assert_same_bits(ours.model, theirs.model)


@pytest.mark.parametrize(
    "names",
    [
        "recadam", "flow", "l2-sp", "mofo", "lora", "wise-ft", "ewc", "sfa", "hft", "distill",
        "gradual-unfreezing", "linear-probe", "sgd", "random-init+recadam", "spd", "finch",
        "lora+recadam+flow+l2-sp+wise-ft",
    ],
)  # fmt: skip
def test_a_recipe_in_lightning_is_the_raw_loop(tmp_path, names):
    if "lora" in names:
        pytest.importorskip("peft", reason="the peft extra is not installed")
    recipe = Recipe.preset(names)
    module = Mine(recipe)
    make_trainer(tmp_path).fit(module)
    raw = finetune_loop(
        make_model(), recipe, make_data(), lr=0.01, epochs=5, batch_size=12, seed=3,
        task="classification", progress=False,
    )  # fmt: skip
    assert_close(module.model, raw)


@pytest.mark.parametrize("update", [RecAdamUpdate(t0=0.1), FinchUpdate()], ids=["recadam", "finch"])
@pytest.mark.parametrize(("size", "accumulate"), [(4, 3), (5, 3), (6, 4), (1, 12)])
def test_accumulation_does_not_matter(tmp_path, size, accumulate, update):
    recipe = Recipe(objective=Flow(), update=update, penalties=[L2SP()])
    modules = [Mine(recipe), Mine(recipe, batch_size=size)]
    make_trainer(tmp_path).fit(modules[0])
    make_trainer(tmp_path, accumulate_grad_batches=accumulate).fit(modules[1])
    assert_close(modules[1].model, modules[0].model, 1e-9)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3)).double()

    def forward(self, input_ids):
        return self.layers(input_ids)


def test_accumulation_is_exact_where_samples_differ_in_tokens(tmp_path):
    ids = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(0))
    labels = (ids % 3).masked_fill(torch.arange(5) > torch.arange(6)[:, None] - 1, -100)
    labels[0] = -100  # a micro-batch without a target
    data = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    options = {"task": "token_classification", "collate": torch.utils.data.default_collate}
    modules = [Mine(Recipe(), Tagger(), data, size, **options) for size in (6, 2, 1)]
    for module, accumulate in zip(modules, (1, 3, 6), strict=True):
        make_trainer(tmp_path, accumulate_grad_batches=accumulate).fit(module)
    assert_close(modules[1].model, modules[0].model, 1e-9)
    assert_close(modules[2].model, modules[0].model, 1e-9)


def test_a_task_of_the_users_own(tmp_path):
    def task(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    modules = [Mine(Recipe()), Mine(Recipe(), task=task, batch_size=5)]
    make_trainer(tmp_path).fit(modules[0])
    make_trainer(tmp_path, accumulate_grad_batches=3).fit(modules[1])
    assert_close(modules[1].model, modules[0].model, 1e-9)


def test_rehearsal(tmp_path):
    module = Mine(Recipe(recall=Rehearsal(ratio=0.5)), old_data=make_data(8))
    make_trainer(tmp_path, max_epochs=1).fit(module)
    assert len(module.holdfast.run.criterion.data) == 18


def test_the_log_contains_the_values_of_the_methods(tmp_path):
    module = Mine(Recipe(update=RecAdamUpdate(), penalties=[L2SP()]), batch_size=6)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = make_trainer(tmp_path, logger=logger, log_every_n_steps=2)
    trainer.fit(module)
    names = {"lam", "pull", "distance", "penalty/L2SP"}
    assert names <= trainer.logged_metrics.keys()
    lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    assert names <= set(lines[0].split(","))
    assert len(lines) == 6


def test_the_schedule(tmp_path):
    module = Mine(Recipe(), schedule=slanted_triangular)
    make_trainer(tmp_path).fit(module)
    raw = finetune_loop(
        make_model(), Recipe(), make_data(), lr=0.01, epochs=5, batch_size=12, seed=3,
        task="classification", progress=False, settings=LoopSettings(schedule=slanted_triangular),
    )  # fmt: skip
    assert_close(module.model, raw)


class Stopped(Exception):
    pass


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise Stopped


def save_every(folder, n):
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=n, save_top_k=-1)


@pytest.mark.parametrize(
    ("names", "stop", "resumed"),
    [
        ("standard", 7, 6), ("recadam", 7, 6), ("flow+l2-sp", 7, 6), ("mofo", 5, 4),
        ("lora+wise-ft", 7, 6), ("mixout", 7, 6), ("sfa", 7, 6), ("ewc", 9, 8),
        ("gradual-unfreezing", 7, 6), ("osft", 7, 6), ("vera+l2-sp", 7, 6),
        ("recadam+flow", 5, 3), ("mixout", 4, 3),  # at the end of an epoch
    ],
)  # fmt: skip
def test_resume_is_exact(tmp_path, names, stop, resumed):
    if "lora" in names or "vera" in names:
        pytest.importorskip("peft", reason="the peft extra is not installed")

    def fit(folder, *callbacks, ckpt_path=None):
        data = make_data(dtype=torch.float32)
        module = Mine(
            Recipe.preset(names), make_model(torch.float32, 0.2), data, batch_size=2,
            schedule=slanted_triangular,
        )  # fmt: skip
        torch.manual_seed(5 if ckpt_path is None else 6)
        make_trainer(
            folder, enable_checkpointing=True, accumulate_grad_batches=2,
            callbacks=[save_every(folder, resumed if resumed == 3 else 2), *callbacks],
        ).fit(module, ckpt_path=ckpt_path)  # fmt: skip
        return module

    whole = fit(tmp_path / "whole")
    with pytest.raises(Stopped):
        fit(tmp_path / "cut", StopAt(stop))
    again = fit(tmp_path / "cut", ckpt_path=str(tmp_path / "cut" / f"step={resumed}.ckpt"))
    assert again.trainer.global_step == 15
    assert_same_bits(again.model, whole.model)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resume_of_another_run_is_refused(tmp_path):
    def fit(module, ckpt_path=None):
        options = {"enable_checkpointing": True, "callbacks": [save_every(tmp_path, 2)]}
        make_trainer(tmp_path, **options).fit(module, ckpt_path=ckpt_path)

    recipe, path = Recipe(update=RecAdamUpdate()), str(tmp_path / "step=2.ckpt")
    fit(Mine(recipe))
    with pytest.raises(ValueError, match=r"step=2\.ckpt belongs to a run with another recipe"):
        fit(Mine(Recipe(merging=WiseFT())), path)
    other = make_model()
    other[0].weight.data += 1
    with pytest.raises(ValueError, match="other pretrained weights"):
        fit(Mine(recipe, other), path)
    fit(Plain(make_model(), make_data(), 12))
    with pytest.raises(ValueError, match="without a recipe"):
        fit(Mine(Recipe()), str(tmp_path / "step=2-v1.ckpt"))


def test_merging_and_what_a_checkpoint_holds(tmp_path):
    module = Mine(Recipe(merging=WiseFT(0.5)))
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[checkpoint]).fit(module)
    merged, base = copy.deepcopy(module.model), make_model()
    module.load_state_dict(torch.load(checkpoint.last_model_path)["state_dict"])
    for p, q, b in zip(
        merged.parameters(), module.model.parameters(), base.parameters(), strict=True
    ):
        assert torch.allclose(p, (q + b) / 2)
    module.holdfast.run.finish()  # as for any other checkpoint
    assert_same_bits(module.model, merged)
    with pytest.raises(RuntimeError, match="finished and its model merged"):
        make_trainer(tmp_path).fit(module)


def test_the_loader_gives_every_sample_once_an_epoch():
    data = list(range(10))
    loaders = [
        ResumableLoader(data, 2, sorted, seed=1, shuffle=True, rank=rank, ranks=3)
        for rank in range(3)
    ]
    epochs = [[[i for batch in loader for i in batch] for loader in loaders] for _ in range(2)]
    assert [len(part) for part in epochs[0]] == [len(loaders[0]) * 2] * 3
    assert all({i for part in epoch for i in part} == set(data) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_an_interrupted_epoch_is_not_repeated():
    loader = ResumableLoader(list(range(6)), 1, list, seed=1, shuffle=False)
    next(iter(loader))
    assert [next(iter(loader)), loader.epoch] == [[0], 1]


def test_a_loaders_batch_size(tmp_path):
    module = Mine(Recipe(objective=Flow()), data=DataLoader(make_data(), 5), batch_size=None)
    make_trainer(tmp_path).fit(module)
    assert module.trainer.global_step == 15


def test_wrong_use_raises_helpful_errors(tmp_path):
    class Forgets(Mine):
        def configure_callbacks(self):
            return []

    with pytest.raises(RuntimeError, match="configure_callbacks"):
        make_trainer(tmp_path).fit(Forgets(Recipe()))

    class Manual(Mine):
        automatic_optimization = False

    with pytest.raises(ValueError, match="automatic_optimization=True"):
        make_trainer(tmp_path).fit(Manual(Recipe()))

    module = Mine(Recipe())
    module.model = make_model()
    with pytest.raises(ValueError, match=r"self\.model = callback\.model"):
        make_trainer(tmp_path).fit(module)
    with pytest.raises(ValueError, match="length of the run"):
        make_trainer(tmp_path, max_epochs=-1).fit(Mine(Recipe()))

    class Validates(Mine):
        def val_dataloader(self):
            return self.train_dataloader()

        def validation_step(self, batch, batch_idx):
            return self.holdfast.loss(batch)

    with pytest.raises(ValueError, match="for training only"):
        make_trainer(tmp_path).fit(Validates(Recipe()))


def test_import_without_lightning_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "holdfast.hosts.lightning")
    with pytest.raises(ImportError, match=r"holdfast\[lightning\]"):
        import holdfast.hosts.lightning  # noqa: F401
