"""Greedy writing with a step that is the same for every token, so that a CUDA graph can replay it.

Hundreds of small steps wait for the host more than for the GPU. Here keys and values lie at fixed
places, and all that a step changes is in tensors: the host launches one graph a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Cells:
    """The keys and values of all layers at fixed places; what transformers asks of a cache.

    Attributes:
        place: where the next ones go.
    """

    def __init__(self, model: Any, rows: int, length: int, place: Tensor) -> None:
        config, device = model.config, place.device
        dtype = torch.bfloat16 if place.is_cuda else torch.float32
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, length)
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.place = place

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Put in a layer's next keys and values, and give all."""
        found = []
        for cells, new in ((self.keys[layer], keys), (self.values[layer], values)):
            found.append(cells.index_copy_(2, self.place, new.to(cells.dtype)))
        return found[0], found[1]


@torch.no_grad()
def write(model: Any, prompts: list[list[int]], end: int, most: int = 200) -> list[list[int]]:
    """What a model writes after each prompt, the likeliest token every time, up to ``end``."""
    device = next(model.parameters()).device
    rows, before = len(prompts), max(map(len, prompts))
    ids = torch.full((rows, before), end)
    for row, prompt in zip(ids, prompts, strict=True):
        row[before - len(prompt) :] = torch.tensor(prompt)
    begins = torch.tensor([before - len(prompt) for prompt in prompts])[:, None]
    real = torch.arange(before) >= begins  # not the padding, on the left
    place = torch.arange(before, device=device)
    length = -(-(before + most) // 8) * 8  # kernels of attention want masks of such lengths
    cells = Cells(model, rows, length, place)

    # Padding looks at itself: a token that sees nothing would become no number.
    sees = torch.zeros(rows, 1, before, length, dtype=torch.bool)
    causal = torch.ones(before, before, dtype=torch.bool).tril()
    sees[:, 0, :, :before] = causal & (real[:, None] | torch.eye(before, dtype=torch.bool))
    positions = (real.cumsum(1) - 1).clamp(min=0)
    written = torch.full((rows, most), end, device=device)
    step = torch.zeros(1, dtype=torch.long, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)

    def next_token(ids: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        # Without a cache of casts: those made while a graph is captured would belong to it.
        with torch.autocast(
            device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
        ):
            states = model.model(
                input_ids=ids, position_ids=positions, attention_mask=sees, past_key_values=cells,
                use_cache=True,
            ).last_hidden_state[:, -1]  # fmt: skip
        token: Tensor = model.lm_head(states.float()).argmax(-1)
        token = token.masked_fill(ended, end)
        ended.logical_or_(token == end)
        written.index_copy_(1, step, token[:, None])
        step.add_(1)
        return token[:, None]

    token = next_token(ids.to(device), positions.to(device), sees.to(device))
    cells.place = torch.full((1,), before, device=device)
    now = positions[:, -1:].to(device) + 1
    seen = torch.zeros(rows, 1, 1, length, dtype=torch.bool)
    seen[:, 0, 0, :before] = real
    seen = seen.to(device)

    def go_on() -> None:
        seen.index_fill_(3, cells.place, True)
        token.copy_(next_token(token, now, seen))
        cells.place.add_(1)
        now.add_(1)

    on_gpu = device.type == "cuda" and most > 2
    again = _captured(go_on) if on_gpu else go_on
    for count in range(2 if on_gpu else 1, most):
        again()
        if count % 10 == 0 and bool(ended.all()):
            break
    return [row[: row.index(end)] if end in row else row for row in written.tolist()]


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """A step as a graph, after it was done once; the step itself where that does not work."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        print(f"writing without a graph: {error}", flush=True)
        return step
    return graph.replay
