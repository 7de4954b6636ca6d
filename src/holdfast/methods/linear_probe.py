"""Linear probing: only the head may change; the body is frozen, in every respect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from holdfast._torch import eval_mode as _eval
from holdfast._torch.layers import head_of, within
from holdfast._torch.names import shorten
from holdfast.methods import _phases
from holdfast.stages import Trainable

if TYPE_CHECKING:
    from holdfast.run import Run

__all__ = ["LinearProbe"]


@dataclass(frozen=True)
class LinearProbe(Trainable):
    """Only the head may change: nothing is forgotten, and the most is left unlearned.

    The features are the pretrained ones to the bit: the body also stays in eval mode whatever
    ``model.train()`` says, so that its dropout does not act and BatchNorm's statistics do not
    move. Kumar et al., https://arxiv.org/abs/2202.10054, compare it with full fine-tuning.

    Args:
        head: the name of the part that is trained, such as ``"classifier"``. None takes what is
            new in the model (``new=`` of the run), else the head that its structure shows.

    Example:
        >>> from holdfast import LinearProbe, Recipe
        >>> Recipe(trainable=LinearProbe(head="classifier")).name
        'linear-probe'
    """

    neutral: ClassVar[dict[str, Any] | None] = None
    needs_pretrained_start: ClassVar[str] = "freezes the body"

    head: str | None = None

    def prepare(self, run: Run) -> nn.Module:
        """Freeze the body, and keep it in eval mode."""
        model: nn.Module = run.model
        heads = heads_of(run, self.head)
        ours = {id(p) for head in heads for p in model.get_submodule(head).parameters()}
        shared = [
            name
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) in ours and not within(name, heads)
        ]
        if shared:
            raise ValueError(
                f"the head {', '.join(heads)} shares weights with {shorten(shared)}: training it "
                "would change the body. Give the model a head with weights of its own, or name "
                "another with head="
            )
        if left := [part for part in run.new if not within(part, heads)]:
            raise ValueError(
                f"{shorten(left)} is new, but is not part of the head {', '.join(heads)}: it "
                "would be frozen at its random values. Name a head= that has it"
            )
        _phases.plan(model, [[n for n, _ in model.named_parameters() if not within(n, heads)]])
        _eval.stay_in_eval(model, [n for n, _ in model.named_modules() if not within(n, heads)])
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        """The model as it was, but for its new head."""
        _phases.release(model)
        _eval.release(model)
        return model


def heads_of(run: Run, head: str | None) -> tuple[str, ...]:
    """The parts that are the head: the one named, those that are new, or what is found."""
    found = (head,) if head is not None else run.new or head_of(run.model)
    if not found:
        children = ", ".join(n for n, _ in run.model.named_children())
        raise ValueError(
            f"cannot tell which part of {type(run.model).__name__} is its head: pass head= (or "
            f"new= if it is new) one of its parts; it has {children}"
        )
    heads = (found,) if isinstance(found, str) else tuple(found)
    for name in heads:
        try:
            module = run.model.get_submodule(name)
        except AttributeError:
            children = ", ".join(n for n, _ in run.model.named_children())
            raise ValueError(f"the model has no part {name!r}; it has {children}") from None
        if not name or not any(True for _ in module.parameters()):
            raise ValueError(f"the head {name!r} must be a part of the model with parameters")
    return heads
