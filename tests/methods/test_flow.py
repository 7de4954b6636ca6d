import dataclasses
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Flow, Scores

losses = st.lists(st.floats(1e-6, 50), min_size=1, max_size=40)


@given(losses)
def test_weights_equal_their_definition(f):
    weights = Flow().weigh(torch.tensor(f, dtype=torch.float64))
    tau = statistics.median(f)
    assert weights.tolist() == pytest.approx([math.exp(-x / tau) for x in f], rel=1e-14, abs=0)
    assert weights.dtype == torch.float64


@pytest.mark.parametrize(
    ("f", "tau"),
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([4.0, 1.0, 2.0, 3.0], 2.5),
        ([7.0], 7.0),
        ([2.0, 2.0, 2.0, 9.0], 2.0),
    ],
    ids=["odd", "even", "one", "ties"],
)
def test_the_median(f, tau):
    weights = Flow().weigh(torch.tensor(f))
    assert weights.tolist() == pytest.approx([math.exp(-x / tau) for x in f], rel=1e-12)


@given(losses, st.floats(0.1, 100))
def test_a_given_tau(f, tau):
    weights = Flow(tau=tau).weigh(torch.tensor(f, dtype=torch.float64))
    assert weights.tolist() == pytest.approx([math.exp(-x / tau) for x in f], rel=1e-12)


@given(losses)
def test_tau_infinite_is_uniform(f):
    assert torch.equal(Flow(tau=math.inf).weigh(torch.tensor(f)), torch.ones(len(f)).double())


@given(losses)
def test_normalized_weights_have_mean_one(f):
    f = torch.tensor(f, dtype=torch.float64)
    raw, scaled = Flow().weigh(f), Flow(normalize=True).weigh(f)
    assert scaled.mean().item() == pytest.approx(1.0)
    assert torch.allclose(scaled, raw / raw.mean())


@given(losses, st.integers(0, 2**16))
def test_the_weights_minimise_the_entropic_objective(f, seed):
    """Σπf + τΣπ log π over all distributions: no other one is better."""
    f = torch.tensor(f, dtype=torch.float64)
    tau = float(statistics.median(f.tolist()))
    weights = Flow().weigh(f)
    best = weights / weights.sum()

    def objective(pi):
        return (pi * f).sum() + tau * torch.special.xlogy(pi, pi).sum()

    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 0.1, 1.0):
        other = best * torch.exp(size * torch.randn(len(f), generator=generator).double())
        assert objective(other / other.sum()) >= objective(best) - 1e-12
    # The optimum is known in closed form: −τ·log Σ exp(−f/τ).
    closed = -tau * torch.logsumexp(-f / tau, 0)
    assert objective(best).item() == pytest.approx(closed.item(), rel=1e-9, abs=1e-9)


@given(losses)
def test_easy_samples_weigh_more(f):
    f = torch.tensor(f, dtype=torch.float64)
    weights = Flow().weigh(f)
    order = f.argsort()
    assert (weights[order].diff() <= 0).all()


class TestRunningMedian:
    def test_it_is_the_median_of_all_so_far(self):
        flow, seen = Flow(tau="running_median"), []
        for step in range(5):
            f = torch.rand(4, generator=torch.Generator().manual_seed(step)).double() + 0.1
            seen += f.tolist()
            assert torch.allclose(flow.weigh(f), torch.exp(-f / statistics.median(seen)))

    def test_only_the_window_counts(self):
        flow, f = Flow(tau="running_median"), torch.ones(6_000)
        flow.weigh(torch.full((10_000,), 100.0))
        assert torch.allclose(flow.weigh(f), torch.exp(-f.double()))  # 6,000 of the last 10,000

    def test_saved_and_loaded(self, tmp_path):
        flow, other = Flow(tau="running_median"), Flow(tau="running_median")
        flow.weigh(torch.arange(1.0, 6.0))
        torch.save(flow.state_dict(), tmp_path / "flow.pt")
        other.load_state_dict(torch.load(tmp_path / "flow.pt", weights_only=True))
        more = torch.tensor([9.0, 10.0])
        assert torch.equal(other.weigh(more), flow.weigh(more))

    def test_what_was_seen_is_no_part_of_the_description(self):
        flow = Flow(tau="running_median")
        flow.weigh(torch.ones(3))
        assert flow == Flow(tau="running_median")
        assert "recent" not in repr(flow)
        assert len(dataclasses.replace(flow)._recent) == 0


class TestScores:
    scores = Scores(
        losses=torch.tensor([1.0, math.nan, 3.0]),
        counts=torch.tensor([2, 0, 1]),
        token_losses=[torch.tensor([0.5, 1.5]), torch.tensor([]), torch.tensor([3.0])],
    )

    def test_samples_without_targets_get_no_weight(self):
        weights = Flow().weigh(self.scores)
        assert weights.tolist() == pytest.approx([math.exp(-0.5), 0.0, math.exp(-1.5)])
        assert self.scores.excluded == [1]

    def test_tokens_have_their_own_median(self):
        weights = Flow(level="token").weigh(self.scores)
        assert weights.tolist() == pytest.approx([math.exp(-x / 1.5) for x in (0.5, 1.5, 3.0)])
        assert [len(w) for w in self.scores.split(weights)] == [2, 0, 1]

    def test_token_weights_need_token_losses(self):
        with pytest.raises(ValueError, match=r"score\(\.\.\., tokens=True\)"):
            Flow(level="token").weigh(Scores(torch.ones(1), torch.ones(1)))


class TestRefused:
    @pytest.mark.parametrize(
        ("bad", "what"), [(math.nan, "nan"), (math.inf, "inf"), (-0.1, "-0.1")]
    )
    def test_losses(self, bad, what):
        with pytest.raises(ValueError, match=rf"2 of \d+ are not: the loss of sample 2 is {what}"):
            Flow().weigh(torch.tensor([1.0, 2.0, bad, bad]))

    def test_no_losses(self):
        with pytest.raises(ValueError, match="the data is empty"):
            Flow().weigh(torch.tensor([]))

    def test_a_median_of_zero(self):
        with pytest.raises(ValueError, match="the median loss is 0"):
            Flow().weigh(torch.tensor([0.0, 0.0, 1.0]))

    def test_weights_that_all_underflow(self):
        with pytest.raises(ValueError, match="all weights are 0"):
            Flow(tau=1e-3).weigh(torch.tensor([1.0, 2.0]))

    @pytest.mark.parametrize("tau", ["mean", 0.0, -1.0, math.nan, None, True])
    def test_tau(self, tau):
        with pytest.raises((ValueError, TypeError), match="tau must be"):
            Flow(tau=tau)

    def test_scores(self):
        bad = Scores(torch.tensor([math.nan, 1.0, math.nan]), torch.tensor([0, 1, 1]))
        with pytest.raises(ValueError, match="the loss of sample 2 is nan"):
            Flow().weigh(bad)
        with pytest.raises(ValueError, match="no sample has a target"):
            Flow().weigh(Scores(torch.tensor([math.nan]), torch.tensor([0])))

    def test_level(self):
        with pytest.raises(ValueError, match="level must be"):
            Flow(level="word")
