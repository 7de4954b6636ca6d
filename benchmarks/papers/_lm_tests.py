"""What a language model can and knows, measured in seconds: all tests in one pass over the model.

The requests of all tests are tokenized once, by the conventions of
:mod:`holdfast.scoring.likelihood`, and run together, those of like length in one batch. Logits
are made of the targets only, in float32. Nothing waits for the GPU before the end.
"""

from __future__ import annotations

import gzip
import itertools
import math
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from additivity_lm import answers, end_of_answer, read
from forgetting_lm import QUESTION, arc_rows, lambada_rows

from holdfast.evaluate.kl import ContextFreeKL
from holdfast.io.encoding import Continuation, encode_pairs, tokenize, windows
from holdfast.io.models import Loaded

LIMIT = 1024  # tokens of a request
TOKENS = 1 << 15  # in a batch
ROWS = 1 << 11  # of logits at a time
ACCURACIES = ("piqa", "arc_easy", "arc_challenge", "boolq", "winogrande", "lambada", "mmlu")
ATTENTION = "causal_without_mask"

Figures = dict[str, float]
Test = dict[str, Any]  # name, kind, requests; of a choice: sizes, lengths and labels as well


def attention_without_mask() -> str:
    """The name of an attention that asks for no mask.

    transformers looks into the positions for packed sequences, which waits for the GPU and cannot
    be captured into a graph. For an attention of an unknown name it makes no mask; without one
    SDPA is causal. So rows are padded on the right, or come with a mask of four dimensions.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
    return ATTENTION


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal without a mask. With one, the query heads of a group are rows of one head.

    SDPA would otherwise copy the keys and values for each of them. This is for a single token.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None or query.shape[2] > 1:
        found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found, None
    grouped = query.to(key.dtype).view(len(query), key.shape[1], -1, query.shape[3])
    mask = attention_mask.expand(-1, key.shape[1], grouped.shape[2], -1)
    found = F.scaled_dot_product_attention(grouped, key, value, mask, scale=options["scaling"])
    return found.reshape(len(query), 1, -1, query.shape[3]), None


def load(folder: Path, device: torch.device) -> Any:
    """The model in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention_without_mask()
    )
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(rms_norm, module)
    return model.to(device).eval()


def rms_norm(module: Any, states: Tensor) -> Tensor:
    """RMSNorm in one kernel; that of transformers reads and writes the states several times."""
    return F.rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)


def make_tests(
    tokenizer: Any, folder: Path, limit: int, limits: Mapping[str, int] | None = None
) -> list[Test]:
    """All tests, tokenized; of each some rows, the same for every run.

    ``limits`` are those of single tests: rows, and of WikiText-2 tokens.
    """
    most = {"wikitext": 240 * limit, "mmlu": 2 * limit} | dict(limits or {})
    loaded = Loaded(nn.Identity(), "causal_lm", tokenizer, LIMIT)

    def some(name: str, rows: Sequence[Any]) -> list[Any]:
        return random.Random(0).sample(rows, min(most.get(name, limit), len(rows)))

    def texts(name: str, kind: str, pairs: Sequence[tuple[str, str]]) -> Test:
        return {"name": name, "kind": kind, "requests": encode_pairs(loaded, pairs)}

    def choice(name: str, rows: Any, by_length: bool = False) -> Test:
        """Rows of pairs to compare, and which of them is right."""
        chosen = some(name, list(rows))
        pairs = [pair for several, _ in chosen for pair in several]
        return texts(name, "choice", pairs) | {
            "sizes": [len(several) for several, _ in chosen],
            "lengths": [max(1, len(end)) if by_length else 1 for _, end in pairs],
            "labels": [label for _, label in chosen],
        }

    def ask(question: str, choices: Sequence[str]) -> list[tuple[str, str]]:
        return [(QUESTION.format(question), f" {choice}") for choice in choices]

    solved = answers(tokenizer, some("gsm8k", read(folder / "gsm8k-test.jsonl.gz")))
    gsm8k = [split_answer(sample) for sample in solved]
    with gzip.open(folder / "wikitext2-test.txt.gz", "rt", encoding="utf-8") as file:
        text = tokenize(tokenizer, file.read()[: 9 * most["wikitext"]])[: most["wikitext"]]
    arc = {kind: arc_rows(folder / f"arc-{kind}-test.jsonl.gz") for kind in ("easy", "challenge")}
    piqa: list[Any] = list(read(folder / "piqa-valid.jsonl.gz"))
    mmlu: list[Any] = list(read(folder / "mmlu-test.jsonl.gz"))
    mbpp = some("mbpp", read(folder / "mbpp.jsonl.gz"))
    lambada = some("lambada", lambada_rows(folder / "lambada-test.jsonl.gz"))
    return [
        {"name": "gsm8k", "kind": "text", "requests": gsm8k},
        {
            "name": "wikitext", "kind": "text",
            "requests": windows(text, loaded.first_token(), LIMIT),
        },
        texts("mbpp", "text", [(r["text"], "\n" + r["code"].replace("\r", "")) for r in mbpp]),
        texts("lambada", "greedy", [(r["prompt"], r["completion"]) for r in lambada]),
        choice("piqa", [(ask(r["goal"], r["choices"]), r["label"]) for r in piqa]),
        *(
            choice(
                f"arc_{kind}", [(ask(r["question"], r["choices"]), r["label"]) for r in rows],
                by_length=kind == "challenge",
            )
            for kind, rows in arc.items()
        ),
        choice("boolq", boolq(read(folder / "boolq-test.jsonl.gz"))),
        choice("winogrande", winogrande(read(folder / "winogrande-test.jsonl.gz"))),
        choice("mmlu", letters(mmlu)),
    ]  # fmt: skip


