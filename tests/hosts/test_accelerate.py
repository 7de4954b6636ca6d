"""A loop with Accelerate: equal to finetune_loop, on one process and on two ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from holdfast import Flow, Recipe, Run, WiseFT
from holdfast.optim import slanted_triangular
from loops import tune
from matrices import sampled
from ranks import run_on_ranks

accelerate = pytest.importorskip("accelerate", reason="the hf extra is not installed")
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from holdfast.hosts.accelerate import (  # noqa: E402
    AccelerateLoop,
    autocast_of,
    make_accelerator,
)

RECIPES = ["recadam", "flow", "l2-sp", "mofo", "lora", "distill", "finch",
           "recadam+flow+l2-sp+wise-ft"]  # fmt: skip
SAMPLES = 21  # no multiple of anything: the last update of an epoch leaves a rank with nothing


@pytest.fixture(autouse=True)
def _one_accelerator_per_test():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_model():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def make_data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


SETTINGS = {"lr": 0.01, "task": "classification", "progress": False, "cache": False}


def make_loop(accelerator, recipe, model=None, run=None, **options):
    if isinstance(recipe, str):
        recipe = Recipe.preset(recipe)
    model = make_model() if model is None else model
    made = Run(recipe, model, make_data(), **(SETTINGS | (run or {})))
    return AccelerateLoop(accelerator, made, **({"epochs": 3, "batch_size": 4} | options))


def train(loop, until=None):
    losses = []
    for update in loop:
        losses.append(float(loop.backward()))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if update == until:
            break
    return losses


def whole_state(model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def expected(names, batch, **options):
    recipe = Recipe.preset(names) if isinstance(names, str) else names
    tuned = tune(
        make_model(), recipe, make_data(), epochs=3, batch_size=batch, **(SETTINGS | options)
    )
    return whole_state(tuned)


def assert_close(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= tolerance, name


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("names", RECIPES)
def test_one_process_is_finetune_loop(names, accumulate):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    torch.manual_seed(0)
    loop = make_loop(accelerator, names)
    train(loop)
    assert_close(whole_state(loop.finish()), expected(names, 4 * accumulate), 1e-12)


def test_losses_schedule_and_workers():
    seen = []
    wanted = expected(
        "recadam", 4, schedule=slanted_triangular, log=lambda row: seen.append(row["loss"]),
        log_every=1,
    )  # fmt: skip
    loop = make_loop(
        accelerate.Accelerator(cpu=True), "recadam", schedule=slanted_triangular, workers=1
    )
    assert len(loop) == 18
    losses = train(loop)
    assert losses == pytest.approx(seen, rel=1e-6)
    assert len(loop) == 0
    assert_close(whole_state(loop.finish()), wanted, 1e-12)


def test_a_task_of_the_users_own():
    def task(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loop = make_loop(accelerator, "recadam", run={"task": task})
    train(loop)
    assert_close(whole_state(loop.finish()), expected("recadam", 8), 1e-12)


def test_mixed_precision_leaves_a_plain_model():
    model = make_model().float()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    run = Run(
        Recipe.preset("recadam+wise-ft"), model, [(x.float(), y) for x, y in make_data()],
        collate=torch.utils.data.default_collate, **SETTINGS,
    )  # fmt: skip
    loop = AccelerateLoop(accelerator, run, batch_size=4)
    train(loop)
    tuned = loop.finish()
    assert tuned is model
    x = torch.randn(5, 4)
    assert torch.equal(tuned(x), nn.Sequential.forward(tuned, x))  # no autocast around it
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in tuned.parameters())


@pytest.mark.parametrize(
    "recipe",
    [Recipe.preset("recadam+l2-sp+wise-ft"), Recipe(objective=Flow(tau="running_median"))],
    ids=["recadam", "running-median"],
)
def test_resume_is_exact(recipe, tmp_path):
    def model():
        model = make_model()
        model[2].p = 0.3
        return model

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loop = make_loop(accelerator, recipe, model())
    train(loop, until=4)
    accelerator.save_state(str(tmp_path / "saved"))
    train(loop)
    wanted = whole_state(loop.finish())

    _one_accelerator_per_test.__wrapped__()
    torch.manual_seed(99)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    again = make_loop(accelerator, recipe, model())
    accelerator.load_state(str(tmp_path / "saved"))
    assert again.done == 4
    assert len(train(again)) == again.total_updates - 4
    assert_close(whole_state(again.finish()), wanted, 0.0)


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    folder = str(tmp_path / "saved")
    loop = make_loop(accelerate.Accelerator(cpu=True), "recadam")
    train(loop, until=2)
    loop.accelerator.save_state(folder)
    tuned = copy.deepcopy(loop.run.model)

    def refused(message, recipe="recadam", **options):
        _one_accelerator_per_test.__wrapped__()
        other = make_loop(accelerate.Accelerator(cpu=True), recipe, **options)
        before = whole_state(other.run.model)
        with pytest.raises(ValueError, match=message):
            other.accelerator.load_state(folder)
        assert_close(whole_state(other.run.model), before, 0.0)

    refused("another recipe", Recipe(merging=WiseFT()))
    refused("other pretrained weights", model=tuned)
    refused("updates=18 there and 6 here", epochs=1)
    refused("another schedule", schedule=slanted_triangular)
    (tmp_path / "saved" / "holdfast.pt").unlink()
    refused("not a checkpoint of an AccelerateLoop")


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_the_run_has_the_precision(mixed, monkeypatch):
    """With or without Accelerate's own mixed precision, as in finetune_loop."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed)
    data = [(x.float(), y) for x, y in make_data()]
    options = {**SETTINGS, "collate": torch.utils.data.default_collate}
    loop_options = {"batch_size": 4, "epochs": 2}
    tuned = tune(
        make_model().float(), Recipe(), data, autocast=torch.bfloat16, **loop_options, **options
    )
    wanted = whole_state(tuned)
    model = make_model().float()
    accelerator = make_accelerator(model, 1)
    assert autocast_of(accelerator, "bfloat16", torch.device("cpu")) == torch.bfloat16
    run = Run(Recipe(), model, data, autocast=torch.bfloat16, **options)
    loop = AccelerateLoop(accelerator, run, **loop_options)
    train(loop)
    assert_close(whole_state(loop.finish()), wanted, 0.0)


