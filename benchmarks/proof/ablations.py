"""Self-replay with one setting changed at a time: SmolLM2 learns GSM8K, as in PROTOCOL.md.

    cd benchmarks/proof
    python ablations.py --model SMOLLM2 --data DATA --runs RUNS
    python ablations.py … --collect results/ablations.json

Texts at another temperature, of other numbers or of another model are drawn first and passed as a
file, so they are decoded and tokenized again; "texts" is the control, drawn as by default.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _jobs import Record, work_or_collect
from _lm_replay import Replay
from _lm_tests import load
from _loop import Batch, Loss
from _measures import TIMES
from _targets import Target
from _texts import write_texts
from language import Plan
from language_models import MODELS, Proof, jobs_of, make_parser
from torch import Tensor

from holdfast import Recipe, Run, SelfReplay
from holdfast._torch.teachers import AllTokens
from holdfast.builtin import MODEL

TEXTS = 4096
#: Files of texts: the temperature, the number, the model that writes them, and the starts.
DRAWN: dict[str, tuple[float, int, str, str]] = {
    "texts": (1.0, TEXTS, "base", "both"),
    "texts-cool": (0.7, TEXTS, "base", "both"),
    "texts-hot": (1.3, TEXTS, "base", "both"),
    "texts-256": (1.0, 256, "base", "both"),
    "texts-1024": (1.0, 1024, "base", "both"),
    "texts-chats": (1.0, TEXTS, "base", "chats"),
    "texts-untrained": (1.0, TEXTS, "untrained", "both"),
    "texts-embedded": (1.0, TEXTS, "embedded", "both"),
}
CHANGED: dict[str, dict[str, Any]] = {
    "default": {},
    **{f"strength-{x:g}": {"strength": x} for x in (0.1, 0.3, 3.0, 10.0)},
    **{f"share-{x:g}": {"share": x} for x in (0.1, 0.25, 1.0)},
    **{f"length-{x}": {"length": x} for x in (32, 256)},
    **{f"top-{x or 'all'}": {"top": x} for x in (8, None)},
    "reversed": {"top": None},
}


class Ablations(Proof):
    """The runs, and the texts that some of them replay."""

    @functools.cached_property
    def target(self) -> Target:
        return super().target._replace(questions=[])

    def plans(self) -> dict[str, Plan]:
        """All runs. The learning rate that they are multiples of is the default of ``holdfast``."""

        def plan(recall: SelfReplay, lr: float = 1.0, **more: Any) -> Plan:
            return Plan(Recipe(recall=recall), lr, (0,), **more)

        found = {name: plan(SelfReplay(**changed)) for name, changed in CHANGED.items()}
        found["no-chats"] = plan(SelfReplay(), chats=False)
        found |= {f"rate-x{lr:g}": plan(SelfReplay(), lr) for lr in TIMES}
        files = {name: str(self.prepared / f"{name}.jsonl") for name in DRAWN}
        return found | {name: plan(SelfReplay(texts=file)) for name, file in files.items()}

    def run(self, name: str, plan: Plan, seed: int) -> Record:
        if name in DRAWN:
            self.draw(name)
        self.reverses = name == "reversed"
        return super().run(name, plan, seed)

    def draw(self, name: str) -> None:
        """Write a file of texts, one per line."""
        temperature, count, writer, kind = DRAWN[name]
        file = self.prepared / f"{name}.jsonl"
        if file.exists():
            return
        model, tokenizer = self.writer(writer)
        write_texts(
            file, model, tokenizer, count, temperature,
            only_chats=kind == "chats",
            skip_special=tokenizer is not self.tokenizer,  # those of another are ordinary text
        )  # fmt: skip

    def writer(self, name: str) -> tuple[Any, Any]:
        """A model that writes texts, and its tokenizer."""
        if name == "embedded":  # the small model that comes with the library
            from transformers import AutoTokenizer

            return load(MODEL, self.device), AutoTokenizer.from_pretrained(MODEL)
        model = self.fresh()
        if name == "untrained":
            torch.manual_seed(0)
            model = type(model)(model.config).to(self.device).eval()
        return model, self.tokenizer

    def terms(self, plan: Plan, run: Run, batches: list[Batch], seed: int) -> list[Loss]:
        found = super().terms(plan, run, batches, seed)
        if self.reverses:
            for replay in found:
                cast(Replay, replay).whole = Reversed
        return found


class Reversed(AllTokens):
    """KL(model ‖ base) instead of KL(base ‖ model)."""

    def compare(self, rows: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """KL = Σ q·log(q/p); ∂KL/∂z = q·(log(q/p) − KL)."""
        log_p = self.logits(rows).to(logits.dtype).log_softmax(1)
        log_q = logits.log_softmax(1)
        q, ratio = log_q.exp(), log_q - log_p
        value = (q * ratio).sum(1)
        return value, lambda: q.mul_(ratio - value[:, None])


def main() -> None:
    parser = make_parser(__doc__)
    args: Any = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    bench = Ablations(args)
    protocol = {
        "model": MODELS["smollm2"], "target": args.target, "rules": "benchmarks/proof/PROTOCOL.md",
        "drawn": {name: list(how) for name, how in DRAWN.items()}, "changed": CHANGED,
    }  # fmt: skip
    work_or_collect(jobs_of(bench, bench.plans()), args, protocol)


if __name__ == "__main__":
    main()
