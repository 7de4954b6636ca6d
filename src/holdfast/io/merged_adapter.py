"""The effective weights of an adapter that is not plain LoRA: PEFT merges it into its model."""

from pathlib import Path

from torch import Tensor

from holdfast._torch.names import align
from holdfast.io.adapter import AdaptedWeights
from holdfast.io.models import Loader
from holdfast.io.weights import Weights


def merged_adapter(path: Path, base: Weights, *, allow_pickle: bool = False) -> Weights:
    """Load the model under an adapter into CPU memory, and merge the adapter into it."""
    if base.path is None:
        raise ValueError(
            f"{path} is not plain LoRA, so its whole model must be loaded: pass the directory of "
            "its base model, or merge it first (merge_and_unload)"
        )
    model = Loader(device="cpu", allow_pickle=allow_pickle).load(str(path), base.path)
    tensors: dict[str, Tensor] = model.state_dict()
    named = align(tensors, base)
    replaced: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = named(name)
        if own is None:  # a new head; or tied weights, which are stored once
            tied = any(tensor.data_ptr() == t.data_ptr() for n, t in tensors.items() if n != name)
            replaced |= {} if tied else {name: tensor}
        else:
            replaced[own] = tensor.to(base[own].dtype)
    return AdaptedWeights(str(path), base, {}, replaced, path)
