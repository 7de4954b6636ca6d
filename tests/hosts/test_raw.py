"""finetune_loop equals a loop written by hand, and its errors are helpful."""

import copy
import inspect
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from holdfast import (
    L2SP,
    AdamWUpdate,
    Distill,
    Flow,
    LinearProbe,
    LoopSettings,
    LoRA,
    Mixout,
    RecAdam,
    RecAdamUpdate,
    Recipe,
    Reference,
    WiseFT,
    finetune_loop,
)
from holdfast._torch.finite import DivergedError
from holdfast.anneal import Sigmoid
from holdfast.optim import slanted_triangular
from holdfast.run import Run
from holdfast.stages import Recall, RecallTerm
from loops import tune as tune_anything
from ranks import run_on_ranks


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.fixture
def data():
    x = torch.randn(20, 4, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def tune(model, recipe, data, **options):
    return tune_anything(model, recipe, data, **({"lr": 0.01, "task": "classification"} | options))


def orders(n, epochs, seed=0):
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        yield torch.randperm(n, generator=generator)


def by_hand(model, data, make_optimizer, batch_size=8, epochs=2):
    optimizer = make_optimizer(model)
    x, y = data.tensors
    for order in orders(len(x), epochs):
        for rows in order.split(batch_size):
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def assert_close(a, b, tolerance=1e-12):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert (p - q).abs().max() <= tolerance


def test_standard_is_a_loop_with_adamw(data):
    ours = tune(make_model(), Recipe(), data, batch_size=8, epochs=2)
    hand = by_hand(
        make_model(), data, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0)
    )
    assert_close(ours, hand)


def test_recadam_is_a_loop_with_recadam(data):
    recipe = Recipe(update=RecAdamUpdate(pull=0.3, t0=0.5, width=0.1))
    ours = tune(make_model(), recipe, data, batch_size=8, epochs=2)
    hand = by_hand(
        make_model(),
        data,
        lambda m: RecAdam(
            m.parameters(), lr=0.01, gamma=30.0, anneal=Sigmoid.over(6, t0=0.5, width=0.1)
        ),
    )
    assert_close(ours, hand)


