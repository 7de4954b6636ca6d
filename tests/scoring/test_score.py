"""score(): against a literal float64 computation on real text, whatever the batches."""

import math
import random
import statistics

import pytest
import torch

from holdfast import Flow
from holdfast._torch import lm_head as _head
from holdfast.scoring import scorer
from scoring.lm import dataset, literal_token_losses, quiet

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 258,
}  # fmt: skip
MASKED = {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}


class TestAgainstALiteralComputation:
    @pytest.mark.parametrize("n", [1, 20, 21], ids=["one", "even", "odd"])
    def test_every_sample_of_real_text(self, model, rows, n):
        literal = [literal_token_losses(model, row) for row in rows[:n]]
        means = [statistics.fmean(tokens) for tokens in literal]
        scores = quiet(model, dataset(rows[:n]), tokens=True)
        assert scores.losses.tolist() == pytest.approx(means, rel=1e-5)
        assert scores.counts.tolist() == [len(tokens) for tokens in literal]
        for found, expected in zip(scores.token_losses, literal, strict=True):
            assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        tau = statistics.median(scores.losses.tolist())
        expected = [math.exp(-f / tau) for f in scores.losses.tolist()]
        assert Flow().weigh(scores).tolist() == pytest.approx(expected, rel=1e-12)
        flat = [x for tokens in scores.token_losses for x in tokens.tolist()]
        tau = statistics.median(flat)
        weights = Flow(level="token").weigh(scores)
        assert weights.tolist() == pytest.approx([math.exp(-x / tau) for x in flat], rel=1e-6)

    def test_ties(self, model, rows):
        scores = quiet(model, dataset([rows[0]] * 4 + [rows[1]]))
        assert scores.losses[:4].tolist() == pytest.approx([scores.losses[0].item()] * 4, rel=1e-6)
        assert Flow().weigh(scores)[0].item() == pytest.approx(math.exp(-1), rel=1e-5)

    def test_a_sample_without_targets_is_left_out_and_said(self, model, rows):
        with pytest.warns(UserWarning, match=r"1 of 5 samples have no targets .* at indices 2"):
            scores = quiet(model, dataset([*rows[:2], MASKED, *rows[2:4]]), tokens=True)
        assert scores.excluded == [2]
        assert scores.losses[2].isnan()
        weights = Flow().weigh(scores)
        assert weights[2] == 0
        kept = [f for f in scores.losses.tolist() if not math.isnan(f)]
        tau = statistics.median(kept)
        assert weights[0].item() == pytest.approx(math.exp(-kept[0] / tau))
        assert len(Flow(level="token").weigh(scores)) == int(scores.counts.sum())


class TestIndependence:
    @pytest.fixture
    def expected(self, model, rows):
        return quiet(model, dataset(rows), batch_size=1).losses

    @pytest.mark.parametrize("batch_size", [2, 7])
    def test_of_batch_size(self, model, rows, expected, batch_size):
        found = quiet(model, dataset(rows), batch_size=batch_size).losses
        assert torch.allclose(found, expected, rtol=1e-4, atol=0)

    def test_of_order(self, model, rows, expected):
        order = random.Random(0).sample(range(len(rows)), len(rows))
        found = quiet(model, dataset([rows[i] for i in order])).losses
        assert torch.allclose(found, expected[order], rtol=1e-4, atol=0)

    def test_of_the_padding_side(self, model, rows, expected):
        def left(samples):
            longest = max(len(s["input_ids"]) for s in samples)
            pads = [longest - len(s["input_ids"]) for s in samples]
            mask = [[0] * n + [1] * (longest - n) for n in pads]
            columns = {
                name: [[fill] * n + s[name] for n, s in zip(pads, samples, strict=True)]
                for name, fill in (("input_ids", 0), ("labels", -100))
            }
            batch = {k: torch.tensor(v) for k, v in {**columns, "attention_mask": mask}.items()}
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
            return batch

        found = quiet(model, dataset(rows), collate=left).losses
        assert torch.allclose(found, expected, rtol=1e-4, atol=0)

    def test_of_the_kind_of_data(self, model, rows, expected):
        data = dataset(rows)
        collate = scorer.as_source(data, None, 1).collate
        shuffled = torch.utils.data.DataLoader(rows, 5, shuffle=True, collate_fn=collate)
        batches = [collate(rows[i : i + 6]) for i in range(0, len(rows), 6)]
        for kind in (shuffled, batches, iter(batches), rows):
            options = {"collate": collate} if kind is rows else {}
            assert torch.allclose(quiet(model, kind, **options).losses, expected, rtol=1e-4, atol=0)

    @pytest.mark.parametrize("chunk", [258, 10_000])
    def test_of_the_chunks_of_logits(self, model, rows, expected, monkeypatch, chunk):
        monkeypatch.setattr(_head, "CHUNK", chunk)
        assert torch.allclose(quiet(model, dataset(rows)).losses, expected, rtol=1e-4, atol=0)

    def test_of_the_way_to_the_logits(self, model, rows, expected, monkeypatch):
        """A model that does more to its logits is run whole."""
        model.get_output_embeddings = lambda: torch.nn.Linear(32, 258)
        assert torch.allclose(quiet(model, dataset(rows)).losses, expected, rtol=1e-4, atol=0)

    def test_of_autocast_nearly(self, model, rows, expected):
        found = quiet(model, dataset(rows), autocast=torch.bfloat16).losses
        assert torch.allclose(found, expected, rtol=2e-2, atol=0)
        assert not torch.equal(found, expected)


