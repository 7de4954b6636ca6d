import subprocess
import sys

import holdfast


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