def test_flow_is_a_loop_with_weights(data):
    model = make_model()
    x, y = data.tensors
    with torch.no_grad():
        f = F.cross_entropy(model(x).float(), y, reduction="none").double()
    w = Flow().weigh(f)
    ours = tune(model, Recipe(objective=Flow()), data, batch_size=8, epochs=1)
    hand = make_model()
    optimizer = torch.optim.AdamW(hand.parameters(), lr=0.01, weight_decay=0)
    for rows in next(orders(20, 1)).split(8):
        losses = F.cross_entropy(hand(x[rows]), y[rows], reduction="none")
        ((w[rows] * losses).sum() / len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(ours, hand, 1e-6)  # scores are kept in float32


def test_finetune_loop_is_a_run_in_train_loop(data):
    settings = LoopSettings(accumulate=2, schedule=slanted_triangular, clip_norm=0.5)
    options = {"lr": 0.01, "epochs": 2, "batch_size": 4, "task": "classification", "seed": 3}
    loader = DataLoader(data, batch_size=4)
    recipe = "flow+recadam+wise-ft"
    one = finetune_loop(
        make_model(), recipe, loader, **options, settings=settings, progress=False
    )  # fmt: skip
    flat = {"accumulate": 2, "schedule": slanted_triangular, "clip_norm": 0.5}
    assert_close(one, tune(make_model(), Recipe.preset(recipe), data, **options, **flat), 0.0)
    assert len(inspect.signature(finetune_loop).parameters) <= 15


def test_merging_and_the_reference(data):
    pretrained = make_model()
    full = tune(copy.deepcopy(pretrained), Recipe(), data)
    half = tune(copy.deepcopy(pretrained), Recipe(merging=WiseFT(0.5)), data)
    for a, b, base in zip(
        half.parameters(), full.parameters(), pretrained.parameters(), strict=True
    ):
        assert torch.allclose(a, (b + base) / 2)


def test_a_reference_of_the_users(data, tmp_path):
    model = make_model()
    Reference.of(model).save(tmp_path / "model.safetensors")
    recipe = Recipe(penalties=L2SP(50.0))
    mapped = Reference.open(tmp_path / "model.safetensors")
    assert_close(
        tune(make_model(), recipe, data, reference=mapped), tune(model, recipe, data), 1e-15
    )


def test_schedule_log_and_clip(data):
    seen = []
    tune(
        make_model(), Recipe(update=RecAdamUpdate(lr=0.02)), data, lr=None, log=seen.append,
        schedule=slanted_triangular, max_updates=10, batch_size=5, log_every=1, clip_norm=1e-9,
    )  # fmt: skip
    assert [row["update"] for row in seen] == list(range(1, 11))
    assert [row["lr"] for row in seen] == [0.02 * slanted_triangular(t, 10) for t in range(10)]
    assert {"loss", "lam", "pull"} <= seen[0].keys()


def test_penalties_are_in_the_log(data):
    seen = []
    tune(make_model(), Recipe(penalties=L2SP(1.0)), data, log=seen.append, log_every=1)
    assert seen[-1]["penalty/L2SP"] > 0


def test_a_data_loader_gives_its_batch_size_and_collate(data):
    loader = DataLoader(data, batch_size=8, shuffle=True)
    assert_close(
        tune(make_model(), Recipe(), loader), tune(make_model(), Recipe(), data, batch_size=8)
    )


def test_a_task_of_the_users_own(data):
    def task(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")

    assert_close(
        tune(make_model(), Recipe(), data, task=task), tune(make_model(), Recipe(), data), 1e-12
    )


def test_the_generator_and_mode_of_the_model_are_reproducible(data):
    model = make_model().eval()
    assert tune(model, Recipe(), data).training is False
    first = tune(make_model(), Recipe(), data, seed=3)
    torch.randn(5)
    assert_close(tune(make_model(), Recipe(), data, seed=3), first, 0.0)


def test_learning_rate_in_one_place(data):
    with pytest.raises(ValueError, match="in one place"):
        tune(make_model(), Recipe(update=AdamWUpdate(lr=0.5)), data)
    with pytest.raises(ValueError, match="pass lr="):
        tune(make_model(), Recipe(), data, lr=None)
    tune(make_model(), Recipe(update=AdamWUpdate(lr=0.01)), data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"task": "clasification"}, "task must be"),
        ({"new": "hed"}, "new='hed' is not a part"),
        ({"max_updates": 0}, "max_updates"),
        ({"log_every": 0}, "log_every"),
        ({"autocast": torch.float16}, "GradScaler"),
        ({"task": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])}, "reduction"),
    ],
)
def test_bad_settings(data, options, message):
    with pytest.raises(ValueError, match=message):
        tune(make_model(), Recipe(merging=WiseFT()), data, **options)


def test_wrong_types_raise_helpful_errors(data):
    with pytest.raises(TypeError, match="a preset name such as"):
        tune(make_model(), ["recadam"], data)
    with pytest.raises(TypeError, match=r"Reference\.open"):
        tune(make_model(), Recipe(), data, reference="path")
    with pytest.raises(TypeError, match="lr must be a number"):
        tune(make_model(), Recipe(), data, lr="2e-5")


def test_nothing_to_pull(data):
    recipe = Recipe(trainable=LinearProbe(head="2"), update=RecAdamUpdate())
    with pytest.raises(ValueError, match="RecAdamUpdate would have no effect"):
        tune(make_model(), recipe, data, new="2")


def test_bad_data():
    with pytest.raises(ValueError, match="empty"):
        tune(make_model(), Recipe(), [])
    with pytest.raises(TypeError, match="default_collate"):
        tune(make_model(), Recipe(), [(torch.zeros(4), 1)] * 3)
    with pytest.raises(ValueError, match="no tensor of labels"):
        tune(make_model(), Recipe(), TensorDataset(torch.zeros(3, 4)))
    batches = [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))]
    with pytest.raises(TypeError, match="dataset with a length"):
        tune(make_model(), Recipe(), iter(batches))
    with pytest.raises(ValueError, match="empty"):
        tune(make_model(), Recipe(), TensorDataset(torch.zeros(0, 4), torch.zeros(0)))


