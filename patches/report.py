"""What `patch` did to a model, for people to read and for tests to check."""

from collections import Counter
from dataclasses import dataclass, field

from ..notices import Calls
from .loss import IN_CHUNKS


@dataclass
class PatchReport:
    """The result of `hf_flash2.patch(model)`; `print(report)` shows it.

    Attributes:
        model: class name of the patched model, e.g. "LlamaForCausalLM".
        family: how its layers reach the kernels: "llama", "mistral", "gpt2" where their own forward is replaced, else "interface"; several
            are joined by " + ".
        expected_backend: what runs on the device the model was on when `patch` was called last: "cuda-sm80", "cuda-sm90" or
            "cpu-reference".
        previous: the attention implementation it had, e.g. "sdpa".
        layers: by the name of each patched attention layer, how often which route was taken since: "dense", "padded", "documents",
            "context parallel" are our op, "sdpa" is a call that it cannot compute and torch's SDPA did. Calls inside a torch.compile graph
            are not counted.
        skipped: the reason for each part that was left as it was, by its name in the model.
        forwards: with packed=True, how often the decoder ran "packed", and by reason how often padded.
        expected_loss: with packed=True, how the loss is computed where the model's own forward is asked for it in training, or why that is
            not ours; it comes from logits then.
        losses: where it may be ours, how often the model's own forward was asked for a loss and computed it "in chunks" or "from logits".
    """

    model: str
    family: str
    expected_backend: str
    previous: str
    layers: dict[str, Calls] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    forwards: Calls | None = None
    expected_loss: str | None = None
    losses: Calls | None = None

    @property
    def backend(self) -> str:
        """What the layers' last calls of our op ran on, in the words of `expected_backend`; before any, that itself. Calls that went to
        torch's SDPA in place of it are in `layers`."""
        ran_on = {calls.backend for calls in self.layers.values() if calls.backend is not None}
        return ", ".join(sorted(ran_on)) or self.expected_backend

    @property
    def patched(self) -> int:
        """Number of attention layers that run on hf_flash2."""
        return len(self.layers)

    @property
    def found(self) -> int:
        """Number of attention layers the model has, skipped ones included; a part that was skipped as a whole counts as one."""
        return self.patched + len(self.skipped)

    @property
    def calls(self) -> dict[str, int]:
        """How often our op ran for each patched layer since `patch`."""
        return {name: routes.total() - routes["sdpa"] for name, routes in self.layers.items()}

    @property
    def loss(self) -> str | None:
        """With packed=True, who computes the loss, as far as calls have shown it: programs may go around the model's own forward."""
        if self.losses is None:
            return self.expected_loss
        counts = ", ".join(f"{count} {route}" for route, count in self.losses.most_common())
        if IN_CHUNKS in self.losses:
            return f"{self.expected_loss}: {counts}"
        if not counts and not any(self.layers.values()):
            return self.expected_loss
        unasked = "the model's own forward was given no labels; where there was a loss, somebody else computed it, as TRL's trainers do"
        return f"not ours so far: {counts or unasked}"

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.patched} of {self.found} attention layers run on hf_flash2 ({self.family})",
            f"  backend   {self.backend}",
            f"  previous  {self.previous}",
        ]
        lines += [f"  skipped   {name}: {reason}" for name, reason in self.skipped.items()]
        routes = sum(self.layers.values(), Counter())
        names = {"sdpa": "sdpa (torch's, not ours: a warning said why)", "blocks": "with images or a prefix that see all of themselves"}
        calls = ", ".join(f"{count} {names.get(route, route)}" for route, count in routes.items())
        uncalled = [name for name, of_layer in self.layers.items() if not of_layer]
        rest = f"; none of {len(uncalled)} layers, as {uncalled[0]}" if calls and uncalled else ""
        lines.append(f"  calls     {calls or 'none yet'}{rest}")
        if self.forwards is not None:
            counts = (f"{count} {route}" for route, count in self.forwards.most_common())
            lines.append(f"  decoder   packed: {', '.join(counts) or 'no padded batch yet'}")
            lines.append(f"  loss      {self.loss}")
        return "\n".join(lines)
