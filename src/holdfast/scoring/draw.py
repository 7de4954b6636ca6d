"""Draw texts from a causal language model, from its own distribution.

A text is drawn token by token at temperature 1 from the whole vocabulary, and ends at an
end-of-sequence token. On a GPU, a step is one CUDA graph, which is replayed.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import unwrapped, without_peft
from holdfast._torch.batch import accepted_names
from holdfast._torch.imports import require
from holdfast._torch.layout import is_sharded
from holdfast._torch.lm_head import is_out_of_memory
from holdfast._torch.memory import Batches
from holdfast._torch.rng import generator_of
from holdfast._torch.vocabulary import vocabulary_size
from holdfast.io.files import first_line

OnTokens = Callable[[int], object]  # called with the number of tokens since its last call

BLOCK = 64  # texts that share a generator of noise; also the texts per cached file
_ROWS, _ROWS_ON_A_CPU = 4096, BLOCK  # texts at a time
_LOGITS = 1 << 28  # per step: a gigabyte of float32
_CHUNK = 256  # tokens of the vocabulary whose probabilities are summed first
_STAGE = 32  # attention sees a multiple of so many tokens
_LOOK = 16  # steps between two looks whether all texts have ended: each waits for the GPU
_OWN_ATTENTION = "softcap", "s_aux", "position_bias", "cache"  # arguments of other attentions
_WARM_UP = 3  # steps before the capture of a CUDA graph


def draw_texts(
    model: nn.Module, starts: Sequence[Sequence[int]], length: int, *, seed: int = 0
) -> list[list[int]]:
    """Draw one text of at most ``length`` tokens after each start; it includes its start."""
    drawer, count = Drawer(model, length), len(starts)
    # Not the noise of pools: a test must not use the texts that a model was trained on.
    noise = torch.cat([noise_of("test", seed, i, length) for i in range(-(-count // BLOCK))])
    with torch.no_grad():
        tokens, lengths = drawer(starts, noise[:count])
    drawer.free()
    return [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def noise_of(
    kind: str, seed: int, block: int, tokens: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The noise of one block of texts, uniform in [0, 1), the same on every machine."""
    generator = generator_of(kind, seed, block)
    return torch.rand(BLOCK, tokens, dtype=dtype, generator=generator)


def end_tokens(model: Any) -> Tensor:
    configs = getattr(model, "generation_config", None), model.config
    found = (getattr(config, "eos_token_id", None) for config in configs)
    end = next((token for token in found if token is not None), None)
    return torch.tensor([] if end is None else end, dtype=torch.long).reshape(-1)


def check_predictions(model: nn.Module, is_nan: bool) -> None:
    """Raise ValueError if a model predicts NaN, so that nothing made of it is stored."""
    if is_nan:
        raise ValueError(
            f"{type(without_peft(model)).__name__} predicts NaN: check its weights, or load it in "
            "bfloat16 or float32 if float16 overflows"
        )


def is_spread(model: nn.Module) -> bool:
    """Whether all ranks must call a model together, because its weights are sharded."""
    return any(is_sharded(p) or hasattr(p, "ds_id") for p in model.parameters())


