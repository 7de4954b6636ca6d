import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
import holdfast.compare


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
        "import sys, holdfast.compare; "
        "assert 'holdfast.compare.running' not in sys.modules; "
        "from holdfast.compare import Plan, Results, Tuning, compare, tune; "
        "import holdfast.compare.running, holdfast.compare.tuning; "
        "assert callable(holdfast.compare.compare) and callable(holdfast.compare.tune)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    modules = {path.stem for path in Path(holdfast.compare.__file__).parent.iterdir()}
    for name in holdfast.compare.__all__:
        assert getattr(holdfast.compare, name).__doc__, name
        assert name in dir(holdfast.compare)
        assert name not in modules  # importing it would put it in the name's place
    with pytest.raises(AttributeError, match="has no attribute 'compares'"):
        _ = holdfast.compare.compares
