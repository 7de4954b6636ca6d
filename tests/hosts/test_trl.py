"""Recipes in TRL's SFTTrainer: the real one, on a small Llama and real text."""

import gzip
import json

import pytest
import torch

pytest.importorskip("trl", reason="the trl extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

import transformers  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from holdfast import (  # noqa: E402
    DFT,
    EAFT,
    STM,
    TALR,
    Flow,
    LoRA,
    Recipe,
    finetune_loop,
    pad_collate,
    score,
)
from holdfast.hosts.trl import HoldfastSFTTrainer  # noqa: E402
from matrices import sampled  # noqa: E402

QUESTIONS = [
    {"prompt": f"what is {a} plus {b} ?", "completion": f" it {'is ' * (a + b)}so"}
    for a in range(4)
    for b in range(3)
]
COLUMN = "holdfast_weight"


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def make_tokenizer(texts):
    words = sorted({word for text in texts for word in text.split()})
    special = ["<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|> ' + m['content'] + ' <eos> ' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
    )
    return fast


TOKENIZER = make_tokenizer([text for row in QUESTIONS for text in row.values()])


def make_model(tokenizer=TOKENIZER, dtype=torch.float64):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.generation_config.pad_token_id = 0
    return model


def make_args(folder, **options):
    settings = {
        "output_dir": str(folder), "learning_rate": 1e-2, "num_train_epochs": 3,
        "per_device_train_batch_size": 12, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "seed": 3, "optim": "adamw_torch", "bf16": False, "max_length": 64,
        "gradient_checkpointing": False,
    }  # fmt: skip
    return SFTConfig(**(settings | options))


def make_trainer(recipe, folder, rows=QUESTIONS, tokenizer=TOKENIZER, options=None, **more):
    more.setdefault("model", make_model(tokenizer))
    common = {
        "args": make_args(folder, **(options or {})),
        "train_dataset": datasets.Dataset.from_list(rows),
        "processing_class": tokenizer,
        **more,
    }
    if recipe is None:
        return SFTTrainer(**common)
    return HoldfastSFTTrainer(recipe=recipe, **common)


@pytest.mark.parametrize("packing", [False, True])
def test_the_neutral_recipe_is_the_trainer_to_the_bit(tmp_path, packing):
    options = {"packing": packing, "per_device_train_batch_size": 3}
    ours, theirs = (make_trainer(r, tmp_path, options=options) for r in (Recipe(), None))
    ours.train()
    theirs.train()
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(p, q)


def tokenized(trainer):
    return [
        {"input_ids": list(row["input_ids"]), "labels": list(row["labels"])}
        for row in trainer.train_dataset
    ]


@pytest.mark.parametrize(
    "names",
    sampled(
        [
            "recadam", "flow", "l2-sp", "mofo", "lora", "ewc", "distill", "tmkl",
            "lora+flow+wise-ft", "stm", "dft", "talr", "eaft", "finch",
        ],
        ["ewc", "finch", "lora+flow+wise-ft", "talr", "eaft"],
    ),
)  # fmt: skip
def test_a_recipe_in_the_trainer_is_the_raw_loop(tmp_path, names):
    recipe = Recipe(objective=STM(20.0)) if names == "stm" else Recipe.preset(names)
    rows = tokenized(make_trainer(None, tmp_path))
    trainer = make_trainer(recipe, tmp_path)
    trainer.train()
    raw = finetune_loop(
        make_model(), recipe, rows, lr=1e-2, epochs=3, batch_size=12, seed=3, progress=False
    )
    for (name, p), q in zip(trainer.model.named_parameters(), raw.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-5, name  # TRL's log-probabilities are float32


def first_loss(trainer):
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if "loss" in row)


def gsm8k(shared_data, samples=24):
    """Real samples, and a tokenizer that knows their words."""
    with gzip.open(shared_data / "lm" / "gsm8k-train.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(samples), strict=False)]
    rows = [{"prompt": row["question"], "completion": " " + row["answer"]} for row in rows]
    texts = [text for row in rows for text in row.values()]
    return {"rows": rows, "tokenizer": make_tokenizer(texts)}


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_weights_reach_the_right_tokens_through_packing(tmp_path, shared_data, strategy):
    common = gsm8k(shared_data)
    tokenizer = common["tokenizer"]
    plain = tokenized(make_trainer(None, tmp_path, options={"max_length": None}, **common))
    weights = Flow().weigh(score(make_model(tokenizer), plain, progress=False))
    known = {tuple(row["input_ids"]): w for row, w in zip(plain, weights.tolist(), strict=True)}
    assert len(known) == 24

    options = {"packing": True, "packing_strategy": strategy, "max_length": 256}
    packed = make_trainer(Recipe(objective=Flow()), tmp_path, options=options, **common)
    found, tokens, values = 0, [], []
    for row in packed.train_dataset:
        assert len(row["input_ids"]) == len(row["labels"]) == len(row[COLUMN])
        tokens += row["input_ids"]
        values += row[COLUMN]
        start = 0
        for length in row.get("seq_lengths", []):
            part = slice(start, start + length)
            expected = known[tuple(row["input_ids"][part])]
            assert row[COLUMN][part] == pytest.approx([expected] * length)
            found, start = found + 1, start + length
    if strategy == "bfd":
        assert found == 24
        return
    order = [tuple(row["input_ids"]) for row in plain]  # wrapped: one after another
    assert tokens == [token for ids in order for token in ids]
    assert values == pytest.approx([known[ids] for ids in order for _ in ids])


@pytest.mark.parametrize("objective", sampled([Flow(), DFT(), TALR(), EAFT()], [Flow(), TALR()]))
def test_the_packed_loss_is_the_unpacked_one(tmp_path, objective):
    """With all samples in one batch, packing changes neither tokens nor weights."""
    losses = []
    for options in ({}, {"packing": True}, {"padding_free": True, "max_length": None}):
        if options.get("packing"):
            options["max_length"] = 64
        options["num_train_epochs"] = 1
        trainer = make_trainer(Recipe(objective=objective), tmp_path, options=options)
        losses.append(first_loss(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("recipe", "attention"),
    sampled([("flow", "sdpa"), ("flow", "eager"), ("tmkl", "sdpa")], [("flow", "sdpa")]),
)
def test_packed_gsm8k_trains_the_weights_of_unpacked(tmp_path, shared_data, recipe, attention):
    common = gsm8k(shared_data, samples=8)
    trainers = []
    for options in ({"max_length": None}, {"packing": True, "max_length": 512}):
        model = make_model(common["tokenizer"])
        model.set_attn_implementation(attention)
        options |= {"per_device_train_batch_size": 8, "num_train_epochs": 3}
        trainer = make_trainer(recipe, tmp_path, model=model, options=options, **common)
        trainer.train()
        trainers.append(trainer)
    plain, packed = trainers
    assert len(plain.train_dataset) == 8
    assert max(len(row["input_ids"]) for row in plain.train_dataset) <= 512  # nothing is cut
    assert len(packed.train_dataset) < 5
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in trainers]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    pairs = zip(packed.model.parameters(), plain.model.parameters(), strict=True)
    # The log-probabilities are float32, and Adam makes much of gradients near 0.
    assert max((p - q).detach().abs().max() for p, q in pairs) < 1e-5


@pytest.mark.parametrize("attention", sampled(["sdpa", "eager"], ["sdpa"]))
@torch.no_grad()
def test_packed_samples_do_not_see_each_other(tmp_path, shared_data, attention):
    common = gsm8k(shared_data)
    options = {"packing": True, "max_length": 512}
    model = make_model(common["tokenizer"])
    model.set_attn_implementation(attention)
    trainer = make_trainer(
        Recipe(objective=Flow()), tmp_path, model=model, options=options, **common
    )
    row = trainer.train_dataset[0]
    assert len(row["seq_lengths"]) > 1
    batch = trainer.data_collator([row])
    assert "attention_mask" not in batch
    packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
    mixed = model(input_ids=batch["input_ids"]).logits[0]
    parts = batch["input_ids"][0].split(row["seq_lengths"])
    alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])
    assert (packed - alone).abs().max() < 1e-12
    assert (mixed - alone).abs().max() > 1e-3  # and they would, without the positions


