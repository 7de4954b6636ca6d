"""How long one RecAdam step takes, beside torch's AdamW and beside what memory allows.

    python benchmarks/recadam_step.py
    python benchmarks/recadam_step.py --device cpu --cases minilm-l6 bert-base --out results.json

A step does so little arithmetic that moving the tensors bounds it. The limit is the bytes of one
pass over them (RecAdam reads θ, g, m, v, θ* and writes θ, m, v; AdamW has no θ*) at the speed of
a large copy on the same device. (On a CPU a copy also reads the lines it is about to overwrite,
which an update in place is spared: there a step can do better than this limit.) ``host ms`` is the
time until ``step()`` returns: on CUDA it is what a loop pays that cannot launch its work ahead.
``kept B`` are the bytes of state and anchors on the device, a parameter. No model is run: only
shapes matter here.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

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
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from holdfast import RecAdam
from holdfast.anneal import Constant
from holdfast.kernels import recadam_cpu

LR, BETA1, BETA2, EPS = 2e-5, 0.9, 0.999, 1e-8
GAMMA, LAM = 5000.0, 0.5  # halfway through the annealing: both Adam and the pull act


class PlainLoop:
    """RecAdam as its rule is written, tensor after tensor."""

    def __init__(self, params: list[Parameter]) -> None:
        self.t = 0
        self.rows = [
            (p, p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in params
        ]
        self.kept = [t for row in self.rows for t in row[1:]]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        c = min(1.0, LR * (1 - LAM) * GAMMA)
        for p, anchor, m, v in self.rows:
            assert p.grad is not None
            m.mul_(BETA1).add_(p.grad, alpha=1 - BETA1)
            v.mul_(BETA2).addcmul_(p.grad, p.grad, value=1 - BETA2)
            m_hat = m / (1 - BETA1**self.t)
            v_hat = v / (1 - BETA2**self.t)
            u = m_hat / (v_hat.sqrt() + EPS)
            p.sub_(LR * LAM * u)
            p.sub_(c * (p - anchor))


class WithoutCompiler(RecAdam):
    """The step on a CPU where the kernel in C cannot be compiled."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with mock.patch.object(recadam_cpu, "library", return_value=None):
            return super().step(closure)


def recadam(
    params: list[Parameter],
    dtype: torch.dtype | None = None,
    cls: type[RecAdam] = RecAdam,
    **options: Any,
) -> RecAdam:
    """RecAdam, with anchors in a dtype of their own."""
    named = [(str(i), p) for i, p in enumerate(params)]
    anchors: dict[str, Tensor] | None = None
    if dtype is not None:
        anchors = {name: p.detach().to(dtype, copy=True) for name, p in named}
    given: dict[str, Any] = {"lr": LR, "gamma": GAMMA, "anneal": Constant(LAM), **options}
    return cls(named, anchors=anchors, **given)


def after_annealing(params: list[Parameter]) -> RecAdam:
    """Once λ is 1, the anchors let go."""
    optimizer = recadam(params, fused=True, release=True, anneal=Constant(1.0))
    optimizer.step()
    return optimizer


def torchao(params: list[Parameter]) -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit(params, lr=LR)


def steps(device: torch.device, dtype: torch.dtype) -> dict[str, Step]:
    """All implementations, over the same parameters, each with a state of its own."""
    b = dtype.itemsize
    bf16, fp32 = torch.bfloat16, torch.float32
    made = {
        "torch_fused_adamw": Step(lambda p: AdamW(p, lr=LR, weight_decay=0.0, fused=True), 7 * b),
        "recadam_fused": Step(lambda p: recadam(p, fused=True), 8 * b),
        "recadam_after_annealing": Step(after_annealing, 7 * b),
        "torch_foreach_adamw": Step(lambda p: AdamW(p, lr=LR, weight_decay=0, foreach=True), 7 * b),
        "recadam_foreach": Step(lambda p: recadam(p, foreach=True), 8 * b),
        "plain_loop": Step(PlainLoop, 8 * b),
    }
    if dtype == fp32:
        made["recadam_fused_bf16_anchor"] = Step(lambda p: recadam(p, bf16, fused=True), 7 * b + 2)
    if dtype == bf16:
        made["recadam_fp32_state"] = Step(lambda p: recadam(p, fused=True, state_dtype=fp32), 24)
        made["recadam_fp32_state_stochastic"] = Step(
            lambda p: recadam(p, fused=True, state_dtype=fp32, stochastic_rounding=True), 24
        )
    if device.type == "cpu" and dtype == fp32:
        made["recadam_fused_without_compiler"] = Step(
            lambda p: recadam(p, fused=True, cls=WithoutCompiler), 8 * b
        )
    if device.type == "cuda":
        scales = 4 * 4 / 256
        made["recadam_8bit"] = Step(
            lambda p: recadam(p, bf16, fused=True, state_dtype="8bit"), 3 * b + 4 + 2 + scales
        )
        if importlib.util.find_spec("torchao"):
            made["torchao_adamw_8bit"] = Step(torchao, 3 * b + 4 + scales)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--cases", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--impls", nargs="+", help="torch_fused_adamw is always measured")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()

    print(f"{describe(args.device)}, torch {torch.__version__}")
    rows: list[StepRow] = []
    bandwidths: dict[str, float] = {}
    for name in args.cases:
        for dtype in args.dtypes:
            case = name if dtype == "float32" else f"{name}, {dtype}"
            params = make_parameters(SHAPES[name], args.device, DTYPES[dtype])
            chosen = steps(args.device, DTYPES[dtype])
            if unknown := set(args.impls or ()) - set(chosen):
                known = ", ".join(chosen)
                parser.error(f"{', '.join(unknown)} is not measured here; there are {known}")
            # torchao's is compiled for each shape, which takes minutes: only if it is asked for.
            wanted = {"torch_fused_adamw", *(args.impls or set(chosen) - {"torchao_adamw_8bit"})}
            chosen = {impl: step for impl, step in chosen.items() if impl in wanted}
            found, bandwidths[case] = measure_steps(case, params, chosen, args.device, args.repeats)
            rows += found
            size = sum(p.numel() for p in params) / 1e6
            title = f"{case}: {size:.1f} M parameters in {len(params)} tensors"
            print_steps(f"{title}, copy {bandwidths[case]:.1f} GB/s", found)
            del params

    if args.out:
        clock = "CUDA events, launched ahead" if args.device.type == "cuda" else "perf_counter"
        copies = ", ".join(f"{case} {gb_per_s:.1f}" for case, gb_per_s in bandwidths.items())
        protocol = (
            f"one optimizer.step(), lam {LAM}, gamma {GAMMA:g}, lr {LR:g}; median of "
            f"{args.repeats} interleaved rounds after 3 of warm-up, three implementations at a "
            f"time beside torch_fused_adamw and a copy, {clock}; limit = bytes_per_param over the "
            f"copy bandwidth of the same rounds (GB/s: {copies})"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
