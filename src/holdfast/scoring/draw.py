"""Draw texts from a causal language model, from its own distribution.

A text is drawn token by token at temperature 1 from the whole vocabulary. It ends at an
end-of-sequence token. :class:`Drawer` also records the model's predictions, and on a GPU it replays
one CUDA graph per token.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import unwrapped, without_peft
from holdfast._torch.imports import require
from holdfast._torch.layout import is_sharded
from holdfast._torch.lm_head import is_out_of_memory
from holdfast.io.files import first_line

Choose = Callable[[Tensor], Tensor]  # float32 logits, texts × vocabulary → tokens, texts × 1
OnTokens = Callable[[int], object]  # called with the number of tokens since its last call

_ROWS, _ROWS_ON_A_CPU = 2048, 64  # texts at a time
_LOGITS = 1 << 27  # per step: half a gigabyte of float32
_CHUNK = 256  # tokens of the vocabulary whose probabilities are summed first
_LEAST = -1e4  # the log-probability of an impossible token, which float16 can hold
_SECOND = 1 << 12  # times noise: the rest is noise, too
_WARM_UP = 3  # steps before the capture of a CUDA graph


@torch.inference_mode()
def draw_texts(
    model: nn.Module,
    count: int,
    tokens: int,
    *,
    prefix: Sequence[int],
    seed: int = 0,
    batch_size: int | None = None,
) -> list[list[int]]:
    """Draw texts without the model's predictions.

    Each text is the prefix, usually only BOS, then at most ``tokens`` drawn tokens: it ends earlier
    if an end-of-sequence token is drawn. ``batch_size`` texts are drawn at a time. If None, all are
    drawn together. The global random state is restored afterwards.
    """
    device = next(model.parameters()).device
    ends = end_tokens(model).to(device)
    size = batch_size or count
    drawn: list[list[int]] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, count, size):
            rows = min(size, count - start)
            texts = _Texts(rows, len(prefix) + tokens, ends)
            texts.begin(prefix)
            _draw(_Growing(model, texts, _multinomial), tokens, rows)
            drawn += texts.lists()
    return drawn


def end_tokens(model: Any) -> Tensor:
    config = getattr(model, "generation_config", None) or model.config
    end = getattr(config, "eos_token_id", None)
    return torch.tensor([] if end is None else end, dtype=torch.long).reshape(-1)


def vocabulary_size(model: nn.Module) -> int:
    embedding = without_peft(model).get_input_embeddings()
    # DeepSpeed empties the weight.
    return int(getattr(embedding, "num_embeddings", embedding.weight.shape[0]))


def _multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1)


class Drawn(NamedTuple):
    """Texts, and the predictions of the model that drew them, on the CPU.

    The predictions of a text are those at its drawn tokens, in order. Entries after the end of a
    text have no meaning.

    Attributes:
        tokens: texts × length, int32.
        lengths: the tokens of each text, its prefix and its end token included, int32.
        ids: the tokens that :func:`kept_tokens` chooses, texts × drawn tokens × k, int32.
        log_probs: their log-probabilities, float16.
        own: the log-probability of each drawn token, float32.
    """

    tokens: Tensor
    lengths: Tensor
    ids: Tensor
    log_probs: Tensor
    own: Tensor


class Drawer:
    """Draws texts of ``length`` tokens, and keeps ``top`` predictions per drawn token.

    Float32 weights on a GPU run in bfloat16. The batch is halved if memory runs out. A model that
    has no static cache, or whose step cannot be captured, is drawn from without a CUDA graph.

    Attributes:
        rows: the number of texts that are drawn at a time.
        dtype: the dtype that the model runs in.
    """

    def __init__(
        self, model: nn.Module, length: int, top: int, *, static: bool | None = None
    ) -> None:
        self.model: Any = unwrapped(model)
        self.length, self.top = length, top
        first = next(self.model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.ends = end_tokens(without_peft(model)).to(self.device)
        on_gpu = self.device.type == "cuda"
        self.precision: AbstractContextManager[object] = nullcontext()
        if on_gpu and self.dtype == torch.float32:
            self.dtype = torch.bfloat16
            # A graph must not hold the copies of weights that autocast caches and then frees.
            self.precision = torch.autocast("cuda", self.dtype, cache_enabled=False)
        self.rows = _ROWS_ON_A_CPU
        if on_gpu:
            self.rows = max(1, min(_ROWS, _LOGITS // vocabulary_size(model)))
        self.static = on_gpu and _has_static_cache(self.model, length) if static is None else static
        self._steps: _Fixed | None = None

    def __call__(
        self,
        prefix: Sequence[int],
        noise: Tensor,
        on_tokens: OnTokens = lambda _: None,
        *,
        ends: int = 1,
    ) -> Drawn:
        """Draw one text per row of noise, up to its end token number ``ends``.

        ``noise`` is uniform in [0, 1), texts × tokens to draw, float64, on the CPU. A row of noise
        determines a text up to rounding, whatever is drawn together with it. ``on_tokens`` is
        called with the number of tokens drawn since its last call.
        """
        parts: list[Drawn] = []
        start = 0
        while start < len(noise):
            some = noise[start : start + self.rows]
            try:
                with torch.inference_mode(), self.precision:
                    parts.append(self._draw(prefix, some, on_tokens, ends))
                start += len(some)
                continue
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                no_memory = is_out_of_memory(error)
                if len(some) == 1 if no_memory else not self.static:
                    raise
                reason = first_line(error)
            # Outside the except clause, so that the tensors of the failed attempt are freed.
            self.free()
            if no_memory:
                self.rows = max(1, len(some) // 2)
            else:
                warnings.warn(f"drawing texts without a CUDA graph: {reason}", stacklevel=3)
                self.static = False
        return Drawn(*map(torch.cat, zip(*parts, strict=True)))

    def free(self) -> None:
        """Free the memory of the cache and of the CUDA graph."""
        self._steps = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _draw(self, prefix: Sequence[int], noise: Tensor, on_tokens: OnTokens, ends: int) -> Drawn:
        count, tokens = noise.shape
        if not self.static:
            texts = _Texts(count, self.length, self.ends)
            record = _Record(noise, self.top, self.device)
            texts.begin(prefix, ends)
            _draw(_Growing(self.model, texts, record), tokens, count, on_tokens)
            return record.drawn(texts, count, tokens)
        new = self._steps is None or self._steps.rows < count
        if self._steps is None or new:
            self._steps = None
            self._steps = _Fixed(self.model, count, self.length, self.ends, self.top, self.dtype)
        drawn = self._steps.draw(prefix, noise, on_tokens, ends)
        if new and not self._agrees(drawn, len(prefix)):
            raise RuntimeError("the model's static cache gives other predictions")
        return drawn

    def _agrees(self, drawn: Drawn, start: int) -> bool:
        """Whether the model without a cache predicts the same for a few of the texts."""
        tokens = drawn.tokens[:4].long().to(self.device)
        logits = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        log_probs = logits.float().log_softmax(-1)[:, start - 1 : -1]
        own = log_probs.gather(-1, tokens[:, start:, None])[..., 0].cpu()
        counted = torch.arange(start, tokens.shape[1]) < drawn.lengths[:4, None]
        own, theirs = own[counted], drawn.own[:4, : own.shape[1]][counted]
        # bfloat16 rounds logits by up to 0.06; another mask or position changes them by 1 or more.
        return bool((own - theirs).abs().mean() < 0.1) or not bool(own.isfinite().all())


class _Texts:
    """Texts that are drawn together, all of which are at the same position."""

    def __init__(self, rows: int, length: int, ends: Tensor) -> None:
        device = ends.device
        self.ends = ends
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.last = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)  # of the last token
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.ends_left = torch.zeros(rows, dtype=torch.long, device=device)

    def begin(self, prefix: Sequence[int], ends: int = 1) -> None:
        self.tokens[:, : len(prefix)] = torch.tensor(list(prefix), device=self.tokens.device)
        self.position.fill_(len(prefix) - 1)
        self.lengths.fill_(len(prefix))
        self.ends_left.fill_(ends)

    def append(self, following: Tensor) -> None:
        """Append one token per text, in place and without a look at values, as graphs need it."""
        self.last.copy_(following)
        self.position += 1
        self.tokens.index_copy_(1, self.position, following)
        self.lengths += ~self.ended
        self.ends_left -= (following == self.ends).any(-1).long()

    @property
    def ended(self) -> Tensor:
        return self.ends_left <= 0

    def lists(self) -> list[list[int]]:
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [row[:length] for row, length in rows]


class _Record:
    """Chooses tokens by given noise and records the model's predictions."""

    def __init__(self, noise: Tensor, top: int, device: torch.device) -> None:
        self.top = top
        self.noise = noise_on(noise, device)
        self.drawn_tokens = torch.zeros(1, dtype=torch.long, device=device)
        self.own = torch.zeros(noise.shape, device=device)
        self.ids = self.log_probs = torch.empty(0, device=device)

    def begin(self, noise: Tensor) -> None:
        self.noise[: noise.shape[0], : noise.shape[1]] = noise.to(self.noise)
        self.drawn_tokens.zero_()

    def __call__(self, logits: Tensor) -> Tensor:
        log_probs, now = logits.log_softmax(-1), self.drawn_tokens
        noise = self.noise.index_select(1, now)
        following = inverse_cdf(log_probs.exp(), noise)
        # The first bits of the noise choose the next token, the others the tokens to keep.
        ids, kept = kept_tokens(log_probs, self.top, (noise * _SECOND) % 1)
        if not self.ids.numel():
            shape = (*self.own.shape, ids.shape[-1])
            self.ids, self.log_probs = ids.new_zeros(shape), kept.new_zeros(shape)
        self.ids.index_copy_(1, now, ids[:, None])
        self.log_probs.index_copy_(1, now, kept[:, None])
        self.own.index_copy_(1, now, log_probs.gather(-1, following))
        self.drawn_tokens += 1
        return following

    def drawn(self, texts: _Texts, count: int, tokens: int) -> Drawn:
        recorded = (x[:count, :tokens].cpu() for x in (self.ids, self.log_probs, self.own))
        found = texts.tokens[:count].int().cpu(), texts.lengths[:count].int().cpu()
        return Drawn(*found, *recorded)


