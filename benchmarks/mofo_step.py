"""How long one MoFO step takes, beside torch's AdamW and beside what memory allows.

    python benchmarks/mofo_step.py --out results.json

MoFO moves the coordinates with the largest momentum of each matrix: it must have all momenta before
it knows which. Its limit is counted as two passes, the moments (read g, m, v, write m, v) and the
move (read θ, m, v, write θ); finding the threshold reads m two or three times more. The plain loop
takes ``torch.topk`` of each matrix.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _common import (
    DTYPES,
    SHAPES,
    Shape,
    Step,
    StepRow,
    default_device,
    describe,
    make_parameters,
    measure_steps,
    print_steps,
    write_results,
)
from torch.nn import Parameter
from torch.optim import AdamW

from holdfast.optim import MoFO

LR, FRACTION = 2e-5, 0.15
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
#: Matrices: vectors are not filtered.
CASES: dict[str, list[Shape]] = {
    **SHAPES,
    "small-2000": [(16 + i % 17, 64 + i % 64) for i in range(2000)],
}


class PlainLoop:
    """MoFO as its rule is written, matrix after matrix."""

    def __init__(self, params: list[Parameter]) -> None:
        self.t = 0
        self.rows = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        self.kept = [t for row in self.rows for t in row[1:]]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        for p, m, v in self.rows:
            assert p.grad is not None
            m.mul_(BETA1).add_(p.grad, alpha=1 - BETA1)
            v.mul_(BETA2).addcmul_(p.grad, p.grad, value=1 - BETA2)
            root = (v / (1 - BETA2**self.t)).sqrt() + EPS
            u = m / (1 - BETA1**self.t) / root
            if p.dim() > 1:
                chosen = m.abs().flatten().topk(max(1, round(FRACTION * m.numel()))).indices
                u = torch.zeros_like(u).view(-1).index_copy(0, chosen, u.flatten()[chosen])
            p.sub_(LR * u.view_as(p))


def steps(dtype: torch.dtype) -> dict[str, Step]:
    b = dtype.itemsize
    return {
        "torch_fused_adamw": Step(lambda p: AdamW(p, lr=LR, weight_decay=0.0, fused=True), 7 * b),
        "mofo_fused": Step(lambda p: MoFO(p, lr=LR, fraction=FRACTION, fused=True), 9 * b),
        "mofo_foreach": Step(lambda p: MoFO(p, lr=LR, fraction=FRACTION, foreach=True), 9 * b),
        "plain_loop": Step(PlainLoop, 9 * b),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    print(f"{describe(args.device)}, torch {torch.__version__}")
    rows: list[StepRow] = []
    for name in args.cases:
        for dtype in args.dtypes:
            case = name if dtype == "float32" else f"{name}, {dtype}"
            params = make_parameters(CASES[name], args.device, DTYPES[dtype])
            found, bandwidth = measure_steps(
                case, params, steps(DTYPES[dtype]), args.device, args.repeats, at_once=4
            )
            rows += found
            size = sum(p.numel() for p in params) / 1e6
            print_steps(f"{case}: {size:.1f} M in {len(params)}, copy {bandwidth:.0f} GB/s", found)
            del params
    if args.out:
        protocol = (
            f"one optimizer.step() at fraction {FRACTION}; median of {args.repeats} interleaved "
            "rounds after 3 of warm-up; limit = bytes_per_param (two passes) over the copy "
            "bandwidth of the same rounds"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
