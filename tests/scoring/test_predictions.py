"""The tokens that are kept per position: an unbiased estimate of KL, exact at the base."""

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast._torch.head_loss import replay_divergence
from holdfast._torch.teachers import AllTokens, KeptTokens
from holdfast.scoring.predictions import Predictor, kept_tokens, positions, sampled_tokens
from small import make_llama, noisy

LENGTHS, STARTS = torch.tensor([9, 4, 12, 7]), torch.tensor([1, 3, 2, 1])


def texts(vocabulary=40):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (4, 12), generator=generator).int()
    noise = torch.rand(4, 11, generator=generator, dtype=torch.float64)
    return tokens, LENGTHS, STARTS, noise


def spread(rows, vocabulary=40, scale=2.0):
    """The logits of one distribution, and noise at equal distances in [0, 1)."""
    z = scale * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0))
    return z, (torch.arange(rows, dtype=torch.float64) + 0.5) / rows


@pytest.mark.parametrize(("kept", "sampled"), [(2, 1), (8, 2), (39, 9), (40, 0), (64, 0)])
def test_a_quarter_is_sampled_in_proportion_to_the_probabilities(kept, sampled):
    z, grid = spread(4000)
    assert sampled_tokens(kept, 40) == sampled
    found = kept_tokens(z.expand(4000, -1), kept, grid)
    log_probs, likeliest = z.log_softmax(-1), min(kept, 40) - sampled
    assert found.ids.shape == found.log_probs.shape == (4000, likeliest + sampled)
    assert (found.ids[:, :likeliest] == z.topk(likeliest).indices).all()
    torch.testing.assert_close(found.log_probs, log_probs[0][found.ids.long()])
    others = log_probs[0].exp().index_fill(0, found.ids[0, :likeliest].long(), 0)
    torch.testing.assert_close(found.rest, others.sum().expand(4000))
    if sampled:
        counts = torch.bincount(found.ids[:, likeliest:].flatten(), minlength=40)
        torch.testing.assert_close(counts / counts.sum(), others / others.sum(), atol=1e-3, rtol=0)
        assert not counts[others == 0].any()


@pytest.mark.parametrize("scale", [2.0, 6.0, 12.0], ids=["flat", "peaked", "sure"])
@pytest.mark.parametrize("kept", [2, 8, 64])
def test_the_estimate_is_unbiased(scale, kept):
    """Also where the others have little of the probability; in float64, q is not p.

    The error of the mean is that of a grid of 10,000 points, relative to the rest.
    """
    z, grid = spread(10_000, vocabulary=300, scale=scale)
    q = z.double() + torch.randn(300, generator=torch.Generator().manual_seed(1)).double()
    found = kept_tokens(z.expand(10_000, -1), kept, grid)
    teacher = KeptTokens(*found, sampled_tokens(kept, 300))
    values, gradient = teacher.compare(slice(None), q.expand(10_000, -1))
    exact, exactly = AllTokens(z.double()).compare(slice(1), q)
    rest = float(found.rest[0])
    assert 0 < rest < {2.0: 1, 6.0: 0.6, 12.0: 1e-3}[scale]
    assert float(values.mean()) == pytest.approx(float(exact), abs=2e-7 + 1e-3 * rest)
    torch.testing.assert_close(gradient().mean(0), exactly()[0], atol=2e-7 + 2e-3 * rest, rtol=0)


@pytest.mark.parametrize("others", [-200.0, -torch.inf])
def test_the_likeliest_token_stands_for_others_without_probability(others):
    """exp(−200) is 0 in float32."""
    z = torch.full((50, 300), others)
    z[:, 5:11] = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    noise = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = kept_tokens(z, 8, noise)
    assert found.ids[0].tolist() == [5, 6, 7, 8, 9, 10, 5, 5]
    assert not found.rest.any()
    values, gradient = KeptTokens(*found, 2).compare(slice(50), z)
    assert values.abs().max() < 1e-6
    assert gradient().abs().max() < 1e-6


def test_the_predictions_are_those_of_each_text_alone():
    model, given = make_llama(vocab=40, scale=0.3), texts()
    predictor = Predictor(model, 12, 8)
    found = predictor(*given)
    assert predictor.sampled == 2
    for i, (length, start) in enumerate(zip(LENGTHS.tolist(), STARTS.tolist(), strict=True)):
        logits = model(input_ids=given[0][i : i + 1, :length].long()).logits[0, start - 1 : -1]
        alone = kept_tokens(logits.detach(), 8, given[3][i, : length - start])
        assert torch.equal(found.ids[i, : length - start], alone.ids)
        torch.testing.assert_close(found.log_probs[i, : length - start], alone.log_probs)
        torch.testing.assert_close(found.rest[i, : length - start], alone.rest)
        assert not any(part[i, length - start :].any() for part in found)


@pytest.mark.parametrize("chunk", [40, 200])
def test_batches_and_chunks_do_not_matter(chunk, monkeypatch):
    model, given = make_llama(vocab=40, scale=0.3), texts()
    wanted, counted = Predictor(model, 12, 8)(*given), []
    monkeypatch.setattr("holdfast._torch.lm_head.CHUNK", chunk)  # logits: one or five rows
    predictor = Predictor(model, 12, 8)
    predictor.batches.size = 3
    found = predictor(*given, counted.append)
    assert torch.equal(found.ids, wanted.ids)
    torch.testing.assert_close(found.log_probs, wanted.log_probs)
    assert counted == [19, 6]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_at_the_base_the_divergence_is_0(autocast):
    """In the training's own path, and in its precision; a changed model is away from it."""
    model, given = make_llama(vocab=300, scale=0.3), texts(300)
    model.train()
    where = positions(LENGTHS, STARTS)
    inputs = {
        "input_ids": given[0].long(),
        "attention_mask": (torch.arange(12) < LENGTHS[:, None]).long(),
    }
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        with torch.no_grad():
            found = Predictor(model, 12, 64)(*given)
        used = torch.arange(11) < (LENGTHS - STARTS)[:, None]
        teacher = KeptTokens(*(part[used] for part in found), 16)
        at_base = replay_divergence(model, inputs, where, teacher)
        away = replay_divergence(noisy(model), inputs, where, teacher)
    assert abs(at_base.item()) / int(used.sum()) < 1e-6
    assert away.item() / int(used.sum()) > 1e-3
