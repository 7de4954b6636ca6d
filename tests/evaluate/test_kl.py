"""KL estimators against exact enumeration, on a vocabulary that can be enumerated."""

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast.comparison.plan import Measuring
from holdfast.evaluate.kl import ContextFreeKL, token_kl
from holdfast.evaluate.suite import Suite
from holdfast.io.models import Loader
from holdfast.scoring import kl, likelihood
from holdfast.scoring.kl import kl_divergence
from small import make_llama, noisy

LENGTH = 4
START, END = 2, 3


def run(kl, base, tuned):
    loader = Loader()
    with tempfile.TemporaryDirectory() as folder:
        with loader.open(base) as loaded:
            kl.remember(loaded, Path(folder), progress=False)
        with loader.open(tuned) as loaded:
            return kl.compare(loaded, progress=False)


def next_tokens(model, prefix):
    with torch.inference_mode():
        ids = torch.tensor([prefix])
        return model(input_ids=ids).logits[0, -1].double().log_softmax(-1)


def exact(base, tuned, vocab):
    """KL of the two distributions over all texts, by their probabilities, and their mean length.

    A text ends with END or at LENGTH tokens.
    """
    divergence, tokens = 0.0, 0.0
    ahead = functools.cache(lambda model, prefix: next_tokens(model, list(prefix)))
    for text in itertools.product(range(vocab), repeat=LENGTH):
        cut = text.index(END) + 1 if END in text else LENGTH
        if any(token != 0 for token in text[cut:]):  # one filling for what comes after the end
            continue
        prefix, log_p, log_q = [START], 0.0, 0.0
        for token in text[:cut]:
            log_p += float(ahead(base, tuple(prefix))[token])
            log_q += float(ahead(tuned, tuple(prefix))[token])
            prefix.append(token)
        p = torch.tensor(log_p).exp().item()
        divergence += p * (log_p - log_q)
        tokens += p * cut
    return divergence / tokens


def test_context_free_texts_estimate_the_divergence_of_all_texts():
    base = make_llama(vocab=5, scale=0.3)
    tuned = noisy(base, 0.1)
    truth = exact(base, tuned, 5)
    found = run(ContextFreeKL(texts=1500, tokens=LENGTH), base, tuned)
    assert truth > 0.01
    assert found.kl.low < truth < found.kl.high  # the stated error
    assert found.kl.high - found.kl.low < 0.2 * truth  # which says something
    assert found.predictions < 1500 * LENGTH  # some texts ended before


def test_texts_are_drawn_from_the_base():
    base = make_llama(vocab=5, scale=0.3)
    with Loader().open(base) as loaded:
        texts = ContextFreeKL(texts=4000, tokens=2).draw(loaded)
    second = torch.tensor([text[1] for text in texts if len(text) > 1])
    wanted = next_tokens(base, [START]).exp()
    wanted[END] = 0  # after it nothing is predicted: those texts are of one token
    share = torch.bincount(second, minlength=5) / len(texts)
    assert torch.allclose(share.double(), wanted, atol=0.03)


def test_on_given_tokens_it_is_exact():
    base = make_llama(vocab=7)
    tuned = noisy(base, 0.1)
    rows = [[2, 4, 6, 1], [2, 5]]
    found = run(token_kl("rows", rows, "how"), base, tuned)
    prefixes = [row[: i + 1] for row in rows for i in range(len(row))]
    each = [
        kl_divergence(next_tokens(base, prefix), next_tokens(tuned, prefix)) for prefix in prefixes
    ]
    assert found.kl.value == pytest.approx(float(sum(each)) / 6, rel=1e-5)
    assert (found.predictions, found.kl.n, found.per) == (6, 2, "token")


