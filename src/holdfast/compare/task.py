"""A model and its training data, from names and files: what ``finetune`` and ``compare`` train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast._rows import read_rows, read_text
from holdfast.forgetting.classify import encoded, texts_of
from holdfast.forgetting.likelihood import encode, encode_pair
from holdfast.forgetting.models import Loaded
from holdfast.forgetting.probes import Completions
from holdfast.losses import IGNORED

__all__ = ["load_rows", "samples_of"]

Sample = dict[str, list[int]] | dict[str, Any]


def load_rows(data: str | Path) -> list[Mapping[str, Any]]:
    """The rows of a file; running text is one row."""
    path = Path(data)
    if path.suffix in (".txt", ".md"):
        return [{"text": read_text(path)}]
    return list(read_rows(path))


def samples_of(loaded: Loaded, rows: Sequence[Mapping[str, Any]], name: str) -> list[Sample]:
    """What a model is trained on, as its kind and the rows' columns ask for.

    A causal language model learns conversations (``messages``: what the assistant says), prompts
    and completions (the completion), or texts (all of it, in pieces of its full length); a
    classifier learns texts and labels.
    """
    if not rows:
        raise ValueError(f"{name} has no rows")
    if loaded.kind == "classifier":
        return [encoded(loaded, row, name) for row in rows]
    if loaded.kind != "causal_lm":
        raise ValueError(
            f"{type(loaded.model).__name__} is neither a causal language model nor a classifier of "
            "texts: train it in a loop of your own, with holdfast.Run"
        )
    first = rows[0]
    if "messages" in first:
        samples = [_conversation(loaded, row["messages"], name) for row in rows]
    elif set(first) & {"completion", "answer", "response", "output", "target"}:
        pairs = Completions(name, rows)
        samples = [_completion(loaded, *pairs.texts(i)) for i in range(len(rows))]
    elif column := texts_of(first):
        samples = [piece for row in rows for piece in _pieces(loaded, str(row[column[0]]))]
    else:
        raise ValueError(
            f"{name}: cannot tell what to learn from the columns {', '.join(map(str, first))}: "
            "messages, or prompt and completion, or text"
        )
    kept = [s for s in samples if any(label != IGNORED for label in s["labels"][1:])]
    if not kept:
        raise ValueError(f"{name}: no row has anything to learn within {loaded.limit} tokens")
    return kept


def _completion(loaded: Loaded, prompt: str, answer: str) -> Sample:
    context, target = encode_pair(loaded, prompt, answer)
    end = loaded.need_tokenizer("training").eos_token_id
    target = target if end is None else [*target, end]
    ids = [*context, *target]
    labels = [*[IGNORED] * len(context), *target]
    return {"input_ids": ids[: loaded.limit], "labels": labels[: loaded.limit]}


def _pieces(loaded: Loaded, text: str) -> list[Sample]:
    ids = encode(loaded.need_tokenizer("training"), text)
    cut = [ids[i : i + loaded.limit] for i in range(0, len(ids), loaded.limit)]
    return [{"input_ids": piece, "labels": list(piece)} for piece in cut]


def _conversation(loaded: Loaded, messages: Sequence[Mapping[str, str]], name: str) -> Sample:
    """All turns by the model's chat template; what the assistant says is the target."""
    tokenizer = loaded.need_tokenizer("a conversation")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{name} holds conversations, and the tokenizer has no chat template")

    def ids_of(turns: Sequence[Mapping[str, str]], *, ask: bool = False) -> list[int]:
        made = tokenizer.apply_chat_template(
            list(turns), add_generation_prompt=ask, tokenize=True, return_dict=True
        )
        return list(made["input_ids"])

    ids: list[int] = []
    labels: list[int] = []
    for i, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        before, after = ids_of(messages[:i], ask=True), ids_of(messages[: i + 1])
        if after[: len(before)] != before or before[: len(ids)] != ids:
            raise ValueError(
                f"{name}: the chat template rewrites earlier turns; give prompt and completion"
            )
        labels += [IGNORED] * (len(before) - len(ids)) + after[len(before) :]
        ids = after
    return {"input_ids": ids[: loaded.limit], "labels": labels[: loaded.limit]}
