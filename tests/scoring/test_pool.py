"""Pools: what they hold, how texts start, the cache, and bad models."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

import transformers

from holdfast._torch.fingerprint import model_fingerprint
from holdfast._torch.teachers import KeptTokens
from holdfast.scoring import blocks, pool
from holdfast.scoring.pool import (
    BLOCK,
    Pool,
    Start,
    default_starts,
    describe_starts,
    draw_pool,
    pool_of_texts,
)
from ranks import run_on_ranks
from small import make_llama, make_tokenizer

START, END = 2, 3
CHAT = "{% for m in messages %}<s> question {{ m['content'] }} </s>{% endfor %}"


def drawn(model=None, count=70, **options):
    """A pool whose texts start with one token, or with three."""
    options = {"prefixes": [([START], 0.5), ([START, 9, 8], 0.5)], "length": 12, "top": 8} | options
    return draw_pool(model or base(), count, **({"progress": False} | options))


def base(**options):
    return make_llama(**({"vocab": 30, "scale": 0.3} | options))


def equal(one, other):
    assert one.path == other.path
    for name in pool._TENSORS:
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    return True


def truth(model, text):
    with torch.no_grad():
        return model.double()(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)


class TestContent:
    def test_a_pool_holds_the_models_distribution_literally(self):
        model = base()
        found = drawn(model)
        assert len(found) == 70
        assert found.drawn == 2
        assert found.starts.tolist() == [1, 3] * 35
        assert len(set(map(tuple, found.texts()))) == 70
        for i, text in enumerate(found.texts()):
            start, table = int(found.starts[i]), truth(model, text)
            assert text[:start] == ([START, 9, 8] if i % 2 else [START])
            assert found.counts[i] == len(text) - start
            assert END not in text[start:-1]
            assert len(text) == 12 or text[-1] == END
            for position in range(start - 1, len(text) - 1):
                place = position - start + 1
                own = float(table[position, text[position + 1]])
                assert float(found.own[i, place]) == pytest.approx(own, abs=1e-4)
                ids = found.ids[i, place].tolist()
                assert ids[:6] == table[position].topk(6).indices.tolist()
                assert not set(ids[:6]) & set(ids[6:])
                kept = table[position, ids]
                assert torch.allclose(found.log_probs[i, place].double(), kept, atol=0.01)
            for name in ("own", "ids", "log_probs"):
                assert not getattr(found, name)[i, int(found.counts[i]) :].any()
            assert not found.tokens[i, len(text) :].any()
        assert int(found.lengths.min()) < 12 <= int(found.lengths.max())

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
        assert len(log_q) == int(found.counts[rows].sum())
        flat = [(i, p) for i, row in enumerate(rows)
                for p in range(int(found.starts[row]) - 1, len(texts[i]) - 1)]  # fmt: skip
        assert batch.where.nonzero().tolist() == [list(pair) for pair in flat]
        assert batch.targets.tolist() == [texts[i][p + 1] for i, p in flat]
        assert torch.allclose(log_q.gather(1, batch.targets[:, None])[:, 0], batch.own, atol=1e-4)
        assert torch.allclose(log_q.gather(1, batch.ids), batch.log_probs, atol=0.01)
        (batch.log_probs.exp() * (batch.log_probs - log_q.gather(1, batch.ids))).sum().backward()

    def test_rounding_to_float16_is_negligible(self):
        """KL(stored ‖ exact) over the likeliest tokens and the rest, at the base's own weights.

        And the weighted log p, where rounding does not cancel within a position.
        """
        model = base(vocab=300)
        found = drawn(model, count=64, top=64)
        batch = found.batch(range(64), "cpu")
        with torch.no_grad():
            exact = model.double()(input_ids=batch.input_ids).logits.log_softmax(-1)[batch.where]
        p, q = (x[:, :48].exp() for x in (batch.log_probs.double(), exact.gather(1, batch.ids)))
        p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, q))
        assert bool((p > 0).all())
        assert float((p * (p / q).log()).sum(1).mean()) < 1e-6
        teacher = KeptTokens(batch.ids, batch.log_probs, found.drawn)
        assert abs(float(teacher.compare(slice(None), exact)[0].mean())) < 1e-4

    def test_4096_texts_take_200_megabytes(self, tmp_path):
        found = drawn(base(limit=128, vocab=100), 64, length=128, top=64, cache=tmp_path,
                      prefixes=[([START], 1.0)])  # fmt: skip
        on_disk = sum(file.stat().st_size for file in found.path.iterdir())
        assert max(found.nbytes, on_disk) * 64 < 210e6

    def test_texts_longer_than_the_model_allows_are_cut(self):
        assert drawn(base(limit=8), length=100).tokens.shape[1] == 8

    def test_a_small_vocabulary_is_kept_whole(self):
        found = drawn(base(vocab=11), top=64)
        assert found.ids.shape[-1] == 11
        assert found.drawn == 0
        assert found.split(8)[1].drawn == 0
        assert torch.allclose(
            found.log_probs[:, 0].float().exp().sum(-1), torch.ones(70), atol=1e-3
        )

    def test_held_out_texts_are_the_last(self):
        found = drawn()
        train, held_out = found.split(8)
        assert train.texts() + held_out.texts() == found.texts()
        assert (len(train), len(held_out)) == (62, 8)
        assert train.drawn == held_out.drawn == 2
        for n in (0, 70, -1):
            with pytest.raises(ValueError, match="cannot be held out"):
                found.split(n)


class TestStarts:
    def test_a_model_that_does_not_write_has_no_start(self):
        with pytest.raises(ValueError, match="Linear does not generate texts"):
            default_starts(torch.nn.Linear(2, 2))

    def test_bos_then_eos_then_the_named_token(self):
        model = base()
        assert default_starts(model) == [Start([START], 1.0)]
        assert default_starts(model, start=7) == [Start([7], 1.0)]
        model.config.bos_token_id = None
        assert default_starts(model) == [Start([END], 1.0)]
        model.config.eos_token_id = None
        with pytest.raises(ValueError, match=r"no BOS or EOS token .* start="):
            default_starts(model)
        assert default_starts(model, start=7) == [Start([7], 1.0)]

    def test_half_of_a_chat_models_texts_start_at_the_users_turn(self):
        tokenizer = make_tokenizer(chat_template=CHAT)
        question = tokenizer.convert_tokens_to_ids("question")
        starts = default_starts(base(), tokenizer)
        assert starts == [Start([START], 0.5), Start([START, question], 0.5, ends=2)]
        shown = describe_starts(starts, tokenizer)
        assert shown == "50 % of the texts start with '<s>', 50 % with '<s> question'"
        assert describe_starts(default_starts(base())) == "all texts start with token 2"

    def test_a_system_turn_before_it_belongs_to_the_start(self):
        tokenizer = make_tokenizer(chat_template="<s> the dog " + CHAT)
        text = tokenizer.decode(default_starts(base(), tokenizer)[1].tokens)
        assert text == "<s> the dog <s> question"

    @pytest.mark.parametrize(
        "template",
        [
            "{{ raise_exception('no') }}",
            "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
            "{% for m in messages %}{{ m['content'] }} and {{ m['content'] }}{% endfor %}",
            "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "{% for",
            None,
        ],
    )
    def test_other_templates_leave_bos_alone(self, template):
        tokenizer = make_tokenizer(chat_template=template)
        assert default_starts(base(), tokenizer) == [Start([START], 1.0)]

    @pytest.mark.parametrize(
        ("template", "end", "ends"),
        [
            (CHAT, END, 2),
            (CHAT, [END, 5], 2),
            (CHAT, 5, 1),
            (CHAT.replace("</s>", "the"), END, 1),
            (CHAT.replace("</s>", "</s> the </s>"), END, 3),
        ],
    )
    def test_a_chat_ends_with_the_answer(self, template, end, ends):
        """The user's message has as many end tokens as the template gives it."""
        model = base()
        model.generation_config.eos_token_id = end
        starts = default_starts(model, make_tokenizer(chat_template=template))
        assert [start.ends for start in starts] == [1, ends]

    def test_a_chat_goes_on_to_the_answers_end(self):
        model = base(vocab=10)
        found = drawn(model, prefixes=[Start([START], 0.5), Start([START, 9, 8], 0.5, 2)])
        for i, text in enumerate(found.texts()):
            ends, start, table = 1 + i % 2, int(found.starts[i]), truth(model, text)
            assert text[start:-1].count(END) < ends
            assert len(text) == 12 or (text[-1] == END and text[start:].count(END) == ends)
            own = table[range(start - 1, len(text) - 1), text[start:]].float()
            assert torch.allclose(found.own[i, : len(own)], own, atol=1e-4)
            kept = table[start - 1 : -1].gather(1, found.ids[i, : len(own)].long()).float()
            assert torch.allclose(found.log_probs[i, : len(own)].float(), kept, atol=0.01)
        assert sum(text[3:].count(END) == 2 for text in found.texts()[1::2]) > 5

    def test_shares_hold_in_every_part(self):
        prefixes = [([START], 0.7), ([4, 5], 0.2), ([6], 0.1)]
        found = drawn(prefixes=prefixes, count=130)
        for part in (found.texts()[:20], found.texts()[37:67], found.texts()):
            for first, share in (([START], 0.7), ([4, 5], 0.2), ([6], 0.1)):
                hits = sum(text[: len(first)] == first for text in part)
                assert abs(hits - share * len(part)) <= 2

    @pytest.mark.parametrize(
        ("prefixes", "message"),
        [
            ([], "at least one start"),
            ([([], 1.0)], "at least one token"),
            ([([1], 0.5)], "add up to 1"),
            ([([1], 1.0), ([2], 0.0)], "share above 0"),
            ([([30], 1.0)], "token 30 is not in the model's vocabulary of 30"),
            ([([1] * 12, 1.0)], "leaves nothing to draw"),
        ],
    )
    def test_wrong_starts(self, prefixes, message):
        with pytest.raises(ValueError, match=message):
            drawn(prefixes=prefixes)


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
        "change", ["weights", "seed", "length", "top", "prefixes", "ends", "end", "base", "dtype"]
    )
    def test_other_weights_or_settings_are_drawn_anew(self, change, monkeypatch):
        drawn(count=5)
        model, options = base(), {}
        if change == "weights":
            model.lm_head.weight.data[0, 0] += 1e-3
        elif change == "dtype":
            model, options = model.bfloat16(), {"base": model_fingerprint(base())}
        elif change == "end":
            model.generation_config.eos_token_id = [3, 5]
        elif change == "ends":
            options["prefixes"] = [Start([START], 0.5), Start([START, 9, 8], 0.5, ends=2)]
        else:
            options[change] = {"seed": 1, "length": 11, "top": 7, "base": "other",
                               "prefixes": [([4], 1.0)]}[change]  # fmt: skip
        monkeypatch.setattr(pool.Drawer, "__call__", None)
        with pytest.raises(TypeError):
            drawn(model, 5, **options)

    def test_a_larger_pool_extends_a_smaller_one(self, monkeypatch):
        small = drawn(count=BLOCK + 6)
        made, call = [], pool.Drawer.__call__
        monkeypatch.setattr(
            pool.Drawer,
            "__call__",
            lambda *args, **options: made.append(len(args[2])) or call(*args, **options),
        )
        large = drawn(count=3 * BLOCK)
        assert large.texts()[: BLOCK + 6] == small.texts()
        assert sum(made) == BLOCK  # only the third block

    def test_a_killed_draw_continues_with_the_finished_blocks(self, monkeypatch):
        whole = drawn(count=4 * BLOCK)
        files = sorted(whole.path.glob("block-*"))
        assert len(files) == 4
        files[-1].unlink()
        files[1].unlink()
        made, noise = [], pool._noise
        monkeypatch.setattr(pool, "_noise", lambda *args: made.append(args[1]) or noise(*args))
        assert equal(drawn(count=4 * BLOCK), whole)
        assert made == [1, 3]

    @pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
    def test_a_damaged_file_is_drawn_again(self, damage):
        whole = drawn()
        file = sorted(whole.path.glob("block-*"))[0]
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[-100] ^= 1
        file.write_bytes(content[:-5] if damage == "cut" else content if damage == "flip" else b"")
        with pytest.warns(UserWarning, match="block-000000.* damaged"):
            assert equal(drawn(), whole)
        assert equal(drawn(), whole)  # it has been replaced

    @pytest.mark.parametrize("after", [0, 1])
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
        assert found.texts() == wanted.texts()
        monkeypatch.setattr(blocks, "save_file", save)
        assert drawn(count=3 * BLOCK).texts() == wanted.texts()  # and the draw continues later

    def test_the_files_can_be_found_and_read(self, tmp_path):
        found = drawn(cache=tmp_path)
        assert found.path.parent == tmp_path / "pools"
        assert json.loads((found.path / "about.json").read_text()) == dict(found.about)
        assert str(found.path) in repr(found)

    def test_fewer_texts_than_asked_for(self):
        seconds = []

        def fewer(expected):
            seconds.append(expected)
            return BLOCK + 1

        found = drawn(count=5 * BLOCK, fewer=fewer)
        assert len(found) == 2 * BLOCK  # whole blocks
        assert len(seconds) == 1
        assert seconds[0] > 0
        assert len(drawn(count=5 * BLOCK, fewer=lambda _: None)) == 5 * BLOCK
        assert len(drawn(count=5 * BLOCK, fewer=fewer)) == 5 * BLOCK  # all are known by now
        assert len(seconds) == 1


