"""How many runs share a GPU, by memory, model and cores; and what is learned meanwhile."""

from dataclasses import replace
from pathlib import Path

import pytest

from comparison.small_plan import make_plan
from holdfast import Recipe
from holdfast._torch.lm_head import LARGE_CHUNK
from holdfast.comparison.crew import (
    CONTEXT,
    MOST,
    SMALL,
    crew_for,
    estimated_need,
    make_crew,
    measured_need,
)
from holdfast.comparison.gpus import Gpu
from holdfast.comparison.results import Results
from holdfast.hosts.forecast import Machines, forecast
from holdfast.hosts.job import Training

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 1 << 30
H200, SMALL_GPU = 139 * GIB, 24 * GIB
#: SmolLM2-135M, and 16 sequences of 512 tokens.
NEED = estimated_need(
    135_000_000, 16 * 512, layers=30, hidden=576, logits=LARGE_CHUNK, head=576 * 49152
)


def gpus(*free):
    return [*map(Gpu, range(len(free)), free)]


@pytest.mark.parametrize(
    ("free", "given", "expected"),
    [
        ([H200], {"parameters": 135_000_000, "need": NEED, "cores": 16}, 5),
        ([H200], {"parameters": 135_000_000, "need": NEED, "cores": 8}, 4),
        ([H200], {"parameters": 135_000_000, "need": NEED, "cores": 1}, 1),
        ([H200], {"parameters": 135_000_000, "need": 50 * GIB, "cores": 16}, 2),
        ([SMALL_GPU], {"parameters": 135_000_000, "need": NEED, "cores": 16}, 1),
        ([H200], {"parameters": SMALL + 1, "need": GIB, "cores": 16}, 1),
        ([H200], {"parameters": None, "need": None, "cores": 16}, 1),  # a model that is not known
        ([H200], {"parameters": 135_000_000, "need": None, "cores": 16}, 1),  # not yet
        ([0], {"parameters": 135_000_000, "need": NEED, "cores": 16}, 1),  # memory is not known
        ([H200, H200], {"parameters": 135_000_000, "need": NEED, "cores": 16}, 8),
        ([H200, 60 * GIB], {"parameters": 135_000_000, "need": 20 * GIB, "cores": 64}, 5 + 3),
        # What the user says counts, whatever the memory.
        ([H200], {"per_gpu": 1, "parameters": 135_000_000, "need": NEED, "cores": 16}, 1),
        ([SMALL_GPU], {"per_gpu": 7, "cores": 2}, 7),
        ([SMALL_GPU, SMALL_GPU], {"jobs": 3, "cores": 2}, 3),
        ([SMALL_GPU, SMALL_GPU], {"jobs": 3, "per_gpu": 1}, 2),
        ([SMALL_GPU, SMALL_GPU], {"jobs": 1}, 1),
        ([], {"cores": 6}, 6),
        ([], {"cores": 6, "jobs": 2, "per_gpu": 4}, 2),
    ],
)
def test_the_number_of_runs_at_a_time(free, given, expected):
    assert make_crew(gpus(*free), **given).at_a_time == expected


def test_workers_take_gpus_in_turns():
    two = make_crew(gpus(H200, H200), per_gpu=2)
    assert two.workers == [0, 1, 0, 1]
    assert two.alone == [0, 1]
    cpu = make_crew([], jobs=3)
    assert cpu.workers == [None] * 3
    assert cpu.alone == [None]
    assert cpu.admits(None, 100)


def test_peaks_raise_the_estimate():
    """A model whose activations nobody can guess begins alone; the largest peak counts."""
    crew = make_crew(gpus(24 * GIB), parameters=10**8, need=None, cores=16)
    assert crew.admits(0, 0)
    assert not crew.admits(0, 1)
    crew.learn(2 * GIB)
    assert crew.at_a_time == MOST
    crew.learn(8 * GIB)
    assert crew.at_a_time == 24 * GIB // measured_need(8 * GIB) == 2
    crew.learn(1 * GIB)
    assert crew.at_a_time == 2
    assert measured_need(0) == CONTEXT


