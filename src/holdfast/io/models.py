"""One model at a time: what kind it is, and everything that is needed to run it.

Transformers' models by directory or hub name, LoRA adapters on their base, GGUF files, and modules
that are in memory already.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast._torch.batch import evaluating
from holdfast._torch.names import shorten
from holdfast.io.hub import check_hub
from holdfast.io.kinds import (
    Kind,
    config_of,
    first_sentence,
    import_transformers,
    is_headless,
    kind_named,
    kind_of,
)

if TYPE_CHECKING:
    from holdfast.io.heads import NewHead

__all__ = ["Kind", "Loaded", "Loader", "Source", "is_headless", "kind_of"]

Source = str | os.PathLike[str] | nn.Module
_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model",
    "spiece.model",
)  # fmt: skip
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to be run.

    Attributes:
        model: in eval mode, on its device.
        kind: what it predicts.
        tokenizer: of an image classifier its image processor; None where it has none.
        limit: the longest sequence that it takes, and that the user wants.
        start: what a text begins with, if the user says so.
    """

    model: nn.Module
    kind: Kind
    tokenizer: Any
    limit: int
    start: int | None = None

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    def need_tokenizer(self, what: str) -> Any:
        """The tokenizer, or an error that says what it is needed for."""
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer, and none is beside the model's weights: save it there "
                "by its save_pretrained (in Python, tokenizer= takes it too)"
            )
        return self.tokenizer

    def start_token(self, given: int | None = None) -> int:
        """What a text begins with: the BOS token, else EOS."""
        config = getattr(self.model, "config", None)
        for token in (
            given,
            self.start,
            getattr(self.tokenizer, "bos_token_id", None),
            getattr(config, "bos_token_id", None),
            getattr(self.tokenizer, "eos_token_id", None),
            getattr(config, "eos_token_id", None),
        ):
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return token
        raise ValueError("the model names no BOS or EOS token to begin with: pass start_token=")


