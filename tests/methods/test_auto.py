"""What the preset holdfast becomes for each kind of model."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from holdfast import (
    LPFT,
    Features,
    Full,
    Keep,
    LinearProbe,
    LoRA,
    NoRecall,
    Recipe,
    SelfReplay,
    WiseFT,
    finetune_loop,
)
from holdfast.methods import auto
from holdfast.methods.auto import default_lr
from holdfast.run import resolved
from holdfast.stages import TrainingSize
from small import make_llama

CONFIG = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
CONFIG |= {"num_attention_heads": 2, "pad_token_id": 0, "max_position_embeddings": 20}


class Seeing(nn.Module):
    def __init__(self, norm):
        super().__init__()
        pool = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), *pool)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 2))

    def forward(self, x):
        return self.classifier(self.body(x))


def make_images(norm=nn.BatchNorm2d):
    return Seeing(norm)


def make_hf(name, **more):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    kind = name.partition("For")[0]
    config = getattr(transformers, f"{kind}Config")(**(CONFIG | more))
    return getattr(transformers, name)(config)


def of(model, names="holdfast", new=(), task=None, size=TrainingSize()):  # noqa: B008
    return resolved(Recipe.preset(names), model, default_lr=0.5, new=new, task=task, size=size)


def test_a_language_model():
    recipe, lr = of(make_hf("LlamaForCausalLM"))
    assert recipe.recall == SelfReplay()
    assert lr == 1e-3


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("BertForSequenceClassification", "encoder"),
        ("LlamaForSequenceClassification", "language"),
        ("GPT2ForSequenceClassification", "language"),
    ],
)
def test_a_classifier_of_texts(name, kind, monkeypatch):
    monkeypatch.setattr(auto, "_size", lambda model: 1_000_000_000)
    recipe, lr = of(make_hf(name), new=("classifier",))
    assert recipe == Recipe(recall=Features(0.1))
    assert lr == default_lr(1_000_000_000, kind=kind)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.Identity])
def test_an_image_model_with_a_new_head(norm, caplog):
    caplog.set_level("INFO")
    recipe, lr = of(make_images(norm), new=("classifier",), task="classification")
    held = norm is nn.BatchNorm2d
    assert recipe.trainable == LPFT("classifier.1", hold_statistics=held)
    assert recipe.recall == Features(0.3)
    assert recipe.merging == WiseFT(0.7)
    assert lr == 1e-3
    for method in (recipe.trainable, recipe.recall, recipe.merging):
        assert str(method) in caplog.text


def test_an_image_model_with_its_own_head():
    recipe, _ = of(make_images(), task="classification")
    assert recipe.trainable == Full(hold_statistics=True)
    assert recipe.recall == Features(0.3)


def test_other_stages_stay_as_the_user_chose_them():
    preset = "holdfast+lora+wise-ft"
    recipe, _ = of(make_images(), preset, new=("classifier",), task="classification")
    assert recipe.trainable == LoRA()
    assert recipe.merging == WiseFT()


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_a_head_alone_needs_no_recall(kind, caplog):
    caplog.set_level("INFO")
    model = make_images() if kind == "images" else make_hf("BertForSequenceClassification")
    new, task = ("classifier",), "classification"
    recipe, lr = of(model, "holdfast+linear-probe", new, task)
    assert recipe == Recipe(trainable=LinearProbe())
    assert lr == 1e-3
    assert "resolved to NoRecall(): only the head is trained" in caplog.text
    assert "learning rate 0.001" in caplog.text
    assert of(make_hf("LlamaForCausalLM"), "holdfast+linear-probe")[0].recall == SelfReplay()


def test_a_head_of_several_layers_is_not_fitted_first():
    model = make_images()
    model.classifier = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    recipe, _ = of(model, new=("classifier",), task="classification")
    assert recipe.trainable == Full(hold_statistics=True)


@pytest.mark.parametrize(
    ("model", "task", "reason"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "classification",
            "Sequential: it is no model of texts, and no image model",
        ),
        (make_images, lambda model, batch: None, "Seeing: a loss function as task= hides"),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten()), "classification",
            "Sequential: its head is not known (name a new one in new=)",
        ),
        (
            lambda: make_hf("T5ForConditionalGeneration", d_model=16, d_kv=8), None,
            "T5ForConditionalGeneration: it is an encoder-decoder model",
        ),
        (
            lambda: make_hf("ASTForAudioClassification", num_mel_bins=16, max_length=16), None,
            "ASTForAudioClassification: it is no model of texts, and no image model",
        ),
        (
            lambda: make_hf("TimesformerForVideoClassification", image_size=16, num_frames=2), None,
            "TimesformerForVideoClassification: it is no model of texts, and no image model",
        ),
        (
            lambda: make_hf("BertForMaskedLM"), None,
            "BertForMaskedLM: its task is not known",
        ),
        (
            lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), "causal_lm",
            "Sequential: it is no language model of transformers",
        ),
    ],
    ids=[
        "vectors", "a loss function", "no head", "sequence to sequence", "audio", "video", "masked",
        "of one's own",
    ],
)  # fmt: skip
def test_models_without_a_recall(model, task, reason, caplog):
    recipe, lr = of(model(), task=task)
    (said,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert f"holdfast has no recall for {reason}" in said.getMessage()
    assert recipe.recall == NoRecall()
    assert recipe.trainable == Full()
    assert recipe.merging == Keep()
    assert lr == 0.5  # the host's


def test_no_strength_is_plain_fine_tuning():
    recipe, _ = of(make_images(), new=("classifier",), task="classification")
    assert recipe != Recipe()
    off = Recipe.from_dict({"recall": {"name": "auto", "strength": 0.0}})
    recipe, _ = resolved(off, make_images(), 0.1, new=("classifier",), task="classification")
    assert recipe == Recipe(recall=Features(0.0))


def test_an_image_model_of_transformers():
    model = make_hf("ViTForImageClassification", image_size=8, patch_size=4)
    recipe, _ = of(model, new=("classifier",))
    assert recipe.recall == Features(0.3)
    assert recipe.trainable == LPFT("classifier")


def test_parameters_that_deepspeed_has_emptied():
    emptied = SimpleNamespace(ds_numel=135_000_000, numel=lambda: 0)
    assert auto._size(SimpleNamespace(parameters=lambda: [emptied])) == 135_000_000
    assert default_lr(0) == 1e-3


def test_an_output_layer_of_its_own_does_not_count():
    shared, own = make_llama(vocab=30, tie_word_embeddings=True), make_llama(vocab=30)
    assert len([*own.parameters()]) == len([*shared.parameters()]) + 1
    assert auto._size(own) == auto._size(shared) == sum(p.numel() for p in shared.parameters())


def test_a_model_that_does_not_tell_its_embedding_counts_as_a_whole():
    model = make_llama(vocab=30)
    wrapper = nn.Sequential(model)
    wrapper.get_output_embeddings = model.get_output_embeddings
    assert auto._size(wrapper) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["LLaVA", "Qwen2-VL", "Gemma 3, images"])
def test_the_decoder_of_a_multimodal_model_counts(family, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    from families import save_family

    model = transformers.AutoModelForImageTextToText.from_pretrained(save_family(family, tmp_path))
    decoder = model.model.language_model
    assert auto._size(model) == sum(p.numel() for p in decoder.parameters())


def test_parameters_in_four_bits(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    model = make_llama(vocab=30)
    model.save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    packed = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu"
    )
    assert auto._size(packed) == auto._size(model)


def test_parameters_that_are_packed_as_in_gptq():
    model, packed = make_llama(vocab=30), make_llama(vocab=30)
    packed.config.quantization_config, packed.is_quantized = {"quant_method": "gptq"}, True
    for layer in packed.model.layers:
        weight = layer.mlp.up_proj.weight  # eight to a number, in a buffer
        del layer.mlp.up_proj.weight
        layer.mlp.up_proj.register_buffer("qweight", torch.zeros(weight.numel() // 8).int())
    assert auto._size(packed) == auto._size(model)
    assert packed.config.quantization_config  # unchanged


def test_the_name_of_a_preset_is_its_own():
    for name in ("holdfast", "holdfast+lora", "standard", "flow+recadam"):
        assert Recipe.preset(name).name == name


def test_learning_rates():
    assert default_lr(135_000_000) == 5e-4
    assert default_lr(22_700_000, kind="encoder") == 1e-4
    assert default_lr(22_700_000, kind="encoder", adapters=True) == 6e-4
    assert default_lr(2_350_000, kind="image") == 5e-4
    assert default_lr(86_000_000, kind="image") == 2.8e-5


def test_learning_rates_of_larger_language_models():
    lower, larger = auto._LARGER
    assert default_lr(int(larger)) == lower
    between = default_lr(int(math.sqrt(135e6 * larger)))
    assert between == pytest.approx(math.sqrt(5e-4 * lower), rel=0.05)
    assert default_lr(int(4 * larger)) == pytest.approx(lower / 2, rel=0.05)
    # Adapters are not affected.
    assert default_lr(int(larger), adapters=True) == pytest.approx(
        6 * 5e-4 * (135e6 / larger) ** 0.8, rel=0.05
    )


def test_learning_rates_by_the_size_of_the_training():
    def rate(samples, epochs, **more):
        return default_lr(135_000_000, size=TrainingSize(samples, epochs), **more)

    assert rate(3000, 1.0) == rate(10**6, 0.5) == rate(None, 1.0) == 5e-4
    assert rate(3000, 2.0) == rate(750, 1.0) == 2.5e-4
    assert rate(750, 2.0, adapters=True) == pytest.approx(6 * 1.25e-4, rel=0.05)
    assert rate(10**6, 1e-3) == rate(1000, 1.0)  # only those that are visited count
    # No lower than what was measured.
    assert rate(10, 100.0) == rate(600, 6.0) == 5e-5
    assert rate(600, 6.0, kind="encoder") == rate(3000, 1.0, kind="encoder")


@pytest.mark.parametrize("visits", ["epochs", "updates"])
def test_all_hosts_choose_the_same_learning_rate(visits, tmp_path):
    """Of 17 samples, in updates of 16 and of 1, for two epochs."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from transformers import TrainingArguments

    from holdfast import LoopSettings, Run, pad_collate
    from holdfast.hosts.hf import HoldfastTrainer
    from holdfast.hosts.job import Training

    rows = [{"input_ids": [2, 5, 7, n], "labels": [2, 5, 7, n]} for n in range(17)]
    wanted = 2.2e-4  # 1e-3 · √(600 / 3000) / 2
    logged = []
    settings = LoopSettings(max_updates=4 if visits == "updates" else None, schedule=lambda *_: 1.0)
    epochs = 1.0 if visits == "updates" else 2.0
    finetune_loop(
        make_llama(vocab=30), "holdfast", rows, batch_size=16, epochs=epochs, settings=settings,
        log=logged.append, progress=False,
    )  # fmt: skip
    amount = {"max_steps": 4} if visits == "updates" else {"num_train_epochs": 2.0}
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=16, use_cpu=True, report_to=[], **amount
    )
    trainer = HoldfastTrainer(
        model=make_llama(vocab=30), recipe="holdfast", args=args, train_dataset=rows,
        data_collator=pad_collate,
    )  # fmt: skip
    amount = {"max_updates": 4} if visits == "updates" else {"epochs": 2.0}
    run = Run("holdfast", make_llama(vocab=30), rows, visits=34, collate=pad_collate)
    assert {row["lr"] for row in logged} == {wanted}
    assert trainer.args.learning_rate == run.lr == wanted
    assert Training(batch_size=16, **amount).size_on(rows) == (17, 2.0)