def test_checkpoints_of_other_runs_are_refused(data, tmp_path):
    path = tmp_path / "a" / "run.pt"
    tune(make_model(), Recipe(), data, checkpoint=path, epochs=1)
    with pytest.raises(
        ValueError, match=r"another recipe \(there and here: merging is keep and wise-ft"
    ):
        tune(make_model(), Recipe(merging=WiseFT()), data, checkpoint=path)
    with pytest.raises(ValueError, match="updates=2 there and 4 here"):
        tune(make_model(), Recipe(), data, checkpoint=path, epochs=2)
    other = nn.Sequential(nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match="another model"):
        tune(other, Recipe(), data, checkpoint=path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="no checkpoint of a run"):
        tune(make_model(), Recipe(), data, checkpoint=path)
    assert [p.name for p in path.parent.iterdir()] == ["run.pt"]


@pytest.mark.parametrize(
    "changed",
    [{"lr": 0.02}, {"batch_size": 5}, {"seed": 1}, {"schedule": slanted_triangular}],
    ids=lambda changed: next(iter(changed)),
)
def test_resume_with_other_settings_is_refused(data, tmp_path, changed):
    options = {"checkpoint": tmp_path / "run.pt", "max_updates": 3}
    tune(make_model(), Recipe(), data, **options)
    with pytest.raises(ValueError, match="other settings"):
        tune(make_model(), Recipe(), data, **(options | changed))
    backwards = TensorDataset(*(t.flip(0) for t in data.tensors))
    with pytest.raises(ValueError, match="other data"):
        tune(make_model(), Recipe(), backwards, **options)


@pytest.mark.parametrize("recipe", [Recipe(objective=Flow()), Recipe(recall=Distill())])
def test_a_tuned_model_is_not_the_base(data, tmp_path, recipe):
    """This is noticed even if no copy of the pretrained weights is kept."""
    tuned = tune(make_model(), recipe, data, checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match="other pretrained weights"):
        tune(tuned, recipe, data, checkpoint=tmp_path / "run.pt")


def test_an_interrupted_run_leaves_a_plain_model(data):
    def stop(_):
        raise KeyboardInterrupt

    for recipe in (Recipe(trainable=Mixout()), Recipe(trainable=LinearProbe(head="2"))):
        model = make_model()
        with pytest.raises(KeyboardInterrupt):
            finetune_loop(
                model, recipe, data, lr=1e-2, task="classification", log=stop, progress=False,
                settings=LoopSettings(log_every=1),
            )  # fmt: skip
        assert [type(m) for m in model] == [nn.Linear, nn.Tanh, nn.Linear]
        assert not model._forward_pre_hooks


def test_existing_gradients_are_cleared(data):
    model = make_model()
    model(data.tensors[0]).sum().backward()
    assert_close(tune(model, Recipe(), data), tune(make_model(), Recipe(), data), 0.0)


def test_a_live_reference_does_not_move_with_the_model(data):
    model = make_model()
    live = Reference(model.state_dict())
    tuned = tune(model, Recipe(merging=WiseFT(0.0)), data, reference=live)
    assert_close(tuned, make_model(), 0.0)


def test_lora_keeps_eval_mode(data):
    assert not tune(make_model().eval(), Recipe(trainable=LoRA(r=2)), data).training


def test_resume_from_tuned_weights_is_refused(data, tmp_path):
    """The model must hold the pretrained weights, which are the anchors."""
    path = tmp_path / "run.pt"
    recipe = Recipe(update=RecAdamUpdate())
    tuned = tune(make_model(), recipe, data, checkpoint=path)
    with pytest.raises(ValueError, match="pretrained"):
        tune(tuned, recipe, data, checkpoint=path)


