import math

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from golden import distill as golden
from holdfast.data import pad_collate
from holdfast.methods import distill
from holdfast.methods._base_model import Frozen, adapters_off_base
from holdfast.methods.distill import Distill, divergence
from holdfast.methods.identity import Uniform
from methods.runs import (
    TASKS,
    batch_of,
    collate_for,
    gradient,
    loss_of,
    make_model,
    make_run,
    make_samples,
    moved,
    recalled,
)
from ranks import run_on_ranks

DISTILL = Distill(strength=0.7, temperature=3.0)
LIVE = Distill(strength=0.7, temperature=3.0, cache=False)


def prepared(task, recall=DISTILL, dropout=0.0, **fields):
    """The criterion of a pretrained model, and the model some way from there."""
    model = make_model(task, dropout=dropout)
    run = make_run(model, make_samples(task), task, collate=collate_for(task), **fields)
    return recalled(recall, run), moved(model)


def literal(task, model, base, samples):
    """Sample by sample, without padding."""
    outputs, of_base, labels = [], [], []
    for sample in samples:
        inputs = {n: torch.as_tensor(v)[None] for n, v in sample.items() if n != "labels"}
        outputs.append(model(**inputs)[0])
        of_base.append(base(**inputs)[0].detach())
        labels.append(torch.as_tensor(sample["labels"]))
    return golden.loss(task, outputs, of_base, labels, DISTILL.strength, DISTILL.temperature)


@pytest.mark.parametrize("recall", [DISTILL, LIVE])
@pytest.mark.parametrize("task", TASKS)
def test_loss_and_gradient_are_the_literal_ones(task, recall):
    criterion, model = prepared(task, recall)
    ours = loss_of(criterion, model, collate_for(task))
    theirs = literal(task, model, make_model(task).eval(), make_samples(task))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    found, expected = gradient(ours, model), gradient(theirs, model)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
def test_it_costs_nothing_to_stay(task):
    criterion, _ = prepared(task)
    model = make_model(task)
    uniform = Uniform().prepare(make_run(model, make_samples(task), task))
    for_both = [loss_of(c, model, collate_for(task)).item() for c in (criterion, uniform)]
    assert for_both[0] == pytest.approx(for_both[1], rel=1e-12)


def test_the_gradient_in_the_outputs_is_the_difference_of_probabilities():
    base, z = torch.randn(2, 5, 6, dtype=torch.float64)
    z.requires_grad_()
    divergence(base, z, "classification", 2.0).sum().backward()
    expected = 2.0 * ((z / 2).softmax(-1) - (base / 2).softmax(-1))
    torch.testing.assert_close(z.grad, expected.detach())


@pytest.mark.parametrize("task", ["classification", "multi_label"])
@pytest.mark.parametrize("scale", [1e3, 1e-6])
def test_the_divergence_is_finite_and_not_negative(task, scale):
    base, z = scale * torch.randn(2, 50, 6)
    values = divergence(base, z, task, 2.0)
    assert values.isfinite().all()
    assert (values > -1e-6).all()


def test_half_precision_outputs_are_compared_in_float32():
    criterion, model = prepared("causal_lm")
    batch = batch_of(criterion, pad_collate)
    model.to(torch.bfloat16)
    assert criterion.loss(model, batch, 10.0, 1).dtype == torch.float32