def test_the_head_is_applied_to_targets_only(model, rows, monkeypatch):
    """Never the logits of a whole batch at once."""
    monkeypatch.setattr(_head, "CHUNK", 258 * 16)
    sizes = []
    losses = scorer.Scorer(model, "causal_lm", False, None)
    batch = scorer.as_source(dataset(rows), None, 8).collate(rows[:8])
    losses.split.look({"input_ids": batch["input_ids"]})
    model.lm_head.register_forward_hook(lambda _, args, out: sizes.append(out.shape[:-1].numel()))
    with torch.no_grad():
        losses(batch, list(range(8)))
    assert max(sizes) <= 16
    assert sum(sizes) == sum(x != -100 for row in rows[:8] for x in row["labels"][1:])


def test_modes_are_put_back(model, rows):
    model.train()
    model.model.layers[0].eval()
    quiet(model, dataset(rows[:2]))
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training
    assert all(p.grad is None for p in model.parameters())


class TestMemory:
    def test_a_batch_that_does_not_fit_is_halved(self, model, rows, monkeypatch):
        expected = quiet(model, dataset(rows)).losses
        real, tried = scorer.Scorer._rows, []

        def tight(self, batch, size):
            tried.append(size)
            if size > 3:
                raise torch.OutOfMemoryError("no room")
            return real(self, batch, size)

        monkeypatch.setattr(scorer.Scorer, "_rows", tight)
        assert torch.allclose(quiet(model, dataset(rows)).losses, expected, rtol=1e-4, atol=0)
        assert sum(size > 3 for size in tried) < 8  # it learns what fits

    def test_one_sample_that_does_not_fit_is_named(self, model, rows, monkeypatch):
        def none(self, batch, size):
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(scorer.Scorer, "_rows", none)
        with pytest.raises(RuntimeError, match=r"sample \d+ alone does not fit into memory"):
            quiet(model, dataset(rows[:4]))

    def test_other_errors_are_not_hidden(self, model, rows, monkeypatch):
        def broken(self, batch, size):
            raise RuntimeError("shapes")

        monkeypatch.setattr(scorer.Scorer, "_rows", broken)
        with pytest.raises(RuntimeError, match="shapes"):
            quiet(model, dataset(rows[:4]))


class TestModels:
    """Against the losses that transformers itself computes, one sample at a time."""

    def make(self, name):
        torch.manual_seed(1)
        t = transformers
        if name == "gpt2":
            return t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=258))
        if name == "gemma2":
            config = t.Gemma2Config(**SMALL, head_dim=8)
            model = t.Gemma2ForCausalLM(config)
            model.model.embed_tokens.weight.data *= 40  # logits beyond the soft cap
            return model
        if name == "cohere":
            return t.CohereForCausalLM(t.CohereConfig(**SMALL, logit_scale=0.3))
        config = t.OPTConfig(
            hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2,
            num_attention_heads=4, vocab_size=258, do_layer_norm_before=False,
        )  # fmt: skip
        return t.OPTForCausalLM(config)

    @pytest.mark.parametrize("name", ["gpt2", "gemma2", "cohere", "opt"])
    def test_causal_models(self, name, rows):
        model = self.make(name).eval()
        found = quiet(model, dataset(rows[:8])).losses
        with torch.no_grad():
            expected = [
                model(**{k: torch.tensor([v]) for k, v in row.items()}).loss.item()
                for row in rows[:8]
            ]
        assert found.tolist() == pytest.approx(expected, rel=1e-4)

    def test_a_decoder_that_classifies_finds_its_last_token(self, rows):
        t = transformers
        config = t.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=258, pad_token_id=99, num_labels=3
        )
        model = t.GPT2ForSequenceClassification(config).eval()
        data = dataset([{"input_ids": r["input_ids"], "labels": i % 3} for i, r in enumerate(rows)])
        alone = quiet(model, data, batch_size=1).losses
        assert torch.allclose(quiet(model, data, batch_size=8).losses, alone, rtol=1e-4, atol=0)

    def test_wrapped_models(self, model, rows):
        plain = quiet(model, dataset(rows[:4])).losses
        assert torch.allclose(quiet(torch.nn.DataParallel(model), dataset(rows[:4])).losses, plain)

    def test_an_encoder_decoder_is_refused(self):
        config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
        with pytest.raises(ValueError, match="derives its decoder inputs from the labels"):
            quiet(transformers.T5ForConditionalGeneration(config), [], task="token_classification")

    def test_a_label_that_is_ignored_is_no_easy_sample(self):
        data = [(torch.randn(4, 3), torch.tensor([0, -100, 1, 1]))]
        with pytest.warns(UserWarning, match="1 of 4 samples have no targets"):
            scores = quiet(torch.nn.Linear(3, 2), data, task="classification")
        assert scores.excluded == [1]
        assert Flow().weigh(scores)[1] == 0

    def test_vectors_of_labels_are_not_taken_for_classes(self):
        data = [(torch.randn(2, 3), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))]
        with pytest.raises(ValueError, match="the task is multi_label"):
            quiet(torch.nn.Linear(3, 2), data, task="classification")


