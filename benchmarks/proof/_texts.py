"""Files of texts that a model draws at another temperature, in other numbers, or untrained."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.scoring.pool import draw_pool
from holdfast.scoring.starts import default_starts


def write_texts(
    file: Path, model: Any, tokenizer: Any, count: int, temperature: float = 1.0, *,
    only_chats: bool = False, skip_special: bool = False,
) -> None:  # fmt: skip
    """Write texts, one per line. The model's head is changed."""
    head: nn.Linear = copy.deepcopy(model.lm_head)
    head.weight = nn.Parameter(head.weight.detach() / temperature)  # not that of the embedding
    model.lm_head = head
    starts = default_starts(model, tokenizer=tokenizer)
    starts = [s for s in starts if not only_chats or len(s.tokens) > 1]
    pool = draw_pool(model, count, starts=starts, cache=False, progress=False, top=2)
    rows = [
        tokenizer.decode(tokens[1:length], skip_special_tokens=skip_special)
        for tokens, length in zip(pool.tokens.tolist(), pool.lengths.tolist(), strict=True)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows if row), "utf-8")
    part.rename(file)