class Drawer:
    """Draws texts of at most ``length`` tokens. The batch is halved if memory runs out.

    With a CUDA graph, float32 weights are used in bfloat16. A model that has no static cache, or
    whose step cannot be captured, is drawn from without a graph.
    """

    def __init__(self, model: nn.Module, length: int, *, static: bool | None = None) -> None:
        self.model: Any = unwrapped(model)
        self.length = length
        self.device = next(self.model.parameters()).device
        self.ends = end_tokens(without_peft(model)).to(self.device)
        on_gpu = self.device.type == "cuda"
        self.static = on_gpu and _has_static_cache(self.model, length) if static is None else static
        most = min(_ROWS, _LOGITS // vocabulary_size(model)) if on_gpu else _ROWS_ON_A_CPU
        self.batches = Batches(max(1, most), self.free)
        self._fixed: _Fixed | None = None
        self.is_nan = False  # whether the model has predicted NaN

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that texts are drawn with."""
        dtype = next(self.model.parameters()).dtype
        halved = self.static and self.device.type == "cuda" and dtype == torch.float32
        return torch.bfloat16 if halved else dtype

    def __call__(
        self,
        starts: Sequence[Sequence[int]],
        noise: Tensor,
        on_tokens: OnTokens = lambda _: None,
        *,
        ends: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw one text per start and row of noise; return tokens and lengths, int32, on the CPU.

        ``noise`` is uniform in [0, 1), texts × length. A row of noise determines a text up to
        rounding, whatever is drawn together with it. A text goes on to its end token number
        ``ends``, 1 by default; tokens after it have no meaning. ``on_tokens`` is called with the
        number of tokens drawn since its last call.
        """
        ends = [1] * len(starts) if ends is None else ends

        def draw(part: slice) -> tuple[Tensor, Tensor]:
            count = len(noise[part])
            steps = self._steps(count)
            with steps.stream():
                steps.texts.begin(starts[part], noise[part], ends[part])
                done = _run(steps, count, on_tokens)
                both = steps.texts.tokens, steps.texts.lengths
                tokens, lengths = (tensor[:count].int().cpu() for tensor in both)
            self.is_nan |= bool(steps.texts.is_nan)
            if isinstance(steps, _Fixed) and not steps.agrees(done):
                raise RuntimeError("the model's static cache gives other predictions")
            return tokens, lengths

        # What is drawn must not depend on the precision that the caller has set.
        with torch.autocast(self.device.type, enabled=False):
            try:
                found = self.batches(len(noise), draw)
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                if not self.static or is_out_of_memory(error):
                    raise
                reason = first_line(error)
            else:
                return torch.cat([t for t, _ in found]), torch.cat([n for _, n in found])
            # Outside the except clause, so that the tensors of the failed attempt are freed.
            warnings.warn(f"drawing texts without a CUDA graph: {reason}", stacklevel=2)
            self.static = False
            self.free()
            return self(starts, noise, on_tokens, ends=ends)

    def free(self) -> None:
        """Free the memory of the cache and of the CUDA graphs."""
        self._fixed = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _steps(self, count: int) -> "_Growing | _Fixed":
        if not self.static:
            return _Growing(self.model, _Texts(count, self.length, self.ends))
        if self._fixed is None or self._fixed.texts.rows < count:
            self._fixed = None  # frees the smaller one first
            texts = _Texts(count, self.length, self.ends)
            self._fixed = _Fixed(self.model, texts, self.dtype)
        return self._fixed


def _run(steps: "_Growing | _Fixed", count: int, on_tokens: OnTokens) -> int:
    """Append tokens until all texts have ended; return the number of steps."""
    steps.begin()
    most = steps.texts.tokens.shape[1] - 1
    for done in range(1, most + 1):
        steps.step()
        on_tokens(count)
        if done % _LOOK == 0 and bool((steps.texts.ends_left <= 0).all()):
            on_tokens(count * (most - done))
            return done
    return most


class _Texts:
    """Texts that are drawn together, all of which are at the same position.

    They are changed in place and without reading values on the host, as CUDA graphs need it. Texts
    with starts of any length are drawn together: at its start, the tokens of a text are given.
    """

    def __init__(self, rows: int, length: int, ends: Tensor) -> None:
        self.rows, self.ends = rows, ends
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=ends.device)
        self.noise = torch.zeros(rows, length, device=ends.device)
        self.position = torch.zeros(1, dtype=torch.long, device=ends.device)  # of the last token
        self.is_nan = torch.zeros((), dtype=torch.bool, device=ends.device)  # some prediction
        self.starts, self.lengths, self.ends_left = (
            torch.zeros(rows, dtype=torch.long, device=ends.device) for _ in range(3)
        )

    def begin(self, starts: Sequence[Sequence[int]], noise: Tensor, ends: Sequence[int]) -> None:
        count = len(starts)
        given = [torch.tensor(list(start)) for start in starts]
        padded = nn.utils.rnn.pad_sequence(given, batch_first=True)
        self.tokens.zero_()
        self.tokens[:count, : padded.shape[1]] = padded.to(self.tokens)
        self.noise[:count] = noise.to(self.noise)
        self.starts[:count] = torch.tensor(list(map(len, starts))).to(self.starts)
        self.ends_left.zero_()  # unused rows have ended
        self.ends_left[:count] = torch.tensor(list(ends)).to(self.ends_left)
        self.lengths.fill_(1)
        self.position.zero_()
        self.is_nan.zero_()

    @property
    def last(self) -> Tensor:
        return self.tokens.index_select(1, self.position)

    def append(self, logits: Tensor) -> None:
        """Append one token to each text: one that is given, or one that is chosen by its noise."""
        noise = self.noise.index_select(1, self.position)
        probabilities = logits.float().softmax(-1)
        self.is_nan |= probabilities[:, 0].isnan().any()  # one is NaN if all are
        chosen = inverse_cdf(probabilities, noise)
        self.position += 1
        is_given = self.position < self.starts[:, None]
        following = self.last.where(is_given, chosen)
        self.tokens.index_copy_(1, self.position, following)
        self.lengths += self.ends_left > 0
        self.ends_left -= ((following == self.ends) & ~is_given).any(-1).long()