@dataclass(frozen=True)
class Loader:
    """How models are loaded.

    Attributes:
        device: None takes an accelerator if there is one.
        dtype: None takes float32 on the CPU, and the checkpoint's own elsewhere.
        max_length: sequences are not longer than this, nor than the model's limit.
        tokenizer: to use instead of the one beside the weights.
        allow_pickle: read ``.bin`` files too. They are loaded as plain tensors.
        start: the token that texts begin with, where a model names none.
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    max_length: int = 1024
    tokenizer: Any = None
    allow_pickle: bool = False
    start: int | None = None

    @contextlib.contextmanager
    def open(
        self, source: Source, base: Source | None = None, head: NewHead | None = None
    ) -> Iterator[Loaded]:
        """A model for a while; one that was loaded for it is let go afterwards.

        Args:
            source: the model.
            base: what a LoRA adapter sits on, if it does not say itself.
            head: a new one, to put onto a model that is loaded for it.
        """
        if isinstance(source, nn.Module):
            with evaluating(source):
                yield self.ready(source, self.tokenizer)
            return
        if head is None:
            model = self.load(str(source), base)
        else:
            from holdfast.io.heads import load_with_head

            model, _ = load_with_head(self, str(source), head)
        try:
            yield self.ready(model, self.tokenizer or self.tokenizer_of(str(source), base))
        finally:
            del model
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def alike(self, base: Source, tuned: Source) -> Loader:
        """This loader with one length and one dtype for two models, so that they are comparable."""
        configs = []
        for source in (base, tuned):
            try:
                name = str(source)
                if isinstance(source, nn.Module) or (Path(name) / "adapter_config.json").is_file():
                    continue
                path = Path(name)
                inside = path.suffix in (".safetensors", ".gguf") and path.is_file()
                gguf = path.name if inside and path.suffix == ".gguf" else None
                configs.append(config_of(str(path.parent) if inside else name, gguf))
            except (ImportError, ValueError):
                continue
        texts = [c.get_text_config() for c in configs]
        limits = [getattr(text, "max_position_embeddings", None) for text in texts]
        length = min([self.max_length, *(n for n in limits if isinstance(n, int) and n > 0)])
        dtype = self.dtype
        if dtype is None and configs and self.where().type != "cpu":
            dtype = getattr(configs[0], "dtype", None)
        return replace(self, max_length=length, dtype=dtype)

    def cannot_write(self, source: Source) -> str | None:
        """Why a model cannot be asked for texts, told without loading it; None if it can."""
        if isinstance(source, nn.Module):
            return None if kind_of(source) == "causal_lm" else "the model does not write texts"
        path = Path(source)
        if (path / "adapter_config.json").is_file() or path.suffix == ".gguf":
            return None
        try:
            config = config_of(str(path.parent if path.is_file() else source), None)
        except (ImportError, ValueError) as error:
            return str(error)
        name = (config.architectures or ["a model of unknown class"])[0]
        return None if kind_named(name) == "causal_lm" else f"{name} does not write texts"

    def load(self, source: str, base: Source | None = None) -> nn.Module:
        """A model of its own class, on the device, in eval mode; an adapter is merged into it."""
        transformers = import_transformers()
        if (Path(source) / "adapter_config.json").is_file():
            return self._adapted(Path(source), base)
        where, options = self.place(source)
        config = config_of(where, options.get("gguf_file"))
        name = (config.architectures or [None])[0]
        cls: Any = getattr(transformers, name or "", None)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            gguf = "gguf_file" in options  # which names no class
            cls = transformers.AutoModelForCausalLM if gguf else transformers.AutoModel
        device = self.where()
        dtype = self.dtype or (torch.float32 if device.type == "cpu" else "auto")
        model: nn.Module
        try:
            model, info = cls.from_pretrained(
                where, dtype=dtype, output_loading_info=True, **options
            )
        except Exception as error:  # safetensors, torch and transformers have each their own
            raise ValueError(f"{source} cannot be loaded: {first_sentence(error)}") from error
        if lacking := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
            raise ValueError(
                f"{source} lacks weights that a {type(model).__name__} has, or has them under "
                f"other names: {shorten(lacking)}. They would be random"
            )
        return model.to(device).eval()

    def place(self, source: str) -> tuple[str, dict[str, Any]]:
        """Where transformers finds a model, and how it is to read it."""
        path = Path(source)
        if path.suffix == ".gguf":
            return str(path.parent), {"gguf_file": path.name}
        if path.suffix == ".safetensors" and path.is_file():
            if path.name != "model.safetensors":
                raise ValueError(
                    f"{path} is not where transformers looks for weights: put it into a directory "
                    "of its own as model.safetensors, with its config.json"
                )
            source = str(path.parent)
        if not path.exists():
            check_hub(source, "model")
        return source, {"use_safetensors": None if self.allow_pickle else True}

    def _adapted(self, path: Path, base: Source | None) -> nn.Module:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ImportError(
                f'{path} holds a LoRA adapter, which needs peft: pip install "holdfast[peft]"'
            ) from error
        own = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
        under = own if base is None or isinstance(base, nn.Module) else base
        if not under:
            raise ValueError(f"{path} is an adapter and does not say where its base model lies")
        from holdfast.io.heads import head_like, load_with_head

        # A config.json beside it is finetune's, of the head that its base lacks, or a copy of the
        # base's own, as other trainers write it.
        head = head_like(under, path)
        if head is None:
            under_it = self.load(str(under), None)
        else:
            under_it, _ = load_with_head(self, str(under), head)
        model: Any = PeftModel.from_pretrained(under_it, path)
        merged: nn.Module = model.merge_and_unload()
        return merged.eval()

    def tokenizer_of(self, source: str, base: Source | None = None) -> Any:
        """What reads a model's inputs: the tokenizer beside it, or beside its base, or the image
        processor; None where there is none."""
        transformers = import_transformers()
        path = Path(source)
        places: list[tuple[str, dict[str, str]]] = [(source, {})]
        if path.suffix == ".gguf":
            places = [(str(path.parent), {}), (str(path.parent), {"gguf_file": path.name})]
        elif path.is_file():
            places = [(str(path.parent), {})]
        if isinstance(base, str | os.PathLike):
            places.append((str(base), {}))
        for place, options in places:
            local = Path(place).is_dir() and not options
            for auto, known in (
                (transformers.AutoTokenizer, _TOKENIZERS),
                (transformers.AutoImageProcessor, _PROCESSORS),
            ):
                if local and not any((Path(place) / name).is_file() for name in known):
                    continue
                try:
                    return auto.from_pretrained(place, **options)
                except Exception as error:
                    if local:  # it is there, and broken
                        what = "tokenizer" if known is _TOKENIZERS else "image processor"
                        raise ValueError(
                            f"the {what} in {place} cannot be loaded: {first_sentence(error)}"
                        ) from error
        return None

    def ready(self, model: nn.Module, tokenizer: Any) -> Loaded:
        """A model with what is needed to run it."""
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        limits = [self.max_length]
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if isinstance(limit := getattr(text, name, None), int) and limit > 0:
                limits.append(limit)
        for name, part in model.named_modules():
            # Positions that begin after the padding's, as RoBERTa's: the table says so itself.
            if name.endswith("position_embeddings") and getattr(part, "padding_idx", None):
                limits.append(part.num_embeddings - part.padding_idx - 1)
        return Loaded(model, kind_of(model), tokenizer, min(limits), self.start)

    def where(self) -> torch.device:
        """The device that models are loaded onto."""
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:
                raise ValueError(f"device {self.device}: {first_sentence(error)}") from error
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