@pytest.mark.parametrize("tokens", [1, 25, 1000])
@pytest.mark.parametrize("apart", [True, False])
def test_sequences_that_run_together_keep_their_order(monkeypatch, tokens, apart):
    monkeypatch.setattr(likelihood, "_TOKENS_ON_A_CPU", tokens)
    model = make_llama(vocab=11, limit=16)
    if not apart:
        model.get_output_embeddings = lambda: torch.nn.Linear(16, 11)
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 16, 1, 7, 20, 7, 2, 12]
    rows = [torch.randint(11, (n,), generator=generator).tolist() for n in lengths]
    with Loader().open(model) as loaded:
        found = list(token_kl("rows", rows, "how").log_probs(loaded))
        for row, table in zip(rows, found, strict=True):
            with torch.inference_mode():
                alone = model(input_ids=torch.tensor([row[:16]])).logits[0].log_softmax(-1)
            assert torch.allclose(table, alone, rtol=1e-5, atol=1e-6)


def test_sequences_of_similar_lengths_run_together(monkeypatch):
    monkeypatch.setattr(likelihood, "_TOKENS_ON_A_CPU", 20)
    model, shapes = make_llama(vocab=11), []
    model.model.register_forward_hook(lambda _, args, out: shapes.append(tuple(out[0].shape[:2])))
    with Loader().open(model) as loaded:
        list(token_kl("rows", [[5] * n for n in (3, 10) * 3], "how").log_probs(loaded))
    assert shapes[2:] == [(2, 10), (2, 10), (2, 3)]  # after the look at the first one


def test_logits_are_made_for_as_many_sequences_as_fit(monkeypatch):
    monkeypatch.setattr(kl, "CHUNK", 7 * 11)
    model, sizes = make_llama(vocab=11), []
    model.lm_head.register_forward_hook(lambda _, args, out: sizes.append(out.shape[:-1].numel()))
    with Loader().open(model) as loaded:
        list(token_kl("rows", [[2, 5, 6]] * 9, "how").log_probs(loaded))
    assert sizes[2:] == [6, 6, 6, 6, 3]  # after the look whether the head can be applied apart


def test_the_same_model_does_not_diverge():
    base = make_llama(vocab=11)
    found = run(ContextFreeKL(texts=8, tokens=8), base, make_llama(vocab=11))
    assert (found.kl.value, found.kl.low, found.kl.high) == (0, 0, 0)


def test_other_numbers_of_classes_are_refused(tmp_path):
    kl = ContextFreeKL(texts=2, tokens=2)
    kl.over_tokens = False
    with Loader().open(make_llama(vocab=5)) as loaded:
        kl.remember(loaded, tmp_path, progress=False)
    over = pytest.raises(ValueError, match="over 5 classes or tokens")
    with Loader().open(make_llama(vocab=6)) as loaded, over:
        kl.compare(loaded, progress=False)


def test_a_model_without_a_begin(monkeypatch):
    base = make_llama(vocab=5)
    base.config.bos_token_id = base.config.eos_token_id = None
    with Loader().open(base) as loaded, pytest.raises(ValueError, match="start_token"):
        ContextFreeKL(texts=2).draw(loaded)
    with Loader(start_token=4).open(base) as loaded:
        assert ContextFreeKL(texts=2, tokens=3).draw(loaded)[0][0] == 4


def test_small_divergences_are_exact_enough_in_float32():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(64, 5000, generator=generator)
    moved = logits + 1e-2 * torch.randn(64, 5000, generator=generator)
    pair = logits.log_softmax(-1), moved.log_softmax(-1)
    exact = kl_divergence(*(part.double() for part in pair))
    assert torch.allclose(kl_divergence(*pair).double(), exact, rtol=1e-3)
    assert kl_divergence(*pair).double().mean().item() == pytest.approx(exact.mean().item(), 1e-5)


def test_zero_probabilities():
    certain, even = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert kl_divergence(certain, even).item() == pytest.approx(0.6931, abs=1e-3)
    assert kl_divergence(even, certain).item() == float("inf")
    assert kl_divergence(even, even * float("nan")).isnan()


@pytest.mark.parametrize("texts", [10**12, 10**23])
def test_more_texts_than_can_be_drawn(texts):
    words = "context_free must be at most 100,000, got 10000"
    with pytest.raises(ValueError, match=words):
        ContextFreeKL(texts)
    for cls in (Suite, Measuring):
        with pytest.raises(ValueError, match=words):
            cls(context_free=texts)
    with pytest.raises(ValueError, match="seed must be at most 2,147,483,647"):
        ContextFreeKL(seed=texts)
