"""The emulator notices what test_emulated_kernels.py counts on it to notice: one kernel (tests/emulator/faults.cu), each time with another
fault. And csrc is translated as it should be.
"""

import ctypes
import re
import shutil

import pytest
import torch
from emulator import build, translate

pytestmark = pytest.mark.skipif(build.reason_not_buildable() is not None, reason=str(build.reason_not_buildable()))

# In the order of `Fault` in faults.cu: what the error says; None: there is none, but the result has NaN.
FAULTS = {
    "none": "",
    "no copy wait": "read while a copy into it is in flight: a wait is missing",
    "no thread barrier": r"a race: warp \d (reads|writes) shared address 0x\w+, which warp \d (wrote|reads), with no barrier between",
    "no proxy fence": "without a fence.proxy.async after it",
    "no tensor wait": "read while a copy into it is in flight: a wait is missing",
    "wrong byte count": "deadlock: block 0: threads 0-127 wait for mbarrier at 0x4400, parity 0",
    "no wgmma fence": "wgmma without a wgmma.fence",
    "no wgmma wait": None,
    "early release": "is written while a wgmma or copy that reads it has not been waited for",
    "left arrival": "the block ends with 32 of 128 arrivals at barrier 3",
    "too many arrivals": "more arrivals than the 1 of its phase",
    "missing arrival": r"wait for barrier 3 \(96 of 128 threads have arrived\)",
    "different counts": r"barrier 3 with \d+ threads, others use it with \d+",
    "diverged warp": "while other lanes of the warp are in",
    "outside shared": "is outside the 16400 bytes of the block",
    "misaligned": "must be aligned to 16 bytes",
    "no kernel wait": "the end of the block before griddepcontrol.wait",
    "unheeded": "(after a semaphore of the past, the end of the block|the end of the kernel) before griddepcontrol.wait",
    "idle block": "",
    "idle blocks": "the end of the kernel before griddepcontrol.wait",
    "busy block": "the end of the block before griddepcontrol.wait",
    "busy warps": "the end of the block before griddepcontrol.wait",
    "busy memory": "the end of the block before griddepcontrol.wait",
    "early access": "ld.acquire before griddepcontrol.wait",
    "uncleared": "ld.acquire of a semaphore that nothing has cleared",
    "no read wait": "ends before a bulk copy has read its shared memory",
    "no product barrier": r"a race: warp \d reads shared address 0x\w+, which warp \d wrote, with no barrier between",
    "untold reload": r"a race: warp 0 writes shared address 0x\w+, which warp 3 reads, with no barrier between|read while a copy into it",
    "all outside": "a box all outside a tensor that begins before its data",
}


def load(source: str, function: str, *arguments: type) -> ctypes.CDLL:
    """The library of a source beside the emulator's, whose function runs its kernel with a fault."""
    library = ctypes.CDLL(str(build.build_file(build.HERE / source)))
    run = getattr(library, function)
    run.argtypes, run.restype = [ctypes.c_int, *arguments], ctypes.c_char_p
    library.emulator_schedule.argtypes = [ctypes.c_uint32, ctypes.c_int]
    return library


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load("faults.cu", "run_with_fault", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


@pytest.mark.parametrize("seed", (0, 1, 2))
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault, seed, library):
    library.emulator_schedule(seed, 1)
    a, b = (torch.randint(-8, 8, (64, 64)).to(torch.bfloat16) for _ in range(2))
    out = torch.zeros(66, 64)
    error = library.run_with_fault(list(FAULTS).index(fault), a.data_ptr(), b.data_ptr(), out.data_ptr()).decode()
    expected = FAULTS[fault]
    if expected:
        assert re.search(expected, error)
        return
    assert error == ""
    if expected is None:
        assert out.isnan().any()
    else:
        assert torch.equal(out[:64], a.float() @ b.float().T)


