"""Small real models and tokenizers to measure."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = "the a cat dog sat ran on mat log and two three plus is four five six . question answer"


def make_tokenizer(words=WORDS, **special):
    names = ["<pad>", "<unk>", "<s>", "</s>", "[MASK]", "[CLS]", "[SEP]", *words.split()]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "[MASK]", **special}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", **names
    )


def make_llama(seed=0, vocab=30, limit=64, scale=1.0, **more):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=limit, bos_token_id=2, eos_token_id=3,
        pad_token_id=0, initializer_range=scale, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def noisy(model, noise=0.05, seed=1):
    """A copy of a model with Gaussian noise on every weight."""
    import copy

    generator = torch.Generator().manual_seed(seed)
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for p in tuned.parameters():
            p.add_(noise * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return tuned


def save(model, folder, tokenizer=None, **options):
    model.save_pretrained(folder, **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