class TestBadModels:
    def test_nan(self):
        model = base()
        model.lm_head.weight.data[5] = float("nan")
        with pytest.raises(ValueError, match="LlamaForCausalLM predicts NaN"):
            drawn(model)

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

    def test_the_callers_precision_has_no_effect(self):
        wanted = drawn(cache=False)
        with torch.autocast("cpu", torch.bfloat16):
            assert equal(drawn(cache=False), wanted)

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
        made = drawn(model, prefixes=[([START], 1.0)])
        found = pool_of_texts(model, made.texts(), length=12, top=8, progress=False)
        assert found.texts() == made.texts()
        assert found.drawn == made.drawn == 2
        assert torch.equal(found.ids[..., :6], made.ids[..., :6])
        assert torch.allclose(found.own, made.own, atol=1e-4)
        for i, text in enumerate(found.texts()):  # the tokens that were drawn differ
            kept = truth(model, text)[:-1].gather(1, found.ids[i, : len(text) - 1].long()).float()
            assert torch.allclose(found.log_probs[i, : len(kept)].float(), kept, atol=0.01)
        assert found.starts.unique().tolist() == [1]
        assert found.path != made.path

    def test_which_tokens_are_kept_depends_on_the_number_of_a_text(self):
        """Not on the texts beside it, and equal texts keep others."""
        read = partial(pool_of_texts, base(), length=12, top=8, progress=False)
        text, longer = [2, 4, 5, 6], [2, 7, 8, 9, 4, 5]
        found = read([text] * (2 * BLOCK)).ids[..., 6:].flatten(1)
        assert len(found.unique(dim=0)) > BLOCK
        beside = read([text, *[longer] * BLOCK, text]).ids[:, : len(text) - 1, 6:].flatten(1)
        assert torch.equal(beside[[0, -1]], found[[0, BLOCK + 1]])

    def test_they_are_cached_by_content(self, monkeypatch):
        model, rows = base(), [[2, 4, 5], [6, 7]] * 50
        first = pool_of_texts(model, rows, progress=False)
        assert len(first) == 100
        monkeypatch.setattr(pool, "_predictions", None)
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
        more = [tokenizer("the cat", add_special_tokens=False)["input_ids"]]
        assert found.texts() == [ids[:10], ids[10:]] + (more if form == "jsonl" else [])
        assert len(read(tokenizer=tokenizer, count=1)) == 1
        with pytest.raises(ValueError, match="needs a tokenizer"):
            read()

    def test_texts_without_predictions(self, tmp_path):
        with pytest.raises(ValueError, match="at least two tokens"):
            pool_of_texts(base(), [[1], [2]])
        with pytest.raises(ValueError, match="token 99 is not in"):
            pool_of_texts(base(), [[1, 99]])
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"words": "the cat"}))
        with pytest.raises(ValueError, match="needs a column text, but it has words"):
            pool_of_texts(base(), file, tokenizer=make_tokenizer())


def draw_on_ranks(folder):
    rank = torch.distributed.get_rank()
    cache = Path(folder) / ("cache" if rank == 0 else "elsewhere")  # no common disk
    found = drawn(count=3 * BLOCK, cache=cache)
    torch.save({name: getattr(found, name) for name in pool._TENSORS}, f"{folder}/{rank}.pt")
    limited = drawn(
        count=4 * BLOCK, seed=1, cache=False, fewer=lambda _: 2 * BLOCK if rank == 0 else 9
    )
    assert len(limited) == 2 * BLOCK
    bad = base()
    bad.lm_head.weight.data[:] = float("nan")
    with pytest.raises(ValueError, match="predicts NaN"):
        drawn(bad, cache=False, count=1)  # one block: the other rank has nothing to draw


@pytest.mark.soak
def test_all_ranks_get_the_pool_of_one_process(tmp_path):
    run_on_ranks(2, draw_on_ranks, tmp_path, folder=tmp_path)
    wanted = drawn(count=3 * BLOCK, cache=False)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert equal(Pool(**found), wanted)
    assert len(list((tmp_path / "cache").rglob("block-*"))) == 3  # rank 0 has all
