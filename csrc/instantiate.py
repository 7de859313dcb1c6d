"""The kernels of the library, one unit per (direction, kernel family, head dim, dtype), the files they are compiled in, and its one
generated header. Standard library only.

hf_flash2/build.py loads this file by path, writes the files into its build folder and compiles each for the architectures of its family;
nothing generated is ever committed. Head dims and dtypes here are the template axes of csrc/dispatch.h.
"""

from dataclasses import dataclass

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
DTYPES = {"bf16": "__nv_bfloat16", "fp16": "__half"}
FAMILIES = {"sm90": ("backward", "forward"), "sm80": ("backward", "forward")}  # the slow ones first, so that the cores finish together


@dataclass(frozen=True)
class Product:
    """One form of wgmma: where A comes from, along which index each operand is contiguous, and the widths N that kernels use."""

    struct: str
    comment: str
    a_in_registers: bool
    flags: str  # scale of A and B, then which operands are transposed (MN-major)
    widths: tuple[int, ...]


PRODUCTS = (
    # Widths: S by key blocks (forward) and query blocks (backward) of tiles.h.
    Product(
        "WgmmaShared",
        "A and B in shared memory, both contracted along their columns (K-major).",
        False,
        "1, 1, 0, 0",
        (32, 64, 80, 112, 128),
    ),
    # Widths: the columns of dQ that one warpgroup computes.
    Product(
        "WgmmaSharedByRows", "A and B in shared memory, both contracted along their rows (MN-major).", False, "1, 1, 1, 1", (16, 32, 64)
    ),
    # Widths: the columns of O (forward), of dK and dV (backward).
    Product(
        "WgmmaRegisters",
        "A in registers, B in shared memory, contracted along its rows (MN-major).",
        True,
        "1, 1, 1",
        (64, 80, 96, 128, 192, 256),
    ),
)


@dataclass(frozen=True)
class Unit:
    """The least that can be compiled alone."""

    name: str  # e.g. forward_sm80_hdim128_bf16
    family: str
    direction: str
    head_dim: int
    dtype: str
    source: str


@dataclass(frozen=True)
class File:
    """Units that are compiled together."""

    name: str  # without suffix, e.g. forward_sm90_hdim128 or forward_sm80_hdim64_96
    label: str  # for progress lines, e.g. forward d64 d96
    family: str  # sm80: every GPU from Ampere on; sm90: Hopper only
    same_ptx: bool  # nothing in it asks which architecture it is for (hf_flash2/build.py, Job)
    source: str


def units(head_dims: tuple[int, ...] = HEAD_DIMS) -> list[Unit]:
    """Every unit of these head dims, the largest first."""
    return [
        Unit(
            f"{direction}_{family}_hdim{head_dim}_{dtype}", family, direction, head_dim, dtype, _source(family, direction, head_dim, ctype)
        )
        for family, directions in FAMILIES.items()
        for direction in directions
        for head_dim in sorted(_of_family(family, head_dims), reverse=True)
        for dtype, ctype in DTYPES.items()
    ]


def _of_family(family: str, head_dims: tuple[int, ...]) -> set[int]:
    """80, which vision towers have, is Hopper's alone: the other family runs it as 96 (csrc/sm80/run.h)."""
    return {96 if family == "sm80" and head_dim == 80 else head_dim for head_dim in head_dims}


def files(head_dims: tuple[int, ...] = HEAD_DIMS) -> list[File]:
    """All units of these head dims in files that take about as long to compile, at most half a minute.

    PERF: the compilers take 2 s for a file before they come to what is in it. On two cores 259 s with a file for each unit, 222 s so.
    """
    together: dict[str, list[Unit]] = {}
    for unit in units(head_dims):
        together.setdefault(_file_name(unit), []).append(unit)
    return [
        File(
            name,
            _label(of_file),
            of_file[0].family,
            (of_file[0].family, of_file[0].direction) == ("sm80", "forward"),
            "".join(unit.source for unit in of_file),
        )
        for name, of_file in together.items()
    ]


def _file_name(unit: Unit) -> str:
    if unit.family == "sm90" and unit.head_dim in (192, 256):  # they have the most kernels, or the longest
        return unit.name
    neighbours = next(dims for dims in ((64, 80, 96), (128, 192), (256, 512)) if unit.head_dim in dims)
    head_dims = tuple(sorted(_of_family("sm80", neighbours))) if unit.family == "sm80" else (unit.head_dim,)
    return f"{unit.direction}_{unit.family}_hdim{'_'.join(map(str, head_dims))}"


def _label(of_file: list[Unit]) -> str:
    head_dims, dtypes = sorted({unit.head_dim for unit in of_file}), {unit.dtype for unit in of_file}
    return " ".join([of_file[0].direction, *(f"d{head_dim}" for head_dim in head_dims), *(dtypes if len(dtypes) == 1 else [])])


def headers() -> dict[str, str]:
    """Generated headers by name: wgmma.cuh, whose operand lists of up to 128 registers nobody should write or read by hand."""
    return {"wgmma.cuh": _wgmma_header()}


def _source(family: str, direction: str, head_dim: int, ctype: str) -> str:
    struct = f"HfFlash2{direction.capitalize()}Params"
    functions = [f"void run_{direction}"]
    if (family, direction) != ("sm80", "forward"):  # which needs no workspace
        functions.append(f"int64_t {direction}_workspace_bytes")
    instances = "".join(f"template {function}<{head_dim}, {ctype}>(const {struct}&);\n" for function in functions)
    namespace = f"hf_flash2::{family}"
    return f'#include "{family}/{direction}_launch.cuh"\nnamespace {namespace} {{\n{instances}}}  // namespace {namespace}\n'


def _wgmma_header() -> str:
    """wgmma.mma_async m64nNk16 for every shape and operand form the kernels use. PTX ISA: "wgmma.mma_async", "Register fragments"."""
    products = "\n".join(
        f"// {product.comment}\ntemplate <typename T, int kN>\nstruct {product.struct};\n\n"
        + "\n".join(_wgmma_product(product, n) for n in product.widths)
        for product in PRODUCTS
    )
    return f"""// Generated by csrc/instantiate.py.
// d [64 x kN] (+)= A [64 x 16] B [16 x kN]; d is not read when accumulate is 0. Asynchronous: see warpgroup.cuh for the fences.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace hf_flash2 {{

{products}
}}  // namespace hf_flash2
"""


def _wgmma_product(product: Product, n: int) -> str:
    a_in_registers = product.a_in_registers
    count = n // 2  # accumulator registers of a thread
    a_count = 4 if a_in_registers else 1
    d = ", ".join(f"%{i}" for i in range(count))
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if a_in_registers else f"%{count}"
    b, predicate = count + a_count, count + a_count + 1
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if a_in_registers else '"l"(a)'

    def statement(dtype: str) -> str:
        return f"""asm volatile(
          "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{predicate}, 0;\\n"
          "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{d}}}, {a}, %{b}, p, {product.flags};\\n}}"
          : {outputs}
          : {a_inputs}, "l"(b), "r"(accumulate));"""

    a_parameter = "const uint32_t* a" if a_in_registers else "uint64_t a"
    return f"""template <typename T>
struct {product.struct}<T, {n}> {{
  static __device__ __forceinline__ void multiply(float* d, {a_parameter}, uint64_t b, int accumulate) {{
    if constexpr (std::is_same_v<T, __half>)
      {statement("f16")}
    else
      {statement("bf16")}
  }}
}};
"""
