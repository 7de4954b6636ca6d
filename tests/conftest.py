import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("default", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=2000)
settings.load_profile("default")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests send it to their children
torch.set_num_threads(1)  # the tensors are small, and pytest-xdist fills the cores

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def shared_data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"needs the real datasets in {DATA.parent.name}/{DATA.name} beside the project")
    return DATA


@pytest.fixture(scope="module")
def browser():
    from browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("needs Chromium on the PATH")
    with Browser() as started:
        yield started
