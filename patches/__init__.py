"""Switch a model that exists already to hf_flash2, and back: `patch`, `unpatch`, `patched`, `verify`.

    report = hf_flash2.patch(model)     # a Transformers model, or a PeftModel, DDP or torch.compile wrapper around one
    print(report)
    hf_flash2.unpatch(model)

Only that instance changes. It gets a copy of its config that names hf_flash2, so that its masks come as ours, and for the families in
PATCHES the forward of its attention modules is replaced by one that goes straight to our op. Nothing of this is saved with the model.
"""

from . import gpt2, llama, mistral
from .comparison import Comparison, verify
from .instance import PATCHES, patch, patched, unpatch
from .report import PatchReport

__all__ = ["PATCHES", "Comparison", "PatchReport", "gpt2", "llama", "mistral", "patch", "patched", "unpatch", "verify"]
