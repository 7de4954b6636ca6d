import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import (
    LPFT,
    Full,
    LinearProbe,
    LoopSettings,
    LoRA,
    Reference,
    WiseFT,
    finetune_loop,
)
from holdfast.methods._batch_norm import reestimate_statistics
from holdfast.recipe import Recipe
from holdfast.run import Run


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3), nn.Dropout(0.9))


def test_means_over_the_batches():
    net, x = make().train(), torch.randn(40, 3)
    net[0].eval()
    weights = copy.deepcopy(net[0].state_dict())
    reestimate_statistics(net, [(part, torch.zeros(len(part))) for part in x.split(10)])
    features = net[0](x).detach()
    assert torch.allclose(net[1].running_mean, features.mean(0), atol=1e-6)
    variances = torch.stack([f.var(0) for f in features.split(10)]).mean(0)
    assert torch.allclose(net[1].running_var, variances, rtol=1e-4)
    assert net[1].num_batches_tracked == 4
    assert all(torch.equal(net[0].state_dict()[n], t) for n, t in weights.items())
    assert net[1].momentum == 0.3
    assert [m.training for m in net] == [False, True, True]
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("kind", ["dataset", "loader", "tensors", "mappings"])
def test_any_data(kind):
    net, x = make(), torch.randn(33, 3)
    dataset = TensorDataset(x, torch.zeros(33))
    given = {
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=8, shuffle=True),
        "tensors": list(x[:32].split(8)),
        "mappings": [{"input": p, "labels": torch.zeros(8)} for p in x[:32].split(8)],
    }[kind]
    reestimate_statistics(net, given)  # the last batch of one sample is passed over
    assert torch.allclose(net[1].running_mean, net[0](x[:32]).mean(0), atol=1e-5)


@pytest.mark.parametrize("data", [[], [(torch.zeros(1, 3), torch.zeros(1))], [{"no": 1}]])
def test_nothing_changes_when_it_fails(data):
    net = make()
    net(torch.randn(8, 3))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises((ValueError, IndexError)):
        reestimate_statistics(net, data)
    assert all(torch.equal(net.state_dict()[n], t) for n, t in before.items())
    assert net[1].momentum == 0.3


def test_a_model_without_statistics_is_left_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    assert reestimate_statistics(net, None) is net


class TestInWiseFT:
    def make(self):
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5))
        reference = Reference.of(net)
        with torch.no_grad():
            net[0].weight.add_(1.0)
        x = torch.randn(64, 1, 5, 5) * 2 + 1
        return net, reference, [(part, torch.zeros(len(part))) for part in x.split(16)], x

    def test_they_are_the_datas(self):
        net, reference, data, x = self.make()
        WiseFT(0.5, statistics="reestimate").merge(net, reference, data=data)
        middle = reference["0.weight"] + 0.5
        assert torch.allclose(net[0].weight, middle, atol=1e-6)
        features = net[0](x).transpose(0, 1).flatten(1).detach()
        assert torch.allclose(net[1].running_mean, features.mean(1), atol=1e-5)
        parts = torch.stack([net[0](p).transpose(0, 1).flatten(1).var(1) for p in x.split(16)])
        assert torch.allclose(net[1].running_var, parts.mean(0), rtol=1e-4)

    def test_the_tuned_end_is_as_tuned(self):
        net, reference, _, _ = self.make()
        end = copy.deepcopy(net).state_dict()
        merged = WiseFT(1.0, statistics="reestimate").merge(net, reference).state_dict()
        assert all(torch.equal(merged[n], t) for n, t in end.items())

    def test_it_needs_data_only_where_there_are_statistics(self):
        net, reference, _, _ = self.make()
        end = copy.deepcopy(net).state_dict()
        with pytest.raises(ValueError, match="pass data="):
            WiseFT(0.5, statistics="reestimate").merge(net, reference)
        assert all(torch.equal(net.state_dict()[n], t) for n, t in end.items())
        plain = nn.Linear(2, 2)
        WiseFT(0.5, statistics="reestimate").merge(plain, Reference.of(plain))

    def test_a_sweep_re_estimates_at_each_point(self):
        net, reference, data, _ = self.make()
        end = copy.deepcopy(net)
        wise = WiseFT(statistics="reestimate")
        means = wise.sweep(
            net, reference, [0.0, 0.5, 1.0], lambda m: m[1].running_mean.clone(), data=data
        )
        assert torch.equal(means[1.0], end[1].running_mean)
        at_half = copy.deepcopy(net)
        WiseFT(0.5, statistics="reestimate").merge(at_half, reference, data=data)
        assert torch.equal(means[0.5], at_half[1].running_mean)
        for n, t in end.state_dict().items():
            assert torch.equal(net.state_dict()[n], t)

    def test_in_a_recipe(self):
        net, _, _, x = self.make()
        recipe = Recipe(merging=WiseFT(0.5, statistics="reestimate"))
        data = torch.utils.data.TensorDataset(x, torch.zeros(64))
        options = {"task": "regression", "progress": False, "cache": False}
        kept = Run(recipe, net, data, lr=1e-3, **options).finish()
        features = kept[0](x).transpose(0, 1).flatten(1)
        assert torch.allclose(kept[1].running_mean, features.mean(1), atol=1e-5)


