import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """Without a GPU, let optimizers use the kernels that tests/conftest.py loaded interpreted."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