@pytest.mark.parametrize(
    ("mixed", "precision", "device", "expected"),
    [
        ("no", "auto", "cpu", None),
        ("no", "auto", "cuda", torch.bfloat16),
        ("no", "float32", "cuda", None),
        ("no", "bfloat16", "cpu", torch.bfloat16),
        ("bf16", "auto", "cpu", torch.bfloat16),
        ("bf16", "float32", "cuda", "precision is float32"),
    ],
)
def test_two_settings_of_the_precision(mixed, precision, device, expected):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            autocast_of(accelerator, precision, torch.device(device))
    else:
        assert autocast_of(accelerator, precision, torch.device(device)) == expected


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_process_is_finetune_loop_to_the_bit(accumulate):
    """Also with dropout, and in the shorter last update of an epoch."""

    def model():
        model = make_model()
        model[2].p = 0.3
        return model

    options = SETTINGS | {"epochs": 3, "batch_size": 2, "accumulate": accumulate}
    wanted = whole_state(tune(model(), Recipe.preset("recadam"), make_data(), **options))
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    fresh = model()
    torch.manual_seed(0)
    loop = make_loop(accelerator, "recadam", fresh, batch_size=2)
    train(loop)
    assert_close(whole_state(loop.finish()), wanted, 0.0)


def test_wrong_use_raises_helpful_errors():
    accelerator = accelerate.Accelerator(cpu=True)
    loop = make_loop(accelerator, "recadam")
    with pytest.raises(RuntimeError, match="no update is due"):
        loop.backward()
    with pytest.raises(RuntimeError, match="was not made"):
        list(loop)
    with pytest.raises(ValueError, match="batch_size"):
        make_loop(accelerator, "recadam", batch_size=0)
    with pytest.raises(ValueError, match="no data"):
        AccelerateLoop(accelerator, Run(Recipe(), make_model(), lr=0.1, task="classification"))