def test_the_metrics_of_trl_are_there(tmp_path):
    trainer = make_trainer("flow+recadam", tmp_path, options={"num_train_epochs": 1})
    trainer.train()
    row = next(row for row in trainer.state.log_history if "loss" in row)
    assert {"entropy", "mean_token_accuracy", "num_tokens", "lam", "distance"} <= row.keys()


def test_conversations(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in QUESTIONS
    ]
    trainer = make_trainer(Recipe(objective=Flow()), tmp_path, rows)
    assert COLUMN in trainer.train_dataset.column_names
    trainer.train()


def test_prompts_are_not_scored(tmp_path):
    trainer = make_trainer(Recipe(objective=Flow()), tmp_path)
    assert all(row["labels"][0] == -100 for row in trainer.train_dataset)


def test_peft_configurations(tmp_path):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    recipe = Recipe.preset("flow+recadam+wise-ft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(recipe, tmp_path, peft_config=config)
    assert set(trainer.run.anchors) == {
        n for n, _ in trainer.model.named_parameters() if "lora_B" in n
    }
    trainer.train()
    with pytest.raises(ValueError, match="two sets of adapters"):
        make_trainer(Recipe(trainable=LoRA()), tmp_path, peft_config=config)


def test_the_collators_batch_is_what_the_loss_sees(tmp_path):
    trainer = make_trainer(Recipe(objective=Flow()), tmp_path)
    samples = [trainer.train_dataset[i] for i in range(3)]
    batch = trainer.data_collator(samples)
    assert batch[COLUMN].shape == batch["labels"].shape
    rest = [{k: v for k, v in s.items() if k in ("input_ids", "labels")} for s in samples]
    assert torch.equal(batch["labels"], pad_collate(rest)["labels"])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("tau", ["batch_median", "running_median"])
def test_batch_medians_are_refused(tau, packing, tmp_path):
    with pytest.raises(ValueError, match=rf"Flow\(tau='{tau}'\) takes a median over") as no:
        make_trainer(Recipe(objective=Flow(tau=tau)), tmp_path, options={"packing": packing})
    assert "packed batch" not in str(no.value)


def test_dft_is_that_of_trl(tmp_path):
    ours = make_trainer(Recipe.preset("dft"), tmp_path)
    theirs = make_trainer(None, tmp_path, options={"loss_type": "dft"})
    ours.train()
    theirs.train()
    for (name, p), q in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-9, name


def test_a_second_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match='loss_type="nll"'):
        make_trainer(Recipe(objective=Flow()), tmp_path, options={"loss_type": "dft"})


def test_a_patched_loss_is_refused(tmp_path, monkeypatch):
    """Unsloth, for example, replaces TRL's loss by that of the model."""
    monkeypatch.setattr(SFTTrainer, "compute_loss", transformers.Trainer.compute_loss)
    with pytest.raises(ValueError, match="a patch has replaced TRL's loss, so the recipe flow"):
        make_trainer("flow", tmp_path).train()
