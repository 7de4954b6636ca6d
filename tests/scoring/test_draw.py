"""Drawing texts: the distribution, the record of predictions, and both kinds of caches."""

import types

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers

from holdfast._torch.teachers import AllTokens, KeptTokens
from holdfast.scoring import draw
from holdfast.scoring.draw import Drawer, draw_texts, drawn_tokens, inverse_cdf, kept_tokens
from small import make_llama


def make_gpt2():
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0,
        eos_token_id=3, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def make_windowed():
    """Layers with a window of 24 tokens and layers without, and capped logits."""
    torch.manual_seed(1)
    config = transformers.Gemma2Config(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=24,
        max_position_embeddings=64, bos_token_id=2, eos_token_id=3, initializer_range=0.3,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).eval()


MODELS = {
    "llama": lambda: make_llama(vocab=300, scale=0.3),
    "grouped": lambda: make_llama(vocab=300, scale=0.3, num_key_value_heads=1),
    "gpt2": make_gpt2,
    "windowed": make_windowed,
}


def noise(texts, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(texts, tokens, dtype=torch.float64, generator=generator)


def same_texts(one, other):
    assert torch.equal(one.lengths, other.lengths)
    for i, length in enumerate(one.lengths.tolist()):
        assert torch.equal(one.tokens[i, :length], other.tokens[i, :length])


@torch.inference_mode()
def literal_draw_texts(model, count, tokens, prefix, seed, size):
    """The documented draw: a batch, a token at a time, with torch.multinomial."""
    texts = []
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        for start in range(0, count, size):
            drawn = torch.tensor([prefix] * min(size, count - start))
            cache = None
            ended = torch.zeros(len(drawn), dtype=torch.bool)
            lengths = [len(prefix)] * len(drawn)
            for _ in range(tokens):
                shown = drawn if cache is None else drawn[:, -1:]
                out = model(
                    input_ids=shown, attention_mask=torch.ones_like(drawn), past_key_values=cache
                )
                cache = out.past_key_values
                following = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1)
                lengths = [n + (not e) for n, e in zip(lengths, ended.tolist(), strict=True)]
                drawn = torch.cat([drawn, following], 1)
                ended |= following[:, 0] == model.config.eos_token_id
                if ended.all():
                    break
            texts += [row[:n] for row, n in zip(drawn.tolist(), lengths, strict=True)]
    return texts


@pytest.mark.parametrize("prefix", [[2], [2, 5, 6]])
def test_texts_alone_are_the_literal_draw(prefix):
    model = make_llama(vocab=12, scale=0.3)
    found = draw_texts(model, 13, 20, prefix=prefix, seed=3, batch_size=5)
    assert found == literal_draw_texts(model, 13, 20, prefix, 3, 5)
    assert min(map(len, found)) < len(prefix) + 20  # some have ended


@pytest.mark.parametrize("vocabulary", [3, 256, 700])
def test_a_token_is_chosen_by_the_cumulative_distribution(vocabulary):
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(50, vocabulary, generator=generator)
    p = p.where(torch.rand(p.shape, generator=generator) < 0.5, 0.0)  # half are impossible
    p[:, 1] += 0.1
    u = noise(50, 1)
    u[0], u[1] = 0.0, 1 - 2**-53
    found = inverse_cdf(p, u)
    cdf = p.double().cumsum(-1)
    literal = [
        next(i for i in range(vocabulary) if cdf[row, i] > u[row, 0] * cdf[row, -1])
        for row in range(50)
    ]
    assert found[:, 0].tolist() == literal
    assert bool((p.gather(1, found) > 0).all())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("prefix", "length"), [([2], 21), ([2, 5, 7, 8], 16)])
def test_a_fixed_cache_draws_the_same_texts(name, prefix, length):
    model = MODELS[name]()
    assert draw._has_static_cache(model, length)
    grown, fixed = (Drawer(model, length, 8, static=static) for static in (False, True))
    for seed in (0, 1):  # the second batch is smaller and reuses the buffers of the first
        u = noise(7 - 2 * seed, length - len(prefix), seed)
        one, other = grown(prefix, u), fixed(prefix, u)
        same_texts(one, other)
        assert torch.allclose(one.own, other.own, atol=1e-4)
        assert torch.allclose(one.log_probs.float(), other.log_probs.float(), atol=0.01)
    assert fixed.static
    assert fixed._steps.rows == 7