def test_a_number_that_did_not_fit_is_not_tried_again():
    crew = make_crew(gpus(H200, H200), parameters=10**8, need=GIB, cores=64)
    assert crew.at_a_time == 2 * MOST
    crew.lower(1, 4, "CUDA out of memory")
    assert (crew.limit(0), crew.limit(1)) == (MOST, 3)
    crew.lower(0, 2, "CUDA error: device-side assert triggered")
    assert crew.limit(0) == MOST
    crew.learn(1)
    assert crew.limit(1) == 3
    for _ in range(5):
        crew.lower(1, 2, "out of memory")
    assert crew.limit(1) == 1
    given = make_crew(gpus(H200), jobs=3)  # also if the user has named the number
    given.lower(0, 3, "out of memory")
    assert given.at_a_time == 2


@pytest.mark.parametrize(
    ("name", "parameters", "layers", "hidden", "words"),
    [
        ("compare_smollm2_gsm8k", 134_515_008, 30, 576, 49152),
        ("compare_minilm_rte", 22_713_216, 6, 384, 30522),
    ],
)
def test_the_estimate_is_just_above_what_comparisons_took(name, parameters, layers, hidden, words):
    found = Results.load(RESULTS / f"{name}.json")
    training = found.plan["training"]
    tokens = training["batch_size"] * training["max_length"]
    measured = measured_need(max(run.peak_memory for run in found.runs))
    logits = tokens * words  # these runs held the logits of all tokens
    estimate = estimated_need(parameters, tokens, layers, hidden, logits)
    assert measured < estimate < 1.3 * measured


@pytest.mark.parametrize("recipe", ["standard", "self-replay"])
def test_the_estimate_is_above_the_forecast(recipe, tmp_path, monkeypatch):
    """Runs of a language model with many tokens do not hold the logits of all positions."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.LlamaConfig(
        vocab_size=150_000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    monkeypatch.setattr("holdfast.comparison.crew.gpus_for", lambda device: gpus(H200))
    training = Training(batch_size=16, max_length=512)
    plan = replace(make_plan(tmp_path), model=str(tmp_path / "model"), training=training)
    found = forecast(plan.model, recipe, Recipe.preset(recipe), training, Machines()).needs.bytes
    estimate = crew_for(plan, None, "auto").need
    assert found + CONTEXT < estimate < measured_need(2 * found)


def test_the_crew_of_a_plan_on_a_cpu(tmp_path, monkeypatch):
    plan = make_plan(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert crew_for(plan, None, "auto").workers == [None] * 3
    assert crew_for(plan, 2, "auto").workers == [None] * 2
    for jobs, per_gpu, name in ((0, "auto", "jobs"), (1, 0, "per_gpu")):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            crew_for(plan, jobs, per_gpu)


@pytest.mark.parametrize("device", [None, "cpu", "xpu"])
def test_runs_per_gpu_without_a_gpu_are_a_warning(device, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = replace(make_plan(tmp_path), device=device)
    with pytest.warns(UserWarning, match=r"per_gpu=5 .*no effect, .* no CUDA GPU: set jobs"):
        assert crew_for(plan, 2, 5).workers == [None] * 2
    crew_for(plan, 2, 5, works=False)  # nothing is left to run


@pytest.mark.parametrize("device", ["xpu", "mps", "xpu:1"])
def test_another_device_does_one_run_at_a_time(device, tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    plan = replace(make_plan(tmp_path), device=device)
    assert crew_for(plan, None, "auto").workers == [None]
    assert crew_for(plan, 2, "auto").workers == [None] * 2
    assert len(crew_for(replace(plan, device="cpu"), None, "auto").workers) == 3


def test_the_crew_of_a_plan_on_gpus(tmp_path, monkeypatch):
    """The size is that of the model's own configuration, without its weights."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    monkeypatch.setattr("holdfast.comparison.crew.gpus_for", lambda device: gpus(H200))
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    plan = make_plan(tmp_path)
    crew = crew_for(plan, None, "auto")
    assert crew.workers == [0] * MOST
    assert crew.at_a_time == MOST
    assert CONTEXT < crew.need < 2 * GIB
    assert crew_for(plan, None, 1).workers == [0]
