"""The forecast of a training against real tensors: states, anchors, copies, pools, activations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers

from heads import LEAN, MODELS, Held, with_lora
from holdfast import SFA, AdamWUpdate, Distill, Recipe, Run, SelfReplay, pad_collate
from holdfast._torch import head_loss
from holdfast._torch.head_tap import divisible_head
from holdfast.cli import main
from holdfast.hosts import _skeleton
from holdfast.hosts import forecast as forecasts
from holdfast.hosts.forecast import GPUS, Forecast, Machines, forecast, measured, needs_of
from holdfast.hosts.job import Training
from holdfast.io.models import Loader
from holdfast.methods._base_model import Frozen
from holdfast.registry import methods
from holdfast.report.words import seconds
from holdfast.stages import Planned
from small import make_llama, save

LENGTH, ROWS, VOCABULARY = 6, 12, 100
IDS = [[5 + (i + j) % 9 for j in range(LENGTH)] for i in range(ROWS)]
ALL = [{"input_ids": ids, "labels": list(ids)} for ids in IDS]


def base():
    return make_llama(vocab=VOCABULARY)


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(base(), tmp_path_factory.mktemp("model") / "llama"))


def trained(recipe):
    """A run after one update of four samples."""
    run = Run(
        recipe, base(), ALL, lr=1e-3, collate=pad_collate, visits=ROWS, update_size=4,
        progress=False,
    )  # fmt: skip
    optimizer = run.make_optimizer(total_updates=3)
    run.advance(1)
    run.recall.plan(run.model, 1, 4, 1)
    batch = pad_collate([run.criterion.data[i] for i in range(4)])
    run.loss(batch, 4 * (LENGTH - 1), 1).backward()
    optimizer.step()
    return run


def planned_of(run):
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    return Planned(
        value=4, anchor=4, data=ROWS, samples=4, updates=3, length=LENGTH, targets=LENGTH - 1,
        outputs=VOCABULARY, keeps_base=run.recipe.trainable.keeps_base,
    ), sum(p.numel() for p in parameters)  # fmt: skip


UPDATES = [e.name for e in methods("update")] + [e.name for e in methods("penalties")]


@pytest.mark.parametrize("name", UPDATES)
def test_the_state_of_a_step_is_as_large_as_declared(name):
    run = trained(Recipe.preset(name))
    planned, weights = planned_of(run)
    costs = [method.cost(planned) for _, method in run.recipe]
    declared = sum(size for cost in costs for size in cost.state.values()) * weights
    tensors = [t for state in run.optimizer.state.values() for t in state.values()]
    real = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.dim())
    real += sum(t.nbytes for found in run.importance.values() if found for t in found.values())
    assert real == declared
    anchors = sum(t.nbytes for t in run.anchors.values()) if run.anchors else 0
    assert anchors == (planned.anchor * weights if run.recipe.needs_reference else 0)


@pytest.mark.parametrize("settings", [{"eight_bit": True}, {"importance": "fisher"}, {"pull": 0.0}])
def test_settings_change_the_state(settings):
    run = trained(Recipe.from_dict({"update": {"name": "recadam", **settings}}))
    planned, weights = planned_of(run)
    declared = sum(run.recipe.update.cost(planned).state.values()) * weights
    tensors = [t for state in run.optimizer.state.values() for t in state.values() if t.dim()]
    real = sum(t.nbytes for t in tensors)
    real += sum(t.nbytes for found in run.importance.values() if found for t in found.values())
    # Scales of blocks that are not full.
    assert declared <= real <= declared + 8 * len(tensors)


@pytest.mark.parametrize("recall", ["distill", "tmkl", "self-replay", "features"])
@pytest.mark.parametrize("adapters", ["", "+lora"])
@pytest.mark.parametrize("cache", [True, False])
def test_kept_predictions_and_copies_are_as_declared(recall, adapters, cache):
    if adapters:
        pytest.importorskip("peft", reason="the peft extra is not installed")
    off = {"self-replay": {"recall.top": None}, "features": {}}
    settings = {} if cache else off.get(recall, {"recall.cache": False})
    run = trained(Recipe.preset(recall + adapters).with_settings(settings))
    cost = run.recipe.recall.cost(planned_of(run)[0])
    term = run.recall
    copies = [v for v in vars(term).values() if isinstance(v, Frozen)]
    assert len(copies) == cost.copies
    kept = getattr(term.base, "tokens", ()) if recall in ("distill", "tmkl") else ()
    if recall == "self-replay":
        pool = term.pool
        kept = [pool.tokens, pool.lengths, pool.starts]
        kept += [pool.ids, pool.log_probs, pool.rest] if cache else []
    real = sum(t.nbytes for t in kept)
    if recall == "self-replay":  # most texts end early, and one is as long as they may be
        assert 0.3 * cost.on_cpu <= real <= cost.on_cpu
    else:
        assert real == cost.on_cpu


@pytest.mark.parametrize("updates", [100, 10**6])
def test_the_updates_of_a_long_run_are_not_counted_one_by_one(updates):
    asked = []

    class Asked(SFA):
        def acts_at(self, update, total_updates):
            asked.append(update)
            return super().acts_at(update, total_updates)

    planned = Planned(4, 4, ROWS, 4, updates, LENGTH, LENGTH - 1, VOCABULARY)
    moved = Asked(every=0.25).cost(planned).moved
    assert len(asked) == min(updates, 10_000)
    assert moved == pytest.approx(4 / len(asked) * (2 * 4 + 4))


def test_the_texts_of_an_update_are_as_declared():
    run = trained(Recipe(recall=SelfReplay(share=1.0, fewest=1, length=9)))
    cost = run.recipe.recall.cost(planned_of(run)[0])
    assert cost.trained == len(run.recall.texts_of(1, 4)) * 9
    assert cost.before_drawn == len(run.recall.pool) * 9


def test_a_recall_that_is_off_costs_nothing():
    planned = Planned(4, 4, ROWS, 4, 3, LENGTH, LENGTH - 1, VOCABULARY)
    plain = {stage: method.cost(planned) for stage, method in Recipe()}
    for entry in methods():
        if entry.stage == "recall" and entry.cls.neutral:
            found = entry.cls(**entry.cls.neutral).cost(planned)
            assert found == plain[entry.stage], entry.name


def test_the_counted_model_is_the_real_one(folder):
    for name in ("standard", "lora", "hft", "recadam"):
        if name == "lora":
            pytest.importorskip("peft", reason="the peft extra is not installed")
        run = Run(name, base(), lr=1e-3, new=(), progress=False)
        run.recipe.trainable.advance(run.model, 1, 16)
        found = prepared(folder, name).parts
        own = list(run.model.parameters())
        assert found.count == sum(p.numel() for p in own)
        assert found.trained == sum(p.numel() for p in own if p.requires_grad)
        assert found.gradients == sum(p.nbytes for p in own if p.requires_grad)
        assert found.anchors == sum(t.numel() for t in (run.anchors or {}).values())
        assert (found.blocks, found.width) == (2, 16)


def prepared(folder, name, length=8, is_half=False):
    return _skeleton.prepare(
        lambda: Loader("cpu").skeleton(folder),
        Recipe.preset(name) if isinstance(name, str) else name,
        length=length, dtype=torch.float32, is_half=is_half,
    )  # fmt: skip


def test_the_counted_passes_are_the_real_ones(folder):
    found, model = prepared(folder, "standard").passes, base().train()
    sizes = []
    for count in (1, 2):
        ids = torch.ones(count, 8, dtype=torch.int64)
        with _skeleton._saved(model) as kept:
            outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        sizes.append(sum(kept.values()))
    # A real call sees that nothing is padded, and needs no mask.
    assert sizes[1] - sizes[0] == pytest.approx(found.kept, rel=0.05)
    assert found.outputs == (1, *outputs.shape[1:])
    linear = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n)
    assert found.forward == pytest.approx(2 * 8 * linear, rel=0.1)  # and attention
    assert found.training == pytest.approx(3 * found.forward, rel=0.1)


REPLAY, DISTILL = Recipe(recall=SelfReplay(length=9)), Recipe(recall=Distill(cache=False))


@pytest.mark.parametrize(
    ("recipe", "is_half", "chunks"),
    [
        (Recipe(), True, 8),
        (Recipe(), True, 1),
        (REPLAY, True, 8),
        (DISTILL, False, 8),
        *(
            pytest.param(recipe, is_half, chunks, marks=pytest.mark.soak)
            for recipe, is_half, chunks in [
                (Recipe(), False, 8), (Recipe(), False, 1), (REPLAY, True, 1), (REPLAY, False, 8),
                (REPLAY, False, 1), (DISTILL, False, 1), (DISTILL, True, 8), (DISTILL, True, 1),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_the_loss_of_a_language_model_holds_a_chunk_of_logits(
    recipe, is_half, chunks, tmp_path, monkeypatch
):
    """The most that an update of a real model holds at a time, beside weights and states."""
    vocabulary, rows, length = 20_000, 4, 64
    for module in (head_loss, forecasts):
        monkeypatch.setattr(module, "LARGE_CHUNK", rows * length * vocabulary // chunks)
    model = make_llama(vocab=vocabulary)
    ids = torch.randint(4, vocabulary, (rows, length)).tolist()
    run = Run(
        recipe, model.train(), [{"input_ids": row, "labels": row} for row in ids], lr=1e-3,
        visits=rows, update_size=rows, progress=False,
    )  # fmt: skip
    batch = pad_collate([run.criterion.data[i] for i in range(rows)])
    for is_known in (False, True):  # the first call learns about the model
        run.recall.plan(run.model, 1, rows, 1)
        with Held() as held, torch.autocast("cpu", torch.bfloat16, is_half):
            loss = run.loss(batch, rows * length, 1)
            if is_known:
                loss.backward()
    found = prepared(str(save(model, tmp_path)), recipe, length, is_half)
    training = Training(
        batch_size=rows, max_length=length, precision="bfloat16" if is_half else "float32"
    )
    memory = needs_of(found, training, Machines()).memory
    beside = ("weights", "optimizer state", "frozen copy")
    estimate = sum(size for name, size in memory.items() if name not in beside)
    assert 0.8 * held.most < estimate < 1.3 * held.most


@pytest.mark.parametrize("name", MODELS)
def test_what_needs_all_logits_at_once(name):
    model = MODELS[name]().train()
    ids = torch.ones(1, 8, dtype=torch.int64)
    found = divisible_head(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert (found is not None) == (name in LEAN)


def test_other_models_hold_all_outputs(tmp_path):
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=50, num_labels=3,
    )  # fmt: skip
    folder = save_config(tmp_path / "tokens", "BertForTokenClassification", config)
    training = Training(batch_size=5, max_length=8)
    whole = needs_of(prepared(folder, "standard"), training, Machines()).memory
    assert whole["outputs and loss"] == 5 * 8 * 3 * (2 + 12)
    model = with_lora(vocab=VOCABULARY, lora_dropout=0.5).train()  # it runs once for all states
    ids = torch.ones(1, 8, dtype=torch.int64)
    assert divisible_head(model, {"input_ids": ids}) is None


def test_a_capped_logit_is_not_kept(tmp_path):
    sizes = {}
    for cap in (None, 4.0):
        model = LEAN["soft-capped"](vocab=5000, final_logit_softcapping=cap)
        sizes[cap] = prepared(str(save(model, tmp_path / str(cap))), "standard").passes.kept
    assert sizes[4.0] == sizes[None]


def test_autocast_keeps_copies_of_the_weights(folder):
    passes = prepared(folder, "standard", is_half=True).passes
    matrices = 2 * sum(p.numel() for n, p in base().named_parameters() if p.dim() > 1)
    assert passes.kept_once == pytest.approx(matrices, rel=0.3)
    assert passes.kept < prepared(folder, "standard").passes.kept


def save_config(folder, name, config):
    config.architectures = [name]
    config.save_pretrained(folder)
    return str(folder)


def test_experts_count_as_often_as_they_run(tmp_path):
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    found = prepared(save_config(tmp_path, "MixtralForCausalLM", config), "standard", 16, True)
    experts = 2 * 8 * 3 * 32 * 64
    others = found.parts.count - experts - 100 * 32  # without the embedding
    assert found.passes.forward == pytest.approx(2 * 16 * (others + experts / 4), rel=0.15)


def test_a_model_that_skips_layers_by_chance(tmp_path):
    config = transformers.OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
        max_position_embeddings=64, word_embed_proj_dim=16, layerdrop=0.5,
    )  # fmt: skip

    def operations(layers):
        config.num_hidden_layers = layers
        folder = save_config(tmp_path, "OPTForCausalLM", config)
        return prepared(folder, "standard").passes.forward

    assert operations(4) > 1.3 * operations(2)  # no layer is skipped


def test_a_quantized_checkpoint_is_named(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = save_config(tmp_path, "LlamaForCausalLM", config)
    found = forecast(folder, "standard", Recipe(), Training(max_length=8), Machines())
    assert found.remarks == (
        "The checkpoint is quantized. The sizes are those of a model with float32 weights.",
    )


def test_images_are_samples_of_one_token(tmp_path):
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=8, num_labels=5,
    )  # fmt: skip
    found = prepared(save_config(tmp_path, "ViTForImageClassification", config), "standard")
    assert found.passes.is_image
    assert found.passes.outputs == (1, 5)
    assert not found.is_token


def test_the_images_of_a_model_of_texts_and_images_have_the_size_of_its_vision(tmp_path):
    layers = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    config = transformers.SiglipConfig(
        text_config={**layers, "vocab_size": 50, "max_position_embeddings": 64},
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        num_labels=5,
    )
    folder = save_config(tmp_path, "SiglipForImageClassification", config)
    found = forecast(folder, "standard", Recipe(), Training(max_length=512), Machines())
    assert found.training["max_length"] == 512  # the limit of its texts is none of its images
    assert found.remarks == ()


def test_a_model_without_a_head_gets_one(tmp_path):
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=50,
    )  # fmt: skip
    folder = save_config(tmp_path, "BertForMaskedLM", config)
    training = Training(batch_size=2, max_length=8)
    found = forecast(folder, "holdfast", Recipe.preset("holdfast"), training, Machines())
    real = transformers.BertForSequenceClassification(config)
    assert found.weights == sum(p.numel() for p in real.parameters())
    assert found.resolved == "features"
    assert found.needs.memory["frozen copy"] == found.needs.memory["weights"]


def test_a_model_that_cannot_run_is_refused_in_a_sentence(folder, monkeypatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda *_, **__: None)
    with pytest.raises(ValueError, match="LlamaForCausalLM does not run without its weights") as e:
        prepared(folder, "standard")
    assert "plan takes causal language models, and classifiers of texts and images" in str(e.value)


def test_sharding_divides_and_adds_up(folder):
    found, training = prepared(folder, "recadam"), Training(batch_size=1, max_length=8)
    one = needs_of(found, training, Machines()).memory
    four = needs_of(found, training, Machines(gpus=4)).memory
    for name in ("weights", "optimizer state", "θ*"):
        assert four[name] == pytest.approx(one[name] / 4, rel=1e-6)
    assert four["activations"] == one["activations"]
    whole = needs_of(found, training, Machines(gpus=4, shard=False)).memory
    assert whole["weights"] == one["weights"]
    host = needs_of(found, training, Machines(anchors="host"))
    assert "θ*" not in host.memory
    assert host.on_cpu["θ*"] == one["θ*"]
    mapped = needs_of(found, training, Machines(gpus=4, anchors="host"))
    assert mapped.memory["θ*"] == four["θ*"]
    assert not mapped.on_cpu
    half = needs_of(found, training, Machines(anchor_dtype="bfloat16")).memory
    assert half["θ*"] == one["θ*"] / 2


def test_a_copy_of_the_whole_model_stays_beside_its_shards(folder):
    training = Training(batch_size=1, max_length=8)
    found = prepared(folder, "recadam")
    weights, values = float(found.parts.weights), 4.0 * found.parts.count  # without buffers
    assert needs_of(found, training, Machines()).whole == {}
    copied = needs_of(found, training, Machines(gpus=4))
    assert copied.whole == {"weights": weights, "θ*": values}
    assert copied.memory["θ*, whole"] == values
    mapped = needs_of(found, training, Machines(gpus=4, anchors="host"))
    assert mapped.whole == {"weights": weights}
    assert mapped.bytes == pytest.approx(copied.bytes - values)
    ewc = needs_of(prepared(folder, "ewc"), training, Machines(gpus=4, anchors="host"))
    assert ewc.memory["importance, whole"] == ewc.whole["importance"] == values


def test_a_small_model_takes_the_time_of_its_launches(folder):
    each = measured()["launch_s_per_layer"]
    found, two = prepared(folder, "distill"), {"batch_size": 2, "max_length": 8}
    one = needs_of(found, Training(**two), Machines()).update
    assert one["forward and backward"] == pytest.approx(2 * each["weights"])
    several = needs_of(found, Training(**two, accumulate=3), Machines()).update
    assert several["forward and backward"] == pytest.approx(6 * each["weights"])
    other_gpu = needs_of(found, Training(**two), Machines(gpu="B200")).update
    assert other_gpu["forward and backward"] == one["forward and backward"]
    large = needs_of(found, Training(batch_size=10**9, max_length=8), Machines()).update
    assert large["forward and backward"] > 10 * one["forward and backward"]


def test_passes_without_gradients_take_their_share_of_the_launches(folder):
    constants, training = measured(), Training(batch_size=2, max_length=8)
    forward = 2 * constants["x_forward"] * constants["launch_s_per_layer"]["weights"]
    recipe = Recipe(recall=Distill(cache=False))
    update = needs_of(prepared(folder, recipe), training, Machines()).update
    assert update["pretrained model's predictions"] == pytest.approx(forward)
    before = needs_of(prepared(folder, "flow"), training, Machines(data_size=8192)).before
    assert before == {"predictions": pytest.approx(2 * forward)}  # batches of 32,768 tokens


def test_adapters_launch_more_kernels(folder):
    pytest.importorskip("peft", reason="the peft extra is not installed")
    found = needs_of(prepared(folder, "lora"), Training(batch_size=2, max_length=8), Machines())
    each = measured()["launch_s_per_layer"]
    assert found.update["forward and backward"] == pytest.approx(2 * each["adapters"])
    assert each["adapters"] > 2 * each["weights"]


def test_constants_are_those_of_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import constants

    assert constants.constants() == measured(), "run python benchmarks/constants.py"


def test_constants_have_a_machine_and_name_every_kernel():
    constants = measured()
    assert constants["device"] == "NVIDIA H200"
    planned = Planned(4, 4, ROWS, 4, 3, LENGTH, LENGTH - 1, VOCABULARY)
    for entry in methods():
        assert entry.cls().cost(planned).kernel in constants["x_limit"]


def test_a_kernel_that_was_not_measured_is_named(folder):
    class Mine(AdamWUpdate):
        def cost(self, planned):
            return replace(super().cost(planned), kernel="mine")

    found = prepared(folder, "standard")
    found = replace(found, recipe=replace(found.recipe, update=Mine()))
    with pytest.raises(ValueError, match="kernel 'mine', which was not measured: it must be one"):
        needs_of(found, Training(), Machines())


@pytest.mark.parametrize("layers", [2, pytest.param(80, marks=pytest.mark.soak)])
def test_a_configuration_is_enough_for_70_billion_weights(layers, tmp_path, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": layers, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [f"--model={tmp_path}", "--recipe=recadam", "--gpus=64", "--batch-size=1"]
    words += ["--anchors=host", "--gradient-checkpointing", "--max-length=64"]
    assert main(["plan", *words, "--json"]) == 0
    found = Forecast.from_json(capsys.readouterr().out)
    assert found.weights == found.trained == layers * 855_654_400 + 2_101_354_496
    assert found.fits == (4 * found.weights < 141e9)
    assert found.needs.bytes < 60e9
    assert found.needs.memory["θ*"] == pytest.approx(4 * found.weights / 64, rel=1e-6)
    assert found.needs.seconds < 1.02 * found.plain.seconds
    more = found.needs.bytes - found.plain.bytes
    assert more == pytest.approx(found.needs.memory["θ*"], rel=1e-6)


def test_the_verdict_says_what_to_change(folder, capsys):
    words = ["plan", f"--model={folder}", "--recipe=l2-sp", "--max-length=64", "--batch-size=64"]
    assert main([*words, "--gpu-memory=0.003"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("does not fit: ")
    assert "It would fit with --batch-size 1 --accumulate 64" in told
    assert "It would fit with --recipe l2-sp+lora" not in told  # activations are too large
    assert "This is an estimate." in told
    assert "Measured constants: NVIDIA H200" in told
    assert main([*words]) == 0
    assert capsys.readouterr().out.startswith("fits: ")


def told_of(capsys, folder, *words):
    assert main(["plan", f"--model={folder}", "--batch-size=1", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
        vocab_size=1000, max_position_embeddings=64,
    )  # fmt: skip
    return save_config(tmp_path_factory.mktemp("wide"), "LlamaForCausalLM", config)


def test_a_model_that_is_too_large_before_it_is_sharded_does_not_fit(wide, capsys):
    sized = ("--gpus=64", "--gpu-memory=0.16", "--max-length=8")  # the weights take 0.176 GB
    told = told_of(capsys, wide, "--recipe=standard", *sized)
    assert told.startswith("does not fit before it is sharded: 0.18 GB of 0.16 GB per GPU")
    assert "Once it is sharded, it needs 0.0" in told
    assert "HoldfastTrainer with FSDP2 leaves it in CPU memory until it is sharded" in told
    told = told_of(capsys, wide, "--recipe=flow", *sized)
    assert told.startswith("does not fit before it is sharded")
    assert "runs the whole model before it is sharded (predictions): take GPUs with more" in told


def test_a_copy_of_the_pretrained_weights_that_stays_whole_may_not_fit(wide, capsys):
    sized = ("--gpus=64", "--gpu-memory=0.16", "--max-length=8")
    told = told_of(capsys, wide, "--recipe=recadam", *sized)
    assert told.startswith("does not fit: ")
    assert "Once it is sharded, it would fit with --anchors host, in Python: reference=" in told
    told = told_of(capsys, wide, "--recipe=recadam", "--gpus=64", "--gpu-memory=0.3")
    assert "It would fit with --anchors host, in Python: reference=Reference.open(DIR)" in told


def test_no_change_that_helps_is_said(folder, capsys):
    told = told_of(capsys, folder, "--recipe=lora", "--max-length=8", "--gpu-memory=0.00001")
    assert "It would fit" not in told
    assert "Take GPUs with more memory, a shorter --max-length or a smaller model" in told


def test_weights_in_half_precision_may_help(wide, capsys):
    told = told_of(capsys, wide, "--recipe=lora", "--max-length=8", "--gpu-memory=0.15")
    assert "It would fit with --dtype bfloat16: 0.1" in told  # 0.18 GB of weights otherwise
    assert "It would fit with --dtype bfloat16 --gradient-checkpointing" not in told


def test_the_time_of_all_updates_is_told(folder, capsys):
    sized = ("--max-length=8", "--recipe=flow", "--max-updates=100")
    told = told_of(capsys, folder, *sized)
    assert main(["plan", f"--model={folder}", "--batch-size=1", *sized, "--json"]) == 0
    found = Forecast.from_json(capsys.readouterr().out)
    assert found.updates == 100
    assert f"All updates together take about {seconds(100 * found.needs.seconds)}, after" in told
    assert "of preparation." not in told_of(capsys, folder, "--max-length=8", "--recipe=standard")


def test_a_recipe_that_a_training_refuses_is_named(tmp_path, capsys):
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=50, num_labels=3,
    )  # fmt: skip
    folder = save_config(tmp_path, "BertForSequenceClassification", config)
    told = told_of(capsys, folder, "--recipe=self-replay", "--max-length=8")
    assert "A training would refuse this recipe: SelfReplay draws texts from the model" in told
    assert "would refuse" not in told_of(capsys, folder, "--recipe=features", "--max-length=8")


def test_samples_are_as_long_as_the_model_takes(wide, capsys):
    told = told_of(capsys, wide, "--max-length=100000")
    assert "Samples are cut to 64 tokens, the most that the model takes" in told
    assert main(["plan", f"--model={wide}", "--max-length=100000", "--json"]) == 0
    long = Forecast.from_json(capsys.readouterr().out)
    assert main(["plan", f"--model={wide}", "--max-length=64", "--json"]) == 0
    same = Forecast.from_json(capsys.readouterr().out)
    assert (long.needs, same.remarks) == (same.needs, ())


def test_old_data_is_named_where_a_recipe_needs_it(folder, capsys):
    sized = ("--max-length=8", "--data-size=1")
    told = told_of(capsys, folder, "--recipe=rehearsal", *sized)
    assert "The recipe needs old data (--old-data)." in told
    assert "in 1 update." in told
    assert "An update takes about as long as with plain fine-tuning" in told
    assert "e-0" not in told  # bytes and shares below any precision
    assert "old data" not in told_of(capsys, folder, "--recipe=holdfast", *sized)


def test_a_folder_without_a_model_is_named(tmp_path, capsys):
    assert main(["plan", f"--model={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "has no config.json, from which plan reads the sizes of a model" in said
    assert "drift" not in said


def test_adapters_are_proposed_where_they_save_a_copy(tmp_path, capsys):
    pytest.importorskip("peft", reason="the peft extra is not installed")
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        vocab_size=1000,
    )  # fmt: skip
    folder = save_config(tmp_path, "LlamaForCausalLM", config)
    words = ["plan", f"--model={folder}", "--recipe=tmkl", "--set", "recall.cache", "false"]
    sized = [*words, "--max-length=8", "--batch-size=1", "--json"]
    assert main(sized) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]["memory"]
    room = (sum(needs.values()) - needs["frozen copy"] / 2) / 1e9
    assert main([*sized[:-1], f"--gpu-memory={room:.9f}"]) == 0
    assert "It would fit with --recipe tmkl+lora" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus=0"], "gpus must be"),
        (["--gpu=V100"], "H200"),
        (["--gpu-memory=-1"], "gpu_memory must be"),
        (["--recipe=nosuch"], "unknown method 'nosuch'"),
        (["--set", "update.nosuch", "1"], "has no setting 'update.nosuch'"),
    ],
)
def test_wrong_options_are_one_sentence(folder, words, said, capsys):
    assert main(["plan", f"--model={folder}", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_forecast_is_saved_and_shown(folder, tmp_path):
    training = Training(batch_size=2, max_length=8)
    found = forecast(folder, "ewc", Recipe.preset("ewc"), training, Machines(gpus=2))
    found.save(tmp_path / "plan.json")
    assert Forecast.load(tmp_path / "plan.json") == found
    assert "importance" in found.to_markdown()
    assert {row["figure"] for row in found.rows()} == {"memory", "whole", "update", "before"}
    assert set(GPUS) == {"H200", "H100", "A100", "B200"}
