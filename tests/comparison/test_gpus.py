"""The free memory of GPUs, as the driver's tool says it."""

import pytest

from holdfast.comparison.gpus import free_memory, gpus_for


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A program that prints what a test wants, in place of the driver's."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def says(text, status=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
        program.chmod(0o755)

    return says


def test_free_bytes_by_uuid(tool):
    tool("GPU-8d1c, 142000\nGPU-77aa, 12")
    assert free_memory() == {"GPU-8d1c": 142000 << 20, "GPU-77aa": 12 << 20}


@pytest.mark.parametrize("text", ["", "No devices were found", "GPU-1, [N/A]"])
def test_a_tool_that_does_not_say(text, tool):
    tool(text, status=6)
    assert free_memory() == {}


def test_without_the_tool(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert free_memory() == {}


def test_a_cpu_is_no_gpu():
    assert gpus_for("cpu") == ()
