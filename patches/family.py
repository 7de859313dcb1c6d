"""One family of models whose attention forward hf_flash2 replaces: for single instances (see `binding`) or for the whole class."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..interface import hf_flash2_attention
from ..notices import NAME
from .binding import replaced

_ABSENT = object()


@dataclass(eq=False)
class Family:
    """What is replaced, and by what.

    Attributes:
        name: Transformers' model_type, e.g. "llama".
        attention: the attention class. Its forward is replaced, never the decoder layer's: that one carries gradient checkpointing.
        pretrained: the base class of the family's models, which chooses the attention implementation of a new model.
        compute: our attention, with the arguments of the class's forward.
        forward: what takes the place of the class's forward: `compute`, or what was there before while the model's config names another
            implementation, or somebody has put a function of theirs in the place of ours in Transformers' registry, as DeepSpeed's Ulysses
            does, which brings the parts of a sequence together around it.
    """

    name: str
    attention: type[nn.Module]
    pretrained: type[PreTrainedModel]
    compute: FunctionType
    forward: FunctionType = field(init=False)
    _replaced: dict[tuple[type, str], tuple[FunctionType, object]] = field(default_factory=dict, init=False)  # by what, and what was there

    def __post_init__(self):
        def forward(module: nn.Module, *args, **kwargs):
            if module.config._attn_implementation != NAME or ALL_ATTENTION_FUNCTIONS[NAME] is not hf_flash2_attention:
                return self._upstream(module)(*args, **kwargs)
            return self.compute(module, *args, **kwargs)

        self.forward = forward

    def apply(self) -> None:
        """Let every model of this family that is constructed from now on use hf_flash2, unless an implementation is asked for by name.

        Replaces two class attributes: the attention's forward, and the choice of the implementation of a model that names none. Models that
        exist already keep the implementation of their config; switch them with `hf_flash2.patch(model)`. Applying twice is applying once.
        """
        if self._replaced:
            return
        pretrained = self.pretrained

        def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
            requested_attention = NAME if requested_attention is None else requested_attention
            return super(pretrained, self).get_correct_attn_implementation(requested_attention, is_init_check)

        self._replace(self.attention, self.forward)
        self._replace(pretrained, get_correct_attn_implementation)

    def revert(self) -> None:
        """Put back the class attributes that `apply` replaced. Models constructed in between keep hf_flash2 through their config.

        Raises:
            RuntimeError: somebody has replaced one of them since; nothing is put back then.
        """
        for (owner, name), (ours, _) in self._replaced.items():
            if vars(owner).get(name) is not ours:
                raise RuntimeError(
                    f"{owner.__name__}.{name} is {vars(owner).get(name)!r}, which came after hf_flash2's and may call it; undo that first"
                )
        for (owner, name), (_, previous) in self._replaced.items():
            if previous is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)
        self._replaced.clear()

    def _upstream(self, module: nn.Module) -> Callable:
        """The bound forward that a module of this family would have without us."""
        previous = replaced(module)
        if previous is not None:
            return previous
        _, forward = self._replaced.get((self.attention, "forward"), (None, self.attention.forward))
        return MethodType(forward, module)

    def _replace(self, owner: type, function: FunctionType) -> None:
        self._replaced[owner, function.__name__] = function, vars(owner).get(function.__name__, _ABSENT)
        setattr(owner, function.__name__, function)
