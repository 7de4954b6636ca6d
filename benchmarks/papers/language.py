"""A language model learns math: what do the methods, alone and together, learn and retain?

SmolLM2-135M-Instruct is fine-tuned on GSM8K (one epoch, batches of 32, float32 weights with
bfloat16 autocast, 3 % warm-up, then linear to 0, gradients clipped to 1), at a learning rate where
plain fine-tuning truly forgets. Every trained model is tested as it is and at four points of
WiSE-FT on its way: GSM8K; WikiText-2, MBPP, LAMBADA, PIQA, ARC, BoolQ, WinoGrande, MMLU; the
distance of its weights; KL(base‖tuned) on GSM8K and on texts of the base's own.

    python benchmarks/papers/language.py --model SMOLLM2 --data DATA --runs RUNS
    python benchmarks/papers/language.py … --collect benchmarks/papers/results/language.json

SMOLLM2 is a directory that transformers reads, DATA holds lm/*.gz. Processes that are started side
by side with the same RUNS share the work. To run only what is missing, put the runs of the results
file into RUNS first, see _jobs.py.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _jobs import Parser, Record, records, work_or_collect
from _lm_replay import replayed
from _lm_tests import ACCURACIES, Tests, draw, load, make_tests
from _lm_train import BATCH, loss_of, make_batches, own_loss_of, weights_of
from _loop import Batch, Loss, train
from _rates import learning_rate
from _summary import LANGUAGE, comparison, goals, mean_points
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _common import default_device
from additivity_lm import answers, read

from holdfast import (
    DFT,
    EAFT,
    EWC,
    HFT,
    L1SP,
    L2SP,
    MAS,
    OSFT,
    SFA,
    STM,
    TALR,
    TMKL,
    Distill,
    FinchUpdate,
    Flow,
    GradualUnfreezing,
    LoRA,
    Mixout,
    MoFOUpdate,
    RecAdamUpdate,
    Recipe,
    Reference,
    Run,
    SelfReplay,
    SPDUpdate,
    WiseFT,
    pad_collate,
)
from holdfast.methods.auto import default_lr
from holdfast.stages import TrainingSize

SEEDS = (0, 1, 2)
#: What records say of the training, see :func:`schedule`.
TRAINING = "float32 weights, bfloat16 autocast, 3 % warm-up, linear to 0, clipped to 1"
ALPHAS = (0.3, 0.5, 0.7, 0.85)
PARAMETERS = 134_515_008  # of SmolLM2-135M
LORA_LR = 3.0  # times the others': adapters want more
EWC_SAMPLES = 128  # of the default 1000, for time


class Plan(NamedTuple):
    """A recipe, its learning rate as a multiple of the others', and how often it is run.

    If ``lr`` is None, it is the recipe's default learning rate, and with ``times`` a multiple of
    that. Without ``chats``, the model draws no texts that begin as chats do. With ``old``, texts of
    the old data are in the loss, and with ``rewritten`` the base rewrites the training data, see
    benchmarks/proof.
    """

    recipe: Recipe
    lr: float | None = 1.0
    seeds: Sequence[int] = SEEDS
    times: float | None = None
    chats: bool = True
    old: bool = False
    rewritten: bool = False


def recadam(t0: float, width: float, **stages: Any) -> Recipe:
    return Recipe(update=RecAdamUpdate(t0=t0, width=width), **stages)


def plans(lr: float) -> dict[str, Plan]:
    """What is compared."""
    flow, lora, l2sp = Flow(), LoRA(r=16), L2SP()
    # The learning rates that holdfast has for this model.
    of_weights, of_adapters = (default_lr(PARAMETERS, adapters=x) / lr for x in (False, True))

    def replay(**settings: Any) -> Plan:
        return Plan(Recipe(recall=SelfReplay(**settings)), of_weights)

    main = {
        "holdfast": Plan(Recipe.preset("holdfast"), None),
        "standard": Plan(Recipe()),
        "standard-0.5lr": Plan(Recipe(), 0.5),
        "standard-0.2lr": Plan(Recipe(), 0.2),
        "standard-0.1lr": Plan(Recipe(), 0.1),
        "lora": Plan(Recipe(trainable=lora), LORA_LR),
        "lora-low": Plan(Recipe(trainable=lora), LORA_LR / 3),
        "lora-mid": Plan(Recipe(trainable=lora), 5.0),
        "lora-high": Plan(Recipe(trainable=lora), LORA_LR * 3),
        "flow": Plan(Recipe(objective=flow)),
        "l2-sp": Plan(Recipe(penalties=[l2sp])),
        "recadam-0.3-0.1": Plan(recadam(0.3, 0.1)),
        "recadam-0.5-0.15": Plan(recadam(0.5, 0.15)),
    }
    once = {
        "self-replay-share-1": replay(share=1.0),
        "self-replay-full": replay(top=None),
        "flow+self-replay": Plan(Recipe(objective=flow, recall=SelfReplay()), of_weights),
        "lora+self-replay": Plan(Recipe(trainable=lora, recall=SelfReplay()), of_adapters),
        "recadam-0.5-0.15-0.2lr": Plan(recadam(0.5, 0.15), 0.2),
        "recadam-0.5-0.15+flow": Plan(recadam(0.5, 0.15, objective=flow)),
        "l2-sp-0.5lr": Plan(Recipe(penalties=[l2sp]), 0.5),
        "lora+flow": Plan(Recipe(trainable=lora, objective=flow), LORA_LR),
        "flow+l2-sp": Plan(Recipe(objective=flow, penalties=[l2sp])),
        "mofo+flow": Plan(Recipe(update=MoFOUpdate(), objective=flow)),
        "hft+flow": Plan(Recipe(trainable=HFT(), objective=flow)),
        "recadam-0.25-0.02": Plan(recadam(0.25, 0.02)),
        "recadam-0.5-0.3": Plan(recadam(0.5, 0.3)),
        "recadam-0.5-0.6": Plan(recadam(0.5, 0.6)),
        "recadam-0.5-0.3+flow": Plan(recadam(0.5, 0.3, objective=flow)),
        "l2-sp-weak": Plan(Recipe(penalties=[L2SP(0.002 / lr)])),
        "flow-token": Plan(Recipe(objective=Flow(level="token"))),
        "lora+tmkl": Plan(Recipe(trainable=lora, recall=TMKL()), LORA_LR),
        "recadam-0.5-0.15-0.5lr": Plan(recadam(0.5, 0.15), 0.5),
    }
    mlp = LoRA(r=16, target="mlp")
    targets = {f"lora-mlp-{lr:g}lr": Plan(Recipe(trainable=mlp), lr) for lr in (1, 3, 5, 9)}
    # Every other method at two learning rates. Alone, the recalls compare the whole vocabulary.
    methods: dict[str, Recipe] = {
        "flow": Recipe(objective=flow),
        "stm": Recipe(objective=STM()),
        "dft": Recipe(objective=DFT()),
        "talr": Recipe(objective=TALR()),
        "eaft": Recipe(objective=EAFT()),
        "distill": Recipe(recall=Distill(cache=False)),
        "tmkl": Recipe(recall=TMKL(cache=False)),
        "asft": Recipe(
            objective=DFT(), recall=Distill(strength=0.05, temperature=1.0, cache=False)
        ),
        "mofo": Recipe(update=MoFOUpdate()),
        "spd": Recipe(update=SPDUpdate()),
        "spd+self-replay": Recipe(update=SPDUpdate(), recall=SelfReplay()),
        "finch": Recipe(update=FinchUpdate()),
        "l1-sp": Recipe(penalties=[L1SP()]),
        "ewc": Recipe(penalties=[EWC(samples=EWC_SAMPLES)]),
        "mas": Recipe(penalties=[MAS(samples=EWC_SAMPLES)]),
        "sfa": Recipe(penalties=[SFA()]),
        "hft": Recipe(trainable=HFT()),
        "mixout": Recipe(trainable=Mixout()),
        "gradual-unfreezing": Recipe(trainable=GradualUnfreezing()),
        "osft": Recipe(trainable=OSFT()),
    }
    pairs = {name: Plan(recipe) for name, recipe in methods.items()}
    pairs |= {f"{name}-0.5lr": Plan(recipe, 0.5) for name, recipe in methods.items()}
    adapters = {"dora": (3, 5), "rslora": (1, 3), "oft": (1, 3), "ia3": (5, 15), "vera": (5, 15)}
    for name, rates in adapters.items():
        pairs |= {f"{name}-{lr:g}lr": Plan(Recipe.preset(name), lr) for lr in rates}
    once |= {name: plan for name, plan in (pairs | targets).items() if name not in main}
    three = ("spd", "spd-0.5lr", "dora-5lr", "rslora-1lr", "l2-sp-0.5lr")  # among the best of all
    return main | {
        name: plan if name in three else plan._replace(seeds=SEEDS[:1])
        for name, plan in once.items()
    }


class Bench:
    """What all runs of a process share, made when it is first needed."""

    alphas: tuple[float, ...] = ALPHAS
    epochs = 1

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, default_device()
        self.prepared = getattr(args, "prepared", None) or args.runs / "prepared"
        self.folder: Any = args.data and args.data / "lm"

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What this process has made, or another one: then it is waited for."""
        file = self.prepared / f"{name}.json"
        self.prepared.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the lock of a process that dies is released
            if not file.exists():
                part = file.with_suffix(".part")
                part.write_text(json.dumps(make()), encoding="utf-8")
                part.rename(file)
        return json.loads(file.read_text(encoding="utf-8"))

    @functools.cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.args.model)

    @functools.cached_property
    def samples(self) -> list[dict[str, list[int]]]:
        """The training data."""
        rows = read(self.folder / "gsm8k-train.jsonl.gz")[: self.args.samples]
        found: list[dict[str, list[int]]] = self.kept(
            f"train-{len(rows)}", lambda: answers(self.tokenizer, rows)
        )
        return found

    @functools.cached_property
    def base(self) -> Reference:
        """The pretrained weights, in the checkpoint's own dtype."""
        return Reference.open(self.args.model, device=self.device)

    @functools.cached_property
    def tests(self) -> Tests:
        limit, model = self.args.limit, load(self.args.model, self.device)
        tests = self.kept(f"tests-{limit}", lambda: make_tests(self.tokenizer, self.folder, limit))
        drawn = self.drawn(model, min(64, limit))
        questions = read(self.folder / "gsm8k-test.jsonl.gz")[: min(200, limit)]
        return Tests(tests, drawn, model, self.tokenizer, questions if self.args.generate else ())

    def drawn(self, model: Any, texts: int) -> list[list[int]]:
        """Texts of the pretrained model, to measure KL on."""
        found: list[list[int]] = self.kept(
            f"drawn-{texts}", lambda: draw(model, self.tokenizer, texts)
        )
        return found

    def pretrained(self) -> Record:
        """The model before anything."""
        point = self.tests.measure(load(self.args.model, self.device), write=True)
        return {"recipe": "pretrained", "points": {"1": {**point, "distance": 0.0}}}

    def run(self, name: str, plan: Plan, seed: int) -> Record:
        """Train by a recipe, and test what comes of it and what lies on the way."""
        tests = self.tests
        model, about = self.trained(plan, seed)
        most = self.free()
        distance = self.base.distance(model)
        points = {1.0: tests.measure(model, write=True)}
        points |= WiseFT().sweep(model, self.base, self.alphas, tests.measure)
        for alpha, point in points.items():
            point["distance"] = round(alpha * distance.total, 4)
            point["relative_distance"] = round(alpha * distance.relative, 6)
        return {
            "recipe": name, "seed": seed, **about,
            "points": {f"{alpha:g}": point for alpha, point in points.items()},
            "gigabytes": max(most, self.free()),
        }  # fmt: skip

    def trained(self, plan: Plan, seed: int) -> tuple[Any, Record]:
        """The model of a recipe, with plain weights, and how it was trained."""
        begin = time.monotonic()
        samples = self.samples_of(plan)  # first: another base may rewrite them
        base, size = load(self.args.model, self.device), TrainingSize(len(samples), self.epochs)
        given = None if plan.lr is None else plan.lr * self.args.lr
        lr = learning_rate(plan.recipe, base, given, plan.times, size=size)
        autocast = torch.bfloat16 if self.device.type == "cuda" else None
        torch.manual_seed(seed)
        run = Run(
            plan.recipe, base, samples, lr=lr, size=size, collate=pad_collate,
            tokenizer=self.tokenizer if plan.chats else None,
            visits=self.epochs * (len(samples) // BATCH * BATCH), cache=self.prepared,
            progress=False, autocast=autocast, seed=seed,
        )  # fmt: skip
        lr, recipe = run.lr, run.recipe
        weights = weights_of(run)
        batches = [
            batch
            for epoch in range(self.epochs)
            for batch in make_batches(samples, weights, seed + 1000 * epoch, self.device)
        ]
        updates = len(batches)
        own = run.criterion.weighs_outputs or run.recall.uses_outputs
        terms = self.terms(plan, run, batches, seed)
        loss = own_loss_of(run) if own else loss_of(run.model, *terms)
        losses: list[Tensor] = []
        ready = time.monotonic()
        # A graph cannot hold losses that wait for the GPU, nor parameters that become more.
        graphs = not own and not isinstance(recipe.trainable, GradualUnfreezing)
        train(
            run, batches, loss, schedule(updates), clip_norm=1.0, autocast=autocast, graphs=graphs,
            after_step=lambda _, loss: losses.append(loss.clone()),
        )  # fmt: skip
        last = float(torch.stack(losses[-20:]).mean())
        model: Any = run.finish()
        if hasattr(model, "merge_and_unload"):  # from here on adapters are weights like any others
            model = model.merge_and_unload()
        model.eval().zero_grad(set_to_none=True)
        return model, {
            "lr": lr, "settings": settings(recipe), "updates": updates,
            "train_loss": round(last, 5), "prepare_seconds": round(ready - begin, 1),
            "train_seconds": round(time.monotonic() - ready, 1),
        }  # fmt: skip

    def samples_of(self, plan: Plan) -> list[dict[str, list[int]]]:
        """What a plan trains on."""
        return self.samples

    def terms(self, plan: Plan, run: Run, batches: list[Batch], seed: int) -> list[Loss]:
        """What is added to the loss of the batches."""
        return replayed(run, batches, self.device)

    def free(self) -> float:
        """Give unused memory back, and say how much was taken at most since the last time."""
        gc.collect()
        if self.device.type != "cuda":
            return 0.0
        most = torch.cuda.max_memory_reserved() / 1e9
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return round(most, 1)


def schedule(total: int) -> list[float]:
    """Factors of the learning rate: 3 % warm-up, then linear to 0."""
    return [min((update + 1) / (0.03 * total), 1 - update / total) for update in range(total)]


def settings(recipe: Recipe) -> Record:
    """What a recipe changes of plain fine-tuning, by stage, without what is not given."""
    plain, given = Recipe().to_dict(), recipe.to_dict()
    changed = {stage: value for stage, value in given.items() if value != plain[stage]}

    def given_of(value: Any) -> Any:
        if isinstance(value, list):
            return [given_of(one) for one in value]
        return {name: setting for name, setting in value.items() if setting is not None}

    return {stage: given_of(value) for stage, value in changed.items()}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_input("--model")
    parser.add_input("--data")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=7473, help="of the training data")
    parser.add_argument("--limit", type=int, default=500, help="rows of a test; of MMLU twice that")
    parser.add_argument("--no-generate", dest="generate", action="store_false")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    bench = Bench(args)
    jobs: dict[str, Callable[[], Record]] = {"pretrained": bench.pretrained}
    for name, plan in plans(args.lr).items():
        for seed in plan.seeds:
            jobs[f"{name}-s{seed}"] = functools.partial(bench.run, name, plan, seed)
    protocol = {
        "model": "SmolLM2-135M-Instruct (Q4_1, dequantised)", "target": "GSM8K", "epochs": 1,
        "batch_size": BATCH, "lr": args.lr, "samples": args.samples, "rows_a_test": args.limit,
        "training": TRAINING,
        "testing": "bfloat16 autocast, float32 logits", "ewc_samples": EWC_SAMPLES,
    }  # fmt: skip
    jobs = work_or_collect(jobs, args, protocol)
    done = records(args.runs)
    points = mean_points(done[name] for name in jobs if name in done)
    print(f"{comparison(points, LANGUAGE)}\n\n{goals(points, ACCURACIES)}")


if __name__ == "__main__":
    main()