def inverse_cdf(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Choose tokens per row, given noise that is uniform in [0, 1), rows × tokens.

    Sums are in the noise's dtype. The sums of chunks of the vocabulary are searched first, then one
    chunk, which is faster than a sum over all tokens.

    >>> p, noise = torch.tensor([[0.5, 0.0, 0.5]] * 2), torch.tensor([[0.49], [0.51]])
    >>> inverse_cdf(p, noise).flatten().tolist()
    [0, 2]
    """
    rows, vocabulary = probabilities.shape
    if vocabulary % _CHUNK:
        probabilities = F.pad(probabilities, (0, -vocabulary % _CHUNK))
    chunks = probabilities.view(rows, -1, _CHUNK)
    sums = chunks.sum(-1, dtype=noise.dtype)
    edges = sums.cumsum(-1)
    wanted = noise * edges[:, -1:]
    chunk = torch.searchsorted(edges, wanted, right=True).clamp_max(edges.shape[1] - 1)
    wanted = wanted - (edges.gather(1, chunk) - sums.gather(1, chunk))
    inside = chunks.gather(1, chunk[..., None].expand(-1, -1, _CHUNK)).cumsum(-1, dtype=noise.dtype)
    token = torch.searchsorted(inside, wanted[..., None], right=True)[..., 0]
    return (chunk * _CHUNK + token.clamp_max(_CHUNK - 1)).clamp_max(vocabulary - 1)


class _Growing:
    """Steps with a cache that grows with the texts, or without a cache if the model has none."""

    def __init__(self, model: Any, texts: _Texts) -> None:
        self.model, self.texts = model, texts
        self.options = _without_router(model)
        self.is_recurrent = "cache_params" in accepted_names(model)[0]  # Mamba
        self.cache_name = "cache_params" if self.is_recurrent else "past_key_values"

    @staticmethod
    def stream() -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self) -> None:
        self.seen, self.cache = 1, None

    def step(self) -> None:
        so_far = self.texts.tokens[:, : self.seen]
        out = self.model(
            input_ids=so_far if self.cache is None else so_far[:, -1:],
            attention_mask=None if self.is_recurrent else torch.ones_like(so_far),
            use_cache=True,
            **{self.cache_name: self.cache},
            **self.options,
        )
        self.cache = getattr(out, self.cache_name, None)
        self.texts.append(out.logits[:, -1])
        self.seen += 1


class _Fixed:
    """Steps with a cache of fixed size. On a GPU, a step is a CUDA graph, which is replayed.

    Everything stays in place, so that the graphs serve all batches of at most as many texts. There
    is a graph per number of tokens that attention sees: it need not read all of the cache.
    """

    def __init__(self, model: Any, texts: _Texts, dtype: torch.dtype) -> None:
        self.model, self.texts, self.dtype = model, texts, dtype
        device = texts.tokens.device
        # Casting once is faster than autocast, which casts in every step.
        named = [(n, p) for n, p in model.named_parameters() if p.dtype == torch.float32]
        self.weights = {n: p.to(dtype) for n, p in named if dtype != torch.float32}
        self.room = _room(texts.tokens.shape[1])
        self.cache = _static_cache(model, texts.rows, self.room, dtype)
        self.options = _without_router(model)
        self.by_position = "cache_position" in accepted_names(model)[0]  # older versions
        self.own_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graphs: dict[int, Any] = {}
        self.is_checked = False

    def stream(self) -> AbstractContextManager[object]:
        """A stream on which graphs can be captured, after everything that was launched so far."""
        if self.own_stream is None:
            return nullcontext()
        self.own_stream.wait_stream(torch.cuda.current_stream(self.own_stream.device))
        return torch.cuda.stream(self.own_stream)

    def begin(self) -> None:
        self.cache.reset()
        self.done = 0

    def step(self) -> None:
        self.done += 1
        width = min(self.room, -(-self.done // _STAGE) * _STAGE)
        if self.own_stream is None or (not self.graphs and self.done <= _WARM_UP):
            self._step(width)
        else:
            if width not in self.graphs:
                self.graphs[width] = self._captured(width)
            self.graphs[width].replay()

    def agrees(self, done: int) -> bool:
        """Whether the model without a cache predicts the same after the last step."""
        if self.is_checked:
            return True
        self.is_checked = True
        tokens = self.texts.tokens[:4, :done]
        mask = torch.ones_like(tokens)
        out = self.model(input_ids=tokens, attention_mask=mask, use_cache=False, **self.options)
        ours, theirs = (z[:4].float().softmax(-1) for z in (self.logits, out.logits[:, -1]))
        # bfloat16 moves a few per cent of the probability; another mask or position most of it.
        apart = (ours - theirs).abs().sum(-1).mean() / 2
        return bool(apart < 0.1) or not bool(apart.isfinite())

    def _step(self, width: int) -> None:
        self.cache.width = width
        position = self.texts.position
        is_seen = torch.arange(width, device=position.device) <= position
        mask = torch.zeros(width, dtype=self.dtype, device=position.device)
        mask = mask.masked_fill(~is_seen, torch.finfo(self.dtype).min)
        inputs = {
            "input_ids": self.texts.last, "attention_mask": mask[None, None, None],
            "past_key_values": self.cache, "use_cache": True, **self.options,
        }  # fmt: skip
        if self.by_position:
            inputs["cache_position"] = position
        with _attention_of_one_token():
            out = functional_call(self.model, self.weights, kwargs=inputs)
        self.logits = out.logits[:, -1]
        self.texts.append(self.logits)

    def _captured(self, width: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        # Threads of a data loader may allocate memory during the capture.
        with torch.cuda.graph(graph, pool, self.own_stream, capture_error_mode="thread_local"):
            self._step(width)
        return graph


@contextmanager
def _attention_of_one_token() -> Iterator[None]:
    """Let query heads that share keys and values read them once.

    transformers copies keys and values for each query head if there is a mask, which takes half of
    a step's time. With one token per text, the query heads of a group can be the rows of one query.
    """
    functions: Any = require("transformers.modeling_utils", extra="hf", what="a static cache")
    functions = functions.ALL_ATTENTION_FUNCTIONS
    usual = functions["sdpa"]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        *args: Any, scaling: float | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        rows, heads, tokens, width = query.shape
        own = [name for name in _OWN_ATTENTION if options.get(name) is not None]
        if tokens > 1 or heads == key.shape[1] or mask is None or args or own:
            found: tuple[Tensor, None] = usual(
                module, query, key, value, mask, *args, scaling=scaling, **options
            )
            return found
        grouped = query.reshape(rows, key.shape[1], -1, width)
        out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
        return out.reshape(rows, 1, heads, value.shape[-1]), None

    is_local = "sdpa" in functions._local_mapping  # which hides what is registered for all
    functions["sdpa"] = attend
    try:
        yield
    finally:
        if is_local:
            functions["sdpa"] = usual
        else:
            del functions["sdpa"]


def _without_router(model: Any) -> dict[str, Any]:
    """Mixtures of experts need a loss of their router in training, which fails with a cache."""
    name = "output_router_logits"
    return {name: False} if name in accepted_names(model)[0] else {}


def _room(length: int) -> int:
    return -(-length // 8) * 8  # the fast kernels of attention need masks of such a width


def _has_static_cache(model: Any, length: int) -> bool:
    """Whether a model may be run with a cache of fixed size, in a CUDA graph."""
    inner = without_peft(model)
    supported = getattr(inner, "_can_compile_fullgraph", False) or getattr(
        inner, "_supports_static_cache", False
    )
    if not supported or getattr(inner, "is_quantized", False):
        return False
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return False
    if getattr(inner.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    if is_spread(model) or len({p.device for p in model.parameters()}) > 1:
        return False
    layers = getattr(_static_cache(model, 1, _room(length), torch.float32), "layers", [])
    # The state of other layers is not all in tensors, as a graph needs it.
    return all(type(layer).__name__ == "StaticLayer" for layer in layers)


def _static_cache(model: Any, rows: int, length: int, dtype: torch.dtype) -> Any:
    caches: Any = require("transformers.cache_utils", extra="hf", what="a static cache")

    class Cut(caches.StaticCache):  # type: ignore[misc]
        """Shows the first ``width`` tokens only."""

        width = length

        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = super().update(keys, values, *args, **kwargs)
            return tuple(part[:, :, : self.width] for part in found)

    config, device = without_peft(model).config, next(model.parameters()).device
    # Older versions allocate at once and need all of these; newer ones need the length only.
    cache: Any = Cut(
        config=config, max_cache_len=length, max_batch_size=rows, device=device, dtype=dtype
    )
    for i, layer in enumerate(getattr(cache, "layers", [])):
        if getattr(layer, "is_sliding", False) and layer.max_cache_len == length:
            cache.layers[i] = caches.StaticLayer(length)  # the window is never full
    return cache