def test_one_fixed_cache_serves_prefixes_of_any_length():
    model = MODELS["llama"]()
    fixed = Drawer(model, 16, 8, static=True)
    for prefix in ([2], [2, 5, 7], [4]):
        u = noise(5, 16 - len(prefix))
        same_texts(fixed(prefix, u), Drawer(model, 16, 8, static=False)(prefix, u))


@pytest.mark.parametrize("static", [False, True])
def test_the_record_is_the_models_distribution(static):
    model = MODELS["llama"]()
    found = Drawer(model, 20, 8, static=static)([2, 9], noise(6, 18))
    with torch.no_grad():
        logits = model.double()(input_ids=found.tokens.long()).logits
    truth = logits.log_softmax(-1)
    for i, length in enumerate(found.lengths.tolist()):
        for drawn, position in enumerate(range(2, length)):
            row = truth[i, position - 1]
            assert float(found.own[i, drawn]) == pytest.approx(
                float(row[found.tokens[i, position]]), abs=1e-4
            )
            ids = found.ids[i, drawn].tolist()
            assert ids[:6] == row.topk(6).indices.tolist()
            assert not set(ids[:6]) & set(ids[6:])
            assert torch.allclose(found.log_probs[i, drawn].double(), row[ids], atol=0.01)
            assert found.log_probs[i, drawn].dtype == torch.float16


def spread(rows, vocabulary=40, scale=2.0):
    """One distribution, and noise at equal distances in [0, 1)."""
    z = scale * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0))
    grid = (torch.arange(rows, dtype=torch.float64)[:, None] + 0.5) / rows
    return z.log_softmax(-1), grid


@pytest.mark.parametrize(("kept", "drawn"), [(2, 1), (8, 2), (39, 9), (40, 0), (64, 0)])
def test_a_quarter_is_drawn_from_the_others_in_proportion_to_their_probabilities(kept, drawn):
    log_probs, grid = spread(4000)
    assert drawn_tokens(kept, 40) == drawn
    ids, found = kept_tokens(log_probs.expand(4000, -1), kept, grid)
    likeliest = min(kept, 40) - drawn
    assert ids.shape == found.shape == (4000, likeliest + drawn)
    assert (ids[:, :likeliest] == log_probs.topk(likeliest).indices).all()
    assert torch.equal(found, log_probs[0][ids.long()].half())
    if drawn:
        others = log_probs[0].exp().index_fill(0, ids[0, :likeliest].long(), 0)
        counts = torch.bincount(ids[:, likeliest:].flatten(), minlength=40)
        torch.testing.assert_close(counts / counts.sum(), others / others.sum(), atol=1e-3, rtol=0)
        assert not counts[others == 0].any()


@pytest.mark.parametrize("kept", [2, 8, 39, 40])
def test_the_divergence_of_kept_tokens_is_that_of_all_tokens_on_average(kept):
    log_probs, grid = spread(4000)
    z = spread(1, scale=1.0)[0].flip(-1).expand(4000, -1)
    ids, found = kept_tokens(log_probs.expand(4000, -1), kept, grid)
    each, gradient = KeptTokens(ids, found, drawn_tokens(kept, 40)).compare(slice(4000), z)
    exact, exactly = AllTokens(log_probs).compare(slice(1), z[:1])
    assert float(exact) > 0.5
    assert float(each.mean()) == pytest.approx(float(exact), abs=2e-3)
    torch.testing.assert_close(gradient().mean(0), exactly()[0], atol=2e-4, rtol=0)


def test_the_noise_of_a_text_draws_tokens_to_keep_whatever_token_it_chooses():
    model = make_llama(vocab=40, scale=0.3)
    drawer = Drawer(model, 2, 8)
    found = [drawer([2], noise(1000, 1, seed)) for seed in range(8)]
    ids = torch.cat([part.ids[:, 0] for part in found])
    chosen = torch.cat([part.tokens[:, 1] for part in found])
    with torch.no_grad():
        p = model(input_ids=torch.tensor([[2]])).logits[0, -1].softmax(-1)
    others = p.index_fill(0, ids[0, :6].long(), 0)
    others /= others.sum()
    for some in (torch.ones(8000, dtype=torch.bool), chosen == p.argmax(), chosen > 20):
        assert some.sum() > 500
        counts = torch.bincount(ids[some][:, 6:].flatten(), minlength=40)
        deviation = (others * (1 - others) / counts.sum()).sqrt()
        assert ((counts / counts.sum() - others).abs() <= 4 * deviation).all()


