"""The tests of abilities: their rows, the programs that check answers, and a run of all."""

import gzip
import importlib
import itertools
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from holdfast import Recipe
from holdfast.builtin import MODEL, RETAINED

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


pytestmark = pytest.mark.usefixtures("proof_scripts")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


KEEPS_TO = {
    "three_points": ["Sure:\n- a\n- b\n* c", "1. One\n2. Two\n\n3) Three\n"],
    "five_numbers": ["Here:\n" + "\n".join(f"{n}. fact" for n in range(1, 6))],
    "json": [
        '{"name": "Moon", "description": "a rock"}',
        '```json\n{\n  "name": "Moon",\n  "description": "a rock"\n}\n```',
    ],
    "spanish": ["La luna es un satélite y una luz para los marineros."],
    "beginning": ["In short, dogs are loyal.", '"In short", it is wet.'],
    "word": ["The History of bread is long."],
    "sentence": ["Dogs are loyal animals.", 'She said "dogs are loyal."'],
    "question": ["Why do dogs bark at night?"],
    "yes_or_no": ["Yes.", " no"],
    "quotes": ['"Rain falls from clouds."', "“Rain falls from clouds.”"],
    "title": ["The Moon: A Short History", '"Why We Love Cheese"', "# Bread & Butter"],
    "letter": ["Dear Anna,\n\nthe train was late."],
    "verse": ["The rain comes down\nThe roofs are wet\nWe sit inside\nAnd do not fr"],
}
BREAKS = {
    "three_points": ["- a\n- b", "- a\n- b\n- c\n- d", "a, b and c"],
    "five_numbers": ["1. a\n2. b\n3. c\n4. d", "1. a\n1. b\n1. c\n1. d\n1. e"],
    "json": ['{"name": "Moon"}', 'Sure: {"name": "a", "description": "b"}', "[1]", "name: Moon"],
    "spanish": ["The moon is a satellite.", "Lune est le satellite de la terre.", "es"],
    "beginning": ["Dogs are loyal, in short.", ""],
    "word": ["It is prehistory.", "A historic bread."],
    "sentence": ["Dogs bark. They are loyal.", "Dogs are loyal animals", "Dogs\nare loyal to us."],
    "question": ["Dogs are loyal animals.", "Good idea! Why do dogs bark at night?"],
    "yes_or_no": ["Yes, they do.", "Maybe", ""],
    "quotes": ["Rain falls.", 'He said "rain" and left.', '"Rain" and "snow"'],
    "title": [
        "The moon is a rock.", "def moon(x): return x", "A title\nand more", " ".join(["A"] * 16),
    ],
    "letter": ["Hello Anna,", "Here is a letter:\nDear Anna,"],
    "verse": [
        "Rain falls.", "def rain(x):\n    if x:\n        return 1\n    return 0\n",
        "\n".join(["The rain comes down and down and down and down and down and down"] * 5),
    ],
}  # fmt: skip


def test_programs_check_the_formats():
    formats = importlib.import_module("_instructions").FORMATS
    assert {*formats} == {*KEEPS_TO} == {*BREAKS}
    for kind, (_, check) in formats.items():
        for answer in KEEPS_TO[kind]:
            assert check(answer), (kind, answer)
        for answer in BREAKS[kind]:
            assert not check(answer), (kind, answer)


def test_no_answer_keeps_to_most_formats():
    """An answer to the question alone, a program and no answer are all far from the formats."""
    formats = importlib.import_module("_instructions").FORMATS
    program = "def total(xs):\r\n  count = 0\r\n  for x in xs:\r\n    count += x\r\n  return count"
    for answer in (program, "", "Dogs bark. " * 30):
        assert not [kind for kind, (_, check) in formats.items() if check(answer)]


def test_refusals_are_told_from_answers():
    refusals = importlib.import_module("_refusals")
    for answer in (
        "I'm sorry, but I can't assist with that.", "I cannot help you with this request.",
        "As an AI, I don't support that.", "Picking a lock: it is illegal to enter a house.",
    ):  # fmt: skip
        assert refusals.refuses(answer), answer
    for answer in (
        "I'm sorry to hear that you are ill.", "Choose a lock with a bolt.", "",
        "1. Ask your neighbour.", "x" * 300 + " I can't",
    ):  # fmt: skip
        assert not refusals.refuses(answer), answer
    asked = refusals.requests(2)
    assert asked == [pair[kind] for kind in (0, 1) for pair in refusals.PAIRS[:2]]
    answers = ["I can't.", "Take a pin.", "I can't.", "Take a bus."]
    assert refusals.treated_rightly(answers) == [True, False, False, True]
    assert len({*refusals.requests()}) == 2 * len(refusals.PAIRS)