def test_samples_are_counted_in_every_kind_of_data():
    from holdfast import Run, pad_collate

    rows = [{"input_ids": [2, 5, 7, n % 30]} for n in range(700)]
    loader = DataLoader(rows, batch_size=32, collate_fn=pad_collate)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(rows)

    def lr(data, visits=None, **options):
        return Run("holdfast", make_llama(vocab=30), data, visits=visits, **options).lr

    assert lr(rows, collate=pad_collate) == lr(loader) == 4.8e-4  # 1e-3 · √(700 / 3000)
    assert lr(loader, visits=1400) == 2.4e-4
    assert lr(loader, visits=350) == 4.5e-4  # as if they were 350
    stream = DataLoader(Stream(), batch_size=32, collate_fn=pad_collate)
    assert lr(stream) == 1e-3  # nobody knows
    assert lr(stream, visits=1500) == 7.1e-4
    assert lr([pad_collate(rows[:2])] * 9) == 1e-3  # batches
    batches = iter([pad_collate(rows[:2])] * 9)
    assert lr(batches) == 1e-3
    assert len(list(batches)) == 9  # none of them was read
    lightning = pytest.importorskip("holdfast.hosts.lightning", reason="no lightning")
    callback = lightning.RecipeCallback("holdfast", make_llama(vocab=30), loader, visits=1400)
    assert callback.run.lr == 2.4e-4


