"""How drawn texts start: BOS, EOS, a named token, the place of a user's first message."""

import types

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast.scoring.starts import Start, default_starts, describe_starts
from small import make_llama, make_tokenizer

START, END = 2, 3
CHAT = "{% for m in messages %}<s> question {{ m['content'] }} </s>{% endfor %}"


def base():
    return make_llama(vocab=30)


def test_a_model_that_does_not_generate_has_no_start():
    with pytest.raises(ValueError, match="Linear does not generate texts"):
        default_starts(torch.nn.Linear(2, 2))


def test_bos_then_eos_then_the_named_token():
    model = base()
    assert default_starts(model) == [Start([START])]
    assert default_starts(model, start=7) == [Start([7])]
    model.config.bos_token_id = None
    assert default_starts(model) == [Start([END])]
    model.config.eos_token_id = None
    with pytest.raises(ValueError, match=r"no BOS or EOS token .* start="):
        default_starts(model)
    assert default_starts(model, start=7) == [Start([7])]


@pytest.mark.parametrize("wrapped", [False, True])
def test_half_of_a_chat_models_texts_start_at_the_users_turn(wrapped):
    """Also with a processor around the tokenizer, whose output has other dimensions."""
    inner = make_tokenizer(chat_template=CHAT)
    tokenizer = types.SimpleNamespace(tokenizer=inner) if wrapped else inner
    question = inner.convert_tokens_to_ids("question")
    starts = default_starts(base(), tokenizer)
    assert starts == [Start([START]), Start([START, question], ends=2)]
    shown = describe_starts(starts, tokenizer)
    assert shown == "half of the texts start with '<s>', half with '<s> question'"
    assert describe_starts(default_starts(base())) == "all texts start with the tokens [2]"


def test_a_system_turn_before_it_belongs_to_the_start():
    tokenizer = make_tokenizer(chat_template="<s> the dog " + CHAT)
    text = tokenizer.decode(default_starts(base(), tokenizer)[1].tokens)
    assert text == "<s> the dog <s> question"


@pytest.mark.parametrize(
    "date", ["{{ strftime_now('%d %b %Y') }}", '{% set x = strftime_now("%Y") %}{{ x }}']
)
def test_the_date_of_a_template_is_fixed(date):
    """Texts that start with the date would be drawn again every day."""
    shown = "26 Jul 2024" if "%d" in date else "2024"
    both = [make_tokenizer(chat_template=f"<s> {x} " + CHAT) for x in (date, shown)]
    for tokenizer in both:
        tokenizer.add_tokens(["2024", "26", "Jul"])
    assert default_starts(base(), both[0]) == default_starts(base(), both[1])
    assert "2024" in both[0].decode(default_starts(base(), both[0])[1].tokens)


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
def test_other_templates_leave_bos_alone(template, caplog):
    tokenizer = make_tokenizer(chat_template=template)
    assert default_starts(base(), tokenizer) == [Start([START])]
    assert ("no drawn text starts like a chat" in caplog.text) == (template is not None)


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
def test_a_chat_ends_with_the_answer(template, end, ends):
    """The user's message has as many end tokens as the template gives it."""
    model = base()
    model.generation_config.eos_token_id = end
    starts = default_starts(model, make_tokenizer(chat_template=template))
    assert [start.ends for start in starts] == [1, ends]


def test_a_long_system_message_leaves_no_room_for_chats(caplog):
    tokenizer = make_tokenizer(chat_template=CHAT)
    assert len(default_starts(base(), tokenizer, length=4)) == 2
    assert default_starts(base(), tokenizer, length=3) == [Start([START])]
    assert "no drawn text starts like a chat" in caplog.text
