"""Self-replay on bases of one shape that are more and more saturated with pretraining.

Marek et al., *Forgetting in Language Models: Capacity, Optimization, and Self-Generated Replay*,
https://arxiv.org/abs/2605.26097, expect that a model that was trained far beyond 20 tokens per
parameter has no capacity left, and must forget to learn. Llamas of 0.1 million parameters, whose
tokens are bytes, are pretrained on WikiText-2 and GSM8K on 20, 100 and 500 tokens per parameter.
Each of them learns Shakespeare in as many updates, by plain fine-tuning, by self-replay and by
rehearsal of the pretraining text, at multiples of the learning rate of pretraining. About 90
minutes on one core; a stopped command goes on where it was. Further commands beside it must name
``--bases`` that are pretrained already.

    cd benchmarks/proof
    python capacity.py --data DATA --runs RUNS
    python capacity.py --data DATA --runs RUNS --collect results/capacity.json

DATA holds lm/*.gz. The bases are kept in RUNS/bases.
"""

from __future__ import annotations

import functools
import gzip
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "embedded"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _jobs import Job, Parser, Record, work_or_collect
from pretrain import CONTEXT, held_out_loss, learning_rate, make_model, rows_at, train
from torch import Tensor
from transformers import AutoModelForCausalLM

from holdfast import LoopSettings, Recipe, Rehearsal, Run, SelfReplay, train_loop

