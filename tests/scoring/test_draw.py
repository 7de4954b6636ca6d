"""Drawing texts: the distribution, where texts end, and both kinds of caches."""

import types

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers

from holdfast.scoring import draw
from holdfast.scoring.draw import Drawer, draw_texts, inverse_cdf, noise_of
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


def noise(texts, tokens, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(texts, tokens, dtype=dtype, generator=generator)


def texts_of(drawn):
    return [row[:n] for row, n in zip(drawn[0].tolist(), drawn[1].tolist(), strict=True)]


@torch.no_grad()
def literal(model, start, noise, length, ends=1):
    """One text, a token at a time: the first token whose cumulative probability is above u."""
    text, end = list(start), model.config.eos_token_id
    while len(text) < length:
        p = model(input_ids=torch.tensor([text])).logits[0, -1].double().softmax(-1)
        text.append(int((p.cumsum(-1) <= noise[len(text) - 1]).sum()))
        if text[len(start) :].count(end) == ends:
            break
    return text


@pytest.mark.parametrize("static", [False, True])
def test_texts_are_drawn_literally(static):
    """Starts of several lengths and texts with several ends are drawn together."""
    model, u = make_llama(vocab=12, scale=0.3), noise(9, 16)
    starts, ends = [[2], [2, 5, 3, 7], [4, 5]] * 3, [1, 2, 1] * 3
    found = Drawer(model, 16, static=static)(starts, u, ends=ends)
    for text, *given in zip(texts_of(found), starts, u, ends, strict=True):
        assert text == literal(model, *given[:2], 16, given[2])
    assert int(found[1].min()) < 16  # some have ended


@pytest.mark.parametrize("vocabulary", [3, 256, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_is_chosen_by_the_cumulative_distribution(vocabulary, dtype):
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(50, vocabulary, generator=generator)
    p = p.where(torch.rand(p.shape, generator=generator) < 0.5, 0.0)  # half are impossible
    p[:, 1] += 0.1
    u = noise(50, 1, dtype=dtype)
    u[0], u[1] = 0.0, 1 - 2**-24
    found = inverse_cdf(p, u)
    cdf = p.double().cumsum(-1)
    literally = [
        next(i for i in range(vocabulary) if cdf[row, i] > u[row, 0] * cdf[row, -1])
        for row in range(50)
    ]
    assert found[:, 0].tolist() == literally
    assert bool((p.gather(1, found) > 0).all())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("start", "length"), [([2], 40), ([2, 5, 7, 8], 16)])
def test_a_fixed_cache_draws_the_same_texts(name, start, length):
    """At 40 tokens, attention sees 32 of them at first."""
    if name == "windowed":
        length = min(length, 24)
    model = MODELS[name]()
    assert draw._has_static_cache(model, length)
    grown, fixed = (Drawer(model, length, static=static) for static in (False, True))
    for seed in (0, 1):  # the second batch is smaller and reuses the buffers of the first
        u = noise(7 - 2 * seed, length, seed)
        assert texts_of(grown([start] * len(u), u)) == texts_of(fixed([start] * len(u), u))
    assert fixed.static
    assert fixed._fixed.texts.rows == 7


def test_noise_depends_on_its_key_only():
    one = noise_of("texts", 0, 3, 5)
    assert torch.equal(one, noise_of("texts", 0, 3, 5))
    for other in (("texts", 1, 3), ("texts", 0, 4), ("kept", 0, 3)):
        assert not torch.equal(one, noise_of(*other, 5))
    assert one[0, 0].item() == pytest.approx(0.2922076)  # on every machine


def test_a_text_depends_on_its_own_noise_only():
    model, u = MODELS["llama"](), noise(9, 16)
    together = texts_of(Drawer(model, 16)([[2]] * 9, u))
    assert texts_of(Drawer(model, 16)([[2]], u[4:5])) == together[4:5]


def test_texts_are_drawn_from_the_distribution():
    model = make_llama(vocab=5, scale=0.3)
    found = [text[1] for text in draw_texts(model, [[2]] * 4000, 2)]
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([[2]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor(found), minlength=5)
    assert torch.allclose(counts / 4000, wanted, atol=0.03)


def test_the_callers_precision_has_no_effect():
    model, u = MODELS["llama"](), noise(5, 16)
    wanted = texts_of(Drawer(model, 16)([[2]] * 5, u))
    with torch.autocast("cpu", torch.bfloat16):
        assert texts_of(Drawer(model, 16)([[2]] * 5, u)) == wanted


@pytest.mark.parametrize("static", [False, True])
def test_the_batch_is_halved_until_it_fits(static):
    model, u = MODELS["llama"](), noise(11, 16)
    wanted = texts_of(Drawer(model, 16)([[2]] * 11, u))
    forward = model.forward

    def small(input_ids, **inputs):
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids=input_ids, **inputs)

    model.forward = small
    drawer = Drawer(model, 16, static=static)
    assert texts_of(drawer([[2]] * 11, u)) == wanted
    assert drawer.batches.size == 2  # 11, 5, 2
    model.forward = lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        drawer([[2]] * 11, u)


@pytest.mark.parametrize("failure", ["raises", "is wrong"])
def test_a_fixed_cache_that_fails_is_not_used(failure, monkeypatch):
    model, u = MODELS["llama"](), noise(5, 16)
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
    drawer = Drawer(model, 16, static=True)
    with pytest.warns(UserWarning, match="without a CUDA graph: "):
        found = drawer([[2]] * 5, u)
    assert not drawer.static
    assert texts_of(found) == texts_of(Drawer(model, 16, static=False)([[2]] * 5, u))


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # the weights of GPT-2's head are tied
def test_weights_are_cast_once(name, monkeypatch):
    """As on a GPU, where float32 weights draw in bfloat16: the model itself stays as it is."""
    model, u = MODELS[name](), noise(5, 16)
    monkeypatch.setattr(Drawer, "dtype", torch.bfloat16)
    fixed = Drawer(model, 16, static=True)
    found = texts_of(fixed([[2]] * 5, u))
    assert fixed.static
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for p in model.parameters():
        p.data = p.data.bfloat16()
    assert found == texts_of(Drawer(model, 16, static=True)([[2]] * 5, u))


def test_a_model_without_a_cache():
    model, u = MODELS["llama"](), noise(5, 16)
    wanted = texts_of(Drawer(model, 16)([[2]] * 5, u))
    forward = model.forward

    def without(input_ids, past_key_values, use_cache, **inputs):
        return types.SimpleNamespace(logits=forward(input_ids=input_ids, **inputs).logits)

    model.forward = without
    assert texts_of(Drawer(model, 16)([[2]] * 5, u)) == wanted


def test_windows_that_fill_up_have_no_fixed_cache():
    model = make_windowed()
    assert draw._has_static_cache(model, 8)
    assert not draw._has_static_cache(model, 32)


def test_progress_counts_every_token():
    model, counted = make_llama(vocab=5, scale=0.3), []
    Drawer(model, 64)([[2]] * 3, noise(3, 64), counted.append)
    assert sum(counted) == 3 * 63  # also those after the end
    assert len(counted) < 64


def make_small(kind, **options):
    torch.manual_seed(1)
    shape = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    tokens = {"bos_token_id": 2, "eos_token_id": 3}
    config = getattr(transformers, f"{kind}Config")(**shape, **tokens, **options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mamba", {}),  # whose cache is a state
        (
            "Mixtral",  # in training, it returns the logits of its router
            {
                "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
                "num_local_experts": 2, "output_router_logits": True,
            },
        ),
    ],
)  # fmt: skip
def test_other_architectures(kind, options):
    model, u = make_small(kind, **options), noise(3, 12)
    found = texts_of(Drawer(model, 12)([[2]] * 3, u))
    assert found == [literal(model, [2], row, 12) for row in u]


def test_packed_weights_are_not_cast():
    model = MODELS["llama"]()
    assert draw._has_static_cache(model, 16)
    model.is_quantized = True
    assert not draw._has_static_cache(model, 16)


def test_the_end_token_of_either_configuration():
    model = MODELS["llama"]()
    model.generation_config.eos_token_id = None
    assert draw.end_tokens(model).tolist() == [3]
    model.generation_config.eos_token_id = [3, 7]
    assert draw.end_tokens(model).tolist() == [3, 7]


def test_query_heads_that_share_keys_read_them_once(monkeypatch):
    model = MODELS["grouped"]()
    heads = []
    usual = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, *args, **kwargs):
        heads.append((query.shape[1], key.shape[1]))
        return usual(query, key, value, *args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attention)
    with torch.no_grad():
        draw.Drawer(model, 8, static=True)([[1]] * 2, torch.rand(2, 8))
    shared = model.config.num_key_value_heads
    assert shared < model.config.num_attention_heads
    assert heads.count((shared, shared)) == 7 * model.config.num_hidden_layers
    assert not transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping  # as before
