"""Axolotl's own entry points train with a recipe, on a CPU."""

import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("axolotl", reason="the package axolotl is not installed")
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train
    from axolotl.common.datasets import load_datasets
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.collators import DataCollatorForSeq2Seq
    from axolotl.utils.dict import DictDefault

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from holdfast import ForgettingReport, Recipe
from holdfast.hosts.axolotl import HoldfastPlugin
from holdfast.hosts.hf import HoldfastTrainer
from holdfast.recipe import recipe_beside
from small import make_llama, make_tokenizer, save

pytestmark = pytest.mark.filterwarnings("ignore")  # Axolotl's own, and of what it imports
PLUGIN = f"{HoldfastPlugin.__module__}.{HoldfastPlugin.__name__}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl")
    save(make_llama(limit=256), folder / "base", make_tokenizer())
    words = ["two", "three", "four", "five"]
    rows = [{"instruction": f"{a} plus {b} is", "output": b} for a in words for b in words]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "prose.txt").write_text("the cat sat on the mat and a dog ran on the log . " * 50)
    return folder


@pytest.fixture(autouse=True)
def _fresh(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOLDFAST_CACHE", str(folder / "cache"))
    PluginManager.get_instance().plugins.clear()


def load(out, recipe=None, report=False, **more):
    config = {
        "base_model": "base", "datasets": [{"path": "sums.jsonl", "type": "alpaca"}],
        "output_dir": str(out), "val_set_size": 0, "sequence_len": 128, "micro_batch_size": 2,
        "gradient_accumulation_steps": 2, "num_epochs": 2, "learning_rate": 1e-2,
        "optimizer": "adamw_torch", "lr_scheduler": "constant", "warmup_steps": 0, "bf16": False,
        "fp16": False, "tf32": False, "sample_packing": False, "logging_steps": 1,
        "dataset_num_proc": 1, "seed": 42,
    }  # fmt: skip
    if recipe is not None:
        config |= {"plugins": [PLUGIN], "holdfast": {"recipe": recipe, "report": report}}
    config = {name: x for name, x in (config | more).items() if x is not None}
    return load_cfg(DictDefault(config))


def train(out, recipe=None, **more):
    do_train(load(out, recipe, **more), TrainerCliArgs())
    return load_file(out / "model.safetensors")


def losses(out):
    """The logged losses. Adam hides the scale of a loss from the weights."""
    state = json.loads((out / "checkpoint-8" / "trainer_state.json").read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row]


def assert_equal(one, other, within=0.0):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=within)


def test_the_standard_recipe_is_plain_axolotl(tmp_path):
    assert_equal(train(tmp_path / "a", "standard"), train(tmp_path / "b"))


def test_a_run_equals_that_of_the_trainer(tmp_path):
    """Axolotl's data, collator and settings in the Hugging Face host give the same weights."""
    recipe = {
        "update": {"name": "recadam", "gamma": 10.0},
        "penalties": ["l2-sp"],
        "merging": {"name": "wise-ft", "alpha": 0.7},
    }
    found = train(tmp_path / "axolotl", recipe)
    cfg, tokenizer = load(tmp_path / "other"), AutoTokenizer.from_pretrained("base")
    args = TrainingArguments(
        tmp_path / "hf", per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=8, learning_rate=1e-2, lr_scheduler_type="constant", seed=42,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = HoldfastTrainer(
        model=AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32),
        recipe=Recipe.from_dict(recipe),
        args=args,
        train_dataset=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()).train_dataset,
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=64),
    )
    trainer.train()
    assert_equal(found, {n: p for n, p in trainer.model.state_dict().items() if n in found}, 1e-6)
    used = recipe_beside(tmp_path / "axolotl")
    assert used.merging.alpha == 0.7
    assert used.update.lr == 1e-2
    # The checkpoint has the weights before merging: theta = 0.7 tuned + 0.3 pretrained.
    tuned = load_file(tmp_path / "axolotl" / "checkpoint-8" / "model.safetensors")
    base = load_file("base/model.safetensors")
    assert_equal(found, {n: 0.7 * tuned[n] + 0.3 * base[n] for n in found}, 1e-6)