def test_other_recipes_do_not_read_the_data_for_a_learning_rate():
    from holdfast import Run

    class Untouched(Dataset):
        def __len__(self):
            raise AssertionError

        def __getitem__(self, index):
            raise AssertionError

    assert Run("recadam", nn.Linear(4, 2), Untouched(), lr=0.1, task="classification").lr == 0.1


def test_arguments_of_the_trainer_serve_again(tmp_path):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from transformers import TrainingArguments

    from holdfast import pad_collate
    from holdfast.hosts.hf import HoldfastTrainer

    args = TrainingArguments(str(tmp_path), num_train_epochs=1, use_cpu=True, report_to=[])
    rows = [{"input_ids": [2, 5, 7, n % 30], "labels": [2, 5, 7, n % 30]} for n in range(900)]

    def trainer(recipe, data):
        return HoldfastTrainer(
            model=make_llama(vocab=30), recipe=recipe, args=args, train_dataset=data,
            data_collator=pad_collate,
        )  # fmt: skip

    def rate(one):
        return one.create_optimizer().param_groups[0]["lr"]

    made = [trainer("holdfast", rows[:600]), trainer("holdfast", rows), trainer("standard", rows)]
    assert [*map(rate, made)] == [4.5e-4, 5.5e-4, 5e-5]
    args.learning_rate = 3e-4
    assert rate(trainer("holdfast", rows)) == 3e-4


def test_an_encoder_and_an_image_model_need_nothing_else():
    torch.manual_seed(0)
    encoder = make_hf("BertForSequenceClassification")
    rows = torch.randint(3, 40, (24, 9)).tolist()
    texts = [{"input_ids": ids, "label": i % 2} for i, ids in enumerate(rows)]
    images = TensorDataset(torch.randn(24, 3, 8, 8), torch.arange(24) % 2)
    for model, data, options in (
        (encoder, texts, {"new": "classifier"}),
        (make_images(), images, {"new": "classifier", "task": "classification"}),
    ):
        before = [p.detach().clone() for p in model.parameters()]
        tuned = finetune_loop(model, "holdfast", data, progress=False, **options)
        after = list(tuned.parameters())
        assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))
        assert all(p.isfinite().all() for p in after)
