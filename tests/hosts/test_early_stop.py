"""Early stopping in the loop: a model that overfits, its best weights, and a resumed run."""

from pathlib import Path

import pytest
import torch

from holdfast import LoopSettings, Recipe, Watch, finetune_loop
from holdfast.hosts._checkpoints import save
from holdfast.methods.sfa import SFA
from ranks import run_on_ranks

EVERY = 5


def rows(seed, noise):
    """Points of two classes; the share ``noise`` of the labels is wrong."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(48, 8, generator=generator)
    wrong = torch.rand(48, generator=generator) < noise
    labels = (points[:, 0] > 0) ^ wrong
    return points, labels.long()


TRAIN, DEV = torch.utils.data.TensorDataset(*rows(0, 0.3)), [rows(1, 0.0)]  # one batch


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))


class Seen(Watch):
    """A watch that keeps the weights that it measured."""

    def __call__(self, update, model):
        found = super().__call__(update, model)
        if found:
            self.weights = {**getattr(self, "weights", {}), update: state_of(model)}
        return found


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train(recipe="standard", patience=3, log=None, watch=Seen, **options):
    model, history = make_model(), []
    looking = watch(model, target={"dev": DEV}, every=EVERY, context_free=0, kl_samples=0)
    settings = LoopSettings(patience=patience, save_every=EVERY, max_updates=200)
    model = finetune_loop(
        model, recipe, TRAIN, lr=0.02, batch_size=16, task="classification", new=(),
        progress=False, watch=looking, log=log or history.append, settings=settings, **options,
    )  # fmt: skip
    return model, history, looking


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_stops_and_keeps_the_best_weights():
    model, history, watch = train()
    measured = {row["update"]: row["forgetting/dev/loss"] for row in history if row["update"]}
    best = min(measured, key=measured.get)
    assert history[-1]["update"] == best + 3 * EVERY < 200
    assert history[-1]["best_update"] == best
    assert_equal(state_of(model), watch.weights[best])
    whole, everything, _ = train(patience=None)
    assert everything[-1]["update"] == 200
    assert "best_update" not in everything[-1]
    assert everything[-1]["forgetting/dev/loss"] > measured[best]  # it overfits
    assert not torch.equal(whole[0].weight, model[0].weight)


def test_merging_starts_from_the_best_weights():
    plain, _, _ = train()
    merged, _, _ = train("wise-ft")
    base, alpha = make_model(), Recipe.preset("wise-ft").merging.alpha
    expected = (1 - alpha) * base[0].weight + alpha * plain[0].weight
    torch.testing.assert_close(merged[0].weight, expected)


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("last", [EVERY, 2 * EVERY, 4 * EVERY])
def test_a_resumed_run_equals_an_uninterrupted_one(last, tmp_path):
    whole, history, _ = train("recadam")
    assert history[-1]["update"] > last
    rows = []

    def stop_after(row):
        rows.append(row)
        if row["update"] > last:
            raise _KilledError

    with pytest.raises(_KilledError):
        train("recadam", log=stop_after, checkpoint=tmp_path / "run.pt")
    resumed, again, _ = train("recadam", checkpoint=tmp_path / "run.pt")
    assert again[0]["update"] > last - EVERY
    assert again[-1] == history[-1]
    assert_equal(state_of(resumed), state_of(whole))


def test_a_run_that_was_killed_after_its_last_update(tmp_path):
    whole, history, _ = train(checkpoint=tmp_path / "run.pt")
    resumed, again, _ = train(checkpoint=tmp_path / "run.pt")
    assert again == []  # it had stopped
    assert_equal(state_of(resumed), state_of(whole))
    with pytest.raises(ValueError, match="patience=3 there and 4 here"):
        train(patience=4, checkpoint=tmp_path / "run.pt")


def test_a_run_that_only_gets_worse_is_said(caplog):
    class Rising(Watch):
        def __call__(self, update, model):
            found = super().__call__(update, model)
            self.target_loss = float(update)
            return found

    _, history, _ = train(watch=Rising)
    assert history[-1]["best_update"] == EVERY  # not the pretrained weights
    assert "the loss on the target never fell below 0, that of the pretrained model" in caplog.text
    caplog.clear()
    train()
    assert not caplog.text


def test_a_loss_that_is_not_a_number_is_no_improvement():
    class Broken(Watch):
        def __call__(self, update, model):
            found = super().__call__(update, model)
            if update > EVERY:
                self.target_loss = float("nan")
            return found

    _, history, _ = train(patience=2, watch=Broken)
    assert (history[-1]["update"], history[-1]["best_update"]) == (3 * EVERY, EVERY)


def test_wrong_use():
    with pytest.raises(ValueError, match=r"pass watch=Watch\(model, target=rows\)"):
        finetune_loop(
            make_model(), "standard", TRAIN, lr=0.1, settings=LoopSettings(patience=1),
            task="classification", watch=Watch(make_model()), log=print, progress=False,
        )  # fmt: skip
    with pytest.raises(ValueError, match="SFA changes the weights after the last update"):
        train(Recipe(penalties=SFA()))
    with pytest.raises(ValueError, match="patience must be at least 1"):
        LoopSettings(patience=0)


def _sharded(folder):
    folder = Path(folder)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from holdfast import Run
    from holdfast._torch.layout import whole
    from holdfast.hosts._early_stop import EarlyStop

    model = make_model()
    expected = state_of(model)
    run = Run("standard", model, TRAIN, lr=0.1, task="classification", new=(), progress=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    run.make_optimizer(10)

    class Look:
        target_loss = 1.0

    early = EarlyStop(1, run, Look())
    assert early.measured(5) == {"best_update": 5}
    save(folder / "run.pt", run, 5, {}, early)
    for p in model.parameters():
        torch.nn.init.zeros_(p)
    assert not early.is_over
    early.restore()
    assert_equal({n: whole(t.detach()) for n, t in model.named_parameters()}, expected)
    saved = torch.load(folder / "run.pt", weights_only=True)["more"]
    assert_equal(saved["weights"], expected)  # whole, whatever the sharding
    other = EarlyStop(1, run, Look())
    other.load(saved)
    assert_equal(other.weights, early.weights)
    assert (other.best, other.update, other.waited) == (1.0, 5, 0)
    Look.target_loss = 2.0
    assert other.measured(10) == {"best_update": 5}
    assert other.is_over


def test_shards_of_two_ranks(tmp_path):  # slow alone: it starts the server of all ranks
    run_on_ranks(2, _sharded, tmp_path, folder=tmp_path)
