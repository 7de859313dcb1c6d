"""bench_profile: kinds of kernels by their names, the sums over a trace, the files."""

import json

import pytest

from hf_flash2 import bench_profile as profile

pytestmark = pytest.mark.timeout(120)

BFLOAT16_COPY = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::operator()() "
    "const::{lambda(c10::BFloat16)#1}"
)
# As they stand in traces of torch, template arguments shortened.
KERNELS = {
    profile.ATTENTION: (
        "void hf_flash2::sm80::forward_kernel<128, __nv_bfloat16, 0>(HfFlash2ForwardParams)",
        "void hf_flash2::sm90::forward_kernel<hf_flash2::sm90::ForwardShape<128>, __nv_bfloat16>(hf_flash2::sm90::ForwardArguments)",
        "void hf_flash2::preprocess_kernel<128, __nv_bfloat16>(HfFlash2BackwardParams)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>, false, true>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 2, 4, 2, false, false>>",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 2, 4, 2, false, false>>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::arch::Sm80>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x128x128_1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, float>(cudnn::fusion::Params)",
        "void at::native::(anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, float, 11, false, false>(float*)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, float, "
        "at::native::(anonymous namespace)::SoftMaxForwardEpilogue>(float*, c10::BFloat16 const*, int)",
    ),
    profile.PRODUCTS: (
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false, false, false>",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, false>",
    ),
    profile.ELEMENTWISE: (
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, "
        "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, std::array<char*, 3ul>)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<float> > >(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float> > >",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int, float)",
        "void hf_flash2::rotary_kernel<__nv_bfloat16>(HfFlash2RotaryParams)",
        "triton_poi_fused_add_mul_silu_3",
    ),
    profile.LOSS: (
        "void hf_flash2::cross_entropy_kernel<__nv_bfloat16>(HfFlash2CrossEntropyParams)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
        "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float, float, "
        "at::native::(anonymous namespace)::LogSoftMaxBackwardEpilogue>(float*, float const*, float const*, long)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*, float const*)",
        "void at::native::(anonymous namespace)::nll_loss_backward_reduce_cuda_kernel_2d<float, long>(float*, float const*, long const*)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, true, false>(float*, float const*, int, int, int)",
    ),
    profile.OPTIMIZER: (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<c10::BFloat16, float, 4> >",
    ),
    profile.COPIES: (
        "Memcpy DtoH (Device -> Pageable)",
        "Memset (Device)",
        f"void at::native::unrolled_elementwise_kernel<{BFLOAT16_COPY}, std::array<char*, 2ul>, 4>(int)",
        f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{BFLOAT16_COPY}> >(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<c10::BFloat16>, std::array<char*, 1ul> >(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<at::native::(anonymous namespace)::OpaqueType<2u>, 4>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_copy_kernel_impl>>(long)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16, float, long>(long const*)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy<long, long>::Policy900>",
    ),
    profile.OTHER: ("some_kernel_that_nobody_has_seen",),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kind_of_a_kernel(kind, name):
    assert profile.category(name) == kind


@pytest.mark.parametrize("number", range(len(profile.RULES)))
def test_every_rule_decides_for_a_kernel(number):
    """A rule that no name needs is dead."""
    kind, pattern = profile.RULES[number]
    before = [rule for _, rule in profile.RULES[:number]]
    assert any(pattern.search(name) and not any(rule.search(name) for rule in before) for name in KERNELS[kind])


def span(cat: str, name: str, ts: float, dur: float, **args: int) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **({"args": args} if args else {})}


TRACE = [
    {"ph": "M", "name": "process_name"},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 0},
    span("gpu_user_annotation", "whole step", 0, 100_000),
    span("cpu_op", "aten::mm", 0, 1000),
    span("cuda_runtime", "cudaLaunchKernel", 100, 10),
    span("cuda_runtime", "cudaLaunchKernel", 1000, 10),
    span("cuda_runtime", "cudaLaunchKernel", 2000, 5010),  # the queue was full
    span("cuda_runtime", "cudaMemcpyAsync", 8000, 500),
    span("cuda_runtime", "cudaDeviceSynchronize", 9000, 11_000),
    span("kernel", "nvjet_tst_192x192", 1000, 6000),
    span("kernel", "nvjet_tst_192x192", 7000, 1000),
    span("kernel", "void hf_flash2::sm90::forward_kernel", 7500, 1500),  # half a millisecond beside the product
    span("kernel", "mystery", 12_000, 900),
    span("kernel", "small mystery", 13_000, 100),
    span("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 14_000, 250),
]


def test_breakdown_of_a_trace():
    found = profile.breakdown("tiny", "sdpa", 20.0, TRACE)
    ms = {name: value for name, value in found.gpu_ms.items() if value}
    assert ms == pytest.approx({"matrix products": 7.0, "attention": 1.5, "other": 1.0, "copies, gathers": 0.25, "idle": 20 - 9.25})
    assert found.host_ms == pytest.approx(20.0 - 5.0 - 0.5 - 11.0)
    assert found.launches == 5
    assert found.unknown_ms == pytest.approx({"mystery": 0.9})
    text = profile.format_breakdown(found)
    assert "matrix products 7.0" in text and "no rule for mystery: 0.9 ms" in text and "small mystery" not in text


START = 10_000
# In no order of time, as torch writes them: what the GPU ran, then what the host did.
TRACE_WITH_LAUNCHES = [
    span("kernel", "first", START + 300, 500, correlation=1),
    span("kernel", "launched early", START + 804, 1196, correlation=2),
    span("kernel", "within the one before", START + 900, 600, correlation=3),
    span("kernel", "launched by nothing in the trace", START + 2002, 498),
    span("kernel", "launched late", START + 2540, 460, correlation=5),
    span("kernel", "launched by another thread", START + 3005, 95, correlation=7),
    span("gpu_memset", "Memset (Device)", START + 3001, 2, correlation=6),
    span("gpu_memcpy", "Memcpy DtoD", START + 3103, 7, correlation=99),
    span("cpu_op", "aten::mm", START, 100),
    span("cuda_runtime", "cudaLaunchKernel", START + 1000, 10, correlation=3),  # in a full queue: the kernel before runs
    span("cuda_runtime", "cudaLaunchKernel", START + 90, 10, correlation=1),
    span("cuda_runtime", "cudaLaunchKernelExC", START + 110, 10, correlation=2),
    span("cuda_runtime", "cudaStreamIsCapturing", START + 2100, 10),
    span("cuda_driver", "cuLaunchKernelEx", START + 2490, 30, correlation=5),  # comes back 20 us after all is done
    span("cuda_runtime", "cudaMemsetAsync", START + 2600, 10, correlation=6),
    span("cpu_op", "aten::zero_", START + 2600, 5000, correlation=6),  # lasts, but launches nothing
    span("cuda_runtime", "cudaLaunchKernel", START + 2990, 13, correlation=7),  # comes back in the very moment when the memset ends
    span("cuda_runtime", "cudaDeviceSynchronize", START + 2700, 500, correlation=8),
]


def test_waits_for_the_host():
    """A gap is one where what ends it was launched after the work before: the start of the step, and one launch that came late."""
    found = profile.breakdown("tiny", "sdpa", 3.2, TRACE_WITH_LAUNCHES)
    assert found.waits_ms == pytest.approx(0.300 + 0.040)
    assert found.last_wait_ms == pytest.approx(2.540)
    assert found.turnaround_ms == pytest.approx(0.004 + 0.002 + 0.001 + 0.002 + 0.003)
    assert profile.format_breakdown(found).splitlines()[0].endswith("; waits for the host 0.3 ms, none after 2.5 ms")


def test_gaps_that_the_trace_ties_to_no_launch_are_no_waits():
    found = profile.breakdown("tiny", "sdpa", 20.0, TRACE)
    assert (found.waits_ms, found.last_wait_ms) == (0.0, 0.0)
    assert found.turnaround_ms == pytest.approx(1.0 + 3.0 + 0.1 + 0.9)
    assert profile.format_breakdown(found).splitlines()[0].endswith("; waits for the host 0.0 ms")


def test_a_step_that_was_faster_than_its_kernels_is_not_idle():
    """The profiled step is another than the timed ones."""
    assert profile.breakdown("tiny", "sdpa", 5.0, TRACE).gpu_ms[profile.IDLE] == 0.0


def test_a_step_without_kernels_is_idle():
    found = profile.breakdown("tiny", "sdpa", 20.0, [])
    assert found.gpu_ms[profile.IDLE] == 20.0 and found.launches == 0 and found.host_ms == 0.0
    assert found.waits_ms == found.last_wait_ms == found.turnaround_ms == 0.0


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    steps = [profile.breakdown(preset, arm, 20.0, TRACE) for preset in ("1b-ragged", "1b-dense") for arm in ("sdpa", "hf_flash2 packed")]
    profile.write(tmp_path / "new" / "p.json", steps, {"gpu": "some GPU", "date": "2026-01-01"})
    written = json.loads((tmp_path / "new" / "p.json").read_text())
    assert written["environment"]["gpu"] == "some GPU" and len(written["steps"]) == 4
    assert written["steps"][0]["gpu_ms"]["matrix products"] == 7.0 and written["steps"][0]["gpu_ms"]["attention"] == 1.5
    assert {"waits_ms", "last_wait_ms", "turnaround_ms"} <= written["steps"][0].keys()
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")
