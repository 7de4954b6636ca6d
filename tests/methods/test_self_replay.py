"""Self-replay: the loss is the literal one, in every cut of an update."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from golden import self_replay as golden
from holdfast import Flow, LoopSettings, LoRA, Recipe, Run, SelfReplay, SGDUpdate, finetune_loop
from holdfast._torch import ride
from holdfast.data import pad_collate
from holdfast.methods import self_replay
from loops import tune
from small import make_llama, make_tokenizer, noisy

LENGTH = 12


def base(dtype=torch.float64, **options):
    return make_llama(**({"vocab": 40, "scale": 0.2} | options)).to(dtype)


def samples(n=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(n):
        ids = torch.randint(4, 40, (5 + i % 4,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return found


def replay(**settings):
    return SelfReplay(**({"length": LENGTH, "top": 8, "fewest": 1} | settings))


def make_run(recall, model=None, data=None, **options):
    options = {"lr": 0.01, "cache": False, "progress": False, "collate": pad_collate} | options
    recipe = recall if isinstance(recall, Recipe) else Recipe(recall=recall)
    return Run(recipe, model or base(), data or samples(), **options)


def recalled(run, update=1, samples=8, rows=8):
    """The term of an update, in a call of its own."""
    run.recall.plan(run.model, update, samples, micro_batches=1)
    return recalled_in(run)


@pytest.mark.parametrize("top", [8, 39, 40, None])
def test_the_loss_is_the_literal_one(top):
    model = base()
    run = make_run(replay(top=top, strength=0.7, share=0.5), model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p))
    chosen = run.recall.texts_of(3, 4)
    pool = run.recall.pool
    texts = [pool.texts()[i] for i in chosen]

    def logits(net):
        return lambda text: net(input_ids=torch.tensor([text])).logits[0].tolist()

    kept = {}
    if top is not None:
        likeliest = top - pool.sampled
        kept = {"likeliest": likeliest, "drawn": pool.ids[chosen, :, likeliest:].tolist()}
    theirs = golden.divergence(
        logits(base()), logits(model), texts, pool.starts[chosen].tolist(), **kept
    )
    # The log-probabilities of the kept tokens are in float32.
    tolerance = 1e-9 if top is None else 1e-5
    assert recalled(run, update=3).item() == pytest.approx(0.7 * theirs, rel=tolerance)


@pytest.mark.parametrize("top", [None, 8])
@pytest.mark.parametrize("recipe", ["full", "lora"])
def test_it_costs_nothing_to_stay(top, recipe):
    trainable = {"trainable": LoRA(r=2)} if recipe == "lora" else {}
    loss = recalled(make_run(Recipe(recall=replay(top=top), **trainable), base(torch.float32)))
    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_the_teacher_has_the_precision_of_the_training():
    """Of float32 weights in bfloat16: the rounding of the teacher is that of the model."""
    found = []
    for autocast in (None, torch.bfloat16):
        run = make_run(replay(share=4.0), base(torch.float32, scale=0.5), autocast=autocast)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(abs(recalled(run).item()))
    assert found[1] < 1e-6 < 1e-5 < found[0]


def test_all_seeds_and_full_fine_tuning_and_lora_share_one_pool(tmp_path):
    kinds = [({}, 0), ({}, 1), ({"trainable": LoRA(r=2)}, 2)]
    for options, seed in kinds:
        run = make_run(Recipe(recall=replay(), **options), cache=tmp_path, seed=seed)
        assert run.recall.pool.path == next((tmp_path / "pools").iterdir())
    orders = {
        tuple(make_run(replay(), seed=seed).recall.texts_of(1, 9).tolist()) for seed in (0, 1)
    }
    assert len(orders) == 2


@pytest.mark.parametrize(("length", "texts"), [(12, 64), (4, 170)])
def test_the_limit_is_in_tokens(length, texts, monkeypatch):
    monkeypatch.setattr("holdfast.methods.self_replay.MOST_TOKENS", 680)
    assert len(make_run(replay(length=length, share=1.0), visits=1000).recall.pool) == texts


def test_other_tokens_than_the_likeliest_are_held_too():
    """KL over the likeliest and "another token" sees less than half of such a change."""
    model = base()
    run = make_run(replay(share=8.0), model)
    head = model.lm_head.weight
    with torch.no_grad():
        head.add_(torch.randn(head.shape, generator=torch.Generator().manual_seed(1)).to(head))
    pool, everything = run.recall.pool, torch.arange(len(run.recall.pool))
    estimate = run.recall.divergence(model, pool, everything)
    whole = make_run(replay(top=None, share=8.0)).recall
    exact = whole.divergence(model, pool, everything)
    assert estimate.item() == pytest.approx(exact.item(), rel=0.05)
    batch = pool.batch(everything, "cpu")
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    log_q = model(**inputs).logits.log_softmax(-1)[batch.where].gather(1, batch.ids)
    p, q = (x[:, :6].double().exp() for x in (batch.log_probs, log_q))
    p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, q))
    assert (p * (p / q).log()).sum() < 0.5 * exact


@pytest.mark.parametrize("parts", [2, 3, 8, 16])
def test_how_an_update_is_cut_does_not_matter(parts):
    found = []
    for micro_batches in (parts, 1):
        run = make_run(replay(share=1.0), noisy(base()))
        run.recall.pool.log_probs[:] = make_run(replay(share=1.0)).recall.pool.log_probs
        run.recall.plan(run.model, 2, 8, micro_batches)
        for _ in range(micro_batches):
            with run.recall.beside(run.model) as loss:
                if (part := loss()) != 0.0:
                    part.backward()
        found.append([p.grad.clone() for p in run.model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_every_micro_batch_of_a_plan_must_run():
    run = make_run(replay(share=1.0))
    with pytest.raises(RuntimeError, match=r"call run.recall.plan\(...\) before each update"):
        recalled_in(run)
    run.recall.plan(run.model, 1, 8, 3)
    recalled_in(run)
    with pytest.raises(RuntimeError, match="2 micro-batches of update 1 did not replay"):
        run.recall.plan(run.model, 2, 8, 3)
    run.recall.plan(run.model, 1, 8, 1)  # again, after an interrupted update
    assert recalled_in(run) != 0.0
    assert recalled_in(run) == 0.0  # a micro-batch more than announced


def recalled_in(run):
    with run.recall.beside(run.model) as loss:
        return loss()


def test_every_text_is_replayed_before_any_is_repeated():
    term = make_run(replay(share=0.5), visits=192).recall
    assert len(term.pool) == 96
    seen = torch.cat([term.texts_of(update, 32) for update in (1, 2, 3)])
    assert sorted(seen.tolist()) == list(range(96))
    assert term.texts_of(2, 32).tolist() == seen[32:64].tolist()  # whatever came before
    again = torch.cat([term.texts_of(update, 32) for update in (4, 5, 6)])
    assert sorted(again.tolist()) == list(range(96))
    assert again.tolist() != seen.tolist()


def test_at_least_one_text_per_update():
    term = make_run(replay(share=0.01)).recall
    term.plan(base(), 1, 4, micro_batches=2)
    assert [len(rows) for rows, weights in term._shares] == [1, 0]
    assert term.texts_of(1, 1) != term.texts_of(2, 1)


def test_a_length_above_the_models_is_said_once(caplog):
    for _ in range(2):
        run = make_run(replay(length=20), base(limit=9))
        assert run.recall.pool.tokens.shape[1] == 9
    words = "texts have at most 9 tokens, as many as the model accepts, not length=20"
    assert caplog.text.count(words) == 1


def test_as_many_texts_are_drawn_as_the_run_uses(caplog):
    self_replay._warn_once.cache_clear()
    long = [{"input_ids": [5] * 99, "labels": [5] * 99}] * 2
    used = {"visits": 1600, "update_size": 20}
    assert len(make_run(replay(fewest=1, share=0.1), data=long, **used).recall.pool) == 160
    assert len(make_run(replay(fewest=1, share=0.1), data=long, visits=1600).recall.pool) == 160
    assert len(make_run(replay(fewest=10, share=0.1), data=long, **used).recall.pool) == 800
    stream = (row for row in long)
    assert replay(share=0.1)._count(SimpleNamespace(data=stream, **used)) == 160
    assert not caplog.records
    short = [{"input_ids": [5], "labels": [5]}] * 2
    for seed in range(2):
        run = make_run(replay(fewest=10, share=0.1), data=short, seed=seed, **used)
        assert len(run.recall.pool) == -(-1600 // LENGTH)
    said = f"would take longer than the training: {-(-1600 // LENGTH)} are drawn"
    assert caplog.text.count(said) == 1


def test_prompt_learning_is_refused():
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="prompt learning adds tokens to each text: use LoRA"):
        make_run(replay(), peft.get_peft_model(base().float(), config))


@pytest.mark.parametrize("accumulate", [2, 8])
def test_accumulation_does_not_change_the_model(accumulate):
    recipe = Recipe(recall=replay(), update=SGDUpdate())  # Adam would enlarge rounding errors
    found = []
    for size, parts in ((8, 1), (8 // accumulate, accumulate)):
        model = tune(
            base(), recipe, samples(), lr=0.1, batch_size=size, accumulate=parts,
            collate=pad_collate, max_updates=4,
        )  # fmt: skip
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(recall=replay()),
        Recipe(recall=replay(), objective=Flow()),
        Recipe(recall=replay(top=None), trainable=LoRA(r=2)),
        Recipe(recall=replay(budget=1e-3)),
    ],
    ids=["alone", "flow", "lora", "budget"],
)
def test_a_resumed_run_is_the_same_to_the_bit(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(ride, "_PADDING", 9.0)

    def base():
        return make_llama(vocab=40, scale=0.2, attention_dropout=0.3).double()

    options = {
        "lr": 0.02,
        "batch_size": 6,
        "max_updates": 7,
        "collate": pad_collate,
        "save_every": 1,
    }
    whole = tune(base(), recipe, samples(), **options)

    def stop(row):
        if row["update"] == 4:
            raise KeyboardInterrupt

    path = tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        tune(base(), recipe, samples(), checkpoint=path, log=stop, log_every=1, **options)
    resumed = tune(base(), recipe, samples(), checkpoint=path, **options)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_keeps_what_plain_fine_tuning_forgets():
    rows, options = samples(32), {"lr": 0.02, "batch_size": 8, "progress": False}
    settings = LoopSettings(max_updates=30)
    held_out = make_run(replay(), seed=9).recall
    found = {}
    for name, recipe in {"plain": Recipe(), "replay": Recipe(recall=replay(share=1.0))}.items():
        model = finetune_loop(base(), recipe, rows, settings=settings, **options)
        kl = held_out.divergence(model, held_out.pool, torch.arange(len(held_out.pool)))
        found[name] = kl.item() / int(held_out.pool.counts.sum())
    assert found["replay"] < 0.5 * found["plain"]


def test_other_texts_do_not_resume(tmp_path):
    options = {"lr": 0.02, "batch_size": 6, "max_updates": 4, "collate": pad_collate}
    path, recipe = tmp_path / "run.pt", Recipe(recall=replay())
    tune(base(), recipe, samples(), checkpoint=path, **options)
    with pytest.raises(ValueError, match="recalls something else: with another tokenizer"):
        tune(base(), recipe, samples(), checkpoint=path, visits=2000, **options)


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"share": 0}, "share must be"),
            ({"budget": 0}, "budget must be"),
            ({"budget": -1}, "budget must be"),
            ({"length": 1}, "length must be at least 2"),
            ({"top": 1}, "top must be at least 2"),
            ({"strength": -1}, "strength must be"),
            ({"strength": 0, "budget": 0.1}, "a budget needs a strength above 0"),
        ],
    )
    def test_settings(self, settings, message):
        with pytest.raises(ValueError, match=message):
            SelfReplay(**settings)

    def test_models_that_do_not_write(self):
        with pytest.raises(ValueError, match="needs a causal language model, got Linear"):
            make_run(replay(), torch.nn.Linear(2, 2), task="classification")

    def test_encoders(self):
        import transformers

        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        config = transformers.BertConfig(vocab_size=40, num_hidden_layers=1, **sizes)
        model = transformers.BertForSequenceClassification(config)
        with pytest.raises(ValueError, match="language model, got BertForSequenceClass"):
            make_run(Recipe.preset("self-replay"), model, [{"input_ids": [5, 6], "label": 0}])

    def test_no_first_token(self):
        model = base()
        model.config.bos_token_id = model.config.eos_token_id = None
        model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
        with pytest.raises(ValueError, match=r"no BOS or EOS token .* set start= to the id"):
            make_run(replay(), model)
        assert make_run(replay(start=5), model).recall.pool.tokens[0, 0] == 5

    def test_a_model_that_predicts_nan(self):
        model = base()
        model.lm_head.weight.data.fill_(math.nan)
        with pytest.raises(ValueError, match="LlamaForCausalLM predicts NaN"):
            make_run(replay(), model)

    def test_a_checkpoint_from_other_weights(self, tmp_path):
        options = {"lr": 0.01, "max_updates": 1, "collate": pad_collate}
        recipe, path = Recipe(recall=replay()), tmp_path / "run.pt"
        tune(base(), recipe, samples(), checkpoint=path, **options)
        with pytest.raises(ValueError, match="other pretrained weights"):
            tune(noisy(base()), recipe, samples(), checkpoint=path, **options)

    def test_texts_of_ones_own_need_a_tokenizer(self, tmp_path):
        file = tmp_path / "texts.txt"
        file.write_text("the cat sat on the mat and the dog ran")
        with pytest.raises(ValueError, match="tokenizer"):
            make_run(replay(texts=str(file)))
        options = {"tokenizer": make_tokenizer(), "model": base(torch.float32)}
        run = make_run(replay(texts=str(file)), **options)
        assert run.recall.pool.texts()[0][0] == 2
        with pytest.raises(ValueError, match=r"has 1 texts .* budget= needs at least 5"):
            make_run(replay(texts=str(file), budget=0.1), **options)
        file.write_text("the cat sat on the mat and the dog ran " * 12)
        term = make_run(replay(texts=str(file), budget=0.1), **options).recall
        assert (len(term.pool), len(term.held_out)) == (9, 2)

    def test_all_texts_of_ones_own_are_used(self, tmp_path, caplog):
        """Nothing is drawn, so that the training need not be longer."""
        file = tmp_path / "texts.txt"
        file.write_text("the cat sat on the mat and the dog ran " * 400)
        options = {"tokenizer": make_tokenizer(), "model": base(torch.float32)}
        run = make_run(replay(texts=str(file), share=200.0), **options)
        assert len(run.recall.pool) > 64
        assert "would take longer" not in caplog.text

    def test_a_new_head(self):
        with pytest.raises(ValueError, match=r"lm_head\.weight is new and predicts at random"):
            make_run(replay(), new=("lm_head",))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": "<s>"}, "start must be a whole number, got '<s>'"),
        ({"start": -1}, "start must be at least 0, got -1"),
        ({"texts": 3}, "texts must be the name of a file, got 3"),
    ],
)
def test_settings_of_another_kind(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SelfReplay(**settings)
    saved = {"recall": {"name": "self-replay", **settings}}
    with pytest.raises(ValueError, match=f"recall self-replay: {message}"):
        Recipe.from_dict(saved)
