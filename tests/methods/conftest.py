import pytest
import torch


@pytest.fixture(params=["one chunk", "many chunks"])
def chunk(request, monkeypatch):
    """The size of what is fetched at a time."""
    from holdfast.kernels import fetching
    from methods.fetching_cuda import SMALL

    if request.param == "many chunks":
        monkeypatch.setattr(fetching, "CHUNK", SMALL)
    return fetching.CHUNK


@pytest.fixture
def count_calls(monkeypatch):
    """The elements of each call of torch's fused operation."""
    calls, fused = [], torch._fused_adamw_

    def counting(p, *args, **options):
        calls.append(sum(t.numel() for t in p))
        return fused(p, *args, **options)

    monkeypatch.setattr(torch, "_fused_adamw_", counting)
    return calls