def test_the_loss_of_a_recipe_does_not_depend_on_micro_batches(tmp_path):
    whole = train(tmp_path / "a", "flow", micro_batch_size=4, gradient_accumulation_steps=1)
    assert_equal(train(tmp_path / "b", "flow"), whole, 1e-4)
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-4)
    plain = train(tmp_path / "c", "standard")
    assert any((whole[name] - plain[name]).abs().max() > 1e-3 for name in whole)


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that Axolotl creates."""
    found, create = [], HoldfastPlugin.post_trainer_create

    def remember(self, cfg, trainer):
        found.append(trainer)
        create(self, cfg, trainer)

    monkeypatch.setattr(HoldfastPlugin, "post_trainer_create", remember)
    return found


def test_packed_samples_and_texts_of_the_base_model(tmp_path, trainers):
    """Without a learning rate, the recipe chooses it. The number of updates may be the user's."""
    more = {"sample_packing": True, "micro_batch_size": 1, "learning_rate": None, "max_steps": 1}
    train(tmp_path / "a", "holdfast", **more)
    (trainer,) = trainers
    assert len(list(trainer._get_train_sampler())) == 4  # rows of an epoch, with 16 samples
    assert trainer.run.update_size == 2 * 4
    used = recipe_beside(tmp_path / "a")
    assert used.recall.trains_on_drawn_texts
    assert used.update.lr not in (None, 5e-5)
    with pytest.raises(ValueError, match="sample_packing: false"):
        load(tmp_path / "b", "flow", **more)


def test_adapters_of_axolotl(tmp_path):
    adapter = {"adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_target_linear": True}
    # Axolotl's kernels for LoRA need a GPU.
    adapter |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    do_train(load(tmp_path / "a", "recadam", **adapter), TrainerCliArgs())
    assert (tmp_path / "a" / "adapter_model.safetensors").exists()
    state = json.loads((tmp_path / "a" / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["log_history"][0]["lam"] < state["log_history"][-2]["lam"]
    with pytest.raises(ValueError, match="leave LoRA out of the recipe"):
        load(tmp_path / "b", "lora+recadam")


def test_resume(tmp_path):
    recipe, more = "recadam+wise-ft", {"save_steps": 4}
    whole = train(tmp_path / "a", recipe, **more)
    again = tmp_path / "a" / "checkpoint-4"
    assert_equal(train(tmp_path / "b", recipe, resume_from_checkpoint=str(again), **more), whole)


def test_the_report_is_beside_the_model(tmp_path):
    train(tmp_path / "a", "standard", report={"target": ["sums.jsonl"], "limit": 4})
    report = ForgettingReport.load(tmp_path / "a-forgetting" / "report.json")
    assert report.base == "base"
    assert report.settings["limit"] == 4
    assert {score.name for score in report.scores} == {"sums"}
    assert report.drift.total.distance > 0
    with pytest.raises(
        RuntimeError, match=r"To repeat it: holdfast measure base .* 'no where.txt'"
    ):
        train(tmp_path / "b", "standard", report={"text": ["no where.txt"]})
    assert (tmp_path / "b" / "model.safetensors").exists()


def test_the_configuration_of_the_guide():
    page = Path(__file__).parents[2] / "docs" / "guides" / "axolotl.md"
    config = yaml.safe_load(re.findall("```yaml\n(.*?)```", page.read_text(), re.DOTALL)[0])
    do_train(load_cfg(DictDefault(config)), TrainerCliArgs())
    report = ForgettingReport.load("tuned-forgetting/report.json")
    assert {score.name for score in report.scores} == {"sums", "prose"}
    assert recipe_beside("tuned").name == config["holdfast"]["recipe"]


@pytest.mark.parametrize(
    ("message", "recipe", "more"),
    [
        ("unknown method 'recadm'", "recadm", {}),
        ("no such recipe file: nowhere.yaml", "nowhere.yaml", {}),
        ("no stage 'updat'", {"updat": "recadam"}, {}),
        ("Extra inputs are not permitted", "recadam", {"report": {"texts": ["a.txt"]}}),
        ("RecAdamUpdate gives all parameters the same", "recadam", {"embedding_lr": 1e-5}),
        ("not with rl", "recadam", {"rl": "orpo", "datasets": [{"path": "sums.jsonl"}]}),
    ],
)
def test_invalid_settings_are_refused_before_the_model_is_loaded(message, recipe, more, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "a", recipe, **more)