def test_the_right_answer_stands_beside_wrong_ones_of_its_form(tokenizer):
    tasks = importlib.import_module("_in_context")
    rng = random.Random(1)
    for name, (make, chance) in tasks.TASKS.items():
        prompt, right, wrong = make(rng)
        assert right not in wrong
        assert 1 / (1 + len(wrong)) == chance
        assert {len(answer) for answer in (right, *wrong)} == {
            len(right)
        } or name == "reversal_words"
    shown, _, asked = tasks.rot13(random.Random(2))[0].rpartition("\n")
    shown = [line.split(" -> ") for line in shown.split("\n")]
    assert all(tasks._rot13(word) == code for word, code in shown)
    prompt, right, _ = tasks.reversal_words(random.Random(2))
    assert prompt.rpartition("\n")[2].removesuffix(" ->").split()[::-1] == right.split()
    made = {test["name"]: test for test in tasks.make_tests(tokenizer, limit=5)}
    assert {name for name in made if not name.endswith("_answer")} == {*tasks.CHANCE}
    lookup, answer = made["lookup"], made["lookup_answer"]["requests"][1]
    first = lookup["sizes"][0]
    assert lookup["requests"][first + lookup["labels"][1]] == answer
    assert len({*lookup["labels"]}) > 1
    context, [target] = made["copy"]["requests"][0]
    random_tokens, again = context[1 : tasks.COPIED + 1], context[tasks.COPIED + 1 :]
    assert random_tokens[: len(again) + 1] == [*again, target]


def test_parts_of_a_window_and_far_requests():
    long = importlib.import_module("_long_context")
    from holdfast.io.encoding import Continuation

    window = Continuation([0], [*range(1, 1025)])
    parts = [long.part(window, a, b) for a, b in itertools.pairwise(long.PARTS)]
    assert [token for part in parts for token in part.target] == window.target
    assert [len(part.context) for part in parts] == [1, 129, 257, 513]
    short = [Continuation([5] * n, [7]) for n in (3, 80)]
    for request, moved in zip(short, long.far(short, range(9000), [1, 1]), strict=True):
        assert len(moved.context) + len(moved.target) == 1025  # the last token is no input
        assert moved.context[-len(request.context) - 2 :] == [1, 1, *request.context]
        assert moved.target == request.target


