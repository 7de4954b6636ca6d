"""The workflow in examples/pipeline: its steps run as they are written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
import yaml

from matrices import sampled
from small import make_llama, make_tokenizer, noisy, save

WORKFLOW = Path(__file__).parents[2] / "examples" / "pipeline" / "forgetting-gate.yml"


GATES = [(0.001, 0, "Passed"), (0.5, 1, "Failed")]


# It takes longer than 5 seconds: a new process imports torch and transformers.
@pytest.mark.parametrize(("noise", "code", "word"), sampled(GATES, GATES[1:]))
def test_the_steps_of_the_workflow(tmp_path, noise, code, word):
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    steps = {step["name"]: step for step in workflow["jobs"]["gate"]["steps"] if "run" in step}
    assert list(steps) == ["Install", "Check", "Summary"]
    assert steps["Summary"]["if"] == "always()"
    assert set(workflow["env"]) == {"BASE", "TUNED", "TARGET", "MAX_TARGET_LOSS", "HOLDFAST"}
    base = make_llama(limit=128, scale=0.3)
    save(base, tmp_path / "base", make_tokenizer())
    save(noisy(base, noise), tmp_path / "tuned", make_tokenizer())
    (tmp_path / "dev.jsonl").write_text('{"prompt": "two", "completion": " three"}\n')
    summary, commands = tmp_path / "step-summary.md", f"{Path(sys.executable).parent}"
    given = {"BASE": "base", "TUNED": "tuned", "GITHUB_STEP_SUMMARY": str(summary)}
    given |= {"TARGET": "dev.jsonl", "MAX_TARGET_LOSS": "100"}
    given["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    codes = [
        subprocess.run(["bash", "-e", "-c", steps[name]["run"]], cwd=tmp_path,
                       env=os.environ | given, capture_output=True).returncode
        for name in ("Check", "Summary")
    ]  # fmt: skip
    assert codes == [code, 0]
    assert word in summary.read_text(encoding="utf-8")
    assert (tmp_path / "gate" / "junit.xml").exists()
