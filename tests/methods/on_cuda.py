"""RecAdam on a CUDA device: parameters, gradients, and what the rule makes of them."""

import warnings
from contextlib import contextmanager

import torch

from golden.recadam import Twin, sigmoid_lambda
from holdfast import RecAdam
from holdfast.anneal import Sigmoid

SHAPES = [(), (1,), (7,), (64, 33), (3, 5, 2), (1025,)]
AMP = {"fused": True, "capturable": True}
SETTINGS = {"lr": 1e-2, "gamma": 20.0, "anneal": Sigmoid(0.2, 20)}


def tensors(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]


def make(dtype=torch.float64, anchor_device="cuda", **options):
    params = [torch.nn.Parameter(t.cuda()) for t in tensors(0, dtype)]
    anchors = {str(i): t.to(anchor_device) for i, t in enumerate(tensors(1, dtype))}
    named = [(str(i), p) for i, p in enumerate(params)]
    return params, RecAdam(named, anchors=anchors, **(SETTINGS | options))


def set_gradients(params, t):
    for p, g in zip(params, tensors(100 + t, params[0].dtype), strict=True):
        if p.grad is None:
            p.grad = g.cuda()
        else:
            p.grad.copy_(g)


def twin_run(steps, wd=0.0, lr=1e-2, dtype=torch.float64):
    """In float64, with the weights rounded to ``dtype`` after every step."""
    twins = [
        Twin(a.double(), b.double())
        for a, b in zip(tensors(0, dtype), tensors(1, dtype), strict=True)
    ]
    for t in range(1, steps + 1):
        for twin, g in zip(twins, tensors(100 + t, dtype), strict=True):
            twin.update(g.double(), lr=lr, lam=sigmoid_lambda(t, 0.2, 20), gamma=20.0, wd=wd)
            twin.theta = twin.theta.to(dtype).double()
    return [twin.theta for twin in twins]


def worst(params, expected):
    return max(
        (p.detach().cpu().double() - e).abs().max().item()
        for p, e in zip(params, expected, strict=True)
    )


@contextmanager
def without_waiting():
    """An operation that makes the host wait for the GPU is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not all of them are found
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