def test_a_fraction_of_an_epoch_is_rounded_up_as_in_transformers(tmp_path):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from holdfast.hosts.job import Training, train
    from scoring.lm import small_llama

    rows = [{"input_ids": [1, 2, n + 3], "labels": [1, 2, n + 3]} for n in range(10)]
    options = {"lr": 0.01, "epochs": 0.5, "batch_size": 2}
    seen = []
    finetune_loop(small_llama(), Recipe(), rows, **options, log=seen.append, progress=False)
    log = train(small_llama(), Recipe(), rows, Training(**options), tmp_path).history
    assert seen[-1]["update"] == log[-1]["update"] == 3


@pytest.mark.parametrize("clip_norm", [-1.0, 0.0, float("nan"), float("inf"), "1"])
def test_a_bound_of_gradients_is_a_positive_number(clip_norm):
    with pytest.raises((TypeError, ValueError), match="clip_norm must be a"):
        LoopSettings(clip_norm=clip_norm)


@pytest.mark.parametrize("log_every", [1, 10, 1000])
def test_a_run_that_diverges_is_an_error(data, log_every, tmp_path):
    settings = LoopSettings(log_every=log_every, max_updates=40)
    rows = []
    options = {"settings": settings, "log": rows.append, "checkpoint": tmp_path / "run.pt"}
    model = make_model()
    with torch.no_grad():
        model[0].bias[0] = float("nan")
    with pytest.raises(DivergedError, match=r"the loss of update \d+ is nan\. Lower the learning"):
        finetune_loop(model, "standard", data, lr=0.01, task="classification", progress=False,
                      **options)  # fmt: skip
    assert not rows
    assert not (tmp_path / "run.pt").exists()


def test_without_a_log_its_values_are_not_computed(data, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "log", None)
    options = {"checkpoint": tmp_path / "run.pt", "save_every": 1, "max_updates": 2}
    tune(make_model(), "l2-sp", data, **options)
    assert (tmp_path / "run.pt").exists()


@dataclass(frozen=True)
class BrokenOnOneRank(Recall):
    """A recall whose part of the loss is NaN on the second rank only."""

    def prepare(self, run):
        class Term(RecallTerm):
            def plan(self, *_):
                """It has data of its own."""

        return Term()

    def log(self, run):
        return {"recall": math.nan if torch.distributed.get_rank() == 1 else 0.1}


def _diverges(folder):
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    recipe = Recipe(recall=BrokenOnOneRank())
    options = {"lr": 0.1, "task": "classification", "progress": False, "batch_size": 8}
    with pytest.raises(DivergedError, match="the loss of update 1 is nan"):
        finetune_loop(nn.Linear(4, 2), recipe, data, **options)


def test_a_recall_that_diverges_on_one_rank_is_an_error_on_all(tmp_path):
    run_on_ranks(2, _diverges, tmp_path, folder=tmp_path)


def test_weights_that_diverge_in_the_last_update_are_an_error():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)  # the loss is finite, its gradient is huge
    data = TensorDataset(torch.full((8, 4), 1e38), torch.arange(8) % 2)
    with pytest.raises(DivergedError, match=r"there is NaN or infinity in weight"):
        tune(model, "sgd", data, lr=1e3, max_updates=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_updates": 10**23}, "max_updates must be at most 100,000,000"),
        ({"epochs": 1e20}, "the number of updates must be at most 100,000,000"),
        ({"accumulate": 10**23}, "accumulate must be at most 2,147,483,647"),
        ({"batch_size": 10**23}, "batch_size must be at most 2,147,483,647"),
        ({"seed": 10**23}, "seed must be at most 2,147,483,647"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_numbers_that_are_too_large(data, options, message):
    settings = {n: options.pop(n) for n in ("max_updates", "accumulate") if n in options}
    with pytest.raises(ValueError, match=message):
        finetune_loop(make_model(), "standard", data, lr=0.1, task="classification", **options,
                      settings=LoopSettings(**settings))  # fmt: skip


@pytest.mark.parametrize("sample", ["some text", {"text": "some text"}])
def test_texts_are_not_tokens(sample):
    with pytest.raises(TypeError, match=r"the samples are texts.*pass samples with input_ids"):
        finetune_loop(nn.Linear(2, 2), Recipe(), [sample] * 4, lr=0.1, progress=False)
