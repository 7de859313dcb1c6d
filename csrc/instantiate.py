"""The compilation units of the library: one per (direction, kernel family, head dim, dtype). Standard library only.

hf_flash2/build.py loads this file by path, writes the sources into its build folder and compiles each for the architectures of its family;
nothing generated is ever committed. Head dims and dtypes here are the template axes of csrc/dispatch.h.
"""

from dataclasses import dataclass

HEAD_DIMS = (64, 96, 128, 192, 256)
DTYPES = {"bf16": "__nv_bfloat16", "fp16": "__half"}
DIRECTIONS = ("backward", "forward")  # the slow ones first, so that the cores finish together


@dataclass(frozen=True)
class Unit:
    name: str  # file name without suffix, e.g. forward_sm80_hdim128_bf16
    label: str  # for progress lines, e.g. forward d128 bf16
    family: str  # sm80: every GPU from Ampere on; sm90: Hopper only
    source: str


def units(head_dims: tuple[int, ...] = HEAD_DIMS) -> list[Unit]:
    """Every generated unit of these head dims, the largest first."""
    return [
        Unit(f"{direction}_sm80_hdim{head_dim}_{dtype}", f"{direction} d{head_dim} {dtype}", "sm80", _source(direction, head_dim, ctype))
        for direction in DIRECTIONS
        for head_dim in sorted(head_dims, reverse=True)
        for dtype, ctype in DTYPES.items()
    ]


def _source(direction: str, head_dim: int, ctype: str) -> str:
    struct = f"HfFlash2{direction.capitalize()}Params"
    functions = {"forward": ("void run_forward",), "backward": ("void run_backward", "int64_t backward_workspace_bytes")}[direction]
    instances = "".join(f"template {function}<{head_dim}, {ctype}>(const {struct}&);\n" for function in functions)
    return f'#include "sm80/{direction}_launch.cuh"\nnamespace hf_flash2::sm80 {{\n{instances}}}  // namespace hf_flash2::sm80\n'
