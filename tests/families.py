"""Tiny random models of every family that is fine-tuned, in folders, as a user would have them."""

import torch
import transformers
from tokenizers.processors import TemplateProcessing

from small import make_tokenizer

_LETTERS = "abcdefghijklmnopqrstuvwxyz .Ġ"
_WIDTH = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
_DECODER = {**_WIDTH, "num_key_value_heads": 1, "head_dim": 8}
_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40, "vocab_size": 40}
_SEQ2SEQ = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "eos_token_id": 3,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
_PATCHES = {
    "image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip

#: Encoders, decoders with labels and encoder-decoders: the class of the checkpoint, and settings.
TEXT = {
    "BERT": ("BertModel", _WIDTH),
    "BERT, masked": ("BertForMaskedLM", _WIDTH),
    "RoBERTa": ("RobertaForMaskedLM", _WIDTH),
    "XLM-RoBERTa": ("XLMRobertaModel", _WIDTH),
    "ELECTRA": ("ElectraModel", {**_WIDTH, "embedding_size": 16}),
    "DeBERTa": ("DebertaModel", {**_WIDTH, "max_relative_positions": 8}),
    "DeBERTa-v2": ("DebertaV2Model", _WIDTH),
    "ModernBERT": ("ModernBertModel", {**_WIDTH, "cls_token_id": 5, "sep_token_id": 6}),
    "MPNet": ("MPNetModel", _WIDTH),
    "DistilBERT": ("DistilBertModel", {"vocab_size": 40, "dim": 16, "hidden_dim": 16,
                                       "n_layers": 1, "n_heads": 2, "pad_token_id": 0}),
    "ALBERT": ("AlbertModel", {**_WIDTH, "embedding_size": 16}),
    "Longformer": ("LongformerModel", {**_WIDTH, "attention_window": 4}),
    "XLNet": ("XLNetModel", {"vocab_size": 40, "d_model": 16, "n_layer": 1, "n_head": 2,
                             "d_inner": 16, "pad_token_id": 0}),
    "BART": ("BartModel", _SEQ2SEQ),
    "T5": ("T5ForConditionalGeneration", {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16,
                                          "num_layers": 1, "num_heads": 2, "eos_token_id": 3,
                                          "decoder_start_token_id": 0}),
}  # fmt: skip
#: Causal language models: with labels and --head classification, or with texts.
CAUSAL = {
    "GPT-2": ("GPT2LMHeadModel", {**_GPT2, "bos_token_id": 2, "eos_token_id": 3}),
    "Llama": ("LlamaForCausalLM", _DECODER),
    "Qwen2": ("Qwen2ForCausalLM", _DECODER),
    "Qwen3": ("Qwen3ForCausalLM", _DECODER),
    "Gemma 3": ("Gemma3ForCausalLM", _DECODER),
    "Mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 2}),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1,
                                   "state_size": 4, "bos_token_id": 2, "eos_token_id": 3,
                                   "pad_token_id": 0}),
}  # fmt: skip
IMAGES = {
    "ViT": ("ViTForImageClassification", _PATCHES),
    "DINOv2": ("Dinov2Model", _PATCHES),
    "Swin": ("SwinModel", {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1],
                           "num_heads": [2, 2], "window_size": 2}),
    "ResNet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16],
                                                "depths": [1, 1], "layer_type": "basic"}),
    "ConvNeXt": ("ConvNextModel", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "MobileNetV2": ("MobileNetV2Model", {"depth_multiplier": 0.1, "finegrained_output": False}),
    "ResNet of timm": ("TimmWrapperForImageClassification", lambda: _timm("resnet18")),
    "ViT of timm": ("TimmWrapperForImageClassification", lambda: _timm("vit_tiny_patch16_224")),
}  # fmt: skip


def save_family(name, folder):
    """Write a tiny model of a family, with its tokenizer or image processor."""
    cls, settings = {**TEXT, **CAUSAL, **IMAGES, **MULTIMODAL}[name]
    model = getattr(transformers, cls)
    torch.manual_seed(0)
    made = model(settings() if callable(settings) else model.config_class(**settings))
    made.save_pretrained(folder)
    if name in IMAGES and not name.endswith("timm"):  # timm's processor is in config.json
        size = {"height": 16, "width": 16}
        transformers.ViTImageProcessorPil(size=size).save_pretrained(folder)
    elif name not in IMAGES:
        _tokenizer(name).save_pretrained(folder)
    return str(folder)


def _tokenizer(name):
    if name.startswith("Qwen2"):  # its class knows one kind of vocabulary
        vocabulary = {c: i for i, c in enumerate(["<pad>", "<unk>", "<s>", "</s>", *_LETTERS])}
        return transformers.Qwen2Tokenizer(
            vocab=vocabulary, merges=[], pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
        )
    made = make_tokenizer(cls_token="[CLS]", sep_token="[SEP]")
    if name in ("BART", "T5"):  # they read the last </s>
        made._tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", 3)])
    return made


def _timm(architecture):
    about = {"input_size": [3, 224, 224], "mean": [0.5] * 3, "std": [0.5] * 3}
    return transformers.TimmWrapperConfig(
        architecture=architecture, pretrained_cfg={**about, "num_classes": 10}, num_labels=10
    )


def _llava():
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_DECODER),
        vision_config=transformers.CLIPVisionConfig(**_PATCHES), image_token_index=39,
        bos_token_id=2, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip


def _qwen2_vl():
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 4}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**_WIDTH, "num_key_value_heads": 1, "rope_parameters": rope}
    return transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=38, video_token_id=37,
        vision_start_token_id=36, vision_end_token_id=35,
    )  # fmt: skip


def _gemma3():
    return transformers.Gemma3Config(
        text_config=_DECODER, vision_config=_PATCHES, mm_tokens_per_image=4, image_token_index=39
    )


#: Multimodal language models, of which the text part is trained.
MULTIMODAL = {
    "LLaVA": ("LlavaForConditionalGeneration", _llava),
    "Qwen2-VL": ("Qwen2VLForConditionalGeneration", _qwen2_vl),
    "Gemma 3, images": ("Gemma3ForConditionalGeneration", _gemma3),
}