BASES = (20, 100, 500)  # tokens per parameter
RATES = (0.1, 0.3, 1.0, 3.0)
LR = 4e-3  # of pretraining, which the rates are multiples of
HIDDEN, LAYERS, BATCH = 64, 2, 16
UPDATES = 300  # of fine-tuning
TESTED = 1 << 17  # bytes of a test
#: Rehearsal sees as many rows of the target per update as the others.
PLANS: dict[str, tuple[Recipe, int]] = {
    "plain": (Recipe(), BATCH), "self-replay": (Recipe(recall=SelfReplay()), BATCH),
    "rehearsal": (Recipe(recall=Rehearsal(ratio=0.25)), BATCH * 5 // 4),
}  # fmt: skip
Rows = list[dict[str, list[int]]]


class Bytes:
    """What stands for a tokenizer: a token is a byte, and there is one for the beginning."""

    bos_token_id, eos_token_id, pad_token_id = 256, None, None

    def __len__(self) -> int:
        return 257


def text_of(file: Path) -> Tensor:
    """The bytes of a text, or of questions with their answers.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "some.jsonl.gz"
    >>> _ = file.write_bytes(gzip.compress(b'{"question": "1+1?", "answer": "2"}'))
    >>> bytes(text_of(file).tolist())
    b'1+1?\\n2\\n\\n'
    """
    content = gzip.decompress(file.read_bytes())
    if file.name.endswith(".jsonl.gz"):
        rows = map(json.loads, content.splitlines())
        content = "".join(f"{row['question']}\n{row['answer']}\n\n" for row in rows).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def samples(*streams: Tensor) -> Rows:
    """Texts in rows, each behind a BOS."""
    rows = [
        row.tolist()
        for stream in streams
        for row in rows_at(
            stream, torch.arange(0, len(stream) - CONTEXT + 2, CONTEXT - 1), Bytes.bos_token_id
        )
    ]
    return [{"input_ids": row, "labels": row} for row in rows]


def in_equal_parts(streams: list[Tensor]) -> Rows:
    """As many samples of each stream, evenly over the longer ones."""
    rows = [samples(stream) for stream in streams]
    fewest = min(map(len, rows))
    return [some[i * len(some) // fewest] for some in rows for i in range(fewest)]


class Bench:
    """The texts, the bases, and what is done with them."""

    def __init__(self, args: Any) -> None:
        self.args, self.folder = args, args.runs / "bases"

    @functools.cached_property
    def old(self) -> list[Tensor]:
        """What the bases are pretrained on."""
        names = ("wikitext2-valid.txt.gz", "gsm8k-train.jsonl.gz")
        return [text_of(self.args.data / "lm" / name) for name in names]

    @functools.cached_property
    def target(self) -> tuple[Tensor, Tensor]:
        """Shakespeare, to train on and to test."""
        text = text_of(self.args.data / "lm" / "tinyshakespeare.txt.gz")
        cut = len(text) * 9 // 10
        return text[:cut], text[cut:]

    @functools.cached_property
    def tests(self) -> dict[str, Tensor]:
        """The target's two halves, to choose on and to report, and what is retained."""
        names = {"wikitext": "wikitext2-test.txt.gz", "gsm8k": "gsm8k-test.jsonl.gz"}
        texts = {test: text_of(self.args.data / "lm" / name) for test, name in names.items()}
        choose, report = self.target[1].chunk(2)
        return {
            f"{test}_nll": text[: self.args.tested]
            for test, text in {"choose": choose, "report": report, **texts}.items()
        }

    def base(self, tokens: float) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / f"{tokens:g}")

    def losses(self, model: Any) -> dict[str, float]:
        """Nats per byte."""
        return {name: round(held_out_loss(model, text), 5) for name, text in self.tests.items()}

    def pretrain(self, tokens: float) -> Record:
        """Pretrain a base on so many tokens per parameter, and keep it."""
        torch.manual_seed(0)
        model = make_model(Bytes(), self.args.hidden, LAYERS)
        size = sum(p.numel() for p in model.parameters())
        print(f"base of {tokens:g} tokens per parameter, {size:,} parameters", flush=True)
        updates = train(model, self.old, tokens=tokens * size, batch=BATCH, lr=LR, seed=0)
        model.save_pretrained(self.folder / f"{tokens:g}")
        seen = updates * BATCH * CONTEXT
        return {
            "base": tokens, "plan": "pretrained", "parameters": size, "tokens": seen,
            "updates": updates, "points": {"base": self.losses(model)},
        }  # fmt: skip

    def seen(self, tokens: float) -> Record:
        """The losses on what a base was pretrained on, which tell whether it knows it by heart."""
        model = self.base(tokens)
        losses = {
            name: round(held_out_loss(model, text[: self.args.tested]), 5)
            for name, text in zip(("wikitext_nll", "gsm8k_nll"), self.old, strict=True)
        }
        return {"base": tokens, "plan": "seen", "points": {"base": losses}}

    def tune(self, tokens: float, row: str, times: float, seed: int) -> Record:
        """Fine-tune a base on the target, at a multiple of the learning rate."""
        updates, (recipe, batch) = self.args.updates, PLANS[row]
        torch.manual_seed(seed)
        run = Run(
            recipe, self.base(tokens), samples(self.target[0]), lr=times * LR, seed=seed,
            old_data=in_equal_parts(self.old) if row == "rehearsal" else None, update_size=batch,
            visits=updates * batch, cache=self.args.runs / "cache", progress=False,
        )  # fmt: skip
        settings = LoopSettings(max_updates=updates, schedule=learning_rate, clip_norm=1.0)
        train_loop(run, batch_size=batch, settings=settings)
        return {
            "base": tokens, "plan": f"{row}-x{times:g}", "seed": seed, "lr": times * LR,
            "settings": run.recipe.to_dict(), "updates": updates,
            "points": {"tuned": self.losses(run.finish())},
        }  # fmt: skip


def jobs_of(bench: Bench) -> dict[str, Job]:
    """The bases, each with what is made of it; further seeds come last."""
    found: dict[str, Job] = {}
    for seed in bench.args.seeds:
        for tokens in bench.args.bases:
            found[f"{tokens:g}-pretrained"] = functools.partial(bench.pretrain, tokens)
            found[f"{tokens:g}-seen"] = functools.partial(bench.seen, tokens)
            for times in RATES:
                for row in PLANS:
                    name = f"{tokens:g}-{row}-x{times:g}-s{seed}"
                    found[name] = functools.partial(bench.tune, tokens, row, times, seed)
    return found


def main() -> None:
    parser = Parser(__doc__)
    parser.add_input("--data")
    parser.add_argument("--bases", type=float, nargs="+", default=BASES, metavar="TOKENS",
                        help="tokens per parameter")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="a multiple of 32")
    parser.add_argument("--updates", type=int, default=UPDATES, help="of fine-tuning")
    parser.add_argument("--tested", type=int, default=TESTED, help="bytes of a test")
    args = parser.parse_args()
    torch.set_num_threads(1)
    protocol = {
        "model": f"Llama, {LAYERS} layers, hidden {args.hidden}, tokens are bytes",
        "context": CONTEXT, "batch_rows": BATCH, "pretraining_lr": LR, "rates": RATES,
        "pretraining": "wikitext2-valid and gsm8k-train, in equal parts",
        "target": "the first 90 % of tinyshakespeare; half of the rest to choose on, half reported",
        "updates": args.updates, "schedule": "5 % warm-up, cosine to 0",
        "tested_bytes": args.tested, "losses": "nats per byte", "self_replay": "defaults",
        "rehearsal": "ratio 0.25 of equal parts of both texts, as many rows of the target",
    }  # fmt: skip
    work_or_collect(jobs_of(Bench(args)), args, protocol)


if __name__ == "__main__":
    main()
