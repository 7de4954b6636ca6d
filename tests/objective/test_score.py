"""score(): against a literal float64 computation on real text, whatever the batches."""

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from holdfast import Flow, Scores, score
from holdfast.objective import _scorer, scoring
from objective.lm import gsm8k, literal_token_losses, small_llama
from ranks import run_on_ranks

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

MASKED = {"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(shared_data):
    return gsm8k(shared_data, 41)


@pytest.fixture
def model():
    return small_llama()


def quiet(model, data, **options):
    return score(model, data, **({"progress": False, "cache": False} | options))


def dataset(rows):
    return datasets.Dataset.from_list(rows)


class TestAgainstALiteralComputation:
    @pytest.mark.parametrize("n", [1, 40, 41], ids=["one", "even", "odd"])
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
        with pytest.warns(UserWarning, match="1 samples have no targets and get no weight: 2"):
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

    @pytest.mark.parametrize("batch_size", [2, 7, 64])
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
        collate = scoring.as_source(data, None, 1).collate
        shuffled = torch.utils.data.DataLoader(rows, 5, shuffle=True, collate_fn=collate)
        batches = [collate(rows[i : i + 6]) for i in range(0, len(rows), 6)]
        for kind in (shuffled, batches, iter(batches), rows):
            options = {"collate": collate} if kind is rows else {}
            assert torch.allclose(quiet(model, kind, **options).losses, expected, rtol=1e-4, atol=0)

    @pytest.mark.parametrize("chunk", [258, 10_000])
    def test_of_the_chunks_of_logits(self, model, rows, expected, monkeypatch, chunk):
        monkeypatch.setattr(_scorer, "_CHUNK", chunk)
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
    monkeypatch.setattr(_scorer, "_CHUNK", 258 * 16)
    sizes = []
    scorer = _scorer.Scorer(model, "causal_lm", False, None)
    batch = scoring.as_source(dataset(rows), None, 8).collate(rows[:8])
    scorer._find_head({"input_ids": batch["input_ids"]})
    model.lm_head.register_forward_hook(lambda _, args, out: sizes.append(out.shape[:-1].numel()))
    with torch.no_grad():
        scorer(batch, list(range(8)))
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
        real, tried = _scorer.Scorer._rows, []

        def tight(self, batch, size):
            tried.append(size)
            if size > 3:
                raise torch.OutOfMemoryError("no room")
            return real(self, batch, size)

        monkeypatch.setattr(_scorer.Scorer, "_rows", tight)
        assert torch.allclose(quiet(model, dataset(rows)).losses, expected, rtol=1e-4, atol=0)
        assert sum(size > 3 for size in tried) < 8  # it learns what fits

    def test_one_sample_that_does_not_fit_is_named(self, model, rows, monkeypatch):
        def none(self, batch, size):
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(_scorer.Scorer, "_rows", none)
        with pytest.raises(RuntimeError, match=r"sample \d+ alone does not fit into memory"):
            quiet(model, dataset(rows[:4]))

    def test_other_errors_are_not_hidden(self, model, rows, monkeypatch):
        def broken(self, batch, size):
            raise RuntimeError("shapes")

        monkeypatch.setattr(_scorer.Scorer, "_rows", broken)
        with pytest.raises(RuntimeError, match="shapes"):
            quiet(model, dataset(rows[:4]))


class TestCache:
    def test_a_second_call_reads(self, model, rows, monkeypatch):
        first = quiet(model, dataset(rows), cache=True, tokens=True)
        monkeypatch.setattr(_scorer.Scorer, "_rows", None)  # would fail if called
        second = quiet(model, dataset(rows), cache=True, tokens=True)
        assert torch.equal(first.losses, second.losses)
        assert all(map(torch.equal, first.token_losses, second.token_losses))

    @pytest.mark.parametrize("change", ["model", "data", "options", "collate"])
    def test_another_model_data_or_option_is_scored_anew(self, model, rows, change, monkeypatch):
        quiet(model, dataset(rows), cache=True)
        data, options = dataset(rows), {}
        if change == "model":
            model.lm_head.weight.data[0, 0] += 1e-3
        elif change == "data":
            data = dataset([*rows[:-1], rows[0]])
        elif change == "options":
            options = {"tokens": True}
        else:
            options = {"collate": lambda samples: samples}
        monkeypatch.setattr(_scorer.Scorer, "_rows", None)
        with pytest.raises(TypeError):
            quiet(model, data, cache=True, **options)

    def test_the_key_is_of_the_content(self, rows):
        def key(data):
            return scoring.as_source(data, None, 1).fingerprint()

        made = dataset(rows)
        assert key(made) == key(dataset([dict(row) for row in rows]))
        assert key(made.select(range(5, 20)).shuffle(seed=1)) == key(
            dataset(rows[5:20]).shuffle(seed=1).flatten_indices()
        )
        others = [made.shuffle(seed=1), made.select(range(40)), made.rename_column("labels", "l")]
        assert len({key(made), *map(key, others)}) == 4

    def test_a_key_of_the_users(self, model, rows, monkeypatch):
        batches = [scoring.as_source(dataset(rows), None, 1).collate(rows)]
        first = quiet(model, iter(batches), cache=True, data_key="v1")
        monkeypatch.setattr(_scorer.Scorer, "_rows", None)
        assert torch.equal(
            quiet(model, iter(batches), cache=True, data_key="v1").losses, first.losses
        )

    @pytest.mark.parametrize("change", ["fewer", "other"])
    def test_changed_data_under_the_same_key_is_refused(self, model, rows, change):
        collate = scoring.as_source(dataset(rows), None, 1).collate
        quiet(model, rows, collate=collate, cache=True, data_key="v1")
        rows = rows[:-1] if change == "fewer" else [rows[1], *rows[1:]]
        with pytest.raises(ValueError, match="give changed data another data_key"):
            quiet(model, rows, collate=collate, cache=True, data_key="v1")

    def test_a_damaged_entry_is_said(self, model, rows, tmp_path):
        quiet(model, dataset(rows), cache=tmp_path / "c")
        file = next((tmp_path / "c").rglob("scores.safetensors"))
        file.write_bytes(file.read_bytes()[:-5])
        with pytest.raises(ValueError, match=r"the scores in .* cannot be read"):
            quiet(model, dataset(rows), cache=tmp_path / "c")

    def test_saved_and_loaded(self, model, rows, tmp_path):
        scores = quiet(model, dataset(rows), tokens=True)
        scores.save(tmp_path / "s")
        again = Scores.load(tmp_path / "s")
        assert torch.equal(again.losses, scores.losses)
        assert all(map(torch.equal, again.token_losses, scores.token_losses))
        with pytest.raises(FileNotFoundError, match="holds no scores"):
            Scores.load(tmp_path / "nowhere")


def slow_pass(shared, cache, out):
    """What is killed: a pass that keeps its parts often and takes about three seconds."""
    torch.set_num_threads(1)
    scoring._KEEP_SECONDS = 0.02
    real = _scorer.Scorer._rows

    def slow(self, batch, size):
        print("scoring", flush=True)
        time.sleep(0.02)
        return real(self, batch, size)

    _scorer.Scorer._rows = slow
    data = datasets.Dataset.from_list(gsm8k(Path(shared), 120))
    scores = score(small_llama(), data, tokens=True, batch_size=1, cache=cache, progress=False)
    scores.save(out)


def test_killed_ten_times_it_ends_the_same(shared_data, tmp_path):
    tests = str(Path(__file__).parents[1])
    chance = random.Random(7)

    def start(cache, out, then):
        arguments = f"{str(shared_data)!r}, {str(cache)!r}, {str(out)!r}"
        code = (
            f"import sys; sys.path.insert(0, {tests!r})\n"
            f"from objective.test_score import slow_pass\nslow_pass({arguments})"
        )
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            return then(process)

    def kill_soon(process):
        time.sleep(chance.uniform(0.0, 0.35))
        alive = process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        return alive

    def finish(process):
        process.stdout.read()
        return process.wait()

    assert start(tmp_path / "whole", tmp_path / "a", finish) == 0
    kills, parts = 0, []
    for _ in range(10):
        kills += start(tmp_path / "killed", tmp_path / "b", kill_soon)
        parts.append(len(list((tmp_path / "killed").rglob("part-*"))))
    assert start(tmp_path / "killed", tmp_path / "b", finish) == 0
    assert kills == 10
    assert parts == sorted(parts)
    assert parts[-1] > 0  # it did go on, and not start over
    whole, killed = Scores.load(tmp_path / "a"), Scores.load(tmp_path / "b")
    assert torch.equal(whole.losses, killed.losses)
    assert all(map(torch.equal, whole.token_losses, killed.token_losses))
    assert not list((tmp_path / "killed").rglob("*.partial"))


def score_on_a_rank(shared, out):
    rank = torch.distributed.get_rank()
    data = datasets.Dataset.from_list(gsm8k(Path(shared), 41))
    scores = score(small_llama(), data, tokens=True, cache=f"{out}/cache", progress=False)
    scores.save(f"{out}/rank{rank}")


def test_two_ranks_share_the_work_and_the_result(shared_data, tmp_path, model, rows):
    run_on_ranks(2, score_on_a_rank, shared_data, tmp_path, folder=tmp_path)
    one, two = (Scores.load(tmp_path / f"rank{r}") for r in (0, 1))
    assert torch.equal(one.losses, two.losses)
    alone = quiet(model, dataset(rows), tokens=True)
    assert torch.equal(alone.losses, one.losses)
    assert torch.equal(Flow().weigh(alone), Flow().weigh(two))
    assert all(map(torch.equal, alone.token_losses, two.token_losses))


class TestOtherTasks:
    def test_an_encoder(self, rows):
        config = transformers.BertConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=258, num_labels=3,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config).eval()
        data = dataset([{"input_ids": r["input_ids"], "labels": i % 3} for i, r in enumerate(rows)])
        found = quiet(model, data)
        for i in (0, 17, 40):
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
        with pytest.raises(ValueError, match=r"one loss a sample, \(4,\), got \(\)"):
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
        with pytest.raises(ValueError, match="a batch must be a mapping with labels"):
            quiet(model, dataset([{"input_ids": r["input_ids"]} for r in rows[:3]]))

    def test_an_unknown_task(self):
        with pytest.raises(ValueError, match="the task of Linear is not known: pass task="):
            quiet(torch.nn.Linear(1, 1), [torch.zeros(3, 1)])

    def test_no_data_at_all(self, model):
        with pytest.raises(TypeError, match="data must be a DataLoader"):
            quiet(model, 3)
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            quiet(model, [], batch_size=0)
        with pytest.raises(ValueError, match="tokens=True needs a task with tokens"):
            quiet(model, [], task="classification", tokens=True)
