"""What Distill and TMKL keep of the pretrained model's predictions on the training data."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast import pad_collate
from holdfast.hosts._packing import Packed
from holdfast.losses import target_mask, target_outputs
from holdfast.methods import _base_predictions
from holdfast.methods._base_model import Frozen
from holdfast.methods._base_predictions import KeptPredictions
from holdfast.methods.distill import Distill
from holdfast.methods.flow import Flow
from holdfast.methods.tmkl import TMKL
from methods.runs import batch_of, gradient, loss_of, make_run, moved, recalled
from ranks import run_on_ranks
from small import make_llama

VOCABULARY = 200
RECALLS = [Distill(temperature=2.0), TMKL()]


def make_model():
    """A language model whose predictions are neither certain nor uniform."""
    return make_llama(0, vocab=VOCABULARY, scale=0.3)


def make_samples(n=12):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, VOCABULARY, (4 + i % 5,), generator=generator) for i in range(n)]
    return [{"input_ids": x.tolist(), "labels": [-100, -100, *x[2:].tolist()]} for x in rows]


def prepared(recall, data=None, objective=None, collate=pad_collate, **fields):
    data = make_samples() if data is None else data
    run = make_run(make_model(), data, "causal_lm", collate=collate, **fields)
    return recalled(recall, run, objective)


def term(criterion, model):
    """The divergence alone."""
    batch = batch_of(criterion, pad_collate)
    values = {name: batch.pop(name) for name in criterion.columns}
    labels = batch.pop("labels")
    before = criterion.recall.before(model, batch, labels, values, 1)
    outputs = target_outputs(model(**batch).logits, labels, "causal_lm")
    targets = labels[target_mask(labels, "causal_lm")]
    return criterion.recall.on_targets(before, slice(0, len(targets)), outputs, targets)


def exact(recall):
    return type(recall)(**{**vars(recall), "cache": False})


@pytest.mark.parametrize("recall", RECALLS)
def test_few_tokens_estimate_the_divergence_without_bias(recall):
    model = moved(make_model(), 0.03)
    whole = term(prepared(exact(recall)), model).item()
    recall = type(recall)(**{**vars(recall), "top": 16})
    found = torch.tensor([term(prepared(recall, seed=i), model).item() for i in range(30)])
    error = found.std().item() / len(found) ** 0.5
    assert error < 0.03 * whole
    assert abs(found.mean().item() - whole) < 3 * error


@pytest.mark.parametrize("recall", RECALLS)
def test_the_default_is_near_the_whole_vocabulary(recall):
    model = moved(make_model(), 0.03)
    whole, kept = prepared(exact(recall)), prepared(recall)
    assert whole.columns == ()
    assert kept.recall.base.tokens.ids.shape[1] == 64 < VOCABULARY
    values = [term(criterion, model) for criterion in (whole, kept)]
    assert values[1].item() == pytest.approx(values[0].item(), rel=0.05)
    slopes = []
    for value in values:
        grads = torch.autograd.grad(value, [*model.parameters()])
        slopes.append(torch.cat([g.flatten() for g in grads]))
    assert (slopes[1] - slopes[0]).norm() < 0.2 * slopes[0].norm()


@pytest.mark.parametrize("recall", RECALLS)
def test_the_whole_vocabulary_is_exact(recall):
    recall = type(recall)(**{**vars(recall), "top": VOCABULARY})
    model = moved(make_model(), 0.03)
    values = [term(prepared(r), model) for r in (recall, exact(recall))]
    torch.testing.assert_close(*values, rtol=1e-5, atol=0)


def test_it_costs_nothing_to_stay():
    for recall in RECALLS:
        assert term(prepared(recall), make_model()).abs() < 1e-5


class TestTheColumn:
    def test_has_the_number_of_each_target(self):
        criterion = prepared(TMKL())
        assert criterion.columns == ("base_prediction",)
        numbers = [row["base_prediction"] for row in criterion.data]
        assert [len(row) for row in numbers] == [len(row["labels"]) for row in criterion.data]
        targets = sum(label != -100 for row in criterion.data for label in row["labels"])
        assert [n for row in numbers for n in row if n] == [*range(1, targets + 1)]

    def test_survives_packing(self):
        criterion = prepared(TMKL())
        model = moved(make_model(), 0.03)
        whole = loss_of(criterion, model, pad_collate)
        criterion.data = Packed(criterion.data, 20, criterion.columns)
        assert len(criterion.data) < 12
        torch.testing.assert_close(loss_of(criterion, model, pad_collate), whole)

    def test_is_beside_that_of_an_objective(self):
        criterion = prepared(TMKL(), objective=Flow(level="token"))
        assert criterion.columns == ("holdfast_weight", "base_prediction")
        assert set(criterion.columns) <= set(criterion.data[0])

    def test_of_a_table(self):
        datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
        table = datasets.Dataset.from_list(make_samples())
        kept, plain = prepared(TMKL(), table), prepared(TMKL())
        assert kept.data["base_prediction"][:] == [row["base_prediction"] for row in plain.data]
        model = moved(make_model(), 0.03)
        torch.testing.assert_close(term(kept, model), term(plain, model))

    def test_of_a_loader(self):
        loader = DataLoader(make_samples(), batch_size=4, collate_fn=pad_collate)
        kept, plain = prepared(TMKL(), loader, collate=None), prepared(TMKL())
        for ours, theirs in zip(kept.recall.base.tokens, plain.recall.base.tokens, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_samples_without_targets(self):
        samples = make_samples()
        samples[:4] = [{**row, "labels": [-100] * len(row["labels"])} for row in samples[:4]]
        kept, live = prepared(TMKL(), samples), prepared(TMKL(cache=False), samples)
        model = moved(make_model(), 0.03)
        torch.testing.assert_close(term(kept, model), term(live, model), rtol=0.05, atol=0)
        for criterion in (kept, live):
            alone = criterion.loss(model, batch_of(criterion, pad_collate, [0]), 1.0, 1)
            assert alone == 0
            assert (gradient(alone, model) == 0).all()


class TestPerBatch:
    """Where predictions cannot be kept, a model makes them."""

    @pytest.fixture(autouse=True)
    def _logged(self, caplog):
        caplog.set_level(logging.INFO, "holdfast")
        self.log = caplog

    def check(self, criterion, why):
        assert isinstance(criterion.recall.base, Frozen)
        assert criterion.columns == ()
        assert f"predicts each batch of the training: {why}" in self.log.text

    def test_a_stream(self):
        batches = [pad_collate(make_samples()[i : i + 4]) for i in (0, 4, 8)]
        self.check(prepared(TMKL(), iter(batches), collate=None), "the data is a stream")

    @pytest.mark.parametrize("kind", ["mappings", "lists", "texts"])
    def test_labels_of_the_collate_function(self, kind):
        rows = [row["input_ids"] for row in make_samples()]
        samples = {
            "mappings": [{"input_ids": row} for row in rows],
            "lists": rows,
            "texts": [" ".join(map(str, row)) for row in rows],
        }[kind]

        def collate(some):
            rows = [x["input_ids"] if kind == "mappings" else x for x in some]
            rows = [[int(n) for n in x.split()] if kind == "texts" else x for x in rows]
            return pad_collate([{"input_ids": x, "labels": x} for x in rows])

        why = "the samples get their labels from the collate function"
        criterion = prepared(TMKL(), samples, collate=collate)
        self.check(criterion, why)
        assert loss_of(criterion, moved(make_model(), 0.03), collate).isfinite()

    def test_labels_that_the_collate_function_changes(self):
        def collate(some):
            return pad_collate([{n: x[:4] for n, x in row.items()} for row in some])

        why = "the collate function changes the labels"
        self.check(prepared(TMKL(), collate=collate), why)

    def test_too_much_memory(self, monkeypatch):
        targets = sum(label != -100 for row in make_samples() for label in row["labels"])
        needed = targets * (64 * 8 + 4)
        monkeypatch.setattr(_base_predictions, "_MOST_KEPT", needed)
        assert isinstance(prepared(TMKL()).recall.base, KeptPredictions)
        monkeypatch.setattr(_base_predictions, "_MOST_KEPT", needed - 1)
        self.check(prepared(TMKL()), "all of them need more than")


@pytest.mark.parametrize("recall", RECALLS)
def test_adapters_are_off(recall):
    pytest.importorskip("peft", reason="the peft extra is not installed")
    from holdfast import Recipe, Run

    run = Run(
        Recipe(trainable=Recipe.preset("lora").trainable, recall=recall), make_model(),
        make_samples(), lr=1e-3, collate=pad_collate, progress=False,
    )  # fmt: skip
    plain = prepared(recall)
    for ours, theirs in zip(run.recall.base.tokens, plain.recall.base.tokens, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_memory_that_runs_out_halves_a_batch(monkeypatch):
    whole, keep, sizes = prepared(TMKL()), _base_predictions.kept_at, []

    def fits_5(model, inputs, *rest):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 5:
            raise torch.OutOfMemoryError
        return keep(model, inputs, *rest)

    monkeypatch.setattr(_base_predictions, "kept_at", fits_5)
    halved = prepared(TMKL())
    assert max(sizes) > 5 >= min(sizes)
    for ours, theirs in zip(halved.recall.base.tokens, whole.recall.base.tokens, strict=True):
        torch.testing.assert_close(ours, theirs)


def same_as_without_a_cache():
    samples, model = make_samples(80), moved(make_model(), 0.03)
    found = [term(prepared(r, samples), model) for r in (TMKL(top=VOCABULARY), TMKL(cache=False))]
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@pytest.mark.soak
def test_ranks_share_the_pass(tmp_path):
    same_as_without_a_cache()
    run_on_ranks(2, same_as_without_a_cache, folder=tmp_path)
