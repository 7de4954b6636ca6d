"""A recipe in TRL's SFTTrainer, with packing: a very small language model learns to subtract.

The script pretrains the model on sums, in sentences such as "3 plus 4 is 7". It then fine-tunes the
model on differences, with and without a recipe. The score "retained" is its accuracy on sums.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.sft_config import SFTConfig

from holdfast.hosts.trl import HoldfastSFTTrainer

SUMS = [(f"{a} plus {b} is", str(a + b)) for a in range(10) for b in range(10)]
DIFFERENCES = [(f"{a + b} minus {b} is", str(a)) for a in range(10) for b in range(10)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "plus", "minus", "is", *map(str, range(20))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


Pairs = list[tuple[str, str]]


def tune(model: Any, recipe: str, pairs: Pairs, tokenizer: Any, updates: int, lr: float) -> Any:
    rows = [{"prompt": question, "completion": f" {answer}"} for question, answer in pairs]
    with tempfile.TemporaryDirectory() as folder:
        trainer = HoldfastSFTTrainer(
            model=model,
            recipe=recipe,
            args=SFTConfig(
                folder, max_steps=updates, per_device_train_batch_size=8, learning_rate=lr,
                packing=True, max_length=64, save_strategy="no", report_to=[], disable_tqdm=True,
                use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=10_000,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
    return trainer.model


@torch.no_grad()
def accuracy(model: Any, pairs: Pairs, tokenizer: Any) -> float:
    model.eval()
    ids = torch.tensor([tokenizer(question)["input_ids"] for question, _ in pairs])
    wanted = torch.tensor([tokenizer(answer)["input_ids"][0] for _, answer in pairs])
    found = model(input_ids=ids).logits[:, -1].argmax(-1)
    return 100 * float((found == wanted).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="recadam+flow", help="methods joined by +")
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--pretraining", type=int, default=400, help="updates of the pretraining")
    args = parser.parse_args()

    disable_progress_bars()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.Random(0).shuffle(DIFFERENCES)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    base = tune(LlamaForCausalLM(config), "standard", SUMS, tokenizer, args.pretraining, 3e-3)
    scores = {"before": accuracy(base, SUMS, tokenizer)}
    for name in ("standard", args.recipe):
        plain = LlamaForCausalLM(config)  # without the trainer's changes to the first one
        plain.load_state_dict(copy.deepcopy(base.state_dict()))
        tuned = tune(plain, name, DIFFERENCES, tokenizer, args.updates, 1e-3)
        scores[name] = accuracy(tuned, SUMS, tokenizer)
        print(f"{name}: {accuracy(tuned, DIFFERENCES, tokenizer):.0f} % of the differences")
    print(
        f"retained: before {scores['before']:.0f} %, after {scores[args.recipe]:.0f} % "
        f"(standard {scores['standard']:.0f} %)"
    )


if __name__ == "__main__":
    main()
