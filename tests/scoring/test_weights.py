import pytest
import torch
from torch.utils.data import DataLoader, Subset, random_split

from holdfast import Flow, Scores, score, weighted_loss, with_weights
from holdfast.data import pad_collate
from scoring.lm import gsm8k, small_llama

datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

ROWS = [{"id": i, "x": float(i)} for i in range(20)]
WEIGHTS = torch.arange(20) / 100


def aligned(samples):
    return all(s["weight"] == pytest.approx(s["id"] / 100) for s in samples) and len(samples) > 0


def test_weights_follow_their_samples_in_datasets():
    data = with_weights(datasets.Dataset.from_list(ROWS), WEIGHTS)
    assert aligned(list(data))
    assert aligned(list(data.shuffle(seed=3)))
    assert aligned(list(data.filter(lambda s: s["id"] % 3 == 0)))
    assert aligned(list(data.shard(4, 1)))
    assert aligned(list(data.shuffle(seed=1).filter(lambda s: s["id"] > 4).shard(2, 0)))


def test_a_dataset_that_was_shuffled_before():
    shuffled = datasets.Dataset.from_list(ROWS).shuffle(seed=5)
    weights = torch.tensor(shuffled["id"]) / 100
    assert aligned(list(with_weights(shuffled, weights)))


def test_weights_follow_their_samples_in_torch():
    data = with_weights(ROWS, WEIGHTS)
    assert aligned([data[i] for i in range(20)])
    assert aligned(list(Subset(data, [7, 3, 11])))
    assert aligned([s for part in random_split(data, [13, 7]) for s in part])
    batches = DataLoader(data, batch_size=6, shuffle=True)
    assert all(torch.allclose(b["weight"].float(), b["id"] / 100) for b in batches)


def test_pairs_get_a_third_element():
    data = with_weights([(torch.ones(2), 0), (torch.zeros(2), 1)], torch.tensor([0.5, 0.25]))
    assert data[1][1:] == (1, 0.25)


def test_wrong_use():
    with pytest.raises(ValueError, match="got 20 weights for 19 samples: score this dataset"):
        with_weights(ROWS[1:], WEIGHTS)
    with pytest.raises(ValueError, match=r"by sample first: scores\.split"):
        with_weights(ROWS, torch.ones(100))
    with pytest.raises(TypeError, match="must be sample weights, got Scores"):
        with_weights(ROWS, Scores(torch.ones(20), torch.ones(20)))
    assert with_weights(ROWS, WEIGHTS.tolist())[3]["weight"] == pytest.approx(0.03)
    data = datasets.Dataset.from_list(ROWS)
    with pytest.raises(ValueError, match="already has a column 'x'"):
        with_weights(data, WEIGHTS, column="x")
    with pytest.raises(ValueError, match="already have an entry 'x'"):
        with_weights(ROWS, WEIGHTS, column="x")[0]


def test_token_weights_reach_their_tokens(shared_data):
    """Through scoring, the column, shuffling, padding and the loss, on real text."""
    rows, model = gsm8k(shared_data, 12), small_llama()
    scores = score(
        model, datasets.Dataset.from_list(rows), tokens=True, cache=False, progress=False
    )
    weights = scores.split(Flow(level="token").weigh(scores))
    data = with_weights(datasets.Dataset.from_list(rows), weights).shuffle(seed=2)
    batch = pad_collate(list(data))
    assert batch["weight"].shape == batch["labels"].shape
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        found = weighted_loss(logits, batch["labels"], batch["weight"], "causal_lm").item()
    pairs = zip(weights, scores.token_losses, strict=True)
    expected = sum(float((w * f).sum()) for w, f in pairs) / int(scores.counts.sum())
    assert found == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"token weights for the \d+ targets of sample 0"):
        with_weights(rows, [weights[0][:-1], *weights[1:]])
