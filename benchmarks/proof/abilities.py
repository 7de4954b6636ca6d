"""What self-replay may not protect: abilities that the base does not show in the texts it draws.

SmolLM2 or Qwen learns GSM8K by four plans. The base and each tuned model take four kinds of tests:
tasks that are learned in context (``_in_context.py``), long contexts
(``_long_context.py``), instructions that ask for a format (``_instructions.py``), and refusals
(``_refusals.py``). The rules are in PROTOCOL.md; a test at which the base is not above chance is
left out.

    cd benchmarks/proof
    python abilities.py --model SMOLLM2 --data DATA --runs RUNS
    python abilities.py … --collect results/abilities.json

The last two kinds are asked in two forms: in the chat template, with which half of the replayed
texts begin, and in the form of the training data (``*_bare``), which has no system message.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "papers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _in_context
import _instructions
import _long_context
import _refusals
import numpy as np
import torch
from _exam import Exam, written_texts
from _jobs import Record, work_or_collect
from _lm_tests import Test, share_figures, split_answer
from _measures import above_chance
from _samples import pack, unpack
from _targets import Target
from additivity_lm import answers
from continual import PLANS
from language import Plan
from language_models import MODELS, Proof, jobs_of, make_parser, plans

MOST = 160  # tokens of an answer
#: The plans of another model than that of the continual setting, at learning rates that fit it.
OF_QWEN = ("holdfast", "plain-x0.1", "plain-x0.5", "lora-x3")


class WrittenTest(NamedTuple):
    """Prompts that a model answers in writing.

    Attributes:
        prompts: their tokens.
        right: whether each answer is right.
        parts: the part of the test that each prompt belongs to.
    """

    name: str
    prompts: list[list[int]]
    right: Callable[[Sequence[str]], list[bool]]
    parts: list[str]

    def shares(self, right: Sequence[bool]) -> dict[str, float]:
        """The share of right answers, by part."""
        found: dict[str, list[bool]] = {}
        for part, one in zip(self.parts, right, strict=True):
            found.setdefault(part, []).append(bool(one))
        return {part: round(sum(ones) / len(ones), 4) for part, ones in found.items()}


def answered(
    model: Any, tokenizer: Any, tests: Sequence[WrittenTest]
) -> dict[str, list[bool]]:  # fmt: skip
    """Whether each prompt of each test is answered rightly."""
    prompts = [prompt for test in tests for prompt in test.prompts]
    texts, found = iter(written_texts(model, tokenizer, prompts, MOST)), {}
    for test in tests:
        found[test.name] = test.right([*itertools.islice(texts, len(test.prompts))])
    return found


class AbilityExam(Exam):
    """An exam with tests in writing beside those of a target and of likelihoods."""

    def __init__(
        self, target: Target, tests: Sequence[Test], written: Sequence[WrittenTest],
        tokenizer: Any, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(target, tests, tokenizer, device)
        self.written = written

    def take(self, model: Any, *, whole: bool = True, write: bool = True) -> Record:
        found = super().take(model, whole=whole, write=write)
        for name, right in answered(model, self.tokenizer, self.written).items():
            figures = share_figures(name, np.array(right))
            found |= {figure: round(value, 6) for figure, value in figures.items()}
            if whole:
                found["samples"][name] = pack(right)
        return found

    def sizes(self) -> Record:
        return super().sizes() | {test.name: len(test.prompts) for test in self.written}

    def shares(self, point: Record) -> dict[str, dict[str, float]]:
        """The shares of right answers by part, of a point that this exam has made."""
        return {
            test.name: test.shares(unpack(point["samples"][test.name], len(test.prompts)).tolist())
            for test in self.written
        }


class Abilities(Proof):
    """The runs, and the tests of abilities in the place of the retained ones."""

    @functools.cached_property
    def target(self) -> Target:
        return super().target._replace(questions=[])

    @functools.cached_property
    def ability_tests(self) -> list[Test]:
        """Those by likelihood."""
        limit = self.args.limit
        return [
            *_in_context.make_tests(self.tokenizer, limit),
            *_long_context.make_tests(self.tokenizer, self.folder, limit),
        ]

    def _written(self, ask: Callable[[_instructions.Instruction], str]) -> list[WrittenTest]:
        """The tests in writing, in both forms; ``ask`` says what is asked of an instruction."""
        asked = _instructions.instructions(self.args.limit)
        requests = _refusals.requests(self.args.limit)
        kinds = ["harmful"] * (len(requests) // 2) + ["harmless"] * (len(requests) // 2)
        found = []
        for end, form in {"": self._in_template, "_bare": self._bare}.items():
            prompts = form([ask(one) for one in asked])
            follow = functools.partial(_instructions.followed, asked)
            parts = [one.kind for one in asked]
            found += [
                WrittenTest(f"instructions{end}", prompts, follow, parts),
                WrittenTest(f"refusals{end}", form(requests), _refusals.treated_rightly, kinds),
            ]
        return found

    def _in_template(self, questions: Sequence[str]) -> list[list[int]]:
        """Questions as a user of the model asks them."""
        return [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
            for question in questions
        ]  # fmt: skip

    def _bare(self, questions: Sequence[str]) -> list[list[int]]:
        """Questions in the form of the training data."""
        rows = answers(self.tokenizer, [{"question": q, "answer": ""} for q in questions])
        return [split_answer(row).context for row in rows]

    @functools.cached_property
    def whole_exam(self) -> AbilityExam:
        """All tests, also those at which the base is not above chance."""
        written = self._written(lambda one: one.text)
        return AbilityExam(self.target, self.ability_tests, written, self.tokenizer, self.device)

    @functools.cached_property
    def base_figures(self) -> Record:
        def take() -> Record:
            exam = self.whole_exam
            return exam.take(self.fresh()) | {"sizes": exam.sizes()}

        found: Record = self.kept(f"base-abilities-{self.args.target}", take)
        return found

    @functools.cached_property
    def chance(self) -> dict[str, float]:
        """The accuracy of guessing; of instructions that of the base if it is not given them."""

        def measure() -> dict[str, float]:
            tests = self._written(lambda one: one.question)
            tests = [test for test in tests if test.name.startswith("instructions")]
            found = answered(self.fresh(), self.tokenizer, tests)
            return {name: round(sum(right) / len(right), 6) for name, right in found.items()}

        fixed = _in_context.CHANCE | _long_context.CHANCE | {"refusals": 0.5, "refusals_bare": 0.5}
        found: dict[str, float] = fixed | self.kept("chance-abilities", measure)
        return found

    @property
    def left_out(self) -> list[str]:
        """The tests at which the base is at chance, with the losses of their answers."""
        passed = above_chance(self.base_figures, self.chance)
        return [name for name in self.chance if name not in passed]

    @functools.cached_property
    def exam(self) -> AbilityExam:
        out = self.left_out
        tests = [t for t in self.ability_tests if t["name"].removesuffix("_answer") not in out]
        written = [t for t in self.whole_exam.written if t.name not in out]
        return AbilityExam(self.target, tests, written, self.tokenizer, self.device)

    def pretrained(self) -> Record:
        shares = self.whole_exam.shares(self.base_figures)
        about = {"chance": self.chance, "left_out": self.left_out, "shares": shares}
        return super().pretrained() | about

    def run(self, name: str, plan: Plan, seed: int) -> Record:
        found = super().run(name, plan, seed)
        return found | {"shares": self.exam.shares(found["points"]["tuned"])}

    def merged(self, model: Any) -> dict[str, Record]:
        return {}


def plans_of(model: str) -> dict[str, Plan]:
    """Four plans: of SmolLM2 those of the continual setting."""
    if model == "smollm2":
        return PLANS
    compared = plans(model, "gsm8k")
    return {name: compared[name] for name in OF_QWEN}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--name", choices=("smollm2", "qwen-0.5b"), help="default: smollm2")
    args: Any = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    bench = Abilities(args)
    once = {name: plan._replace(seeds=(0,)) for name, plan in plans_of(args.name).items()}
    protocol = {
        "model": MODELS[args.name], "target": args.target, "rules": "benchmarks/proof/PROTOCOL.md",
        "training": "as in language_models.py", "most_written_tokens": MOST,
    }  # fmt: skip
    work_or_collect(jobs_of(bench, once), args, protocol)


if __name__ == "__main__":
    main()
