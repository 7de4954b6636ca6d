"""Keeping scores: a second call, a killed pass, other ranks and processes, keys."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast import Flow, Scores, score
from holdfast.scoring import scorer
from ranks import run_on_ranks
from scoring.lm import dataset, gsm8k, quiet, small_llama

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")


class TestCache:
    def test_a_second_call_reads(self, model, rows, monkeypatch):
        first = quiet(model, dataset(rows), cache=True, tokens=True)
        monkeypatch.setattr(scorer.Scorer, "_rows", None)  # would fail if called
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
        monkeypatch.setattr(scorer.Scorer, "_rows", None)
        with pytest.raises(TypeError):
            quiet(model, data, cache=True, **options)

    def test_the_key_is_of_the_content(self, rows):
        def key(data):
            return scorer.as_source(data, None, 1).fingerprint()

        made = dataset(rows)
        assert key(made) == key(dataset([dict(row) for row in rows]))
        assert key(made.select(range(5, 20)).shuffle(seed=1)) == key(
            dataset(rows[5:20]).shuffle(seed=1).flatten_indices()
        )
        others = [made.shuffle(seed=1), made.select(range(20)), made.rename_column("labels", "l")]
        assert len({key(made), *map(key, others)}) == 4

    def test_every_token_of_rows_is_part_of_the_key(self):
        def key(rows):
            return scorer.as_source(rows, None, 1).fingerprint()

        rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
        keys = {key(rows), key(rows[:1]), key(rows[::-1])}
        for i, row in enumerate(rows):
            for name, ids in row.items():
                for at in range(len(ids)):
                    other = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
                    keys.add(key([*rows[:i], {**row, name: other}, *rows[i + 1 :]]))
                keys.add(key([*rows[:i], {**row, name: ids[:-1]}, *rows[i + 1 :]]))
        assert len(keys) == 3 + 8 + 4
        assert key(rows) == key([dict(reversed(row.items())) for row in rows])

    def test_a_key_of_the_users(self, model, rows, monkeypatch):
        batches = [scorer.as_source(dataset(rows), None, 1).collate(rows)]
        first = quiet(model, iter(batches), cache=True, data_key="v1")
        monkeypatch.setattr(scorer.Scorer, "_rows", None)
        assert torch.equal(
            quiet(model, iter(batches), cache=True, data_key="v1").losses, first.losses
        )

    @pytest.mark.parametrize("change", ["fewer", "other"])
    def test_changed_data_under_the_same_key_is_refused(self, model, rows, change):
        collate = scorer.as_source(dataset(rows), None, 1).collate
        quiet(model, rows, collate=collate, cache=True, data_key="v1")
        rows = rows[:-1] if change == "fewer" else [rows[1], *rows[1:]]
        with pytest.raises(ValueError, match="another data_key"):
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
        with pytest.raises(FileNotFoundError, match="contains no scores"):
            Scores.load(tmp_path / "nowhere")


def slow_pass(shared, cache, out):
    """What is killed: a pass that keeps its parts often and takes some seconds."""
    torch.set_num_threads(1)
    scorer._SAVE_SECONDS = 0.02
    real = scorer.Scorer._rows

    def slow(self, batch, size):
        print("scoring", flush=True)
        time.sleep(0.02)
        return real(self, batch, size)

    scorer.Scorer._rows = slow
    data = datasets.Dataset.from_list(gsm8k(Path(shared), 240))
    scores = score(small_llama(), data, tokens=True, batch_size=1, cache=cache, progress=False)
    scores.save(out)


@pytest.mark.soak
def test_killed_ten_times_it_ends_the_same(shared_data, tmp_path):
    tests = str(Path(__file__).parents[1])
    chance = random.Random(7)

    def start(cache, out, then):
        arguments = f"{str(shared_data)!r}, {str(cache)!r}, {str(out)!r}"
        code = (
            f"import sys; sys.path.insert(0, {tests!r})\n"
            f"from scoring.test_score_cache import slow_pass\nslow_pass({arguments})"
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
    data = datasets.Dataset.from_list(gsm8k(Path(shared), 21))
    scores = score(small_llama(), data, tokens=True, cache=f"{out}/cache", progress=False)
    scores.save(f"{out}/rank{rank}")


@pytest.mark.soak
def test_two_ranks_share_the_work_and_the_result(shared_data, tmp_path, model, rows):
    run_on_ranks(2, score_on_a_rank, shared_data, tmp_path, folder=tmp_path)
    one, two = (Scores.load(tmp_path / f"rank{r}") for r in (0, 1))
    assert torch.equal(one.losses, two.losses)
    alone = quiet(model, dataset(rows), tokens=True)
    assert torch.equal(alone.losses, one.losses)
    assert torch.equal(Flow().weigh(alone), Flow().weigh(two))
    assert all(map(torch.equal, alone.token_losses, two.token_losses))


def score_twice(shared, out):
    """Each rank with a cache of its own, as on two nodes; killed before with a part kept."""
    rank = torch.distributed.get_rank()
    data = datasets.Dataset.from_list(gsm8k(Path(shared), 20))
    for _ in range(2):
        scores = score(small_llama(), data, tokens=True, cache=f"{out}/node{rank}", progress=False)
    scores.save(f"{out}/rank{rank}")


def test_ranks_with_caches_of_their_own(shared_data, tmp_path):
    run_on_ranks(2, score_twice, shared_data, tmp_path, folder=tmp_path)
    one, two = (Scores.load(tmp_path / f"rank{r}") for r in (0, 1))
    assert torch.equal(one.losses, two.losses)


def refuse_on_all(shared, out):
    """Changed data under an old key: rank 0 sees it, every rank is told."""
    rows = gsm8k(Path(shared), 12)
    options = {"cache": f"{out}/cache", "data_key": "k", "progress": False}
    score(small_llama(), rows[:6], **options)
    with pytest.raises(ValueError, match="another data_key"):
        score(small_llama(), rows[6:], **options)
    (Path(out) / f"told{torch.distributed.get_rank()}").touch()


def test_an_error_on_rank_0_is_raised_on_all(shared_data, tmp_path):
    run_on_ranks(2, refuse_on_all, shared_data, tmp_path, folder=tmp_path)
    assert len(list(tmp_path.glob("told*"))) == 2


class TestKeysThatMustDiffer:
    @pytest.fixture
    def batches(self):
        return [(torch.randn(4, 3), torch.arange(4) % 2)]

    def test_functions_with_other_surroundings(self, batches, tmp_path):
        def make(factor):
            return lambda m, batch: factor * torch.ones(4)

        class Times:
            def __init__(self, factor):
                self.factor = factor

            def __call__(self, model, batch):
                return self.factor * torch.ones(4)

            def method(self, model, batch):
                return self(model, batch)

        def with_default(model, batch, factor=1.0):
            return factor * torch.ones(4)

        model = torch.nn.Linear(3, 2)
        for n, task in enumerate(
            [make(1.0), make(2.0), Times(3.0), Times(4.0), Times(5.0).method, Times(6.0).method]
            + [partial(with_default, factor=f) for f in (7.0, 8.0)]
        ):
            found = quiet(model, batches, task=task, cache=tmp_path)
            assert found.losses.tolist() == [n + 1.0] * 4

    def test_models_of_the_same_weights(self, batches, tmp_path):
        one, two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
        models = [
            torch.nn.Sequential(one, torch.nn.ReLU(), two),
            torch.nn.Sequential(one, torch.nn.Sigmoid(), two),
        ]
        for model in models:
            kept = quiet(model, batches, task="classification", cache=tmp_path).losses
            assert torch.equal(kept, quiet(model, batches, task="classification").losses)

    def test_a_key_is_not_changed_by_a_forward_pass(self, tmp_path, monkeypatch):
        config = transformers.BertConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=60, num_labels=3,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        data = dataset([{"input_ids": [5, 6, 7], "label": i % 3} for i in range(6)])
        quiet(model, data, cache=tmp_path)
        model(input_ids=torch.tensor([[5]]), labels=torch.tensor([0]))  # writes its problem_type
        monkeypatch.setattr(scorer.Scorer, "_rows", None)
        quiet(model, data, cache=tmp_path)

    def test_transforms_and_columns_of_a_dataset(self, model, rows):
        data = dataset([{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows[:6]])
        kinds = [
            data,
            data.with_transform(lambda batch: {k: [x[:9] for x in v] for k, v in batch.items()}),
            data.with_transform(lambda batch: {k: [x[:7] for x in v] for k, v in batch.items()}),
            data.with_format("torch", columns=["input_ids", "labels"]),
        ]
        keys = [scorer.as_source(kind, None, 1).fingerprint() for kind in kinds]
        assert len(set(keys)) == 4

    def test_what_cannot_be_told_is_not_kept(self, batches, tmp_path):
        class Opaque:
            pass

        thing = Opaque()
        with pytest.warns(UserWarning, match="the scores are not cached"):
            quiet(
                torch.nn.Linear(3, 2), batches, cache=tmp_path,
                task=lambda m, batch: torch.ones(4) if thing else None,
            )  # fmt: skip
        with pytest.warns(UserWarning, match="the scores are not cached: .*; pass data_key="):
            quiet(torch.nn.Linear(3, 2), iter(batches), task="classification", cache=tmp_path)


class TestCacheAccidents:
    def test_images_are_kept(self, tmp_path, monkeypatch):
        data = torch.utils.data.TensorDataset(torch.randn(6, 3), torch.arange(6) % 2)
        model = torch.nn.Linear(3, 2)
        first = quiet(model, data, task="classification", cache=tmp_path)
        monkeypatch.setattr(scorer.Scorer, "_rows", None)
        again = quiet(model, data, task="classification", cache=tmp_path)
        assert torch.equal(first.losses, again.losses)

    def test_what_was_done_before_ctrl_c_is_kept(self, model, rows, tmp_path, monkeypatch, capsys):
        real, calls = scorer.Scorer._rows, []

        def interrupted(self, batch, size):
            calls.append(size)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return real(self, batch, size)

        monkeypatch.setattr(scorer.Scorer, "_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quiet(model, dataset(rows), cache=tmp_path, batch_size=2)
        quiet(model, dataset(rows), cache=tmp_path, batch_size=2, progress=True)
        assert sum(calls) - calls[3] == len(rows)
        assert f"{sum(calls[:3])} samples are already scored" in capsys.readouterr().err

    def test_a_damaged_part_is_scored_again(self, model, rows, tmp_path, monkeypatch):
        monkeypatch.setattr(scorer, "_SAVE_SECONDS", 0.0)
        real, calls = scorer.Scorer._rows, []

        def killed(self, batch, size):
            calls.append(size)
            if len(calls) > 3:
                raise KeyboardInterrupt
            return real(self, batch, size)

        monkeypatch.setattr(scorer.Scorer, "_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            quiet(model, dataset(rows), cache=tmp_path, batch_size=2)
        part = next(tmp_path.rglob("part-*")) / "scores.safetensors"
        part.write_bytes(b"")
        monkeypatch.setattr(scorer.Scorer, "_rows", real)
        with pytest.warns(UserWarning, match="skipping a part of an unfinished pass"):
            found = quiet(model, dataset(rows), cache=tmp_path, batch_size=2)
        assert torch.equal(found.losses, quiet(model, dataset(rows), batch_size=2).losses)

    def test_another_process_may_finish_first(self, model, rows, tmp_path, monkeypatch):
        monkeypatch.setattr(scorer, "_SAVE_SECONDS", 0.0)
        real = scorer.Scorer._rows

        def removing(self, batch, size):
            for folder in tmp_path.rglob("*.partial"):
                shutil.rmtree(folder)
            return real(self, batch, size)

        monkeypatch.setattr(scorer.Scorer, "_rows", removing)
        found = quiet(model, dataset(rows), cache=tmp_path, batch_size=2)
        assert len(found) == len(rows)

    def test_a_one_shot_iterator_under_an_old_key_is_looked_at(self, model, rows):
        collate = scorer.as_source(dataset(rows), None, 1).collate
        quiet(model, iter([collate(rows[:4])]), cache=True, data_key="k")
        with pytest.raises(ValueError, match="another data_key"):
            quiet(model, iter([collate(rows[4:8])]), cache=True, data_key="k")
