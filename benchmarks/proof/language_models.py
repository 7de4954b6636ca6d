"""A language model learns a target: `holdfast` at its defaults against everything else.

Settings, opponents, seeds and measures are in PROTOCOL.md.

    cd benchmarks/proof
    python language_models.py --model SMOLLM2 --data DATA --target gsm8k --runs RUNS
    python language_models.py … --stage more      # further seeds, chosen by the first runs
    python language_models.py … --stage both      # one after the other
    python language_models.py … --collect results/smollm2_gsm8k.json

SMOLLM2 is a directory that transformers reads, DATA holds lm/*.gz. RUNS is a folder of this model
and target alone. Processes that are started side by side with the same RUNS share the work.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _stages
import torch
from _exam import Exam
from _jobs import (
    Job,
    Parser,
    Record,
    failed,
    records,
    work_first,
    work_or_collect,
)
from _lm_tests import LIMIT, load, make_tests
from _lm_train import BATCH, body_and_head, head_loss
from _loop import Batch, Loss
from _measures import CHANCE, OURS, RATES_OF_OURS, TIMES, Setting, above_chance, is_plain
from _rewritten import rewrite
from _stages import HOLDFAST
from _targets import GSM8K, MAKERS, Target, make_target
from additivity_lm import answers, read
from language import TRAINING, Bench, Plan
from torch import Tensor

from holdfast import (
    L2SP,
    Flow,
    LiNeS,
    LoRA,
    MoFOUpdate,
    RecAdamUpdate,
    Recipe,
    Run,
    SPDUpdate,
    WiseFT,
)
from holdfast._torch.teachers import DrawnTokens
from holdfast.io.encoding import tokenize

#: The learning rates that the plans are multiples of.
RATES = {"smollm2": 5e-4, "qwen-0.5b": 1.8e-4, "qwen-1.5b": 7.2e-5}
ALPHAS, LINES = (0.5, 0.7), (0.5,)
#: By the beginning of a model's name.
MERGED = {
    "smollm2": ("plain-x0.5", "plain-x1"),
    "qwen": ("plain-x0.05", "plain-x0.1", "plain-x0.2", "plain-x0.5", "plain-x1"),
}
MERGED_SEEDS = (0, 1, 2)  # the rows of merged models have three seeds at most
#: Rows of retained tests, where not all are used; tokens of WikiText-2.
MOST = {
    "wikitext": 80 * LIMIT, "gsm8k": 500, "mbpp": 487, "lambada": 1500, "arc_easy": 800,
    "mmlu": 4000,
}  # fmt: skip
#: Those of the first setting, MBPP, which was run before the others.
FIRST = {"wikitext": 160 * LIMIT, "lambada": 2500, "mmlu": 4000}
FEWER = {
    "wikitext": 80 * LIMIT, "gsm8k": 660, "mbpp": 487, "lambada": 1500, "piqa": 1000,
    "arc_easy": 1200, "arc_challenge": 600, "boolq": 1600, "winogrande": 1267, "mmlu": 2000,
}  # fmt: skip
OLD = 16, 128  # texts of rehearsal per update, and their tokens: as many as holdfast replays
#: The base that is close to saturation: an ablation with plain fine-tuning and one seed.
SATURATED = ("qwen-0.5b", "mbpp")
#: The rows of the protocol.
ROWS = {
    OURS: Plan(HOLDFAST, None), "plain": Plan(Recipe()), "lora": Plan(Recipe(trainable=LoRA(r=16))),
    "lora-mlp": Plan(Recipe(trainable=LoRA(r=16, target="mlp"))),
    "l2-sp": Plan(Recipe(penalties=[L2SP()])), "recadam": Plan(Recipe(update=RecAdamUpdate())),
    "flow": Plan(Recipe(objective=Flow())), "mofo": Plan(Recipe(update=MoFOUpdate())),
    "spd": Plan(Recipe(update=SPDUpdate())), "rehearsal": Plan(Recipe(), old=True),
    "rewritten": Plan(Recipe(), rewritten=True),
    "holdfast-lora": Plan(Recipe.preset("holdfast+lora"), None),
    RATES_OF_OURS: Plan(HOLDFAST, None),
}  # fmt: skip
DEFAULT = (None,)
#: Of each setting: the rows with their learning rates, as multiples of those in ``RATES``. None is
#: the default of ``holdfast``, which ``RATES_OF_OURS`` are multiples of. ``ablations.py`` has these
#: of SmolLM2 on GSM8K. GSM8K's answers end with a number that can be checked, so that they can be
#: rewritten.
PLANNED: dict[tuple[str, str], dict[str, Sequence[float | None]]] = {
    ("smollm2", "gsm8k"): {
        OURS: DEFAULT, "plain": (0.1, 0.2, 0.5, 1, 2), "lora": (1, 3, 6, 12), "lora-mlp": (3, 6),
        "l2-sp": (0.5, 1), "recadam": (0.5, 1), "flow": (0.5, 1), "mofo": (0.5, 1),
        "spd": (0.5, 1), "rehearsal": (0.5, 1), "rewritten": (0.5, 1), "holdfast-lora": DEFAULT,
    },
    ("smollm2", "mbpp"): {
        OURS: DEFAULT, "plain": (0.1, 0.2, 0.5, 1, 2, 4), "lora": (1, 3, 6, 12),
        "lora-mlp": (1, 3, 6, 12), "l2-sp": (1, 2), "recadam": (1, 2), "flow": (1, 2),
        "mofo": (1, 2), "spd": (0.2, 0.5), "rehearsal": (1, 2), "holdfast-lora": DEFAULT,
        RATES_OF_OURS: TIMES,
    },
    ("smollm2", "boolq"): {
        OURS: DEFAULT, "plain": (0.1, 0.2, 0.5, 1, 2), "lora": (1, 3, 6, 12), "lora-mlp": (3, 6),
        "l2-sp": (0.2, 0.5), "recadam": (0.2, 0.5), "flow": (0.2, 0.5), "mofo": (0.2, 0.5),
        "spd": (0.5, 1), "rehearsal": (0.2, 0.5), "holdfast-lora": DEFAULT, RATES_OF_OURS: TIMES,
    },
    ("smollm2", "shakespeare"): {
        OURS: DEFAULT, "plain": (0.1, 0.2, 0.5, 1, 2), "lora": (1, 3, 6, 12), "lora-mlp": (3, 6),
        "l2-sp": (0.5, 1), "recadam": (0.5, 1), "flow": (0.5, 1), "mofo": (0.5, 1),
        "spd": (0.5, 1), "rehearsal": (0.5, 1, 0.2), "holdfast-lora": DEFAULT, RATES_OF_OURS: TIMES,
    },
    ("qwen-0.5b", "gsm8k"): {
        OURS: DEFAULT, "plain": (0.05, 0.1, 0.2, 0.5, 1, 2), "lora": (1, 3, 6),
        "rehearsal": (0.1, 0.5), RATES_OF_OURS: TIMES,
    },
    ("qwen-0.5b", "shakespeare"): {
        OURS: DEFAULT, "plain": (0.1, 0.2, 0.5, 1, 2), "lora": (1, 3, 6),
        "rehearsal": (0.1, 0.2), RATES_OF_OURS: TIMES,
    },
    ("qwen-1.5b", "gsm8k"): {OURS: DEFAULT, "plain": (0.1, 0.2, 0.5)},
    SATURATED: {OURS: DEFAULT, "plain": (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)},
}  # fmt: skip
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct (Q4_1, dequantized)",
    "qwen-0.5b": "Qwen2.5-Coder-0.5B-Instruct (Q4_K_M, dequantized)",
    "qwen-1.5b": "Qwen2.5-Coder-1.5B-Instruct (Q4_K_M, dequantized)",
}


def plans(model: str, target: str) -> dict[str, Plan]:
    """What is compared in a setting, with one seed."""
    found = {}
    for row, rates in PLANNED[model, target].items():
        unit = "times" if row == RATES_OF_OURS else "lr"
        for rate in rates:
            name = row if rate is None else f"{row}-x{rate:g}"
            given: Any = {"seeds": (0,), unit: rate}
            found[name] = ROWS[row]._replace(**given)
    return found


class Proof(Bench):
    """One model and one target, with everything that its runs share."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        args.lr = RATES[args.name]
        if args.collect is None:
            self.epochs = self.target.epochs

    def fresh(self) -> Any:
        return load(self.args.model, self.device)

    @functools.cached_property
    def target(self) -> Target:
        args, limit = self.args, self.args.limit
        found = make_target(args.target, self.tokenizer, self.folder, args.samples)
        return found._replace(choose=found.choose[:limit], report=found.report[:limit])

    @property
    def samples(self) -> list[dict[str, list[int]]]:
        return self.target.train

    def samples_of(self, plan: Plan) -> list[dict[str, list[int]]]:
        return answers(self.tokenizer, self.rewritten) if plan.rewritten else self.samples

    @functools.cached_property
    def given(self) -> list[dict[str, str]]:
        """GSM8K's training data with the given solutions."""
        rows: list[dict[str, str]] = read(self.folder / "gsm8k-train.jsonl.gz")
        return rows[:GSM8K][: self.args.samples]

    @functools.cached_property
    def rewritten(self) -> list[dict[str, str]]:
        """GSM8K's training data with the base's own solutions where these are right."""
        found: list[dict[str, str]] = self.kept(
            f"rewritten-{len(self.given)}",
            lambda: rewrite(self.fresh(), self.tokenizer, self.given),
        )
        return found

    @property
    def share_rewritten(self) -> float:
        """The share of the solutions that are the base's own."""
        pairs = zip(self.rewritten, self.given, strict=True)
        return sum(row["answer"] != old["answer"] for row, old in pairs) / len(self.given)

    @functools.cached_property
    def base_figures(self) -> Record:
        """The pretrained model on all retained tests, also on those that are left out."""

        def take() -> Record:
            exam = Exam(self.target, self.all_tests, self.tokenizer, self.device)
            return exam.take(self.fresh()) | {"sizes": exam.sizes()}

        found: Record = self.kept(f"base-{self.args.target}-{self.args.limit}", take)
        return found

    @functools.cached_property
    def all_tests(self) -> list[Any]:
        """The retained tests, also those at which the base is not above chance."""
        tests = retained_tests(self, rows_of(self.args.name, self.args.target))
        return [test for test in tests if test["name"] != self.args.target]

    @functools.cached_property
    def exam(self) -> Exam:
        figures = {k: v for k, v in self.base_figures.items() if isinstance(v, float)}
        passed = above_chance(figures)
        tests = [t for t in self.all_tests if t["name"] not in CHANCE or t["name"] in passed]
        return Exam(self.target, tests, self.tokenizer, self.device)

    def pretrained(self) -> Record:
        return {"plan": "pretrained", "points": {"base": self.base_figures}}

    def run(self, name: str, plan: Plan, seed: int) -> Record:
        """Train by a plan, and examine the model; a plain one also merged with its base."""
        exam = self.exam
        model, about = self.trained(plan, seed)
        most = self.free()
        distance = self.base.distance(model)
        # Of plain fine-tuning, the best learning rate is known once there are further seeds.
        once = name == OURS or (self.args.name, self.args.target) == SATURATED
        write = seed == (0 if once else 1) and (name == OURS or is_plain(name))
        points = {"tuned": exam.take(model, write=write)}
        if name in MERGED[self.args.name.split("-")[0]] and seed in MERGED_SEEDS:
            points |= self.merged(model)
        return {
            "plan": name, "seed": seed, **about, "points": points,
            **({"rewritten": round(self.share_rewritten, 4)} if plan.rewritten else {}),
            "distance": round(distance.total, 4),
            "relative_distance": round(distance.relative, 6),
            "gigabytes": max(most, self.free()),
        }  # fmt: skip

    def merged(self, model: Any) -> dict[str, Record]:
        """The figures of a model that is merged with its base, by the way and its α."""
        if (self.args.name, self.args.target) == SATURATED:
            return {}
        examine = functools.partial(self.exam.take, whole=False)
        swept = WiseFT().sweep(model, self.base, ALPHAS, examine)
        found = {f"wise-ft-{alpha:g}": point for alpha, point in swept.items()}
        for alpha in LINES if self.args.name != "qwen-1.5b" else ():
            lines = LiNeS(beta=1 - alpha).sweep(model, self.base, [alpha], examine)
            found[f"lines-{alpha:g}"] = lines[alpha]
        return found

    def terms(self, plan: Plan, run: Run, batches: list[Batch], seed: int) -> list[Loss]:
        found = super().terms(plan, run, batches, seed)
        return [*found, rehearsed(run.model, self.old_texts, batches, seed)] if plan.old else found

    @functools.cached_property
    def old_texts(self) -> Tensor:
        """WikiText-2's validation text in windows."""
        import gzip

        with gzip.open(self.folder / "wikitext2-valid.txt.gz", "rt", encoding="utf-8") as file:
            ids = torch.tensor(tokenize(self.tokenizer, file.read()))
        length = OLD[1]
        return ids[: len(ids) // length * length].view(-1, length).to(self.device)


def rows_of(model: str, target: str) -> dict[str, int]:
    """The most rows of the retained tests of a setting."""
    if model != "smollm2":
        return FEWER
    return FIRST if target == "mbpp" else MOST


def retained_tests(bench: Bench, rows: dict[str, int]) -> list[Any]:
    """The retained tests, tokenized once for all targets with these rows."""
    limit = bench.args.limit
    most = {name: min(count, 100 * limit) for name, count in rows.items()}
    found: list[Any] = bench.kept(
        f"tests-{limit}-{sum(rows.values())}",
        lambda: make_tests(bench.tokenizer, bench.folder, limit, most),
    )
    return found


def rehearsed(model: Any, texts: Tensor, batches: list[Batch], seed: int) -> Loss:
    """The mean loss of a token of some old texts, other ones in every batch."""
    generator, count = torch.Generator().manual_seed(seed), OLD[0]
    rounds = -(-len(batches) * count // len(texts))
    order = torch.cat([torch.randperm(len(texts), generator=generator) for _ in range(rounds)])
    for number, batch in enumerate(batches):
        batch["old"] = texts[order[number * count : (number + 1) * count].to(texts.device)]

    def loss(batch: Batch) -> Tensor:
        ids = batch["old"]
        body, head = body_and_head(model)
        states = body(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        wanted = ids[:, 1:].flatten()
        certain = DrawnTokens(wanted, torch.zeros_like(wanted, dtype=torch.float32))
        weights = torch.full_like(certain.log_probs, 1 / len(wanted))
        return head_loss(states, head, certain, weights)

    return loss


def further_seeds(done: Mapping[str, Record], model: str) -> dict[str, tuple[int, ...]]:
    """The seeds of each plan by the rule of the protocol, which looks at the runs with seed 0."""
    runs = [run for run in done.values() if run.get("seed", 0) == 0]
    if model == "qwen-1.5b" or not _stages.can_choose(runs):
        return {}
    setting = Setting(runs)
    if model == "smollm2":
        found = _stages.further_seeds(_stages.choices(setting))
        return {plan: (0, *seeds) for plan, seeds in found.items()}
    return dict.fromkeys(("holdfast", setting.best_plain), (0, 1, 2))


def seeds_of(plan: str, done: Mapping[str, Record]) -> list[int]:
    """The seeds of a plan that have been run, also those that the rule does not ask for."""
    return [run["seed"] for run in done.values() if run["plan"] == plan]


def jobs_of(bench: Any, compared: Mapping[str, Plan]) -> dict[str, Job]:
    """The pretrained model, and every plan with its seeds; those of seed 0 come first."""
    jobs: dict[str, Job] = {"pretrained": bench.pretrained}
    for seed in sorted({seed for plan in compared.values() for seed in plan.seeds}):
        for name, plan in compared.items():
            if seed in plan.seeds:
                jobs[f"{name}-s{seed}"] = functools.partial(bench.run, name, plan, seed)
    return jobs


def make_parser(about: str | None) -> Parser:
    """What the scripts for language models have in common."""
    parser = Parser(about)
    parser.add_input("--model")
    parser.add_input("--data")
    parser.add_argument(
        "--prepared", type=Path, metavar="DIR",
        help="texts, tests and figures of the base, which all targets of a model share; default: "
        "a folder in RUNS",
    )  # fmt: skip
    parser.add_argument("--samples", type=int, help="of the training data; default: all")
    parser.add_argument("--limit", type=int, default=10_000, help="rows of a test, for a trial")
    parser.set_defaults(name="smollm2", target="gsm8k")
    return parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--name", choices=MODELS, help="of the model; default: smollm2")
    parser.add_argument("--target", choices=MAKERS, required=True)
    parser.add_argument("--stage", choices=("first", "more", "both"), default="first")
    args = parser.parse_args()
    if (args.name, args.target) not in PLANNED:
        allowed = ", ".join(f"{name} {target}" for name, target in PLANNED)
        parser.error(f"{args.name} does not learn {args.target}: choose one of {allowed}")
    torch.set_float32_matmul_precision("high")
    bench, compared = Proof(args), plans(args.name, args.target)
    if args.stage == "both" and args.collect is None:
        work_first(jobs_of(bench, compared), args)
    if args.stage == "more" or args.collect is not None:
        done, first = records(args.runs), jobs_of(bench, compared)
        needed = {"pretrained", f"{OURS}-s0"}  # to choose further seeds
        tried = {*done} | {*failed(args.runs, first)} - needed
        missing = [name for name in first if name not in tried]
        if missing and args.collect is None:
            sys.exit(f"runs of the first stage are missing: {', '.join(missing)}")
        once = (args.name, args.target) == SATURATED
        seeds = {} if once else further_seeds(done, args.name)
        compared = {
            name: plan._replace(seeds=sorted({*seeds.get(name, (0,)), *seeds_of(name, done)}))
            for name, plan in compared.items()
        }
    protocol = {
        "model": MODELS[args.name], "target": args.target, "batch_size": BATCH,
        "samples": args.samples or "all", "lr": RATES[args.name],
        "retained_rows": rows_of(args.name, args.target),
        "training": TRAINING,
        "testing": "bfloat16 autocast, float32 logits", "rules": "benchmarks/proof/PROTOCOL.md",
    }  # fmt: skip
    work_or_collect(jobs_of(bench, compared), args, protocol)


if __name__ == "__main__":
    main()