def split_answer(sample: dict[str, list[int]]) -> Continuation:
    """A question and its answer, tokenized as in training."""
    begin = sum(label == -100 for label in sample["labels"])
    return Continuation(sample["input_ids"][:begin], sample["input_ids"][begin:])


def boolq(rows: Sequence[dict[str, str]]) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """Yes or no, without the passage: the instruction form has none."""
    for row in rows:
        asked = row["instruction"].split("question: ", 1)[1].split("\n\nAnswer format")[0]
        prompt = QUESTION.format(asked)
        yield [(prompt, " no"), (prompt, " yes")], int(row["answer"] == "true")


def winogrande(rows: Sequence[dict[str, str]]) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """How likely the rest of the sentence is after each of the two, put into the blank."""
    for row in rows:
        text = row["instruction"].split("given sentence: ", 1)[1]
        sentence, _, rest = text.partition("\n\nOption1: ")
        options = re.split(r" Option2: ", rest.partition(" Answer format")[0])
        before, _, after = sentence.partition("_")
        yield [(before + o.strip(), after) for o in options], int(row["answer"][-1]) - 1


def letters(rows: Sequence[Any]) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """The choices with letters; a letter is the answer."""
    for row in rows:
        named = list(zip("ABCD", row["choices"], strict=True))
        prompt = "\n".join([row["question"], *(f"{a}. {c}" for a, c in named), "Answer:"])
        yield [(prompt, f" {letter}") for letter, _ in named], int(row["label"])


