"""Mixtures of experts: objectives keep the auxiliary loss of the model."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

from transformers import Trainer, TrainingArguments  # noqa: E402

from holdfast import Distill, Flow, Recipe  # noqa: E402
from holdfast.hosts.hf import HoldfastTrainer  # noqa: E402
from loops import tune  # noqa: E402
from matrices import sampled  # noqa: E402

ALIKE = Flow(tau=1e12)  # weights of 1 but for rounding, through FLOW's own loss
WEAK = Distill(strength=1e-12)
ROWS = [{"input_ids": [1, 2, i, i + 1], "labels": [1, 2, i, i + 1]} for i in range(3, 11)]


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def make_model(coefficient=0.5):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=3, pad_token_id=0,
        output_router_logits=True, router_aux_loss_coef=coefficient,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the others know no float64
    return transformers.MixtralForCausalLM(config).double()


def options(folder, accumulate):
    return {
        "output_dir": str(folder), "learning_rate": 1e-2, "max_steps": 3, "max_grad_norm": 0,
        "per_device_train_batch_size": 8 // accumulate, "use_cpu": True, "report_to": [],
        "gradient_accumulation_steps": accumulate, "save_strategy": "no", "disable_tqdm": True,
        "lr_scheduler_type": "constant", "optim": "adamw_torch", "seed": 3, "bf16": False,
    }  # fmt: skip


def tuned(folder, recipe=None, accumulate=1, coefficient=0.5):
    common = {
        "model": make_model(coefficient),
        "args": TrainingArguments(**options(folder, accumulate)),
        "train_dataset": datasets.Dataset.from_list(ROWS),
    }
    trainer = HoldfastTrainer(recipe=recipe, **common) if recipe else Trainer(**common)
    trainer.train()
    return trainer.model


def apart(ours, theirs):
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize(
    ("stage", "accumulate"),
    sampled(
        itertools.product(
            [{"objective": Flow(tau=float("inf"))}, {"objective": ALIKE}, {"recall": WEAK}], [1, 4]
        ),
        [({"objective": ALIKE}, 4)],
    ),
)
def test_the_trainers_own_loss(tmp_path, stage, accumulate):
    theirs = tuned(tmp_path, accumulate=accumulate)
    ours = tuned(tmp_path, Recipe(**stage), accumulate)
    assert apart(ours, theirs) < 1e-5  # the Trainer's loss is float32
    without = tuned(tmp_path, Recipe(**stage), accumulate, coefficient=0.0)
    assert apart(without, theirs) > 1e-4


@pytest.mark.parametrize("accumulate", sampled([1, 4], [4]))
def test_trls_own_loss(tmp_path, accumulate):
    trl = pytest.importorskip("trl", reason="the trl extra is not installed")
    from holdfast.hosts.trl import HoldfastSFTTrainer
    from hosts.test_trl import TOKENIZER

    models = []
    for cls, more in (
        (trl.SFTTrainer, {}),
        (HoldfastSFTTrainer, {"recipe": Recipe(objective=ALIKE)}),
        (HoldfastSFTTrainer, {"recipe": Recipe(recall=WEAK)}),
    ):
        settings = options(tmp_path, accumulate) | {"gradient_checkpointing": False}
        trainer = cls(
            model=make_model(0.001),
            # Another than the model's: it is the one that counts.
            args=trl.SFTConfig(**settings, router_aux_loss_coef=0.5),
            train_dataset=datasets.Dataset.from_list(ROWS),
            processing_class=TOKENIZER,
            **more,
        )
        trainer.train()
        models.append(trainer.model)
    assert apart(models[1], models[0]) < 1e-5
    assert apart(models[2], models[0]) < 1e-5


def test_the_auxiliary_loss_is_the_mean_over_micro_batches():
    """As the model has it in one batch; of micro-batches their mean, by their targets."""
    recipe = Recipe()
    model, rows = make_model(), [{**row} for row in ROWS[:6]]
    rows[0] = {"input_ids": [1, 2], "labels": [1, 2]}
    seen = []
    tune(
        copy.deepcopy(model), recipe, rows, lr=1e-2, max_updates=1, batch_size=6,
        log=lambda values: seen.append(values["loss"]),
    )  # fmt: skip
    pad = {"input_ids": [*rows[0]["input_ids"], 0, 0], "labels": [*rows[0]["labels"], -100, -100]}
    batch = {n: torch.tensor([pad[n], *(r[n] for r in rows[1:])]) for n in pad}
    mask = torch.ones_like(batch["labels"]).masked_fill(batch["labels"] == -100, 0)
    with torch.no_grad():
        whole = model(**batch, attention_mask=mask)
    assert seen == [pytest.approx(float(whole.loss), rel=1e-6)]
    assert float(whole.aux_loss) > 0.1

    def loss(coefficient, accumulate):
        values = []
        tune(
            make_model(coefficient), recipe, ROWS, lr=0.0, max_updates=1,
            batch_size=8 // accumulate, accumulate=accumulate,
            log=lambda row: values.append(row["loss"]),
        )  # fmt: skip
        return values[0]

    one, four = (loss(0.5, n) - loss(0.0, n) for n in (1, 4))
    assert four == pytest.approx(one, rel=0.3)  # and not four times as much


class Unknown(torch.nn.Module):
    config = transformers.BertConfig()

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return SimpleNamespace(logits=self.layer(x), aux_loss=torch.ones(()))


def test_an_unknown_strength_is_refused():
    data = torch.utils.data.TensorDataset(torch.randn(4, 2), torch.arange(4) % 2)
    with pytest.raises(ValueError, match="output_router_logits=False"):
        tune(Unknown(), Recipe(), data, lr=0.1, task="classification")
