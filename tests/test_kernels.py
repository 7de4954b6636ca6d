"""The kernels on a machine without a GPU: in Triton's interpreter, which is chosen at the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/kernels run on it")
def test_the_kernels_in_tritons_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = Path(__file__).parent / "kernels"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
