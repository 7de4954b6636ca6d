import gc
import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("default", deadline=None, max_examples=30)
settings.register_profile("soak", deadline=None, max_examples=300)
settings.load_profile("default")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests send it to their children
torch.set_num_threads(1)  # the tensors are small, and pytest-xdist fills the cores
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # in subprocesses too

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    # Triton chooses its interpreter at import, so the kernels are loaded under this setting.
    # tests/kernels sets it again for its tests; everywhere else the CPU's own operations run.
    os.environ["TRITON_INTERPRET"] = "1"
    from holdfast.kernels import mofo, pull, recadam  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # a collection in a test takes a second if it goes through all imported modules


def pytest_unconfigure():
    gc.unfreeze()  # Triton looks for leaks at exit


DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def shared_data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"needs the real datasets in {DATA.parent.name}/{DATA.name} beside the project")
    return DATA


@pytest.fixture
def proof_scripts(monkeypatch):
    """The scripts of the proof, and those that they import, can be imported."""
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    folders = [benchmarks / "proof", benchmarks / "papers", benchmarks / "embedded", benchmarks]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])


@pytest.fixture(scope="module")
def forked_workers():
    """The worker processes of comparisons start at once."""
    from forks import FORKS
    from holdfast.comparison import processes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_PROCESSES", FORKS)
        yield


@pytest.fixture(scope="module")
def browser():
    from browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("needs Chromium on the PATH")
    with Browser() as started:
        yield started
