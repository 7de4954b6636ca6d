"""The descriptions of optimizers: what a recipe builds from them."""

import dataclasses
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast import (
    EWC,
    MAS,
    AdamWUpdate,
    FinchUpdate,
    MoFOUpdate,
    RecAdam,
    RecAdamUpdate,
    Reference,
    SGDUpdate,
    SPDUpdate,
)
from holdfast.anneal import Constant, Linear, Sigmoid
from holdfast.methods.lora import LoRA
from holdfast.methods.lp_ft import LPFT
from holdfast.optim import SPD, Finch, MoFO, fisher_importance, mas_importance
from holdfast.recipe import Recipe
from holdfast.registry import methods
from holdfast.run import Run
from methods.problems import backward, far, make_net

UPDATES = [AdamWUpdate, SGDUpdate, RecAdamUpdate, MoFOUpdate, SPDUpdate, FinchUpdate]


def data(samples=24):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, torch.arange(samples) % 3)


def make_run(update, penalties=(), *, net=None, lr=1e-2, given=None, **options):
    recipe = Recipe(
        update=update, penalties=penalties, trainable=options.pop("trainable", Recipe().trainable)
    )
    options = {"task": "classification", "progress": False, "cache": False} | options
    return Run(
        recipe, net or make_net(torch.float32), data() if given is None else given, lr=lr, **options
    )


def train(net, opt, steps=12):
    for t in range(steps):
        backward(net, t)
        opt.step()


def torchs_groups(net, wd):
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": wd}, {"params": vectors, "weight_decay": 0.0}]


@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("cls", UPDATES)
def test_neutral_is_torchs_own_to_the_bit(cls, wd):
    update = cls(**(cls.neutral or {}))
    run = make_run(update, weight_decay=wd)
    train(run.model, run.make_optimizer(12))
    other = make_net(torch.float32)
    if cls is SGDUpdate:
        plain = torch.optim.SGD(torchs_groups(other, wd), lr=1e-2, momentum=0.9)
    else:
        plain = torch.optim.AdamW(torchs_groups(other, wd), lr=1e-2)
    train(other, plain)
    assert far(run.model, other) == 0.0


@pytest.mark.parametrize(
    ("update", "cls", "settings"),
    [
        (AdamWUpdate(betas=(0.8, 0.99), eps=1e-6), torch.optim.AdamW, {"eps": 1e-6}),
        (SGDUpdate(momentum=0.5, nesterov=True), torch.optim.SGD, {"nesterov": True}),
        (MoFOUpdate(fraction=0.3, betas=(0.8, 0.99)), MoFO, {"fraction": 0.3}),
        (FinchUpdate(betas=(0.8, 0.99)), Finch, {}),
        (SPDUpdate(lam=0.5, betas=(0.8, 0.99)), SPD, {"lam": 0.5}),
        (RecAdamUpdate(betas=(0.8, 0.99), gamma=3.0), RecAdam, {"gamma": 3.0}),
    ],
    ids=lambda x: getattr(x, "__name__", None) or type(x).__name__,
)
def test_the_settings_arrive(update, cls, settings):
    opt = make_run(update).make_optimizer(20)
    assert type(opt) is cls
    for group in opt.param_groups:
        for name, value in settings.items():
            assert group[name] == value
        assert group["weight_decay"] == 0.0  # not torch's 0.01
        assert group["foreach"] is None
        assert group["fused"] is None
        if "betas" in group:
            assert group["betas"] == (0.8, 0.99)


def test_a_host_that_says_no_weight_decay_gets_none():
    net = make_net(torch.float32)
    for update in (cls() for cls in UPDATES):
        run = make_run(update, net=net)
        opt = run.make_optimizer(5, [{"params": list(net.named_parameters())}])
        assert opt.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize("fraction", [0.05, 0.15, 0.5])
def test_mofo_moves_exactly_its_share(fraction):
    run = make_run(MoFOUpdate(fraction=fraction), weight_decay=0.1)
    opt = run.make_optimizer(3)
    for t in range(3):
        before = [p.detach().clone() for p in run.model.parameters()]
        backward(run.model, t)
        opt.step()
        for p, old in zip(run.model.parameters(), before, strict=True):
            share = p.numel() if p.dim() == 1 else max(1, round(fraction * p.numel()))
            assert int((p != old).sum()) == share


