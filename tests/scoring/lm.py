"""A small causal LM and real text for it."""

import gzip
import json

import torch

from holdfast import score


def byte_tokens(text, limit=256):
    return list(text.encode()[:limit])


def small_llama(seed=0, vocab=258, tie=False):
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            tie_word_embeddings=tie, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()


def gsm8k(folder, n, prompt_masked=True):
    """Real questions and answers as byte tokens; the answer is the target."""
    rows = []
    with gzip.open(folder / "lm" / "gsm8k-train.jsonl.gz", "rt") as lines:
        for line in lines:
            row = json.loads(line)
            question, answer = byte_tokens(row["question"], 120), byte_tokens(row["answer"], 100)
            labels = [-100] * len(question) + answer if prompt_masked else question + answer
            rows.append({"input_ids": question + answer, "labels": labels})
            if len(rows) == n:
                return rows
    return rows


def literal_token_losses(model, row):
    """One sample alone, float64, position by position."""
    model = model.double()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
    model.float()
    losses = []
    for t in range(1, len(row["labels"])):
        label = row["labels"][t]
        if label != -100:
            shifted = logits[t - 1] - logits[t - 1].max()
            losses.append(float(shifted.exp().sum().log() - shifted[label]))
    return losses


def quiet(model, data, **options):
    """Score without a progress bar and, unless asked for, without a cache."""
    return score(model, data, **({"progress": False, "cache": False} | options))


def dataset(rows):
    import datasets

    return datasets.Dataset.from_list(rows)