class TestTheBase:
    @pytest.mark.parametrize("task", ["classification", "multi_label", "regression"])
    def test_kept_outputs_are_those_of_a_frozen_copy(self, task):
        kept, model = prepared(task, dropout=0.5)
        live, _ = prepared(task, LIVE, dropout=0.5)
        assert kept.columns == ("base_logits",)
        assert live.columns == ()
        assert isinstance(live.recall.base, Frozen)
        assert "base_logits" in kept.data[0]
        assert "base_logits" not in live.data[0]
        losses = []
        for criterion in (kept, live):
            torch.manual_seed(3)  # of the model's own dropout: the base's pass draws nothing
            losses.append(loss_of(criterion, model.train(), collate_for(task)))
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)

    def test_the_copy_stays_where_it_was(self):
        criterion, model = prepared("causal_lm", LIVE, dropout=0.5)
        pretrained = make_model("causal_lm")
        for name, p in criterion.recall.base.model.named_parameters():
            assert torch.equal(p, pretrained.get_parameter(name))
            assert not p.requires_grad
        assert not any(m.training for m in criterion.recall.base.model.modules())
        loss_of(criterion, model, pad_collate).backward()
        assert all(p.grad is None for p in criterion.recall.base.model.parameters())
        assert model.training

    def test_pairs_of_inputs_and_labels(self):
        samples = [(s["x"], s["labels"]) for s in make_samples("classification")]

        class Of(torch.nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = net

            def forward(self, x):
                return self.net(x=x)

        model = Of(make_model("classification"))
        kept = recalled(DISTILL, make_run(model, DataLoader(samples), "classification"))
        assert len(kept.data[0]) == 3
        run = make_run(model, samples, "classification", collate=default_collate)
        live = recalled(LIVE, run)
        moved(model)
        losses = [loss_of(c, model, default_collate) for c in (kept, live)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)

    def test_a_table_keeps_them_as_a_column(self):
        datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
        rows = [
            {"x": s["x"].tolist(), "labels": int(s["labels"])}
            for s in make_samples("classification")
        ]
        table, model = datasets.Dataset.from_list(rows), make_model("classification").float()

        def collate(samples):
            return {n: torch.tensor([s[n] for s in samples]) for n in samples[0]}

        kept = recalled(DISTILL, make_run(model, table, "classification", collate=collate))
        assert kept.data.features["base_logits"].feature.dtype == "float32"
        live = recalled(
            LIVE,
            make_run(model, table, "classification", collate=collate),
        )
        moved(model)
        order = [4, 0, 2]
        losses = [loss_of(c, model, collate, order) for c in (kept, live)]
        torch.testing.assert_close(*losses)

    def test_what_is_too_much_is_not_kept(self, monkeypatch):
        monkeypatch.setattr(distill, "_MOST_KEPT", 7 * 4 * 8 - 1)
        criterion, _ = prepared("classification")
        assert isinstance(criterion.recall.base, Frozen)
        assert criterion.columns == ()

    def test_a_stream_cannot_carry_them(self):
        batches = (default_collate([s]) for s in make_samples("classification"))
        run = make_run(make_model("classification"), batches, "classification")
        assert isinstance(recalled(DISTILL, run).recall.base, Frozen)

    @pytest.mark.parametrize("task", ["classification", "causal_lm"])
    def test_adapters_switched_off_are_a_frozen_copy(self, task):
        peft = pytest.importorskip("peft", reason="the peft extra is not installed")
        from holdfast.methods.lora import LoRA

        model = make_model(task, dropout=0.5)
        config = peft.LoraConfig(target_modules=["hidden"], r=2)
        model = peft.get_peft_model(model, config).train()
        criteria = []
        for recall, trainable in [
            (Distill(0.7, 3.0), LoRA()),
            (LIVE, LoRA()),
            (LIVE, None),  # the adapters came with the model
        ]:
            samples, collate = make_samples(task), collate_for(task)
            run = make_run(model, samples, task, collate=collate, trainable=trainable)
            criteria.append(recalled(recall, run))
        cached, adapters_off, came_along = criteria
        for criterion in (adapters_off, came_along):
            assert criterion.recall.base.func is adapters_off_base
        assert (cached.recall.base is None) == (task == "classification")
        criteria.append(recalled(recall, run))
        criteria[-1].recall.base = Frozen(model, **adapters_off.recall.base.keywords)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p += torch.randn(p.shape).to(p)
        losses = []
        for criterion in criteria:
            torch.manual_seed(3)
            losses.append(loss_of(criterion, model, collate_for(task)).item())
        assert losses[1:] == pytest.approx([losses[0]] * 3, rel=1e-12)
        assert model.training

    @pytest.mark.parametrize("why", ["trained before", "a head in full", "biases", "statistics"])
    def test_where_the_adapters_are_not_all_that_changes_a_copy_is_taken(self, why):
        peft = pytest.importorskip("peft", reason="the peft extra is not installed")
        model = make_model("causal_lm")
        if why == "statistics":
            model.dropout = torch.nn.BatchNorm1d(5)
        options = {
            "trained before": {"init_lora_weights": False},
            "a head in full": {"modules_to_save": ["head"]},
            "biases": {"bias": "all"},
        }
        config = peft.LoraConfig(target_modules=["hidden"], r=2, **options.get(why, {}))
        model = peft.get_peft_model(model, config)
        run = make_run(model, make_samples("causal_lm"), "causal_lm")
        assert isinstance(recalled(LIVE, run).recall.base, Frozen)


def same_on_all_ranks():
    samples = [s for seed in range(20) for s in make_samples("classification", seed=seed)]
    model = make_model("classification")
    run = make_run(model, samples, "classification", collate=default_collate)
    kept = recalled(DISTILL, run)
    expected = model(x=torch.stack([s["x"] for s in samples]))
    found = torch.stack([s["base_logits"] for s in kept.data])
    torch.testing.assert_close(found, expected.detach())


@pytest.mark.soak
def test_ranks_share_the_pass(tmp_path):
    same_on_all_ranks()
    run_on_ranks(2, same_on_all_ranks, folder=tmp_path)


@pytest.mark.parametrize("task", TASKS)
def test_cutting_an_update_changes_nothing(task):
    criterion, model = prepared(task)
    collate = collate_for(task)
    whole = loss_of(criterion, model, collate, num_targets=17.0)
    halves = [
        loss_of(criterion, model, collate, part, num_targets=torch.tensor(17.0))
        for part in ([0, 1, 2], [3, 4, 5, 6])
    ]
    torch.testing.assert_close(sum(halves), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("task", TASKS)
def test_no_strength_is_uniform_to_the_bit(task):
    neutral, model = prepared(task, Distill(**Distill.neutral))
    uniform = Uniform().prepare(make_run(model, make_samples(task), task))
    assert type(neutral) is type(uniform)
    a, b = (loss_of(c, model, collate_for(task)) for c in (neutral, uniform))
    assert torch.equal(a, b)


class TestRefused:
    def test_a_loss_function(self):
        run = make_run(make_model("classification"), [], lambda model, batch: None)
        with pytest.raises(ValueError, match="which a loss function does not"):
            recalled(Distill(), run)

    @pytest.mark.parametrize(
        "settings", [{"strength": -1}, {"temperature": 0}, {"temperature": math.inf}]
    )
    def test_settings(self, settings):
        with pytest.raises(ValueError, match="must be a finite number"):
            Distill(**settings)

    def test_too_few_tokens(self):
        with pytest.raises(ValueError, match="top must be"):
            Distill(top=1)