class TestRecAdam:
    def test_laid_out_over_the_run(self):
        opt = make_run(RecAdamUpdate(t0=0.5, width=0.1)).make_optimizer(200)
        group = opt.param_groups[0]
        assert group["gamma"] == pytest.approx(10.0)  # 0.1 / 1e-2
        assert group["anneal"] == Sigmoid.over(200, t0=0.5, width=0.1)
        assert opt.recall_state()["pull"] == pytest.approx(0.1, rel=1e-2)

    def test_absolute_settings_win(self):
        update = RecAdamUpdate(gamma=7.0, anneal=Linear(30), t0=0.9)
        group = make_run(update).make_optimizer(200).param_groups[0]
        assert (group["gamma"], group["anneal"]) == (7.0, Linear(30))

    def test_layer_decay_leaves_gamma(self):
        opt = make_run(RecAdamUpdate(layer_decay=2.0)).make_optimizer(20)
        assert [g["gamma"] for g in opt.param_groups] == pytest.approx([10.0] * 3)
        assert len({g["lr"] for g in opt.param_groups}) > 1

    def test_a_new_head_is_free_and_nothing_warns(self):
        run = make_run(RecAdamUpdate(), new="head", weight_decay=0.1)
        opt = run.make_optimizer(20)
        free = {n for g in opt.param_groups if not g["anchored"] for n in g["param_names"]}
        assert free == {"head.weight", "head.bias"}
        decayed = {n for g in opt.param_groups if g["weight_decay"] for n in g["param_names"]}
        assert decayed == {n for n, p in run.model.named_parameters() if p.dim() > 1}
        train(run.model, opt, 3)
        assert opt.recall_state()["lam"] < 0.5

    def test_equals_the_optimizer_by_hand(self):
        run = make_run(RecAdamUpdate(importance="fisher"))
        train(run.model, run.make_optimizer(12))
        net = make_net(torch.float32)
        importance = fisher_importance(
            net, data(), task="classification", normalize=True, progress=False
        )
        opt = RecAdam(
            torchs_groups(net, 0.0), lr=1e-2, gamma=0.1 / 1e-2, anneal=Sigmoid.over(12),
            anchors=Reference.of(net), importance=importance,
        )  # fmt: skip
        train(net, opt)
        assert far(run.model, net) < 1e-6

    def test_lora(self):
        pytest.importorskip("peft", reason="the peft extra is not installed")
        run = make_run(RecAdamUpdate(importance="mas"), [EWC(3.0)], trainable=LoRA(r=2))
        opt = run.make_optimizer(10)
        pulled = {n for g in opt.param_groups if g["anchored"] for n in g["param_names"]}
        assert pulled
        assert all("lora_B" in n for n in pulled)
        assert set(run.importance[run.recipe.update]) == pulled
        train(run.model, opt, 5)
        assert run.anchors.distance(run.model).total > 0

    def test_without_pretrained_weights(self):
        run = make_run(RecAdamUpdate())
        run.anchors = None
        with pytest.raises(ValueError, match="the run has none"):
            run.make_optimizer(3)


class TestImportance:
    @pytest.mark.parametrize("normalize", [True, False])
    @pytest.mark.parametrize("cls", [EWC, MAS])
    def test_is_that_of_the_functions(self, cls, normalize):
        penalty = cls(1.0, samples=None, normalize=normalize)
        found = make_run(AdamWUpdate(), [penalty]).importance[penalty]
        net, options = make_net(torch.float32), {"normalize": normalize, "progress": False}
        if cls is EWC:
            expected = fisher_importance(net, data(), task="classification", **options)
        else:
            expected = mas_importance(net, data(), **options)
        assert set(found) == set(expected)
        for name in found:
            assert torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-8)

    @pytest.mark.parametrize("update", [RecAdamUpdate(importance="fisher"), AdamWUpdate()])
    def test_the_mean_is_over_what_is_pulled(self, update):
        """Gradients of a new head would shrink all others."""
        run = make_run(update, [EWC(), MAS()], trainable=LPFT(), new="head", lr=1e-3)
        for found in run.importance.values():
            if found is not None:
                assert not any("head" in name for name in found)
                total = sum(float(f.sum()) for f in found.values())
                assert total / sum(f.numel() for f in found.values()) == pytest.approx(1, rel=1e-5)
        run.make_optimizer(5)

    def test_each_method_has_its_own(self):
        update, ewc, mas = RecAdamUpdate(importance="mas"), EWC(kind="empirical"), MAS()
        run = make_run(update, [ewc, mas], lr=1e-3)
        assert torch.equal(run.importance[update]["head.bias"], run.importance[mas]["head.bias"])
        assert not torch.equal(run.importance[ewc]["head.bias"], run.importance[mas]["head.bias"])
        train(run.model, run.make_optimizer(4), 4)

    @pytest.mark.parametrize("penalty", [EWC(0.0), MAS(0.0)])
    def test_what_does_nothing_measures_nothing(self, penalty):
        update = RecAdamUpdate(pull=0.0, anneal=Constant(1.0), importance="fisher")
        run = make_run(update, [penalty], given=[None])
        assert set(run.importance.values()) == {None}
        run.make_optimizer(3)

    @pytest.mark.parametrize("importance", ["fisher", "mas"])
    def test_a_new_head_is_fitted_first(self, importance):
        for run in (
            make_run(RecAdamUpdate(importance=importance), new="head"),
            make_run(AdamWUpdate(), [EWC()], new="head"),
        ):
            assert run.recipe.trainable == LPFT()

    @pytest.mark.parametrize("kind", ["dataset", "loader", "hf"])
    def test_so_many_samples_drawn_by_the_seed(self, kind):
        given = data(40)
        collate = None
        if kind == "loader":
            given = DataLoader(given, batch_size=7, shuffle=True)
        if kind == "hf":
            datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
            rows = [{"x": x.tolist(), "labels": int(y)} for x, y in given]
            given = datasets.Dataset.from_list(rows)
            collate = pairs
        penalty = EWC(samples=10, kind="empirical", normalize=False)
        found = [
            make_run(AdamWUpdate(), [penalty], given=given, collate=collate, seed=s, lr=1e-3)
            .importance[penalty]["head.bias"]
            for s in (1, 1, 2)
        ]  # fmt: skip
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
        chosen = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:10].sort().values
        some = torch.utils.data.Subset(data(40), chosen.tolist())
        expected = fisher_importance(
            make_net(torch.float32), some, kind="empirical", task="classification", progress=False
        )
        assert torch.allclose(found[0], expected["head.bias"], rtol=1e-5)


