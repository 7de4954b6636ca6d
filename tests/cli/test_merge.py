import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.cli import main


def run(*arguments):
    return main(["merge", *map(str, arguments)])


@pytest.fixture
def pair(tmp_path):
    save_file({"a.weight": torch.ones(4), "b": torch.ones(5)}, tmp_path / "base.safetensors")
    save_file({"a.weight": 3 * torch.ones(4), "b": torch.ones(5)}, tmp_path / "tuned.safetensors")
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"


def test_writes_and_tells(tmp_path, pair, capsys):
    assert run(*pair, "--alpha", "0.25", "--out", tmp_path / "out") == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["a.weight"], torch.full((4,), 1.5))
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert f"wrote {tmp_path / 'out'}" in out
    assert "33 % from the base" in out  # ‖θ − θ*‖ = 1, ‖θ*‖ = 3


def test_not_finite_is_told(tmp_path, pair, capsys):
    save_file({"a.weight": torch.full((4,), torch.nan), "b": torch.ones(5)}, pair[1])
    run(*pair, "--out", tmp_path / "out")
    assert "1 tensors hold NaN or infinity, a.weight first" in capsys.readouterr().out


def test_errors_are_one_line(tmp_path, pair, capsys):
    assert run(*pair, "--alpha", "2", "--out", tmp_path / "out") == 1
    assert "alpha must lie in [0, 1]" in capsys.readouterr().err
    assert run(pair[0], tmp_path / "nowhere", "--out", tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "no such file or directory" in err
    assert len(err.splitlines()) == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    out = capsys.readouterr().out
    assert "holdfast merge models/Llama-3.2-1B runs/my-tune --alpha 0.5" in out