@pytest.mark.parametrize("trainable", [LinearProbe(head="head"), LoRA(r=2)], ids=["probe", "lora"])
def test_statistics_of_a_frozen_body_stay(trainable):
    torch.manual_seed(0)
    layers = {"norm": nn.BatchNorm1d(4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    model = nn.Sequential(OrderedDict(layers))
    x = torch.randn(20, 4) + 5
    with torch.no_grad():
        model(x)
    mean = model.norm.running_mean.clone()
    tuned = finetune_loop(
        model, Recipe(trainable=trainable, merging=WiseFT(0.5, "reestimate")),
        TensorDataset(x - 5, torch.arange(20) % 2), lr=0.1, task="classification", progress=False,
    )  # fmt: skip
    norm = next(m for m in tuned.modules() if isinstance(m, nn.BatchNorm1d))
    assert torch.equal(norm.running_mean, mean)


def make_classifier():
    torch.manual_seed(0)
    layers = OrderedDict(
        stem=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), act=nn.Tanh(), head_norm=nn.BatchNorm1d(4),
        head=nn.Linear(4, 2),
    )  # fmt: skip
    net = nn.Sequential(layers)
    net(1 + torch.randn(20, 3))
    return net, TensorDataset(torch.randn(30, 3), torch.arange(30) % 2)


class TestHeldStatistics:
    @pytest.mark.parametrize("trainable", [Full(hold_statistics=True), LPFT(hold_statistics=True)])
    def test_they_stay_and_new_parts_have_their_own(self, trainable):
        net, data = make_classifier()
        before = copy.deepcopy(net.state_dict())
        rates, new = [], ["head"] if isinstance(trainable, LPFT) else ["head_norm", "head"]
        tuned = finetune_loop(
            net, Recipe(trainable=trainable), data, lr=0.01, batch_size=10, epochs=14, new=new,
            task="classification", progress=False, settings=LoopSettings(log_every=1),
            log=lambda row: rates.append(row["lr"]),
        )  # fmt: skip
        for name in ("norm", "head_norm"):
            same = torch.equal(
                tuned.state_dict()[f"{name}.running_mean"], before[f"{name}.running_mean"]
            )
            assert same == (name not in new)
        assert not torch.equal(tuned.norm.weight, before["norm.weight"])
        assert not tuned._forward_pre_hooks
        assert rates[:3] == pytest.approx([0.01 / 2.1, 0.02 / 2.1, 0.01])  # 5 % of 42 updates
        assert rates[-1] == pytest.approx(0.01 / 39.9)

    def test_gradients_are_clipped_unless_the_user_says_otherwise(self, monkeypatch):
        norms = []
        monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda _, norm: norms.append(norm))
        for clip_norm, held in ((None, True), (0.1, True), (None, False)):
            net, data = make_classifier()
            finetune_loop(
                net, Recipe(trainable=Full(hold_statistics=held)), data, lr=0.01, batch_size=30,
                task="classification", progress=False, settings=LoopSettings(clip_norm=clip_norm),
            )  # fmt: skip
        assert norms == [1.0, 0.1]

    def test_the_users_schedule_is_used(self):
        net, data = make_classifier()
        seen = []
        finetune_loop(
            net, Recipe(trainable=Full(hold_statistics=True)), data, lr=0.01, batch_size=10,
            task="classification", progress=False, log=lambda row: seen.append(row["lr"]),
            settings=LoopSettings(schedule=lambda update, total: 0.5, log_every=1),
        )  # fmt: skip
        assert seen == [0.005] * 3

    def test_they_are_free_again_after_an_error(self):
        net, data = make_classifier()

        def stop(row):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            finetune_loop(
                net, Recipe(trainable=Full(hold_statistics=True)), data, lr=0.01, log=stop,
                task="classification", progress=False,
            )  # fmt: skip
        assert not net._forward_pre_hooks
