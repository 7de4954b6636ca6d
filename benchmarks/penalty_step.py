"""What penalties add to a step: L2-SP and EWC, decoupled and coupled, beside what memory allows.

    python benchmarks/penalty_step.py --out results.json

Timed are the hooks alone that act in an optimizer's step. A decoupled pull reads θ and θ* (and F)
and writes θ; a coupled one reads θ, θ*, g (and F) and writes g. ``l2sp_recadam_8bit`` is a whole
step with 8-bit moments and the hooks of L2-SP, beside ``recadam_8bit``, the step without them.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import (
    DTYPES,
    SHAPES,
    Step,
    StepRow,
    default_device,
    describe,
    make_parameters,
    measure_steps,
    print_steps,
    write_results,
)
from recadam_step import recadam
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from holdfast import EWC, L2SP, Reference
from holdfast.methods.l2_sp import ScaledPenalty
from holdfast.optim import attach_penalties

LR = 2e-5


class Hooks:
    """What a penalty does in a step, without the step."""

    def __init__(self, penalty: ScaledPenalty, params: list[Parameter]) -> None:
        named = [(str(i), p) for i, p in enumerate(params)]
        self.optimizer = SGD(named, lr=LR)
        anchors = {name: p.detach().clone() for name, p in named}
        weights = {name: torch.rand_like(p) for name, p in named} if penalty.weighted else {}
        self.attached = attach_penalties(
            self.optimizer, [penalty], Reference(anchors), Reference(weights) if weights else None
        )
        self.kept = [*anchors.values(), *weights.values()]

    def step(self) -> None:
        self.attached._before_step(self.optimizer, (self.optimizer,), {})
        self.attached._after_step(self.optimizer)


def eight_bit(params: list[Parameter], *penalties: ScaledPenalty) -> Any:
    """A step with 8-bit moments, and penalties."""
    optimizer: Any = recadam(params, torch.bfloat16, fused=True, state_dtype="8bit")
    if penalties:
        anchors = {str(i): p.detach().clone() for i, p in enumerate(params)}
        attach_penalties(optimizer, penalties, Reference(anchors))
        optimizer.kept = [*anchors.values()]
    return optimizer


class PlainLoop:
    """Decoupled L2-SP as it is written, tensor after tensor."""

    def __init__(self, params: list[Parameter]) -> None:
        self.rows = [(p, p.detach().clone()) for p in params]
        self.kept: list[Tensor] = [anchor for _, anchor in self.rows]

    @torch.no_grad()
    def step(self) -> None:
        for p, anchor in self.rows:
            p.sub_(0.01 * (p - anchor))


def steps(dtype: torch.dtype) -> dict[str, Step]:
    b, strength = dtype.itemsize, 0.01 / LR
    eight = 3 * b + 4 + 2 + 4 * 4 / 256
    return {
        "torch_fused_adamw": Step(lambda p: AdamW(p, lr=LR, weight_decay=0.0, fused=True), 7 * b),
        "l2sp": Step(partial(Hooks, L2SP(strength)), 3 * b),
        "ewc": Step(partial(Hooks, EWC(strength)), 4 * b),
        "l2sp_coupled": Step(partial(Hooks, L2SP(0.01, coupled=True)), 4 * b),
        "ewc_coupled": Step(partial(Hooks, EWC(0.01, coupled=True)), 5 * b),
        "recadam_8bit": Step(eight_bit, eight),
        "l2sp_recadam_8bit": Step(lambda p: eight_bit(p, L2SP(strength)), eight + 3 * b),
        "plain_loop": Step(PlainLoop, 3 * b),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--cases", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    print(f"{describe(args.device)}, torch {torch.__version__}")
    rows: list[StepRow] = []
    dtype = DTYPES[args.dtype]
    for name in args.cases:
        case = name if args.dtype == "float32" else f"{name}, {args.dtype}"
        params = make_parameters(SHAPES[name], args.device, dtype)
        found, bandwidth = measure_steps(case, params, steps(dtype), args.device, args.repeats)
        rows += found
        size = sum(p.numel() for p in params) / 1e6
        print_steps(f"{case}: {size:.1f} M in {len(params)}, copy {bandwidth:.0f} GB/s", found)
        del params
    if args.out:
        protocol = (
            f"the penalty's hooks of one step, {args.dtype}; with 8-bit moments whole steps; "
            f"median of {args.repeats} interleaved rounds after 3 of warm-up; limit = "
            "bytes_per_param over the copy bandwidth of the same rounds"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