class Pool:
    """Rows of tokens in batches, and the positions of all targets in them.

    Requests with the same inputs, such as the letters after a question, are one row.

    Attributes:
        wanted: all target tokens, in the order of :meth:`states`.
        owner: the request of each.
    """

    def __init__(self, requests: Sequence[Continuation], device: torch.device) -> None:
        rows: dict[tuple[int, ...], list[int]] = {}
        for number, (context, target) in enumerate(requests):
            rows.setdefault(tuple([*context, *target][:-1][-LIMIT:]), []).append(number)
        order = sorted(rows, key=lambda row: -len(row))
        self.size, self.batches = len(requests), list[tuple[Tensor, Tensor]]()
        wanted, owner = list[int](), list[int]()
        while order:
            longest = len(order[0])
            some, order = order[: TOKENS // longest], order[TOKENS // longest :]
            ids, positions = torch.zeros(len(some), longest, dtype=torch.long), list[int]()
            for number, row in enumerate(some):
                ids[number, : len(row)] = torch.tensor(row)
                for request in rows[row]:
                    target = requests[request].target[-LIMIT:]
                    end = number * longest + len(row)
                    positions += range(end - len(target), end)
                    wanted += target
                    owner += [request] * len(target)
            self.batches.append((ids.to(device), torch.tensor(positions, device=device)))
        self.wanted = torch.tensor(wanted, device=device)
        self.owner = torch.tensor(owner, device=device)
        self.tokens = np.bincount(owner, minlength=self.size)

    def states(self, model: Any) -> Iterator[tuple[slice, Tensor]]:
        """The hidden states that predict the targets, some at a time, and where these are."""
        start = 0
        for ids, positions in self.batches:
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            for part in hidden.flatten(0, 1)[positions].float().split(ROWS):
                yield slice(start, start + len(part)), part
                start += len(part)

    def answered(self, model: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The loss of each request, and whether all its target tokens are the likeliest ones."""
        losses, misses = [], []
        for where, states in self.states(model):
            logits = F.linear(states, model.lm_head.weight)
            losses.append(F.cross_entropy(logits, self.wanted[where], reduction="none"))
            misses.append(logits.argmax(-1) != self.wanted[where])
        return self.sums(losses), self.sums(misses) == 0

    def sums(self, values: list[Tensor]) -> np.ndarray[Any, Any]:
        """Of values of the targets, by request: the one time that the GPU is waited for."""
        total = torch.zeros(self.size, dtype=torch.float64, device=self.owner.device)
        return total.index_add_(0, self.owner, torch.cat(values).double()).cpu().numpy()


class Tests:
    """Everything that is measured of a model.

    Args:
        tests: of :func:`make_tests`; the first is the target's.
        drawn: of :func:`draw`.
        base: the pretrained model; its states are kept, not its logits.
        tokenizer: to read what it writes.
        questions: of GSM8K, to be answered in writing; none is none.
    """

    def __init__(
        self, tests: list[Test], drawn: list[list[int]], base: Any, tokenizer: Any,
        questions: Sequence[dict[str, str]] = (),
    ) -> None:  # fmt: skip
        self.tests, self.tokenizer, self.questions = tests, tokenizer, questions
        device = next(base.parameters()).device
        requests = [Continuation(*r) for test in tests for r in test["requests"]]
        self.pool = Pool(requests, device)
        solved = [Continuation(*r) for r in tests[0]["requests"][:100]]
        free = [
            Continuation(ids[:1], [*ids[1:], 0]) for ids in drawn
        ]  # a prediction after each token
        self.divergent, self.solved = Pool([*solved, *free], device), len(solved)
        self.head = base.lm_head.weight.detach().clone()
        with torch.no_grad():
            self.states = torch.cat([states for _, states in self.divergent.states(base)])

    @torch.no_grad()
    def measure(self, model: Any, *, write: bool = False) -> Figures:
        """All figures of a model; with ``write`` it answers the questions as well."""
        nll, greedy = self.pool.answered(model)
        figures, start = Figures(), 0
        for test in self.tests:
            here = slice(start, start := start + len(test["requests"]))
            figures |= _figures(test, nll[here], self.pool.tokens[here], greedy[here])
        if all(name in figures for name in ACCURACIES):
            mean = [figures[name] for name in ACCURACIES]
            errors = [figures[f"{name}_se"] for name in ACCURACIES]
            figures["retained_accuracy"] = sum(mean) / len(mean)
            figures["retained_accuracy_se"] = math.hypot(*errors) / len(mean)
        figures |= self._divergences(model)
        if write and self.questions:
            figures["gsm8k_match"] = share = self._match(model)
            figures["gsm8k_match_se"] = math.sqrt(share * (1 - share) / len(self.questions))
        return {name: round(float(value), 6) for name, value in figures.items()}

    def _divergences(self, model: Any) -> Figures:
        """KL(base‖tuned) per target token of the first test, and per token that the base wrote."""
        found = []
        for where, states in self.divergent.states(model):
            p = F.linear(self.states[where], self.head).log_softmax(-1)
            q = F.linear(states, model.lm_head.weight).log_softmax(-1)
            found.append((p.exp() * (p - q)).sum(-1))
        sums, tokens, n = self.divergent.sums(found), self.divergent.tokens, self.solved
        return {
            f"kl_{self.tests[0]['name']}": sums[:n].sum() / tokens[:n].sum(),
            "kl_context_free": sums[n:].sum() / tokens[n:].sum(),
        }

    def _match(self, model: Any) -> float:
        from _lm_write import write

        prompts = [split_answer(s).context for s in answers(self.tokenizer, self.questions)]
        texts = self.tokenizer.batch_decode(write(model, prompts, end_of_answer(self.tokenizer)))
        right = [final(t) == final(q["answer"]) for t, q in zip(texts, self.questions, strict=True)]
        return sum(right) / len(right)


def draw(base: Any, tokenizer: Any, texts: int) -> list[list[int]]:
    """Texts that the base model writes without any context."""
    return ContextFreeKL(texts, 64).draw(Loaded(base, "causal_lm", tokenizer, LIMIT))


def final(text: str) -> float | None:
    """The number after ####, which ends an answer of GSM8K.

    >>> final("so 5 + 5 = 10. #### $1,010.00<|im_end|>")
    1010.0
    """
    found = re.search(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return float(found[1].replace(",", "")) if found else None


def right_answers(test: Test, nll: Any, greedy: Any) -> Any:
    """Which rows of a test are answered rightly: by the likeliest choice, or by every token."""
    if test["kind"] != "choice":
        return greedy
    ends = list(itertools.accumulate(test["sizes"]))
    cut = np.split(nll / np.array(test["lengths"]), ends[:-1])
    return np.array([c.argmin() == y for c, y in zip(cut, test["labels"], strict=True)])


def _figures(test: Test, nll: Any, tokens: Any, greedy: Any) -> Figures:
    """A test's figures and their standard errors, of a request's loss, its length and its match."""
    found = Figures()
    if test["kind"] != "choice":
        found |= loss_figures(test["name"], nll, tokens)
    if test["kind"] != "text":
        found |= share_figures(test["name"], right_answers(test, nll, greedy))
    return found


def loss_figures(name: str, nll: Any, tokens: Any) -> Figures:
    """The mean loss of a token, and its standard error over requests."""
    mean, n = nll.sum() / tokens.sum(), len(nll)
    spread = nll - mean * tokens
    error = math.sqrt((spread**2).sum() * n / max(1, n - 1)) / tokens.sum()
    return {f"{name}_nll": mean, f"{name}_nll_se": error}


def share_figures(name: str, right: Any) -> Figures:
    """The share of right answers, and its standard error."""
    p = float(right.mean())
    return {name: p, f"{name}_se": math.sqrt(p * (1 - p) / len(right))}