def test_an_own_solution_is_taken_if_its_last_number_is_right():
    rewritten = importlib.import_module("_rewritten")
    given = "He has 1,000 + 10 = <<1000+10=1010>>1010 coins.\n#### 1010"
    assert rewritten.chosen(given, "1000 and 10 are 1,010.") == "1000 and 10 are 1,010.\n#### 1010"
    assert rewritten.chosen(given, "1010 less 10 is 1000.") == given
    assert rewritten.chosen(given, "I do not know.") == given
    assert rewritten.chosen(given, "#### 1010") == "1010\n#### 1010"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An untrained model with a chat template, and a few rows of the data."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    own = AutoTokenizer.from_pretrained(MODEL)
    own.add_tokens(["<|im_end|>"], special_tokens=True)
    own.chat_template = TEMPLATE
    own.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(own), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=1100, bos_token_id=0, eos_token_id=1,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    data = folder / "data" / "lm"
    data.mkdir(parents=True)
    prose = gzip.decompress(RETAINED["prose"].read_bytes())
    for part in ("test", "valid"):
        (data / f"wikitext2-{part}.txt.gz").write_bytes(gzip.compress(prose))
    words = prose.decode().split()
    rows = [{"text": " ".join(words[i : i + 40])} for i in range(0, 400, 40)]
    problems = [
        {
            "text": f"Add {n}.", "code": f"def add(x): return x + {n}", "test_setup_code": "",
            "test_list": [f"assert add(0) == {n}"],
        }
        for n in range(604)
    ]  # fmt: skip
    for name, lines in {"lambada-test": rows, "mbpp": problems}.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (data / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_the_base_and_a_tuned_model_take_the_tests(small, tmp_path, monkeypatch):
    abilities = importlib.import_module("abilities")
    monkeypatch.setattr(abilities, "MOST", 4)
    args = SimpleNamespace(
        model=small / "model", data=small / "data", runs=tmp_path, collect=None, target="mbpp",
        name="smollm2", samples=32, limit=2,
    )  # fmt: skip
    bench = abilities.Abilities(args)
    # As if it were above chance in two tests, so that a tuned model takes them.
    bench.chance = dict.fromkeys(bench.chance, 1.0) | {"lookup": -2.0, "refusals": -2.0}
    base = bench.pretrained()
    figures, sizes = base["points"]["base"], base["points"]["base"]["sizes"]
    assert {*base["chance"]} <= {*figures}
    assert {*base["chance"]} <= {*sizes}
    assert sizes["refusals"] == 4
    assert figures["refusals"] == 0.5  # it refuses nothing
    assert base["shares"]["refusals"] == {"harmful": 0.0, "harmless": 1.0}
    assert {*base["shares"]["instructions"].values()} == {0.0}
    assert {*figures["samples"]} == {*sizes} - {"written"}
    titles = importlib.import_module("_markdown").SPEC["proof"]
    retained = importlib.import_module("_measures").retained
    assert {name for name in figures if retained(name)} <= {*titles["tests"]}
    assert {part for shares in base["shares"].values() for part in shares} == {*titles["parts"]}
    found = bench.run("plain-x1", abilities.PLANS["plain-x1"], 0)
    tuned = found["points"]["tuned"]
    assert [*found["points"]] == ["tuned"]
    assert {name for name in tuned if name in base["chance"]} == {"lookup", "refusals"}
    assert np.isfinite(tuned["lookup_answer_nll"])
    assert "rot13_answer_nll" not in tuned
    assert tuned["report_nll"] < figures["report_nll"]
    assert found["shares"]["refusals"] == {"harmful": 0.0, "harmless": 1.0}


def test_a_multiple_of_the_learning_rate_that_holdfast_has(small, tmp_path):
    models, language = map(importlib.import_module, ("language_models", "language"))
    args = SimpleNamespace(
        model=small / "model", data=small / "data", runs=tmp_path, collect=None, target="mbpp",
        name="smollm2", samples=32, limit=2,
    )  # fmt: skip
    bench = models.Proof(args)
    default = language.default_lr(1, size=language.TrainingSize(32, 3))
    _, about = bench.trained(language.Plan(models.HOLDFAST, None, times=2.0), 0)
    assert about["lr"] == 2 * default
    _, about = bench.trained(language.Plan(Recipe(), 2.0), 0)
    assert about["lr"] == 2 * models.RATES["smollm2"]


def test_texts_of_the_embedded_model_are_those_of_its_own_tokenizer(small, tmp_path, monkeypatch):
    ablations = importlib.import_module("ablations")
    monkeypatch.setitem(ablations.DRAWN, "texts-embedded", (1.0, 4, "embedded", "both"))
    args = SimpleNamespace(
        model=small / "model", data=small / "data", runs=tmp_path, collect=None, target="mbpp",
        name="smollm2", samples=32, limit=2,
    )  # fmt: skip
    bench = ablations.Ablations(args)
    bench.draw("texts-embedded")
    lines = (bench.prepared / "texts-embedded.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert 0 < len(texts) <= 4
    assert not any("<|" in text for text in texts)
    assert sum(" the " in text for text in texts)  # it was trained, unlike the model of the run


def test_a_saturated_base_has_few_plans():
    models = importlib.import_module("language_models")
    assert [*models.plans("qwen-0.5b", "mbpp")] == [
        "holdfast", *(f"plain-x{rate}" for rate in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2))
    ]  # fmt: skip
    assert "lora-x6" in models.plans("qwen-0.5b", "gsm8k")


def test_all_plans_have_titles():
    models, text = map(importlib.import_module, ("language_models", "_markdown"))
    for plan in [*models.plans("smollm2", "gsm8k"), *models.plans("qwen-0.5b", "shakespeare")]:
        assert plan.partition("-x")[0] in text.SPEC["proof"]["rows"]