def test_the_pull_is_the_papers_unless_it_or_gamma_is_given():
    assert dataclasses.replace(RecAdamUpdate(), gamma=5.0) == RecAdamUpdate(gamma=5.0)
    for update, gamma in [
        (RecAdamUpdate(), 10.0), (RecAdamUpdate(pull=0.2), 20.0), (RecAdamUpdate(gamma=5), 5.0),
        (RecAdamUpdate(pull=0), 0.0), (RecAdamUpdate(gamma=0), 0.0),
    ]:  # fmt: skip
        opt = make_run(update, lr=1e-2).make_optimizer(4)
        assert opt.param_groups[0]["gamma"] == pytest.approx(gamma)
        assert update.pulls == (gamma > 0)


def pairs(rows):
    return torch.tensor([r["x"] for r in rows]), torch.tensor([r["labels"] for r in rows])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(update=RecAdamUpdate(lr=1e-3, anneal=Linear(9), betas=[0.8, 0.9])),
        Recipe(update=RecAdamUpdate(gamma=5.0)),
        Recipe(update=MoFOUpdate(fraction=0.1), penalties=[EWC(), MAS(samples=None)]),
        Recipe.preset("sgd+l2-sp+l1-sp+sfa+wise-ft"),
    ],
    ids=lambda r: r.name,
)
def test_recipes_round_trip(recipe):
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    assert len({recipe.update, recipe.update}) == 1  # hashable: a run looks it up


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecAdamUpdate(pull=0.2, gamma=10.0), "set the same thing.*give one of them"),
        (lambda: RecAdamUpdate(pull=0.1, gamma=10.0), "set the same thing.*give one of them"),
        (lambda: RecAdamUpdate(pull=0, gamma=0), "set the same thing.*give one of them"),
        (lambda: RecAdamUpdate(pull=-1.0), "pull must be"),
        (lambda: RecAdamUpdate(gamma=math.nan), "gamma must be"),
        (lambda: RecAdamUpdate(t0=1.5), "t0 must be a fraction"),
        (lambda: RecAdamUpdate(width=0.0), "width must be"),
        (lambda: RecAdamUpdate(anneal="sigmoid"), "anneal must be"),
        (lambda: RecAdamUpdate(importance="ewc"), "importance must be one of 'fisher', 'mas'"),
        (lambda: RecAdamUpdate(lr=-1.0), "lr must be"),
        (lambda: AdamWUpdate(betas=(0.9, 1.0)), "betas must be"),
        (lambda: AdamWUpdate(eps=-1.0), "eps must be"),
        (lambda: AdamWUpdate(weight_decay=-1.0), "weight_decay must be"),
        (lambda: SGDUpdate(momentum=-0.1), "momentum must be"),
        (lambda: SGDUpdate(momentum=0.0, nesterov=True), "nesterov=True needs a momentum"),
        (lambda: SGDUpdate(nesterov="yes"), "nesterov must be"),
        (lambda: MoFOUpdate(fraction=0.0), "fraction must be"),
        (lambda: MoFOUpdate(fraction=1.5), "fraction must be in"),
        (lambda: EWC(kind="false"), "kind must be"),
        (lambda: EWC(samples=0), "samples must be"),
        (lambda: MAS(samples=1.5), "samples must be"),
        (lambda: EWC(coupled="no"), "coupled must be"),
    ],
)
def test_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_recadams_shift_is_that_of_a_sigmoid_by_default():
    assert Sigmoid.over(1000) == Sigmoid.over(1000, t0=RecAdamUpdate.t0, width=RecAdamUpdate.width)


@pytest.mark.parametrize("name", [entry.name for entry in methods("update")])
def test_a_nan_gradient_shows_in_the_weights(name):
    torch.manual_seed(0)
    model, some = torch.nn.Linear(6, 3), data()
    run = Run(name, model, some, lr=1e-2, task="classification", progress=False, cache=False)
    optimizer = run.make_optimizer(total_updates=4)
    run.loss(some.tensors, num_targets=24, update=1).backward()
    model.weight.grad[2, 3] = torch.nan
    optimizer.step()
    assert bool(model.weight.isnan()[2, 3])
    with pytest.raises(ValueError, match=r"the training diverged: there is NaN .* in weight"):
        run.finish()
