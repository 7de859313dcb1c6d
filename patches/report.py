"""What `patch` did to a model, for people to read and for tests to check."""

from collections import Counter
from dataclasses import dataclass, field

from ..notices import Calls


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
        loss: with packed=True, where the loss is computed.
    """

    model: str
    family: str
    expected_backend: str
    previous: str
    layers: dict[str, Calls] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    forwards: Counter[str] | None = None
    loss: str | None = None

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

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.patched} of {self.found} attention layers run on hf_flash2 ({self.family})",
            f"  backend   {self.backend}",
            f"  previous  {self.previous}",
        ]
        lines += [f"  skipped   {name}: {reason}" for name, reason in self.skipped.items()]
        routes = sum(self.layers.values(), Counter())
        names = {"sdpa": "sdpa (torch's, not ours: a warning said why)"}
        calls = ", ".join(f"{count} {names.get(route, route)}" for route, count in routes.items())
        uncalled = [name for name, of_layer in self.layers.items() if not of_layer]
        rest = f"; none of {len(uncalled)} layers, as {uncalled[0]}" if calls and uncalled else ""
        lines.append(f"  calls     {calls or 'none yet'}{rest}")
        if self.forwards is not None:
            counts = (f"{count} {route}" for route, count in self.forwards.most_common())
            lines.append(f"  decoder   packed: {', '.join(counts) or 'no padded batch yet'}")
            lines.append(f"  loss      {self.loss}")
        return "\n".join(lines)
