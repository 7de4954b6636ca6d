import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
import holdfast.comparison


def test_the_core_import_is_light():
    """torch, safetensors and numpy: nothing of a host or of the command line."""
    code = (
        "import sys, holdfast; "
        "heavy = {'transformers', 'accelerate', 'peft', 'trl', 'datasets', 'lightning', 'optuna', "
        "'plotly', 'rich', 'sklearn', 'triton'} & set(sys.modules); "
        "print(*sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_public_names_exist_and_are_documented():
    for name in holdfast.__all__:
        assert getattr(holdfast, name).__doc__, name


def test_hosts_are_importable_from_the_top():
    for name in holdfast._LAZY:
        assert getattr(holdfast, name).__doc__, name
        assert name in dir(holdfast)


def test_comparing_is_importable_from_its_package_and_only_when_asked_for():
    code = (
        "import sys, holdfast.comparison; "
        "assert 'holdfast.comparison.scheduler' not in sys.modules; "
        "from holdfast.comparison import Plan, Results, Tuning, compare, tune; "
        "import holdfast.comparison.scheduler, holdfast.comparison.tuning; "
        "assert callable(holdfast.comparison.compare) and callable(holdfast.comparison.tune)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    modules = {path.stem for path in Path(holdfast.comparison.__file__).parent.iterdir()}
    for name in holdfast.comparison.__all__:
        assert getattr(holdfast.comparison, name).__doc__, name
        assert name in dir(holdfast.comparison)
        assert name not in modules  # importing it would put it in the name's place
    with pytest.raises(AttributeError, match="has no attribute 'compares'"):
        _ = holdfast.comparison.compares