def noise_on(noise: Tensor, device: torch.device) -> Tensor:
    return noise.to(device, torch.float32 if device.type == "mps" else torch.float64)


def drawn_tokens(kept: int, vocabulary: int) -> int:
    """How many of the tokens that are kept per prediction are drawn: a quarter."""
    return 0 if kept >= vocabulary else max(1, kept // 4)


def kept_tokens(log_probs: Tensor, kept: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens to keep per row, as int32, and their log-probabilities, as float16.

    The likeliest tokens come first, then tokens that are drawn from the others in proportion to
    their probabilities, at equal distances in their cumulative sum. A token may be drawn more than
    once. ``kept`` is at least 2. ``noise``, rows × 1, is uniform in [0, 1).
    """
    kept = min(kept, log_probs.shape[-1])
    drawn = drawn_tokens(kept, log_probs.shape[-1])
    ids = log_probs.topk(kept - drawn).indices
    if drawn:
        others = log_probs.exp().scatter_(-1, ids, 0)
        points = (noise + torch.arange(drawn, device=noise.device)) / drawn
        found = inverse_cdf(others, points)
        # If the others have no probability, the likeliest token stands for them.
        found = found.where(others.gather(-1, found) > 0, ids[:, :1])
        ids = torch.cat([ids, found], -1)
    return ids.int(), log_probs.gather(-1, ids).clamp_min(_LEAST).half()


def inverse_cdf(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Choose tokens per row, given noise that is uniform in [0, 1), rows × tokens.

    Sums are in the noise's dtype: in float32, unlikely tokens would be lost. The sums of chunks of
    the vocabulary are searched first, then one chunk, which is faster than a sum over all tokens.

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


class _Steps(Protocol):
    texts: "_Texts"
    look: int  # after how many steps to look whether all texts have ended

    def step(self) -> None:
        """Append one token to each text."""


def _draw(steps: _Steps, tokens: int, count: int, on_tokens: OnTokens = lambda _: None) -> None:
    """Append up to ``tokens`` tokens to the texts, until the first ``count`` of them have ended."""
    for done in range(1, tokens + 1):
        steps.step()
        on_tokens(count)
        if done % steps.look == 0 and bool(steps.texts.ended[:count].all()):
            on_tokens(count * (tokens - done))
            return


class _Growing:
    """Steps with a cache that grows with the texts, or without a cache if the model has none."""

    look = 1

    def __init__(self, model: Any, texts: _Texts, choose: Choose) -> None:
        self.model, self.texts, self.choose = model, texts, choose
        self.seen, self.cache = int(texts.position) + 1, None

    def step(self) -> None:
        so_far = self.texts.tokens[:, : self.seen]
        out = self.model(
            input_ids=so_far if self.cache is None else so_far[:, -1:],
            attention_mask=torch.ones_like(so_far),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = getattr(out, "past_key_values", None)
        self.texts.append(self.choose(out.logits[:, -1].float()))
        self.seen += 1


class _Fixed:
    """Steps with a cache of fixed size. On a GPU, one step is a CUDA graph, which is replayed.

    The cache, the texts and the record stay in place, so that the graph serves all batches of at
    most ``rows`` texts and prefixes of any length.
    """

    look = 16  # because it waits for the GPU

    def __init__(
        self, model: Any, rows: int, length: int, ends: Tensor, top: int, dtype: torch.dtype
    ) -> None:
        self.model, self.rows = model, rows
        self.texts = _Texts(rows, length, ends)
        self.record = _Record(torch.zeros(rows, length, dtype=torch.float64), top, ends.device)
        self.mask = torch.ones(rows, _room(length), dtype=torch.long, device=ends.device)
        self.cache = _static_cache(model, rows, _room(length), dtype)
        accepted = inspect.signature(without_peft(model).forward).parameters
        self.keep = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.by_position = "cache_position" in accepted
        self.graph: Any = None
        self.stream = torch.cuda.Stream(ends.device) if ends.device.type == "cuda" else None
        self.prefix = self.done = 0

    def draw(self, prefix: Sequence[int], noise: Tensor, on_tokens: OnTokens, ends: int) -> Drawn:
        count, tokens = noise.shape
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self.texts.begin(prefix, ends)
            self.record.begin(noise)
            self.cache.reset()
            self.prefix, self.done = len(prefix), 0
            _draw(self, tokens, count, on_tokens)
            return self.record.drawn(self.texts, count, tokens)

    def step(self) -> None:
        if self.done == _WARM_UP and self.stream is not None and self.graph is None:
            self.graph = self._captured()
        if self.done == 0:
            self._step(self.texts.tokens[:, : self.prefix])
        elif self.graph is None:
            self._step(self.texts.last)
        else:
            self.graph.replay()
        self.done += 1

    def _step(self, inputs: Tensor) -> None:
        more: dict[str, Any] = dict(self.keep)
        if self.by_position:
            back = torch.arange(1 - inputs.shape[1], 1, device=inputs.device)
            more["cache_position"] = self.texts.position + back
        out = self.model(
            input_ids=inputs,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            **more,
        )
        self.texts.append(self.record(out.logits[:, -1].float()))

    def _captured(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        # Threads of a data loader may allocate memory during the capture.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self._step(self.texts.last)
        return graph


def _room(length: int) -> int:
    return -(-length // 8) * 8  # the fast kernels of attention need masks of such a width


def _has_static_cache(model: Any, length: int) -> bool:
    """Whether a model may be run with a cache of fixed size, in a CUDA graph."""
    inner = without_peft(model)
    supported = getattr(inner, "_can_compile_fullgraph", False) or getattr(
        inner, "_supports_static_cache", False
    )
    if not supported or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return False
    if getattr(inner.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return False
    parameters = list(model.parameters())
    if any(is_sharded(p) or hasattr(p, "ds_id") for p in parameters):
        return False
    if len({p.device for p in parameters}) > 1:
        return False
    layers = getattr(_static_cache(model, 1, _room(length), torch.float32), "layers", [])
    # The state of other layers is not all in tensors, as a graph needs it.
    return all(type(layer).__name__ == "StaticLayer" for layer in layers)


def _static_cache(model: Any, rows: int, length: int, dtype: torch.dtype) -> Any:
    caches: Any = require("transformers.cache_utils", extra="hf", what="a static cache")

    class Typed(caches.StaticCache):  # type: ignore[misc]
        """In autocast, keys may be float32 and values bfloat16; the cache has one dtype."""

        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(keys.to(dtype), values.to(dtype), *args, **kwargs)

    config, device = without_peft(model).config, next(model.parameters()).device
    # Older versions allocate at once and need all of these; newer ones need the length only.
    cache: Any = Typed(
        config=config, max_cache_len=length, max_batch_size=rows, device=device, dtype=dtype
    )
    for i, layer in enumerate(getattr(cache, "layers", [])):
        if getattr(layer, "is_sliding", False) and layer.max_cache_len == length:
            cache.layers[i] = caches.StaticLayer(length)  # the window is never full
    return cache
