"""How long one RecAdam step takes, beside torch's AdamW and beside what memory allows.

    python benchmarks/recadam_step.py
    python benchmarks/recadam_step.py --device cpu --cases minilm-l6 --out results.json

A step does so little arithmetic that moving the tensors bounds it. The limit is the bytes of one
pass over them (RecAdam reads θ, g, m, v, θ* and writes θ, m, v; AdamW has no θ*) at the speed of
a large copy on the same device. (On a CPU a copy also reads the lines it is about to overwrite,
which an update in place is spared: there a step can do better than this limit.) ``host ms`` is the
time until ``step()`` returns: on CUDA it is what a loop pays that cannot launch its work ahead.
All implementations are timed in one run, interleaved. No model is run: only shapes matter here.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from _common import (
    Copy,
    Shape,
    bert_shapes,
    default_device,
    describe,
    device_ms,
    host_ms,
    interleaved_medians,
    write_results,
)
from torch.nn import Parameter
from torch.optim import AdamW

from holdfast import Constant, RecAdam

CASES: dict[str, list[Shape]] = {
    "minilm-l6": bert_shapes(layers=6, hidden=384),
    "bert-base": bert_shapes(layers=12, hidden=768),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VALUES_MOVED = {"recadam": 8, "adamw": 7}  # for each parameter: reads + writes

LR, BETA1, BETA2, EPS = 2e-5, 0.9, 0.999, 1e-8
GAMMA, LAM = 5000.0, 0.5  # halfway through the annealing: both Adam and the pull act


class Row(TypedDict):
    case: str
    impl: str
    ms: float
    x_limit: float
    x_fused_adamw: float
    bytes_per_param: int
    host_ms: float


class PlainLoop:
    """RecAdam as its rule is written, tensor after tensor."""

    def __init__(self, params: list[Parameter]) -> None:
        self.t = 0
        self.rows = [
            (p, p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in params
        ]

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


def make_parameters(
    shapes: list[Shape], device: torch.device, dtype: torch.dtype
) -> list[Parameter]:
    torch.manual_seed(0)
    params = []
    for shape in shapes:
        p = Parameter(0.02 * torch.randn(shape, device=device, dtype=dtype))
        p.grad = 0.02 * torch.randn_like(p)
        params.append(p)
    return params


def make_optimizers(params: list[Parameter]) -> dict[str, PlainLoop | torch.optim.Optimizer]:
    """All implementations, over the same parameters, each with a state of its own."""
    recadam = partial(RecAdam, params, lr=LR, gamma=GAMMA, anneal=Constant(lam=LAM))
    adamw = partial(AdamW, params, lr=LR, weight_decay=0.0)
    return {
        "plain_loop": PlainLoop(params),
        "recadam_single": recadam(foreach=False, fused=False),
        "recadam_foreach": recadam(foreach=True),
        "recadam_fused": recadam(fused=True),
        "torch_foreach_adamw": adamw(foreach=True),
        "torch_fused_adamw": adamw(fused=True),
    }


def measure(
    case: str, device: torch.device, dtype: torch.dtype, repeats: int
) -> tuple[list[Row], float]:
    """The rows of one case, and the copy bandwidth (GB/s) that their limits come from."""
    params = make_parameters(CASES[case], device, dtype)
    optimizers = make_optimizers(params)
    copy = Copy(device)
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    ms = interleaved_medians({**steps, "copy": copy}, device, device_ms, repeats=repeats)
    on_host = ms
    if device.type == "cuda":
        on_host = interleaved_medians(steps, device, host_ms, repeats=repeats)
    bandwidth = copy.bytes / ms["copy"]  # bytes a millisecond

    rows: list[Row] = []
    for impl in optimizers:
        rule = "adamw" if impl.endswith("adamw") else "recadam"
        bytes_per_param = VALUES_MOVED[rule] * dtype.itemsize
        limit = bytes_per_param * sum(p.numel() for p in params) / bandwidth
        rows.append(
            {
                "case": case,
                "impl": impl,
                "ms": round(ms[impl], 4),
                "x_limit": round(ms[impl] / limit, 3),
                "x_fused_adamw": round(ms[impl] / ms["torch_fused_adamw"], 3),
                "bytes_per_param": bytes_per_param,
                "host_ms": round(on_host[impl], 4),
            }
        )
    return rows, bandwidth / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()

    print(f"{describe(args.device)}, torch {torch.__version__}, {args.dtype}")
    rows: list[Row] = []
    bandwidths: dict[str, float] = {}
    for case in args.cases:
        case_rows, bandwidths[case] = measure(case, args.device, DTYPES[args.dtype], args.repeats)
        rows += case_rows
        size = sum(torch.Size(shape).numel() for shape in CASES[case]) / 1e6
        print(f"\n{case}: {size:.1f} M parameters in {len(CASES[case])} tensors, ", end="")
        print(f"copy {bandwidths[case]:.1f} GB/s")
        print(f"{'':20}{'ms':>10}{'× limit':>10}{'× torch fused AdamW':>22}{'host ms':>10}")
        for row in case_rows:
            print(f"{row['impl']:20}{row['ms']:10.3f}", end="")
            print(f"{row['x_limit']:10.2f}{row['x_fused_adamw']:22.2f}{row['host_ms']:10.3f}")

    if args.out:
        clock = "CUDA events, launched ahead" if args.device.type == "cuda" else "perf_counter"
        copies = ", ".join(f"{case} {gb_per_s:.1f}" for case, gb_per_s in bandwidths.items())
        protocol = (
            f"one optimizer.step(), {args.dtype}, lam {LAM}, gamma {GAMMA:g}, lr {LR:g}; median "
            f"of {args.repeats} interleaved rounds after 3 of warm-up, {clock}; limit = "
            f"bytes_per_param over the copy bandwidth of the same rounds (GB/s: {copies})"
        )
        write_results(args.out, args.device, protocol, rows=rows)


if __name__ == "__main__":
    main()
