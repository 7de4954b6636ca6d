"""Pretrain the language model that `holdfast compare` runs on when it is given none.

    python benchmarks/embedded/pretrain.py --corpus corpus.jsonl.xz

A Llama of a few million parameters learns prose, verse and code in equal parts, from the corpus
that corpus.py gathered, with a byte-level BPE tokenizer of its own. The weights are saved in
bfloat16 beside the tokenizer. A GPU takes minutes; `--tokens 1e6` is a trial on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from corpus import REPOSITORY, Chunk, load
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _common import default_device, write_results

KINDS = ("prose", "verse", "code")
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
CONTEXT = 256
#: What the tokenizer joins: words, single digits and signs, each with the space before it.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(corpus: Sequence[Chunk], vocabulary: int, characters: int = 3_000_000) -> Any:
    """A byte-level BPE in which each digit is a token, from as much text of each kind.

    It begins a text with BOS, as the rows that the model is trained on do.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    texts = []
    for kind in KINDS:
        some = [chunk.text for chunk in corpus if chunk.kind == kind]
        step = -(-sum(map(len, some)) // characters)
        texts += some[::step]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """In the form that old and new versions of transformers read."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_model(tokenizer: Any, hidden: int, layers: int) -> Any:
    """A Llama with heads of 32, random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """The texts one after another, each with EOS behind it."""
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for some in ids for token in [*some, tokenizer.eos_token_id]])


def rows_at(stream: Tensor, starts: Tensor, bos: int) -> Tensor:
    """Pieces of a stream, each behind a BOS; a row is as long as the context."""
    rows = stream[starts[:, None] + torch.arange(CONTEXT - 1, device=stream.device)]
    return torch.nn.functional.pad(rows, (1, 0), value=bos)


def learning_rate(update: int, total: int) -> float:
    """The share of the peak: 5 % warm-up, then a cosine to 0."""
    warm = max(1, total // 20)
    return min((update + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * update / total))


def train(
    model: Any, streams: Sequence[Tensor], *, tokens: float, batch: int, lr: float, seed: int
) -> int:
    """Train on random pieces, as many from each stream. Returns the number of updates."""
    device = streams[0].device
    generator = torch.Generator().manual_seed(seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=lr, betas=(0.9, 0.95), fused=device.type == "cuda",
    )  # fmt: skip
    each = max(1, batch // len(streams))
    total = max(1, round(tokens / (each * len(streams) * CONTEXT)))
    begin = time.perf_counter()
    model.train()
    for update in range(total):
        for group in optimizer.param_groups:
            group["lr"] = lr * learning_rate(update, total)
        rows = []
        for stream in streams:
            starts = torch.randint(len(stream) - CONTEXT, (each,), generator=generator)
            rows.append(rows_at(stream, starts.to(device), model.config.bos_token_id))
        ids = torch.cat(rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update % max(1, total // 20) == 0 or update == total - 1:
            elapsed = time.perf_counter() - begin
            print(f"{update + 1:6}/{total}  {loss.item():.3f}  {elapsed:.0f} s", flush=True)
    return total


@torch.no_grad()
def held_out_loss(model: Any, stream: Tensor) -> float:
    """Nats a token, over pieces that do not overlap."""
    model.eval()
    starts = torch.arange(0, len(stream) - CONTEXT + 2, CONTEXT - 1, device=stream.device)
    ids = rows_at(stream, starts, model.config.bos_token_id)
    return float(model(input_ids=ids, labels=ids).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=150e6)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=258, help="rows of an update")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "src/holdfast/builtin/model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    device = default_device()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    corpus = load(args.corpus)
    tokenizer = train_tokenizer([c for c in corpus if not c.held_out], args.vocabulary)

    def stream(kind: str, held_out: bool) -> Tensor:
        some = [c.text for c in corpus if c.kind == kind and c.held_out == held_out]
        return encode(tokenizer, some).to(device)

    streams = {kind: stream(kind, False) for kind in KINDS}
    held = {kind: stream(kind, True) for kind in KINDS}
    model = make_model(tokenizer, args.hidden, args.layers).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    sizes = {kind: len(tokens) for kind, tokens in streams.items()}
    print(f"{parameters / 1e6:.2f} M parameters; tokens of text: {sizes}", flush=True)
    updates = train(
        model, [*streams.values()],
        tokens=args.tokens, batch=args.batch, lr=args.lr, seed=args.seed,
    )  # fmt: skip

    model.to(torch.bfloat16).save_pretrained(args.out)
    save_tokenizer(tokenizer, args.out)
    (args.out / "generation_config.json").unlink(missing_ok=True)
    (args.out / "model.safetensors").chmod(0o644)
    model = type(model).from_pretrained(args.out, dtype=torch.float32).to(device)  # as shipped
    losses = {kind: held_out_loss(model, tokens) for kind, tokens in held.items()}
    print("held out, nats a token:", {kind: round(loss, 3) for kind, loss in losses.items()})
    if args.json:
        protocol = {
            "model": f"Llama, {args.layers} layers, hidden {args.hidden}",
            "parameters": parameters, "vocabulary": len(tokenizer), "context": CONTEXT,
            "corpus": "prose, verse and code of benchmarks/embedded/corpus.py, in equal parts",
            "corpus_tokens": sizes, "batch_rows": args.batch, "updates": updates,
            "training": f"AdamW, lr {args.lr:g}, 5 % warm-up, cosine to 0, weight decay 0.1",
            "seed": args.seed,
        }  # fmt: skip
        write_results(
            args.json, device, protocol,
            tokens=updates * (args.batch // len(KINDS)) * len(KINDS) * CONTEXT,
            held_out={kind: round(loss, 4) for kind, loss in losses.items()},
            bytes={path.name: path.stat().st_size for path in sorted(args.out.iterdir())},
        )  # fmt: skip


if __name__ == "__main__":
    main()