class TestKindsOfData:
    def test_a_list_of_samples(self, model, rows):
        assert len(quiet(model, rows)) == len(rows)

    def test_a_stream_of_samples(self, model, rows):
        stream = dataset(rows).to_iterable_dataset()
        collate = scorer.as_source(dataset(rows), None, 1).collate
        expected = quiet(model, dataset(rows)).losses
        found = quiet(model, stream, collate=collate).losses
        assert torch.allclose(found, expected, rtol=1e-4, atol=0)

    def test_columns_that_are_no_numbers(self, model, rows):
        more = [{**r, "text": "x", "tags": ["a"], "none": None, "chat": [{"a": 1}]} for r in rows]
        assert len(quiet(model, more)) == len(rows)

    def test_inputs_as_a_mapping_beside_labels(self, model, rows):
        batch = scorer.as_source(dataset(rows), None, 1).collate(rows[:5])
        labels = batch.pop("labels")
        assert len(quiet(model, [(batch, labels)])) == 5

    def test_lists_are_halved_too(self, monkeypatch):
        real = scorer.Scorer._rows

        def tight(self, batch, size):
            if size > 3:
                raise torch.OutOfMemoryError("no room")
            return real(self, batch, size)

        monkeypatch.setattr(scorer.Scorer, "_rows", tight)
        data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
        assert len(quiet(torch.nn.Linear(3, 2), data, task="classification")) == 8

    def test_all_splits_at_once_are_refused(self, model, rows):
        with pytest.raises(TypeError, match="one split of it"):
            quiet(model, datasets.DatasetDict({"train": dataset(rows)}))


class TestOtherTasks:
    def test_an_encoder(self, rows):
        config = transformers.BertConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=258, num_labels=3,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config).eval()
        data = dataset([{"input_ids": r["input_ids"], "labels": i % 3} for i, r in enumerate(rows)])
        found = quiet(model, data)
        for i in (0, 7, 20):
            logits = model(input_ids=torch.tensor([rows[i]["input_ids"]])).logits
            expected = torch.nn.functional.cross_entropy(logits, torch.tensor([i % 3]))
            assert found.losses[i].item() == pytest.approx(expected.item(), rel=1e-4)

    def test_images(self):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(27, 4)).train()
        x, y = torch.randn(10, 3, 3, 3), torch.arange(10) % 4
        data = torch.utils.data.TensorDataset(x, y)
        expected = torch.nn.functional.cross_entropy(model(x), y, reduction="none").double()
        assert torch.allclose(quiet(model, data, task="classification").losses, expected, rtol=1e-5)

    def test_a_loss_of_the_users(self):
        model = torch.nn.Linear(3, 1)
        batches = [torch.ones(4, 3), torch.zeros(2, 3)]
        found = quiet(model, batches, task=lambda m, batch: m(batch).squeeze(1).abs())
        assert len(found) == 6
        with pytest.raises(ValueError, match=r"one loss per sample, \(4,\), got \(\)"):
            quiet(model, batches, task=lambda m, batch: m(batch).mean())


class TestRefused:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
    def test_a_loss_that_is_none_names_the_sample(self, bad):
        losses = torch.tensor([1.0, bad, 1.0])
        with pytest.raises(ValueError, match=rf"the loss of sample 1 is {bad}"):
            quiet(torch.nn.Linear(1, 1), [torch.zeros(3, 1)], task=lambda m, batch: losses)

    def test_empty_data(self, model):
        with pytest.raises(ValueError, match="the data is empty"):
            quiet(model, [])

    def test_no_labels(self, model, rows):
        with pytest.raises(ValueError, match="a batch must be a mapping with a tensor of labels"):
            quiet(model, dataset([{"input_ids": r["input_ids"]} for r in rows[:3]]))

    def test_labels_that_do_not_fit_their_ids(self, model, rows):
        short = {"input_ids": rows[0]["input_ids"], "labels": rows[0]["labels"][5:]}
        with pytest.raises(ValueError, match=r"a sample has \d+ labels for \d+ input_ids"):
            quiet(model, [rows[1], short])

    def test_no_target_anywhere(self, model):
        with pytest.raises(ValueError, match="all labels are −100"):
            quiet(model, [MASKED, MASKED])

    def test_an_unknown_task(self):
        with pytest.raises(ValueError, match="the task of Linear is not known: pass task="):
            quiet(torch.nn.Linear(1, 1), [torch.zeros(3, 1)])

    def test_no_data_at_all(self, model):
        with pytest.raises(TypeError, match="data must be a DataLoader"):
            quiet(model, 3)
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            quiet(model, [], batch_size=0)
        with pytest.raises(ValueError, match="tokens=True needs one of"):
            quiet(model, [], task="classification", tokens=True)