CASES = {
    "ddp": [
        ("recadam", 2),
        ("mofo", 2),
        ("finch", 2),
        ("flow+recadam+l2-sp+wise-ft", 1),
        ("lora", 1),
        ("lp-ft", 1),
        ("hft", 1),
    ],
    "ddp-unused": [("hft", 1), ("gradual-unfreezing", 1)],
    "fsdp2": [
        ("recadam", 2),
        ("mofo", 2),
        ("flow+recadam+l2-sp+wise-ft", 1),
        ("distill", 1),
        ("spd", 2),
        ("finch", 2),
    ],
}


def on_ranks(kind, out):
    states = []
    for names, accumulate in CASES[kind]:
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        loop = make_loop(ranks_accelerator(kind, accumulate), names, batch_size=2)
        assert (kind == "fsdp2") == any(hasattr(p, "full_tensor") for p in loop.model.parameters())
        train(loop)
        states.append(whole_state(loop.finish()))
    if kind == "ddp":
        refuses_other_weights_on_a_rank()
    if torch.distributed.get_rank() == 0:
        torch.save(states, out)


def refuses_other_weights_on_a_rank():
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    model = make_model()
    if torch.distributed.get_rank():
        model[0].weight.data.zero_()  # as FSDP's cpu_ram_efficient_loading leaves it
    with pytest.raises(ValueError, match="cpu_ram_efficient_loading"):
        make_loop(ranks_accelerator("ddp"), "recadam", model)


def ranks_accelerator(kind, accumulate=1, **wrapping):
    plugin = None
    if kind == "fsdp2":
        # Accelerate ignores its FSDP plugin on CPUs, without a word; on any other device it does
        # not look at which. What it then does runs on gloo.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        wrapping = wrapping or {"auto_wrap_policy": "size_based_wrap", "min_num_params": 40}
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, **wrapping
        )
    handlers = [accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)]
    return accelerate.Accelerator(
        cpu=kind != "fsdp2", gradient_accumulation_steps=accumulate, fsdp_plugin=plugin,
        kwargs_handlers=handlers if kind == "ddp-unused" else None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", sampled(CASES, ["ddp", "fsdp2"]))
def test_two_ranks_are_one_process(kind, tmp_path):
    run_on_ranks(2, on_ranks, kind, tmp_path / "out.pt", folder=tmp_path)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for (names, accumulate), state in zip(CASES[kind], found, strict=True):
        assert_close(state, expected(names, 4 * accumulate), 1e-9)


def stop_or_resume(kind, names, folder, out):
    loop = make_loop(ranks_accelerator(kind), names, batch_size=2)
    if out:
        loop.accelerator.load_state(folder)
        train(loop)
        state = whole_state(loop.finish())
        if loop.accelerator.is_main_process:
            torch.save(state, out)
    else:
        train(loop, until=7)
        loop.accelerator.save_state(folder)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_resume(kind, tmp_path):
    names, out = "recadam+l2-sp", tmp_path / "out.pt"
    for file in ("", out):
        run_on_ranks(2, stop_or_resume, kind, names, tmp_path / "s", file, folder=tmp_path)
    assert_close(torch.load(out, weights_only=True), expected(names, 4), 1e-9)


def test_a_run_that_diverges_is_an_error():
    loop = make_loop(accelerate.Accelerator(cpu=True), "standard")
    for _ in loop:
        loss = loop.backward()
        loop.model[0].weight.grad[0, 0] = torch.nan
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert bool(loss.isnan())
    with pytest.raises(ValueError, match=r"the training diverged: there is NaN .* in 0.weight"):
        loop.finish()
