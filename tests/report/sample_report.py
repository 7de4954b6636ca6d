"""A report as one looks in use: SmolLM2-135M tuned on GSM8K; the figures are made up."""

import math

from holdfast.evaluate.report import (
    Curve,
    Divergence,
    Drift,
    DriftRow,
    Estimate,
    ForgettingReport,
    Score,
)

KINDS = {  # shape, and how much it moves beside the others
    "self_attn.q_proj.weight": (576, 576, 1.0),
    "self_attn.k_proj.weight": (192, 576, 0.9),
    "self_attn.v_proj.weight": (192, 576, 1.5),
    "self_attn.o_proj.weight": (576, 576, 1.3),
    "mlp.gate_proj.weight": (1536, 576, 0.8),
    "mlp.up_proj.weight": (1536, 576, 1.1),
    "mlp.down_proj.weight": (576, 1536, 1.2),
    "input_layernorm.weight": (576, 1, 0.25),
    "post_attention_layernorm.weight": (576, 1, 0.2),
}


def estimate(value: float, margin: float, n: int) -> Estimate:
    return Estimate(value, value - margin, value + margin, n)


def score(name, metric, before, after, margin, change_margin, n, lower=False, role="retained"):
    return Score(
        name,
        metric,
        lower,
        estimate(before, margin, n),
        estimate(after, margin, n),
        estimate(after - before, change_margin, n),
        role,
    )


def total(name: str, rows) -> DriftRow:
    rows = list(rows)
    return DriftRow(
        name,
        math.hypot(*(r.distance for r in rows)),
        math.hypot(*(r.norm for r in rows)),
        sum(r.size for r in rows),
    )


def drift(layers: int = 30) -> Drift:
    tensors = [
        _tensor("model.embed_tokens.weight", "embed_tokens", "embed_tokens.weight", 28311552, 0.001)
    ]
    for i in range(layers):
        bump = 0.006 + 0.018 * math.exp(-(((i - 0.63 * layers) / (0.07 * layers)) ** 2))
        for kind, (rows, columns, much) in KINDS.items():
            wave = 1 + 0.18 * math.sin(1.7 * i + 9 * much)
            layer = f"model.layers.{i}"
            tensors.append(
                _tensor(f"{layer}.{kind}", layer, kind, rows * columns, bump * much * wave)
            )
    tensors.append(_tensor("model.norm.weight", "norm", "norm.weight", 576, 0.003))
    by_layer = dict.fromkeys(t.layer for t in tensors)
    by_kind = dict.fromkeys(t.kind for t in tensors)
    return Drift(
        total("all", tensors),
        tuple(total(name, (t for t in tensors if t.layer == name)) for name in by_layer),
        tuple(total(name, (t for t in tensors if t.kind == name)) for name in by_kind),
        tuple(tensors),
    )


def _tensor(name: str, layer: str, kind: str, size: int, relative: float) -> DriftRow:
    norm = 0.12 * math.sqrt(size)
    return DriftRow(name, relative * norm, norm, size, layer, kind)


def sample() -> ForgettingReport:
    steps = tuple(range(0, 626, 25))
    loss = tuple(0.80 + 0.6 * math.exp(-s / 60) + 0.012 * math.sin(s) for s in steps)
    distance = tuple(9.4 * (1 - math.exp(-s / 170)) for s in steps)
    return ForgettingReport(
        base="HuggingFaceTB/SmolLM2-135M",
        tuned="runs/smollm2-gsm8k",
        drift=drift(),
        divergences=(
            Divergence(
                "gsm8k-test.jsonl",
                estimate(0.412, 0.021, 500),
                61_204,
                "token",
                "teacher-forced, over the target tokens",
            ),
            Divergence(
                "context-free",
                estimate(0.083, 0.006, 256),
                32_768,
                "token",
                "256 texts of 128 tokens that the base model sampled from its start token",
            ),
        ),
        scores=(
            score("WikiText-2", "nll", 2.803, 2.921, 0.031, 0.012, 248, lower=True),
            score("PIQA", "acc_norm", 0.684, 0.653, 0.0212, 0.0094, 1838),
            score("ARC-easy", "acc_norm", 0.586, 0.583, 0.0199, 0.0081, 2376),
            score("LAMBADA", "acc", 0.429, 0.366, 0.0135, 0.0102, 5153),
            score("GSM8K", "nll", 1.396, 0.805, 0.022, 0.019, 1319, lower=True, role="target"),
        ),
        curves=(Curve("target loss", steps, loss), Curve("distance to the base", steps, distance)),
        notes=("HellaSwag was left out: the file is not there.",),
        settings={
            "seed": 0,
            "max_length": 512,
            "batch_size": 16,
            "dtype": "float32",
            "resamples": 2000,
        },
        versions={
            "holdfast": "0.1.0",
            "torch": "2.13.0",
            "transformers": "5.2.0",
            "lm_eval": "0.4.12",
        },
    )
