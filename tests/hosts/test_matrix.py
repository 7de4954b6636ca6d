"""Every recipe in every host: docs/guides/hosts.md lists those that are refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
pytest.importorskip("peft", reason="the peft extra is not installed")

from holdfast import STM, LoopSettings, Recipe, Run, pad_collate, train_loop  # noqa: E402
from holdfast.cli import main  # noqa: E402
from holdfast.registry import methods  # noqa: E402
from matrices import sampled  # noqa: E402
from small import make_llama, make_tokenizer, save  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs/guides/hosts.md").read_text(encoding="utf-8")
REFUSED = re.compile(r"^\| (`.*`) \| (.*) \| `(.*)` \|$", re.MULTILINE)

UPDATES, SIZE, LR = 2, 4, 1e-2
TOKENIZER = make_tokenizer()
ROWS = [
    {"prompt": f"the {a} sat", "completion": f" on the {b} and {c} ."}
    for a in ("cat", "dog")
    for b in ("mat", "log")
    for c in ("two", "three")
]
CLASSES = [
    {"text": row["prompt"] + row["completion"], "label": i % 2} for i, row in enumerate(ROWS)
]
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " is four plus five ."}
    for row in ROWS
]


def recipes():
    """A recipe with every method that is no default of its stage."""
    plain = {type(method) for _, method in Recipe()}
    names = {entry.name for entry in methods() if entry.cls not in plain}
    alone = names - {"auto", "random-init"}  # the weights of random-init are pulled back to θ*
    return sorted(alone | {"standard", "holdfast", "random-init+recadam"})


def refused():
    """The sentence with which a host refuses a recipe, for each row of the table of the page."""
    for names, hosts, sentence in REFUSED.findall(PAGE):
        for name in names.split(", "):
            for host in HOSTS if hosts == "all" else hosts.split(", "):
                yield (host, name.strip("`")), sentence


@pytest.fixture(autouse=True)
def _alone(request, monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    accelerate = pytest.importorskip("accelerate.state", reason="the hf extra is not installed")
    if getattr(request.node, "callspec", None) and "Axolotl" in request.node.name:
        return  # which keeps them
    for state in ("AcceleratorState", "GradientState", "PartialState"):
        getattr(accelerate, state)._reset_state()


def recipe_of(name):
    """The preset; the tiny model, which was never trained, finds no token likely enough for STM."""
    return Recipe(objective=STM(tau=1e3)) if name == "stm" else Recipe.preset(name)


def make_model(classifies=False):
    if not classifies:
        return make_llama(vocab=len(TOKENIZER), scale=0.3)
    settings = make_model().config.to_dict() | {"num_labels": 2}
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**settings))


def encoded(classifies=False):
    """The rows as samples of token ids."""
    if classifies:
        rows = [{"input_ids": TOKENIZER(r["text"])["input_ids"], "labels": r["label"]}
                for r in CLASSES]  # fmt: skip
        return datasets.Dataset.from_list(rows)
    pairs = [[TOKENIZER(text)["input_ids"] for text in row.values()] for row in ROWS]
    return datasets.Dataset.from_list(
        [{"input_ids": p + c, "labels": [-100] * len(p) + c} for p, c in pairs]
    )


def run_of(recipe, **options):
    """A model with its data and recipe, for hosts that take a Run."""
    classifies = recipe.trainable.fits_head
    return {
        "model": make_model(classifies), "data": encoded(classifies), "collate": pad_collate,
        "lr": LR, "new": "score" if classifies else (), "tokenizer": TOKENIZER, "progress": False,
        "old_data": encoded(classifies) if "rehearsal" in recipe.name else None, **options,
    }  # fmt: skip


def in_own_loop(recipe, folder):
    run = Run(recipe, **run_of(recipe))
    train_loop(run, batch_size=SIZE, settings=LoopSettings(max_updates=UPDATES, clip_norm=1.0))
    return run.finish()


def on_the_command_line(recipe, folder):
    rows = CLASSES if recipe.trainable.fits_head else ROWS
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    base = save(make_model(), folder / "base", TOKENIZER)
    given = recipe.name
    if recipe != Recipe.preset(given):
        given = folder / "recipe.yaml"
        given.write_text(recipe.to_yaml())
    words = ["finetune", "--model", base, "--data", data, "--recipe", given, "--lr", LR,
             "--out", folder / "tuned", "--max-updates", UPDATES, "--batch-size", SIZE]  # fmt: skip
    if recipe.trainable.fits_head:
        words += ["--head", "classification"]
    if "rehearsal" in recipe.name:
        words += ["--old-data", data]
    assert main([*map(str, words)]) == 0
    (weights,) = (folder / "tuned").glob("*model.safetensors")
    return load_file(weights)


def arguments(folder, **options):
    return {
        "output_dir": str(folder), "learning_rate": LR, "max_steps": UPDATES, "use_cpu": True,
        "per_device_train_batch_size": SIZE, "report_to": [], "save_strategy": "no", "bf16": False,
        "disable_tqdm": True, "gradient_checkpointing": False, **options,
    }  # fmt: skip


def trained_by(trainer):
    trainer.train()
    assert trainer.state.global_step == UPDATES
    return trainer.model


def in_trainer(recipe, folder):
    from holdfast.hosts.hf import HoldfastTrainer

    given = run_of(recipe)
    return trained_by(
        HoldfastTrainer(
            model=given["model"], recipe=recipe, new=given["new"], old_data=given["old_data"],
            args=transformers.TrainingArguments(**arguments(folder)), data_collator=pad_collate,
            train_dataset=given["data"], processing_class=TOKENIZER,
        )
    )  # fmt: skip


def in_trl(name, recipe, folder):
    trl = pytest.importorskip("trl", reason="the trl extra is not installed")
    from holdfast.hosts import trl as hosts

    rows, given, options = {
        "SFT": (ROWS, {"old_data": run_of(recipe)["old_data"] and datasets.Dataset.from_list(ROWS)},
                {"max_length": 32}),
        "DPO": (PAIRS, {"ref_model": None if recipe.trainable.keeps_base else make_model()}, {}),
        "GRPO": ([{"prompt": row["prompt"]} for row in ROWS],
                 {"reward_funcs": lambda completions, **_: [len(c) / 50 for c in completions]},
                 {"num_generations": 2, "max_completion_length": 8}),
    }[name]  # fmt: skip
    settings = getattr(trl, f"{name}Config")(**arguments(folder, **options))
    return trained_by(
        getattr(hosts, f"Holdfast{name}Trainer")(
            model=make_model(), recipe=recipe, args=settings, processing_class=TOKENIZER,
            train_dataset=datasets.Dataset.from_list(rows), **given,
        )
    )  # fmt: skip


def in_lightning(recipe, folder):
    lightning = pytest.importorskip("lightning.pytorch", reason="the lightning extra is missing")
    from holdfast.hosts.lightning import RecipeCallback

    class Mine(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.holdfast = RecipeCallback(recipe, **run_of(recipe))
            self.model = self.holdfast.model

        def configure_callbacks(self):
            return [self.holdfast]

        def train_dataloader(self):
            return self.holdfast.train_dataloader(batch_size=SIZE)

        def training_step(self, batch, batch_idx):
            return self.holdfast.loss(batch)

        def configure_optimizers(self):
            return self.holdfast.configure_optimizers()

    module = Mine()
    trainer = lightning.Trainer(
        max_steps=UPDATES, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module)
    assert trainer.global_step == UPDATES
    return module.model


def in_accelerate(recipe, folder):
    from accelerate import Accelerator

    from holdfast.hosts.accelerate import AccelerateLoop

    loop = AccelerateLoop(
        Accelerator(cpu=True), Run(recipe, **run_of(recipe)), batch_size=SIZE,
        max_updates=UPDATES,
    )  # fmt: skip
    for _ in loop:
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop.finish()


def in_axolotl(recipe, folder):
    pytest.importorskip("axolotl", reason="the package axolotl is not installed")
    import test_axolotl as host

    host.PluginManager.get_instance().plugins.clear()
    rows = [{"instruction": row["prompt"], "output": row["completion"]} for row in ROWS]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    base = save(make_llama(vocab=len(TOKENIZER), scale=0.3, limit=256), folder / "base", TOKENIZER)
    given = {"base_model": str(base), "datasets": [{"path": str(data), "type": "alpaca"}]}
    return host.train(folder / "out", recipe.to_dict(), **given)


HOSTS = {
    "your own loop": in_own_loop,
    "command line": on_the_command_line,
    "Trainer": in_trainer,
    "SFTTrainer": lambda *given: in_trl("SFT", *given),
    "DPOTrainer": lambda *given: in_trl("DPO", *given),
    "GRPOTrainer": lambda *given: in_trl("GRPO", *given),
    "Lightning": in_lightning,
    "Accelerate": in_accelerate,
    "Axolotl": in_axolotl,
}


SENTENCES = dict(refused())
CELLS = [(host, recipe) for recipe in recipes() for host in HOSTS]
QUICK = [c for c in CELLS if c[1] == "holdfast" or c in (("DPOTrainer", "distill"),
         ("GRPOTrainer", "flow"), ("GRPOTrainer", "ewc"), ("DPOTrainer", "dft"),
         ("SFTTrainer", "stm"), ("command line", "eaft"))]  # fmt: skip


def test_the_page_has_every_host_and_refuses_known_recipes():
    assert SENTENCES.keys() < {*CELLS}
    assert all(f"| {host} | [" in PAGE for host in HOSTS)


@pytest.mark.filterwarnings("ignore")  # the frameworks' own, which differ by release
@pytest.mark.parametrize(("host", "recipe"), sampled(CELLS, QUICK))
def test_a_recipe_in_a_host(host, recipe, tmp_path):
    if (host, recipe) not in SENTENCES:
        assert moved(HOSTS[host](recipe_of(recipe), tmp_path))
        return
    sentence = re.escape(SENTENCES[host, recipe]).replace("…", ".+")
    if host != "Axolotl":  # whose configuration adds words of its own
        sentence = f"^{sentence}$"
    with pytest.raises(ValueError, match=sentence):
        HOSTS[host](recipe_of(recipe), tmp_path)


def moved(tuned):
    """Whether training has changed a pretrained weight, or an adapter."""
    weights = tuned if isinstance(tuned, dict) else tuned.state_dict()
    if adapters := [w for name, w in weights.items() if "lora_B" in name]:
        return any(bool(w.any()) for w in adapters)
    pretrained = make_model("score.weight" in weights).state_dict()
    common = pretrained.keys() & weights.keys()
    assert len(common) >= len(pretrained) - 1  # tied or new heads
    return any(not torch.equal(weights[name], pretrained[name]) for name in common)
