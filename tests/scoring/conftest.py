import pytest

from scoring.lm import gsm8k, small_llama


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(shared_data):
    return gsm8k(shared_data, 21)


@pytest.fixture
def model():
    return small_llama()