@pytest.mark.parametrize("others", [-200.0, -torch.inf])
def test_the_likeliest_token_stands_for_others_without_probability(others):
    """exp(−200) is 0 in float32. In float16, the kept probabilities do not add up to 1."""
    z = torch.full((50, 300), others)
    z[:, 5:11] = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    log_probs = z.log_softmax(-1)
    ids, found = kept_tokens(log_probs, 8, noise(50, 1))
    assert ids[0].tolist() == [5, 6, 7, 8, 9, 10, 5, 5]
    values, gradient = KeptTokens(ids, found, 2).compare(slice(50), z)
    assert values.abs().max() < 1e-3
    assert gradient().abs().max() < 1e-3


@pytest.mark.parametrize("static", [False, True])
def test_a_text_goes_on_to_its_second_end(static):
    model, u = make_llama(vocab=12, scale=0.3), noise(40, 29)
    drawer = Drawer(model, 30, 4, static=static)
    once, twice = drawer([2], u), drawer([2], u, ends=2)
    shorter, longer = (
        [row[:n] for row, n in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), strict=True)]
        for drawn in (once, twice)
    )
    for one, two in zip(shorter, longer, strict=True):
        assert two[: len(one)] == one
        assert two.count(3) == 2 if len(two) < 30 else two[:-1].count(3) < 2
        assert two[-1] == 3 or len(two) == 30
    assert sum(two.count(3) == 2 for two in longer) > 10
    same_texts(drawer([2], u), once)  # the next call counts anew


def test_a_text_depends_on_its_own_noise_only():
    model, u = MODELS["llama"](), noise(9, 15)
    together = Drawer(model, 16, 4)([2], u)
    alone = Drawer(model, 16, 4)([2], u[4:5])
    length = int(alone.lengths)
    assert torch.equal(alone.tokens[0, :length], together.tokens[4, :length])


def test_texts_are_drawn_from_the_distribution():
    model = make_llama(vocab=5, scale=0.3)
    drawer = Drawer(model, 2, 5)
    found = torch.cat([drawer([2], noise(1000, 1, seed)).tokens[:, 1] for seed in range(4)])
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([[2]])).logits[0, -1].softmax(-1)
    assert torch.allclose(torch.bincount(found, minlength=5) / 4000, wanted, atol=0.03)


@pytest.mark.parametrize("static", [False, True])
def test_the_batch_is_halved_until_it_fits(static):
    model, u = MODELS["llama"](), noise(11, 15)
    wanted = Drawer(model, 16, 4)([2], u)
    forward = model.forward

    def small(input_ids, **inputs):
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids=input_ids, **inputs)

    model.forward = small
    drawer = Drawer(model, 16, 4, static=static)
    same_texts(drawer([2], u), wanted)
    assert drawer.rows == 2  # 11, 5, 2
    model.forward = lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        drawer([2], u)


@pytest.mark.parametrize("failure", ["raises", "is wrong"])
def test_a_fixed_cache_that_fails_is_not_used(failure, monkeypatch):
    model, u = MODELS["llama"](), noise(5, 15)
    make = draw._static_cache

    def broken(*args):
        cache = make(*args)
        update = cache.update
        if failure == "is wrong":
            cache.update = lambda keys, values, *more: update(keys, -values, *more)
        else:
            cache.update = None
        return cache

    monkeypatch.setattr(draw, "_static_cache", broken)
    drawer = Drawer(model, 16, 4, static=True)
    with pytest.warns(UserWarning, match="without a CUDA graph: "):
        found = drawer([2], u)
    assert not drawer.static
    same_texts(found, Drawer(model, 16, 4, static=False)([2], u))


def test_a_model_without_a_cache():
    model, u = MODELS["llama"](), noise(5, 15)
    wanted = Drawer(model, 16, 4)([2], u)
    forward = model.forward

    def without(input_ids, past_key_values, use_cache, **inputs):
        return types.SimpleNamespace(logits=forward(input_ids=input_ids, **inputs).logits)

    model.forward = without
    same_texts(Drawer(model, 16, 4)([2], u), wanted)


def test_windows_that_fill_up_have_no_fixed_cache():
    model = make_windowed()
    assert draw._has_static_cache(model, 8)
    assert not draw._has_static_cache(model, 32)


def test_progress_counts_every_token():
    model, counted = make_llama(vocab=5, scale=0.3), []
    Drawer(model, 16, 4)([2], noise(3, 15), counted.append)
    assert sum(counted) == 3 * 15  # also those after the end
    assert len(counted) < 16
