"""Pools: what they hold, the cache, adapters, ranks, bad models, and texts of one's own."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers
from safetensors import safe_open

from holdfast._torch.fingerprint import base_fingerprint, model_fingerprint
from holdfast.scoring import blocks, pool
from holdfast.scoring.draw import BLOCK
from holdfast.scoring.pool import Pool, draw_pool, pool_of_texts
from holdfast.scoring.starts import Start
from ranks import run_on_ranks
from small import make_llama, make_tokenizer, noisy

START, END = 2, 3
TENSORS = (*pool._TEXTS, *pool._PREDICTIONS)


def drawn(model=None, count=70, **options):
    """A pool whose texts start with one token, or with three."""
    options = {"starts": [Start([START]), Start([START, 9, 8])], "length": 12, "top": 8} | options
    return draw_pool(model or base(), count, **({"progress": False} | options))


def base(**options):
    return make_llama(**({"vocab": 30, "scale": 0.3} | options))


def equal(one, other):
    assert one.sampled == other.sampled
    for name in TENSORS:
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    return True


def truth(model, text):
    with torch.no_grad():
        return model.double()(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)


class TestContent:
    def test_a_pool_holds_the_models_distribution_literally(self):
        model = base(vocab=10)
        found = drawn(model, starts=[Start([START]), Start([START, 9, 8], ends=2)])
        assert len(found) == 70
        assert found.sampled == 2
        assert found.starts.tolist() == [1, 3] * 35
        assert len(set(map(tuple, found.texts()))) > 60
        for i, text in enumerate(found.texts()):
            start, ends, table = int(found.starts[i]), 1 + i % 2, truth(model, text)
            assert text[:start] == ([START, 9, 8] if i % 2 else [START])
            assert found.counts[i] == len(text) - start
            assert text[start:-1].count(END) < ends
            assert len(text) == 12 or (text[-1] == END and text[start:].count(END) == ends)
            for place, row in enumerate(table[start - 1 : len(text) - 1]):
                ids = found.ids[i, place].tolist()
                assert ids[:6] == row.topk(6).indices.tolist()
                assert not set(ids[:6]) & set(ids[6:])
                torch.testing.assert_close(found.log_probs[i, place], row[ids].float())
                rest = 1 - row[ids[:6]].exp().sum()
                assert float(found.rest[i, place]) == pytest.approx(float(rest), abs=1e-5)
            for name in pool._PREDICTIONS:
                assert not getattr(found, name)[i, int(found.counts[i]) :].any()
            assert not found.tokens[i, len(text) :].any()
        assert any(text[3:].count(END) == 2 for text in found.texts()[1::2])

    def test_a_batch_is_ready_for_a_forward_pass(self):
        model = base()
        found = drawn(model)
        short = int((found.lengths * 10 + torch.arange(70) / 70).argmin())
        rows = [short, 5, 4, 5]
        batch = found.batch(rows, "cpu")
        texts = [found.texts()[row] for row in rows]
        assert batch.input_ids.shape == (4, max(map(len, texts)))
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        log_q = logits.log_softmax(-1)[batch.where]
        assert len(log_q) == len(batch.rest) == int(found.counts[rows].sum())
        flat = [[i, p] for i, row in enumerate(rows)
                for p in range(int(found.starts[row]) - 1, len(texts[i]) - 1)]  # fmt: skip
        assert batch.where.nonzero().tolist() == flat
        torch.testing.assert_close(log_q.gather(1, batch.ids), batch.log_probs)
        (batch.log_probs.exp() * (batch.log_probs - log_q.gather(1, batch.ids))).sum().backward()

    def test_4096_texts_take_270_megabytes(self, tmp_path):
        found = drawn(base(limit=128, vocab=100), 64, length=128, top=64, cache=tmp_path,
                      starts=[Start([START])])  # fmt: skip
        on_disk = sum(file.stat().st_size for file in found.path.rglob("block-*"))
        assert max(sum(getattr(found, name).nbytes for name in TENSORS), on_disk) * 64 < 275e6

    def test_texts_longer_than_the_model_allows_are_cut(self):
        assert drawn(base(limit=8), length=100).tokens.shape[1] == 8

    def test_a_small_vocabulary_is_kept_whole(self):
        found = drawn(base(vocab=11), top=64)
        assert found.ids.shape[-1] == 11
        assert found.sampled == found.split(8)[1].sampled == 0
        assert torch.allclose(found.log_probs[:, 0].exp().sum(-1), torch.ones(70), atol=1e-5)

    def test_the_size_of_the_vocabulary_is_that_of_the_logits(self):
        """Not that of the input embedding, which may be padded."""
        model = base(vocab=10)
        model.set_input_embeddings(torch.nn.Embedding(64, 16))
        assert drawn(model, top=10).sampled == 0

    def test_texts_without_predictions(self):
        found, whole = drawn(top=None), drawn()
        assert found.texts() == whole.texts()
        assert found.path == whole.path
        assert found.batch([0, 1], "cpu").ids.shape == (int(found.counts[:2].sum()), 0)

    def test_held_out_texts_are_the_last(self):
        found = drawn()
        train, held_out = found.split(8)
        assert train.texts() + held_out.texts() == found.texts()
        assert (len(train), len(held_out)) == (62, 8)
        assert train.sampled == held_out.sampled == 2
        for n in (0, 70, -1):
            with pytest.raises(ValueError, match="cannot be held out"):
                found.split(n)

    @pytest.mark.parametrize(
        ("starts", "message"),
        [
            ([], "at least one start"),
            ([Start([])], "at least one start, each with a token"),
            ([Start([30])], "token 30 is not in the model's vocabulary of 30"),
            ([Start([1] * 12)], "leaves nothing to draw"),
        ],
    )
    def test_wrong_starts(self, starts, message):
        with pytest.raises(ValueError, match=message):
            drawn(starts=starts)


class TestAdapters:
    """A model with adapters and the one below have the same texts, and one cached pool."""

    @staticmethod
    def adapted(trained=False, **options):
        peft = pytest.importorskip("peft", reason="the peft extra is not installed")
        options = {"r": 2, "target_modules": ["q_proj", "embed_tokens"]} | options
        model = peft.get_peft_model(base(), peft.LoraConfig(task_type="CAUSAL_LM", **options))
        for name, p in model.named_parameters():
            if trained and ("lora_" in name or "modules_to_save" in name):
                p.data.normal_()
        return model

    @pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}])
    def test_new_ones_are_off(self, options, monkeypatch):
        wanted, model = drawn(), self.adapted(**options)
        assert base_fingerprint(model) == base_fingerprint(base())
        assert equal(drawn(model, cache=False), wanted)
        monkeypatch.setattr(pool.Drawer, "__call__", None)  # would fail if called
        monkeypatch.setattr(pool.Predictor, "__call__", None)
        assert drawn(model).path == wanted.path

    def test_trained_ones_belong_to_the_model(self):
        model = self.adapted(trained=True)
        assert base_fingerprint(model) != base_fingerprint(base())
        found = drawn(model, cache=False)
        assert found.texts() != drawn(cache=False).texts()
        merged = model.merge_and_unload()
        torch.testing.assert_close(drawn(merged, cache=False).log_probs, found.log_probs)

    def test_the_residual_model_of_pissa_is_not_the_base(self):
        peft = pytest.importorskip("peft", reason="the peft extra is not installed")
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM"
        )
        found = drawn(peft.get_peft_model(base(), config), cache=False)
        torch.testing.assert_close(found.log_probs, drawn(cache=False).log_probs)

    def test_what_trainers_set_does_not_matter(self):
        model = base()
        model.config.use_cache, model.config.pad_token_id = False, 7
        assert base_fingerprint(model) == base_fingerprint(base())
        assert model_fingerprint(model) != model_fingerprint(base())  # a head may use the padding

    def test_other_models_have_another_fingerprint(self):
        found = {base_fingerprint(m) for m in (base(), noisy(base()), base(rms_norm_eps=0.1))}
        assert len(found | {base_fingerprint(base().double())}) == 4


class TestCache:
    def test_a_second_call_reads(self, monkeypatch):
        first = drawn()
        monkeypatch.setattr(pool.Drawer, "__call__", None)  # would fail if called
        assert equal(drawn(), first)

    def test_equal_seeds_give_equal_pools_without_a_cache_too(self):
        first, second = drawn(cache=False), drawn(cache=False)
        assert equal(first, second)
        assert first.path is None
        assert drawn(cache=False, seed=1).texts() != first.texts()

    @pytest.mark.parametrize(
        "change", ["weights", "seed", "length", "starts", "ends", "end", "dtype", "format"]
    )
    def test_other_weights_or_settings_are_drawn_anew(self, change, monkeypatch):
        drawn(count=5)
        model, options = base(), {}
        if change == "weights":
            model.lm_head.weight.data[0, 0] += 1e-3
        elif change == "dtype":
            model = model.bfloat16()
        elif change == "format":  # of an older version
            monkeypatch.setattr(pool, "_FORMAT", 2)
        elif change == "end":
            model.generation_config.eos_token_id = [3, 5]
        elif change == "ends":
            options["starts"] = [Start([START]), Start([START, 9, 8], ends=2)]
        else:
            options[change] = {"seed": 1, "length": 11, "starts": [Start([4])]}[change]
        monkeypatch.setattr(pool.Drawer, "__call__", None)
        with pytest.raises(TypeError):
            drawn(model, 5, **options)

    def test_other_predictions_are_made_for_the_same_texts(self, monkeypatch):
        first = drawn()
        monkeypatch.setattr(pool.Drawer, "__call__", None)
        assert drawn(top=7).ids.shape[-1] == 7
        with torch.autocast("cpu", torch.bfloat16):
            half = drawn()
        assert half.texts() == first.texts()
        assert half.path == first.path
        assert 0 < (half.rest - first.rest).abs().max() < 0.05
        monkeypatch.setattr(pool.Predictor, "__call__", None)
        assert equal(drawn(), first)  # nothing was overwritten

    def test_a_larger_pool_extends_a_smaller_one(self, monkeypatch):
        small = drawn(count=BLOCK + 6)
        made, noise = [], pool.noise_of
        monkeypatch.setattr(pool, "noise_of", lambda *args: made.append(args[::2]) or noise(*args))
        large = drawn(count=3 * BLOCK)
        assert equal(large[: BLOCK + 6], small)
        assert [args[:2] for args in made] == [("texts", 2), ("kept", 2)]  # only the third block

    def test_a_killed_draw_continues_with_the_finished_blocks(self, monkeypatch):
        whole = drawn(count=4 * BLOCK)
        for part, numbers in (("", (1, 3)), ("*/", (0,))):
            files = sorted(whole.path.glob(f"{part}block-*"))
            assert len(files) == 4
            for number in numbers:
                files[number].unlink()
        made, noise = [], pool.noise_of
        monkeypatch.setattr(pool, "noise_of", lambda *args: made.append(args[::2]) or noise(*args))
        assert equal(drawn(count=4 * BLOCK), whole)
        assert [args[:2] for args in made] == [("texts", 1), ("texts", 3), ("kept", 0)]

    @pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
    @pytest.mark.parametrize("part", ["", "*/"], ids=["texts", "predictions"])
    def test_a_damaged_file_is_made_again(self, damage, part):
        whole = drawn()
        file = sorted(whole.path.glob(f"{part}block-*"))[0]
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[-100] ^= 1
        file.write_bytes(content[:-5] if damage == "cut" else content if damage == "flip" else b"")
        with pytest.warns(UserWarning, match="block-000000.* damaged"):
            assert equal(drawn(), whole)
        assert equal(drawn(), whole)  # it has been replaced

    def test_predictions_are_those_of_the_texts_that_another_process_has_drawn(self):
        """On a GPU, two processes can draw different texts: their batches round differently."""
        mine = drawn(base(), 2 * BLOCK)
        (file,) = mine.path.glob("block-000000*")
        with safe_open(file, "pt") as opened:
            block = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        block["tokens"][:, 3] = START + 2
        about = json.loads((mine.path / "about.json").read_text())
        file.unlink()
        blocks.BlockStore(mine.path.parent, about).write({0: block})
        with pytest.warns(UserWarning, match="block-000000.* other data") as caught:
            theirs = drawn(base(), 2 * BLOCK)
        assert len(caught) == 1
        assert not torch.equal(theirs.tokens, mine.tokens)
        assert equal(theirs[BLOCK:], mine[BLOCK:])  # blocks do not depend on each other
        assert equal(drawn(base(), 2 * BLOCK), theirs)  # it has been replaced
        known = truth(base(), theirs.texts()[0])
        count = int(theirs.counts[0])
        kept = known[:count].gather(1, theirs.ids[0, :count].long())
        assert torch.allclose(theirs.log_probs[0, :count], kept.float(), atol=1e-4)

    def test_the_first_of_two_processes_decides(self, tmp_path):
        mine, theirs = ({"tokens": torch.full((2, 3), value)} for value in (1, 2))
        store = blocks.BlockStore(tmp_path, {})
        store.write({0: theirs})
        found = store.write({0: mine, 1: mine})
        assert found[0]["tokens"].equal(theirs["tokens"])
        assert found[1]["tokens"].equal(mine["tokens"])
        assert store.read([0])[0]["tokens"].equal(theirs["tokens"])

    @pytest.mark.parametrize("after", [0, 1, 4])
    def test_a_full_disk_loses_no_texts(self, after, monkeypatch):
        wanted, written, save = drawn(cache=False, count=3 * BLOCK), [], blocks.save_file

        def full(block, path, note):
            if len(written) == after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written.append(path)
            save(block, path, note)

        monkeypatch.setattr(blocks, "save_file", full)
        with pytest.warns(UserWarning, match="not cached in .*No space left") as caught:
            found = drawn(count=3 * BLOCK)
        assert len(caught) == 1
        assert equal(found, wanted)
        monkeypatch.setattr(blocks, "save_file", save)
        assert equal(drawn(count=3 * BLOCK), wanted)  # and the draw continues later

    def test_the_files_can_be_found_and_read(self, tmp_path):
        found = drawn(cache=tmp_path)
        assert found.path.parent == tmp_path / "pools"
        assert json.loads((found.path / "about.json").read_text())["length"] == 12


class TestBadModels:
    def test_nan(self, tmp_path):
        model = base()
        model.lm_head.weight.data[5] = float("nan")
        with pytest.raises(ValueError, match="LlamaForCausalLM predicts NaN"):
            drawn(model, cache=tmp_path)
        assert not [*tmp_path.rglob("block-*")]  # no later run reads texts of such a model

    def test_all_texts_equal(self):
        model = base()
        model.lm_head.weight.data.zero_()[7, :8] = 1e6
        model.model.norm.weight.data.zero_()[:8] = 1.0
        model.model.forward = partial(_constant_states, model.model.forward)
        with pytest.raises(ValueError, match="are equal"):
            drawn(model)

    def test_all_texts_end_at_once(self):
        model = base()
        model.generation_config.eos_token_id = list(range(30))
        with pytest.raises(ValueError, match="ends after one token"):
            drawn(model)

    def test_a_model_that_does_not_write(self):
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32,
        )  # fmt: skip
        with pytest.raises(ValueError, match="BertForSequenceClassification does not generate"):
            drawn(transformers.BertForSequenceClassification(config))

    def test_wrong_numbers(self):
        for option in ({"count": 0}, {"length": 1}, {"top": 1}, {"seed": -1}):
            with pytest.raises(ValueError, match=f"{next(iter(option))} must be at least"):
                drawn(**option)

    def test_autocast_does_not_keep_weights_without_gradients(self):
        """Its cache lives until the outermost context ends."""
        model = base()
        with torch.autocast("cpu", torch.bfloat16):
            drawn(model, cache=False)
            model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_the_mode_of_the_model_is_restored(self):
        model = base(attention_dropout=0.5).train()
        found = drawn(model, cache=False)
        assert all(module.training for module in model.modules())
        assert found.texts() == drawn(model.eval(), cache=False).texts()


def _constant_states(forward, *args, **kwargs):
    out = forward(*args, **kwargs)
    out.last_hidden_state = torch.ones_like(out.last_hidden_state)
    return out


class TestOwnTexts:
    def test_token_lists_get_the_predictions_of_a_draw(self):
        model = base()
        made = drawn(model, starts=[Start([START])])
        found = pool_of_texts(model, made.texts(), length=12, top=8, progress=False)
        places = [made.texts().index(text) for text in found.texts()]
        assert sorted(found.texts()) == sorted(made.texts())
        assert found.texts() != made.texts()  # shuffled
        assert found.sampled == made.sampled == 2
        torch.testing.assert_close(found.rest, made.rest[places, : found.rest.shape[1]])
        assert torch.equal(found.ids[..., :6], made.ids[places][:, : found.ids.shape[1], :6])
        assert found.starts.unique().tolist() == [1]
        assert found.path != made.path

    def test_texts_start_with_the_first_token(self):
        found = pool_of_texts(base(), [[5, 6, 7, 8], [START, 5], [9]], length=4, progress=False)
        assert sorted(found.texts()) == [[2, 5], [2, 5, 6, 7], [2, 8], [2, 9]]
        other = pool_of_texts(base(), [[5, 6]], start=7, progress=False)
        assert other.texts() == [[7, 5, 6]]
        model = base()
        model.config.bos_token_id = model.config.eos_token_id = None
        with pytest.raises(ValueError, match="set start= to the id of a token"):
            pool_of_texts(model, [[5, 6]])

    def test_the_order_depends_on_the_seed_only(self):
        read = partial(pool_of_texts, base(), [[i, 5] for i in range(4, 30)], progress=False)
        assert read().texts() == read().texts() != read(seed=1).texts()
        assert read(count=9).texts() == read().texts()[:9]

    def test_which_tokens_are_kept_depends_on_the_number_of_a_text(self):
        """Equal texts keep others."""
        read = partial(pool_of_texts, base(), length=12, top=8, progress=False)
        found = read([[4, 5, 6, 7]] * (2 * BLOCK)).ids[..., 6:].flatten(1)
        assert len(found.unique(dim=0)) > BLOCK

    def test_they_are_cached_by_content(self, monkeypatch):
        model, rows = base(), [[4, 5], [6, 7]] * 50
        first = pool_of_texts(model, rows, progress=False)
        assert len(first) == 100
        monkeypatch.setattr(pool.Predictor, "__call__", None)
        assert equal(pool_of_texts(model, rows, progress=False), first)
        with pytest.raises(TypeError):
            pool_of_texts(model, [*rows, [1, 2]], progress=False)

    @pytest.mark.parametrize("form", ["txt", "jsonl"])
    def test_files(self, form, tmp_path):
        tokenizer, file = make_tokenizer(), tmp_path / f"texts.{form}"
        text = "the cat sat on the mat . the dog ran and two plus two is four"
        rows = [json.dumps({"text": text}), json.dumps({"text": "the cat"})]
        file.write_text(text if form == "txt" else "\n".join(rows))
        read = partial(pool_of_texts, base(), file, length=10, progress=False)
        found = read(tokenizer=tokenizer)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        wanted = [[2, *ids[:9]], [2, *ids[9:]]]
        if form == "jsonl":
            wanted.append([2, *tokenizer("the cat", add_special_tokens=False)["input_ids"]])
        assert sorted(found.texts()) == sorted(wanted)
        assert len(read(tokenizer=tokenizer, count=1)) == 1
        with pytest.raises(ValueError, match="needs a tokenizer"):
            read()

    def test_texts_without_tokens_to_predict(self, tmp_path):
        with pytest.raises(ValueError, match="no tokens to predict"):
            pool_of_texts(base(), [[START], []])
        with pytest.raises(ValueError, match="token 99 is not in"):
            pool_of_texts(base(), [[1, 99]])
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"words": "the cat"}))
        with pytest.raises(
            ValueError, match="row 0 needs one of the columns text, sentence, but it has"
        ):
            pool_of_texts(base(), file, tokenizer=make_tokenizer())


def draw_on_ranks(folder):
    rank = torch.distributed.get_rank()
    cache = Path(folder) / ("cache" if rank == 0 else "elsewhere")  # no common disk
    found = drawn(count=3 * BLOCK, cache=cache)
    tensors = {name: getattr(found, name) for name in TENSORS}
    torch.save(tensors | {"sampled": found.sampled}, f"{folder}/{rank}.pt")
    bad = base()
    bad.lm_head.weight.data[:] = float("nan")
    with pytest.raises(ValueError, match="predicts NaN"):
        drawn(bad, cache=False, count=1)  # one block: the other rank has nothing to draw


@pytest.mark.soak
def test_all_ranks_get_the_pool_of_one_process(tmp_path):
    run_on_ranks(2, draw_on_ranks, tmp_path, folder=tmp_path)
    wanted = drawn(count=3 * BLOCK, cache=False)
    for rank in (0, 1):
        assert equal(Pool(**torch.load(tmp_path / f"{rank}.pt")), wanted)
    assert len(list((tmp_path / "cache").rglob("block-*"))) == 6  # rank 0 has all
