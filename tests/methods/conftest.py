import pytest


@pytest.fixture(params=["one chunk", "many chunks"])
def chunk(request, monkeypatch):
    """The size of what is fetched at a time."""
    from holdfast.kernels import fetching
    from methods.fetching_cuda import SMALL

    if request.param == "many chunks":
        monkeypatch.setattr(fetching, "CHUNK", SMALL)
    return fetching.CHUNK
