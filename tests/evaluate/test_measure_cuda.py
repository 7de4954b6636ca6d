"""What is measured on a GPU is what is measured on the CPU."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

import holdfast
from holdfast.methods.ewc import fisher_importance
from small import make_llama, make_tokenizer, noisy, save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("models"), make_tokenizer()
    base = make_llama(scale=0.5)
    save(base, folder / "base", tokenizer)
    save(noisy(base), folder / "tuned", tokenizer)
    (folder / "notes.txt").write_text("the cat sat on the mat . " * 40)
    choices = [
        {"goal": "two plus two is", "choices": ["four", "five six", "six"], "label": i % 3}
        for i in range(8)
    ]
    rows = [{"question": "two plus three is", "answer": "five"}] * 4
    (folder / "choices.jsonl").write_text("\n".join(map(json.dumps, choices)))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_a_report_is_the_cpus(folders):
    options = {
        "text": [folders / "notes.txt"], "data": [folders / "choices.jsonl"],
        "target": folders / "rows.jsonl", "context_free": 0, "progress": False,
    }  # fmt: skip
    base, tuned = folders / "base", folders / "tuned"
    cpu, gpu = (
        holdfast.measure(base, tuned, loader=holdfast.Loader(device=device), **options)
        for device in ("cpu", "cuda")
    )
    assert cpu.scores
    assert len(cpu.scores) == len(gpu.scores)
    for one, other in zip(cpu.scores, gpu.scores, strict=True):
        assert (one.before.value, one.after.value) == pytest.approx(
            (other.before.value, other.after.value), rel=1e-4
        )
    assert gpu.divergences
    assert len(cpu.divergences) == len(gpu.divergences)
    for one, other in zip(cpu.divergences, gpu.divergences, strict=True):
        assert one.kl.value == pytest.approx(other.kl.value, rel=1e-3)


@pytest.mark.parametrize("kind", ["empirical", "true"])
def test_fishers_information_is_the_cpus(kind):
    rows = [{"input_ids": [2, 7 + i % 8, 9, 10 + i % 5, 3]} for i in range(12)]
    samples = [{**row, "labels": row["input_ids"]} for row in rows]
    found = {}
    for device in ("cpu", "cuda"):
        model = make_llama(scale=0.5).to(device)
        fisher = fisher_importance(
            model, samples, kind=kind, task="causal_lm", collate=holdfast.pad_collate,
            progress=False,
        )  # fmt: skip
        found[device] = {name: fisher[name].cpu() for name in fisher}
    for name, one in found["cpu"].items():
        other = found["cuda"][name]
        assert other.isfinite().all()
        assert other.sum() > 0
        if kind == "empirical":  # the draws of the two devices are not the same
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