# In the order of `Fault` in cluster_faults.cu.
CLUSTER_FAULTS = {
    "none": "",
    "no proxy fence": "without a fence.proxy.async after it",
    "no empty wait": r"a race: warp \d+ writes|written while a wgmma or copy that reads it|another one that fills it is in flight",
    "no full wait": r"read while a copy into it is in flight: a wait is missing|a race: warp \d+ writes",
    "nothing sent": r"deadlock:.* block 1: threads 0-63 wait for mbarrier at 0x600, parity 0",
    "too few bytes": "the size must be a multiple of 16 bytes",
    "ordinary access": "is outside the 560 bytes of the block",
    "no meeting": "shared memory of the peer, which has ended|no barrier has told it that warp 0 is done with its shared memory",
    "no arrival": "waits at the barrier of the cluster before it arrives",
    "unheard": "which a copy of the first block reads, with no barrier between|written while a wgmma or copy that reads it",
    "unmet end": r"no barrier has told it that (warp \d+|a copy of the \w+ block) is done with its shared memory|which has ended",
    "unmet begin": r"mbarrier at 0x\w+ of the peer, which warp \d+ initialised, with no barrier between|was not initialised",
    "stores": "",
    "stores unheard": r"a race: warp \d+ writes|another one that fills it is in flight",
}


@pytest.fixture(scope="module")
def cluster_library() -> ctypes.CDLL:
    return load("cluster_faults.cu", "run_cluster_with_fault", ctypes.c_void_p, ctypes.c_int)


@pytest.mark.parametrize("seed", (0, 1, 2))
@pytest.mark.parametrize("fault", CLUSTER_FAULTS)
def test_fault_of_a_cluster(fault, seed, cluster_library):
    cluster_library.emulator_schedule(seed, 1 + seed)
    out = torch.full((3, 2, 64), float("nan"))
    error = cluster_library.run_cluster_with_fault(list(CLUSTER_FAULTS).index(fault), out.data_ptr(), 4).decode()
    if CLUSTER_FAULTS[fault]:
        assert re.search(CLUSTER_FAULTS[fault], error)
        return
    assert error == ""
    peers = 100.0 * torch.tensor([1, 0])
    assert torch.equal(out, 1000.0 * torch.arange(3)[:, None, None] + peers[:, None] + torch.arange(64.0))


def test_a_grid_of_half_a_cluster_is_refused(cluster_library):
    assert "no multiple of the cluster" in cluster_library.run_cluster_with_fault(0, torch.empty(384).data_ptr(), 3).decode()


def test_an_unknown_instruction_is_named():
    text = translate.translate(
        'asm volatile("frobnicate.sync.b32 %0, [%1 + 8], {%2, 3};" : "=r"(x) : "r"(y), "f"(z[1]) : "memory");', "a.cuh"
    )
    assert text.splitlines()[1] == "do { ::emulator::ptx::frobnicate_sync_b32(x, (y) + 8, ::emulator::ptx::list(z[1], 3)); } while (0);"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('// asm volatile("bar;")', '// asm volatile("bar;")'),
        ('asm volatile("" : "+f"(x[i]));', "do { } while (0);"),
        (
            'asm("{\\n.reg .pred p;\\nL:\\ntry.wait p, [%0];\\n@!p bra L;\\n}" ::"r"(b) : "memory");',
            "do { __label__ L; bool p; L:; ::emulator::ptx::try_wait(p, b); if (!p) goto L; } while (0);",
        ),
        (
            'asm("wgmma.mma_async.m64n16k16 {%0, %1}, %2, p, 1;" : "+f"(d[0]), "+f"(d[1]) : "l"(f(a, b)));',
            "do { ::emulator::ptx::wgmma_mma_async_m64nNk16<16>(::emulator::ptx::list(d[0], d[1]), f(a, b), p, 1); } while (0);",
        ),
        ("void f(const __grid_constant__ P<2> p) {", "void f(const P<2>& p) {"),
        ("__shared__ __align__(8) T x[N * 2];", 'auto& x = ::emulator::static_shared<T[N * 2]>("a.cuh:1", 8);'),
    ],
)
def test_translation(source, expected):
    assert translate.translate(source, "a.cuh") == f'#line 1 "a.cuh"\n{expected}'


def test_the_compiler_is_called_as_cxx_says(monkeypatch):
    program = shutil.which("g++") or shutil.which("clang++")
    monkeypatch.setenv("CXX", f"env {program} -m64")
    assert build._compiler_command() == ["env", program, "-m64"]
