import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

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
