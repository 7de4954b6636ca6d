"""A forgetting budget: is it kept on fresh texts, is it used up, and what does the target lose?

    python benchmarks/budget.py --embedded --out FILE.json
    python benchmarks/budget.py --smollm2 DIR --gsm8k gsm8k-train.jsonl.gz --jobs 4 --out FILE.json

A language model learns GSM8K in :func:`holdfast.train_loop` by self-replay, without a budget and
with several ones, and by plain fine-tuning. The embedded model runs on a CPU in some minutes. Of
each tuned model the loss on GSM8K's test is measured, and KL(base ‖ tuned) per token on texts that
are drawn for the test only: over the whole vocabulary, and as the mean of log p_base − log p_tuned
of the drawn tokens, which uses nothing but the probabilities of the texts. Plain fine-tuning is
brought to the same KL by WiSE-FT alone. The test problems of GSM8K lie beside the training ones.

With ``--runs``, processes that are started side by side with the same directory share the work,
and a stopped benchmark continues there; ``--jobs`` starts several.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _common import default_device
from additivity_lm import answers, nll, read
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent / "papers"))

from _jobs import Record, collect, records, work

from holdfast import LoopSettings, Recipe, Reference, Run, SelfReplay, WiseFT, builtin, pad_collate
from holdfast import train_loop as train
from holdfast.io.encoding import TrainingData
from holdfast.io.models import Loader
from holdfast.scoring.pool import Pool, draw_pool
from holdfast.scoring.starts import default_starts

NAME = "SmolLM2-135M-Instruct (Q4_1, dequantised)"
FRESH = 1_000_003  # the seed of the texts for the test
ROWS = 16  # texts at a time
SECANTS = 3  # per budget, to find the α of plain fine-tuning
EMBEDDED = {
    "lr": 3e-3, "updates": 40, "batch_size": 16, "share": 1.0, "length": 64, "texts": 512,
}  # fmt: skip
SMOLLM2 = {
    "lr": 5e-4, "updates": 233, "batch_size": 32, "share": 0.25, "length": 128, "texts": 1024,
}  # fmt: skip

Samples = list[dict[str, list[int]]]


class Bench:
    """The model, the samples, and the texts for the test; made when they are first needed."""

    def __init__(self, args: argparse.Namespace, runs: Path) -> None:
        self.args, self.cache = args, runs / "drawn"
        self.device = torch.device("cpu") if args.embedded else default_device()

    @functools.cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.args.model)

    def load(self) -> Any:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.args.model, dtype=torch.float32)
        return model.to(self.device).eval()

    @functools.cached_property
    def base(self) -> Any:
        return self.load().requires_grad_(False)

    @functools.cached_property
    def reference(self) -> Reference:
        return Reference.of(self.base)

    @functools.cached_property
    def samples(self) -> tuple[Samples, Samples]:
        """To learn, and for the test."""
        if self.args.embedded:
            learned, tested = (self._encoded(path) for path in (builtin.TRAIN, builtin.DEV))
        else:
            path = self.args.gsm8k
            test = path.with_name(path.name.replace("train", "test"))
            learned, tested = (answers(self.tokenizer, read(file)) for file in (path, test))
        return learned[: self.args.samples], tested[: self.args.test_samples]

    def _encoded(self, path: Path) -> Samples:
        loader = Loader(max_length=256, tokenizer=self.tokenizer)
        return list(TrainingData.open(str(self.args.model), str(path), loader).samples(self.base))

    @functools.cached_property
    def fresh(self) -> Pool:
        starts = default_starts(self.base, self.tokenizer)
        return draw_pool(
            self.base, self.args.texts, starts=starts, length=self.args.length, top=None,
            seed=FRESH, cache=self.cache, progress=False,
        )  # fmt: skip

    def measure(self, model: nn.Module) -> Record:
        was_training = model.training
        found = {"target": nll(model.eval(), self.samples[1]), **self.divergence(model)}
        model.train(was_training)
        return found

    @torch.no_grad()
    def divergence(self, model: nn.Module) -> Record:
        """KL(base ‖ model) per drawn token by two estimates, and their standard errors."""
        pool, sums = self.fresh, torch.zeros(len(self.fresh), 2, dtype=torch.float64)
        for rows in torch.arange(len(pool)).split(ROWS):
            batch = pool.batch(rows, self.device)
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            text, at = batch.where.nonzero(as_tuple=True)
            log_p, log_q = (
                net(**inputs).logits[text, at].float().log_softmax(-1) for net in (self.base, model)
            )
            apart = log_p - log_q
            drawn = batch.input_ids[text, at + 1][:, None]
            ratio = apart.gather(1, drawn)[:, 0]
            both = torch.stack([(log_p.exp() * apart).sum(1), ratio], 1).double().cpu()
            sums.index_add_(0, rows[text], both)
        kl, ratio = (per_token(column, pool.counts) for column in sums.unbind(1))
        return {"kl": kl[0], "kl_error": kl[1], "ratio": ratio[0], "ratio_error": ratio[1]}

    def train(self, recipe: Recipe, seed: int) -> tuple[nn.Module, Run, list[dict[str, float]]]:
        args, log = self.args, list[dict[str, float]]()
        torch.manual_seed(seed)
        run = Run(
            recipe, self.load(), self.samples[0], lr=args.lr, collate=pad_collate,
            tokenizer=self.tokenizer, visits=args.updates * args.batch_size, seed=seed,
            cache=self.cache, progress=False,
        )  # fmt: skip
        settings = LoopSettings(
            max_updates=args.updates, schedule=schedule, clip_norm=1.0,
            log_every=max(1, args.updates // 20),
            autocast=torch.bfloat16 if self.device.type == "cuda" else None,
        )  # fmt: skip
        train(run, batch_size=args.batch_size, settings=settings, log=log.append)
        return run.finish(), run, log

    def replay(self, budget: float | None, seed: int) -> Record:
        recall = SelfReplay(budget=budget, share=self.args.share, length=self.args.length)
        model, run, log = self.train(Recipe(recall=recall), seed)
        kept = {"alpha": getattr(run.recall, "alpha", 1.0)}
        return {"budget": budget, "seed": seed, **self.measure(model), **kept, "log": log}

    def plain(self, seed: int) -> Record:
        """Plain fine-tuning, and the points on the way to it with the KL of each budget."""
        model, _, log = self.train(Recipe(), seed)
        points: dict[float, Record] = {}

        def at(alpha: float) -> None:
            points.update(WiseFT().sweep(model, self.reference, [alpha], self.measure))

        at(1.0)
        for budget in sorted(self.args.budgets, reverse=True):
            for _ in range(SECANTS):
                alpha = alpha_for(budget, {a: point["kl"] for a, point in points.items()})
                if alpha in points:
                    break
                at(alpha)
        rows = [{"alpha": alpha, **points[alpha]} for alpha in sorted(points)]
        return {"seed": seed, "points": rows, "log": log}


def per_token(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """Σ sums / Σ counts over texts, and its standard error."""
    n, mean = len(sums), float(sums.sum() / counts.sum())
    return mean, float((sums - mean * counts).square().sum().mul(n / (n - 1)).sqrt() / counts.sum())


def alpha_for(kl: float, known: Mapping[float, float]) -> float:
    """The α of WiSE-FT with about this KL, between the nearest that are known; at most 1."""
    below = max((a for a in known if known[a] < kl), default=0.0)
    above = min((a for a in known if known[a] >= kl), default=1.0)
    if below == 0:  # KL is nearly quadratic in α
        return above * math.sqrt(kl / known[above])
    if below >= above:
        return below
    way = math.log(kl / known[below]) / math.log(known[above] / known[below])
    return float(below * (above / below) ** way)


def target_at(kl: float, points: Sequence[Record]) -> float:
    """The target of plain fine-tuning at a KL: linear in log KL between two points."""
    ordered = sorted(points, key=lambda point: float(point["kl"]))
    for one, other in itertools.pairwise(ordered):
        if one["kl"] <= kl <= other["kl"]:
            way = math.log(kl / one["kl"]) / math.log(other["kl"] / one["kl"])
            return float(one["target"] + way * (other["target"] - one["target"]))
    return float(min(ordered, key=lambda point: abs(point["kl"] - kl))["target"])


def schedule(update: int, total: int) -> float:
    """3 % warm-up, then linear to 0."""
    return min((update + 1) / (0.03 * total), 1 - update / total)


def summary(runs: Iterable[Record]) -> list[Record]:
    """One row per budget: KL in shares of it, targets, and plain fine-tuning at the same KL."""
    found: dict[float | None, list[Record]] = {}
    plain: dict[int, Sequence[Record]] = {}
    for run in runs:
        if "points" in run:
            plain[run["seed"]] = run["points"]
        else:
            found.setdefault(run["budget"], []).append(run)
    rows = []
    for budget in sorted(found, key=lambda b: math.inf if b is None else b):
        some = found[budget]
        targets = [run["target"] for run in some]
        row: Record = {"budget": budget, "seeds": len(some)}
        row |= {name: statistics.median(run[name] for run in some) for name in ("kl", "ratio")}
        row |= {"target": statistics.median(targets), "spread": max(targets) - min(targets)}
        if budget is not None:
            shares = [run["kl"] / budget for run in some]
            row |= {"most_used": max(shares), "least_used": min(shares)}
        theirs = [
            (run["target"], target_at(run["kl"], plain[run["seed"]]))
            for run in some
            if run["seed"] in plain
        ]
        if theirs:
            row["plain_target"] = statistics.median(target for _, target in theirs)
            row["better_than_plain"] = sum(ours < target for ours, target in theirs)
        rows.append(row)
    return rows


def show(rows: Sequence[Record]) -> None:
    heads = ("budget", "KL", "log ratio", "used, most", "least", "target", "spread", "plain")
    print("".join(f"{head:>12}" for head in heads))
    names = (
        "budget", "kl", "ratio", "most_used", "least_used", "target", "spread", "plain_target",
    )  # fmt: skip
    for row in rows:
        cells = (row.get(name) for name in names)
        print("".join(f"{'–' if cell is None else f'{cell:.4f}':>12}" for cell in cells))


def jobs_of(args: argparse.Namespace, runs: Path) -> dict[str, Callable[[], Record]]:
    bench = Bench(args, runs)
    found: dict[str, Callable[[], Record]] = {}
    for seed in args.seeds:
        found[f"plain-s{seed}"] = functools.partial(bench.plain, seed)
        for budget in (None, *args.budgets):
            name = "unlimited" if budget is None else f"budget-{budget:g}"
            found[f"{name}-s{seed}"] = functools.partial(bench.replay, budget, seed)
    return found


def run_all(args: argparse.Namespace, runs: Path) -> None:
    torch.set_float32_matmul_precision("high")
    work(jobs_of(args, runs), runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--embedded", action="store_true", help="the embedded model, on the CPU")
    model.add_argument("--smollm2", type=Path, metavar="DIR")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="gsm8k-train.jsonl.gz")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.02, 0.05, 0.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, help="by default 3e-3 or 5e-4")
    parser.add_argument("--updates", type=int, help="by default 40 or 233")
    parser.add_argument("--batch-size", type=int, help="by default 16 or 32")
    parser.add_argument("--share", type=float, help="by default 1 or 0.25")
    parser.add_argument("--length", type=int, help="of the drawn texts, by default 64 or 128")
    parser.add_argument("--texts", type=int, help="for the test, by default 512 or 1024")
    parser.add_argument("--samples", type=int, help="of the training data")
    parser.add_argument("--test-samples", type=int, default=500)
    parser.add_argument("--runs", type=Path, help="where the runs' records go")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    if args.smollm2 and not args.gsm8k:
        parser.error("--smollm2 needs --gsm8k")
    args.model = builtin.MODEL if args.embedded else args.smollm2
    usual = EMBEDDED if args.embedded else SMOLLM2
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    with tempfile.TemporaryDirectory() as temporary:
        runs = args.runs or Path(temporary)
        start = multiprocessing.get_context("spawn").Process
        others = [start(target=run_all, args=(args, runs)) for _ in range(args.jobs - 1)]
        for other in others:
            other.start()
        run_all(args, runs)
        for other in others:
            other.join()
        show(rows := summary(records(runs).values()))
        if args.out:
            names = ("budgets", "seeds", *EMBEDDED)
            protocol = {
                "model": "embedded" if args.embedded else NAME,
                "target": "GSM8K",
                **{name: getattr(args, name) for name in names},
                "training": "3 % warm-up, linear to 0, clipped to 1; on a GPU float32 weights and "
                "bfloat16 autocast",
                "kl": "KL(base ‖ tuned) in nats per drawn token, over the whole vocabulary, on "
                "texts drawn for the test only; ratio: the mean of log p_base − log p_tuned there",
                "plain": "plain fine-tuning at the same learning rate, brought to the same KL by "
                "WiSE-FT",
                "summary": rows,
            }
            collect(runs, jobs_of(args, runs), args.out, protocol)


if __name__ == "__main__":
    main()
