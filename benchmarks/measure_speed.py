"""What ``measure`` takes beside the forward passes of its tests alone.

    python benchmarks/measure_speed.py --model DIR --text wikitext2-test.txt.gz \\
        --rows piqa.jsonl.gz arc.jsonl.gz boolq.jsonl.gz winogrande.jsonl.gz --out results.json

Two models in memory take the tests: the model itself and one whose weights were changed a little.
``measure`` does everything, from the reading of the files to the report. ``forward`` runs the same
token sequences through both models, in the same batches, as far as the logits of the targets: they
are encoded before. ``harness`` asks lm-evaluation-harness' backend for transformers for the same
log-likelihoods, where it is installed, with the best of some batch sizes.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import default_device, describe, synchronize, write_results

from holdfast import Loader, measure
from holdfast.evaluate.suite import Suite
from holdfast.scoring.likelihood import Runner, log_likelihoods

BATCHES = (32, 128, 512)


def unpacked(path: Path, folder: Path) -> Path:
    """A file, without compression."""
    if path.suffix != ".gz":
        return path
    made = folder / path.stem
    made.write_bytes(gzip.decompress(path.read_bytes()))
    return made


class Case:
    """A model, another one, and the tests."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        transformers: Any = importlib.import_module("transformers")
        self.device = args.device
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
        self.base = model.to(self.device).eval()
        self.tuned = copy.deepcopy(self.base)
        with torch.no_grad():
            for p in self.tuned.parameters():
                p.mul_(1.001)
        self.tests: dict[str, Any] = {
            "text": [str(unpacked(args.text, folder))],
            "data": [str(unpacked(path, folder)) for path in args.rows],
        }
        self.loader = Loader(device=str(self.device), tokenizer=self.tokenizer)
        self.limit = args.limit
        self.requests = self._requests()

    def _requests(self) -> list[Any]:
        """The continuations that the tests ask for."""
        asked: list[Any] = []
        names: Any = importlib.import_module("holdfast.evaluate.asking")

        def record(loaded: Any, requests: Any, *args: Any, **options: Any) -> Any:
            asked.extend(requests)
            return log_likelihoods(loaded, requests, *args, **options)

        before, names.log_likelihoods = names.log_likelihoods, record
        try:
            with self.loader.open(self.base) as loaded:
                self.length = loaded.limit
                tests, _ = Suite(**self.tests, limit=self.limit, context_free=0).build()
                amount = importlib.import_module("holdfast.evaluate.amount")
                for test in tests:
                    amount.limited(test, loaded, self.limit, None).run(loaded, progress=False)
        finally:
            names.log_likelihoods = before
        return asked

    def measured(self) -> None:
        measure(
            self.base, self.tuned, **self.tests, limit=self.limit, context_free=0, drift=False,
            loader=self.loader, progress=False,
        )  # fmt: skip

    @torch.no_grad()
    def forward(self) -> None:
        sizes: dict[tuple[int, ...], int] = {}  # equal inputs run once
        for context, target in self.requests:
            sizes[(*context, *target)[:-1][-self.length :]] = len(target)
        rows = list(sizes)
        for model in (self.base, self.tuned):
            with self.loader.open(model) as loaded:
                for numbers, predictions in Runner(loaded)(rows):
                    width = predictions.states.shape[1]
                    ends = [i * width + len(rows[n]) for i, n in enumerate(numbers)]
                    counts = [sizes[rows[n]] for n in numbers]
                    pairs = zip(ends, counts, strict=True)
                    where = torch.tensor([i for e, c in pairs for i in range(e - c, e)])
                    for logits, _ in predictions.logits(where, where):
                        logits.amax(-1)

    def harness(self, batch: int) -> None:
        module: Any = importlib.import_module("lm_eval.models.huggingface")
        asked = [(("", ""), list(r.context), list(r.target)) for r in self.requests]
        for model in (self.base, self.tuned):
            backend = module.HFLM(
                pretrained=model, tokenizer=self.tokenizer, batch_size=batch,
                max_length=self.length, backend="causal",
            )  # fmt: skip
            backend._loglikelihood_tokens(asked, disable_tqdm=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=500, help="rows, and blocks of the text")
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        case = Case(args, Path(folder))
        jobs: dict[str, Callable[[], None]] = {"forward": case.forward, "measure": case.measured}
        if importlib.util.find_spec("lm_eval"):
            for batch in BATCHES:
                jobs[f"harness_{batch}"] = lambda batch=batch: case.harness(batch)  # type: ignore[misc]
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for repeat in range(args.repeats + 1):  # the first one warms up
            for name, job in jobs.items():
                begin = time.perf_counter()
                job()
                synchronize(args.device)
                if repeat:
                    times[name].append(time.perf_counter() - begin)
    tokens = sum(len(r.context) + len(r.target) for r in case.requests)
    about = f"{len(args.rows)} tasks of {args.limit} rows and a text, {tokens:,} tokens, two models"
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows = [
        {
            "case": about, "impl": name, "ms": round(1e3 * s, 1),
            "x_forward": round(s / medians["forward"], 3),
        }
        for name, s in medians.items()
    ]  # fmt: skip
    print(f"{describe(args.device)}, torch {torch.__version__}\n{about}")
    for row in rows:
        print(f"{row['impl']:16}{row['ms']:10.0f} ms{row['x_forward']:8.2f} × forward")
    if args.out:
        protocol = (
            f"{args.model.name}, {args.dtype}; median of {args.repeats} interleaved rounds after "
            "one; models in memory; forward: the same batches as far as the logits of the targets"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
