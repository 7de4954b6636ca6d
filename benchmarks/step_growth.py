"""How the cost of a step grows: with the number of parameters, and with the number of tensors.

python benchmarks/step_growth.py --out results.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _common import (
    Step,
    default_device,
    describe,
    make_parameters,
    measure_steps,
    print_steps,
    write_results,
)
from torch.optim import AdamW

from holdfast import RecAdam
from holdfast.anneal import Constant

LR = 2e-5
#: Parameters and tensors.
CASES = [
    *((size, 200) for size in (10**5, 10**6, 10**7, 10**8, 10**9)),
    *((10**7, tensors) for tensors in (1, 10, 100, 1000, 4000)),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--most", type=int, default=10**9, help="leave out what is larger")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    print(f"{describe(args.device)}, torch {torch.__version__}")
    steps = {
        "torch_fused_adamw": Step(lambda p: AdamW(p, lr=LR, weight_decay=0.0, fused=True), 28),
        "recadam_fused": Step(lambda p: RecAdam(p, lr=LR, anneal=Constant(0.5), fused=True), 32),
    }
    rows: list[dict[str, Any]] = []
    for size, tensors in CASES:
        if size > args.most:
            continue
        params = make_parameters([(size // tensors,)] * tensors, args.device, torch.float32)
        case = f"{size:,} parameters in {tensors} tensors"
        found, _ = measure_steps(case, params, steps, args.device, args.repeats)
        print_steps(case, found)
        rows += [{**row, "parameters": size, "tensors": tensors} for row in found]
        del params
    if args.out:
        protocol = (
            f"one optimizer.step(), float32, tensors of one size; median of {args.repeats} "
            "interleaved rounds after 3 of warm-up; limit = bytes_per_param over the bandwidth of "
            "a large copy in the same rounds"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
