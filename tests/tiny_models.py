"""Tiny random models and ragged batches for the interface tests, and the rule that judges them against eager attention.

Weights are drawn with a large standard deviation: at the default one attention is nearly flat, and a lost mask or window hardly shows.
"""

import copy

import torch
import transformers
from transformers import PreTrainedModel

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # at these sizes more threads only wait for each other

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
VOCABULARY, BATCH, SEQLEN = 61, 4, 12
DTYPES = [torch.bfloat16] if torch.cuda.is_available() else [torch.float32, torch.bfloat16]

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = _TOKENS | {"initializer_range": 0.25, "tie_word_embeddings": False}
_DECODER = _COMMON | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip
_T5GEMMA = _DECODER | {
    "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": None,
}  # fmt: skip
_GPT2 = _COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_BART = _TOKENS | {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "init_std": 0.25, "dropout": 0.0,
    "max_position_embeddings": 64, "decoder_start_token_id": 2,
}  # fmt: skip

# family -> (class of the model, arguments of its config)
FAMILIES = {
    "llama": ("LlamaForCausalLM", _DECODER),
    "mistral": ("MistralForCausalLM", _DECODER | {"sliding_window": 5}),
    "gpt2": ("GPT2LMHeadModel", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2_cross": ("GPT2LMHeadModel", _GPT2 | {"add_cross_attention": True}),
    "qwen3": ("Qwen3ForCausalLM", _DECODER),
    "gemma3": ("Gemma3ForCausalLM", _DECODER | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "bert": ("BertForMaskedLM", _COMMON | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64,
    }),
    "modernbert": ("ModernBertForMaskedLM", _COMMON | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_cutoff_factor": 5.0,
        "local_attention": 6, "layer_types": ["full_attention", "sliding_attention"], "cls_token_id": 1, "sep_token_id": 2,
    }),
    "bart": ("BartForConditionalGeneration", _BART),
    # its layers take the window of their bidirectional masks for a causal one
    "t5gemma": ("T5GemmaEncoderModel", {"is_encoder_decoder": False, "encoder": _T5GEMMA, "decoder": _T5GEMMA}),
    # multi-head latent attention: v has another head dim than q and k
    "deepseek_v3": ("DeepseekV3ForCausalLM", _COMMON | {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
        "max_position_embeddings": 128,
    }),
    # its layers leave their window to the mask; all experts take part, so that rounding changes no route
    "qwen2_moe": ("Qwen2MoeForCausalLM", _DECODER | {
        "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "olmoe": ("OlmoeForCausalLM", _DECODER | {"num_experts": 2, "num_experts_per_tok": 2}),
    # attention sinks; one expert, so that rounding changes no route, nor the gradient of a router
    "gpt_oss": ("GptOssForCausalLM", _DECODER | {
        "num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    }),
    # sinks in the layers with a window alone, which have more key heads than the others; a head dim of its own for v; all experts take part
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", _DECODER | {
        "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "v_head_dim": 8,
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "swa_head_dim": 16, "swa_v_head_dim": 8,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    }),
    # a cap of 2, which tiny models reach
    "gemma2": ("Gemma2ForCausalLM", _DECODER | {
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 16,
    }),
    # its global layers have heads of their own, wider than those of other models; 512 in the ones that there are
    "gemma4": ("Gemma4ForCausalLM", _DECODER | {
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 264,
        "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    }),
    "stablelm": ("StableLmForCausalLM", _DECODER),
    # what must be refused
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 2}),
    "mpt": ("MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 1, "n_heads": 2}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}),
    # until it calls the attention interface, from Transformers 5.24 on
    "gptj": ("GPTJForCausalLM", _COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
}  # fmt: skip


def config(family: str, **overrides):
    class_name, arguments = FAMILIES[family]
    return getattr(transformers, class_name).config_class(**arguments | overrides)


def model(family: str, implementation: str = "hf_flash2", device="cpu", dtype=torch.float32, **overrides) -> PreTrainedModel:
    """The same weights for every implementation, in evaluation mode. A config of its own: implementations live in the config."""
    torch.manual_seed(0)
    model_class = getattr(transformers, FAMILIES[family][0])
    return model_class._from_config(config(family, **overrides), attn_implementation=implementation).to(device, dtype).eval()


def twins(family: str, device="cpu", dtype=torch.float32, **overrides) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(hf_flash2, eager)"""
    return model(family, "hf_flash2", device, dtype, **overrides), model(family, "eager", device, dtype, **overrides)


def attention_mask(padding: str, device="cpu", seqlen: int = SEQLEN) -> torch.Tensor | None:
    """int64 [BATCH, seqlen], 1 = real. "holes" lie at both ends and inside, some wider than a window; "empty" has a row without a token."""
    mask = torch.ones(BATCH, seqlen, dtype=torch.int64, device=device)
    match padding:
        case "dense":
            return None
        case "left" | "right":
            for row, missing in enumerate((seqlen - 1, 3, 0, 5)):
                mask[row, :missing] = 0
            return mask if padding == "left" else mask.flip(1)
        case "holes":
            mask[0, 2:9] = 0
            mask[1, [0, 4, seqlen - 1]] = 0
            mask[2, ::2] = 0
        case "empty":
            mask[1] = 0
            mask[2, 7:] = 0
    return mask


PADDINGS = ("dense", "left", "right", "holes", "empty")


def tokens(device="cpu", batch: int = BATCH, seqlen: int = SEQLEN, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=generator).to(device)


def real(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """bool [B, S]: the rows whose results mean something."""
    return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device) if mask is None else mask.bool()


def labels(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Real tokens behind a real token: what padding predicts is every implementation's own affair."""
    kept = real(mask, input_ids)
    kept[:, 1:] &= kept[:, :-1].clone()
    return input_ids.masked_fill(~kept, -100)


def gradients(trained: PreTrainedModel, **inputs) -> dict[str, torch.Tensor]:
    trained.zero_grad()
    trained(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in trained.named_parameters() if parameter.grad is not None}


def eager_in_float32(eager: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(eager).float()


def assert_as_exact_as_eager(
    ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, factor: float = 2.0, name: str = "", dtype: torch.dtype | None = None
) -> None:
    """float32: equal to eager up to float32 rounding. Half types: at most `factor` times eager's own distance from float32.

    `dtype` is the model's, where the result is of another: the loss of a half-precision model is a float32.
    """
    scale = truth.float().abs().max().item() + 1e-12
    error = (ours.float() - truth.float()).abs().max().item() / scale
    eager_error = (eager.float() - truth.float()).abs().max().item() / scale
    allowed = 2e-5 if (dtype or ours.dtype) == torch.float32 else factor * eager_error + 1e-3
    assert error <= allowed, f"{name}: error {error:.2e} of the largest value, allowed {allowed:.2e} (eager: {eager_error:.2e})"


def assert_same_greedy_tokens(ours: torch.nn.Module, eager: torch.nn.Module, **arguments) -> None:
    """Both generate the same tokens; in half types a row may part ways, for good, at a step where eager's logits tie within rounding."""
    results = [model.generate(**arguments, return_dict_in_generate=True, output_logits=True) for model in (ours, eager)]
    found, expected = (result.sequences for result in results)
    if eager.dtype == torch.float32:
        assert torch.equal(found, expected)
        return
    prompt = found.shape[1] - len(results[1].logits)
    for row in range(found.shape[0]):
        _assert_tied_where_they_part(
            found[row, prompt:], expected[row, prompt:], [step[row] for step in results[1].logits], eager.dtype, f"row {row}"
        )


def assert_greedy_answer(answer: list[int], eager: torch.nn.Module, prompt: list[int], **arguments) -> None:
    """What a continuous batch answered to a prompt are the tokens that eager generates from it alone, likewise."""
    ids = torch.tensor([prompt], device=eager.device)
    result = eager.generate(ids, eos_token_id=None, return_dict_in_generate=True, output_logits=True, **arguments)
    expected = result.sequences[0, len(prompt) :]
    if eager.dtype == torch.float32:
        assert answer == expected.tolist()
    else:
        found = torch.tensor(answer, device=expected.device)
        _assert_tied_where_they_part(found, expected, [step[0] for step in result.logits], eager.dtype, f"prompt {prompt}")


def _assert_tied_where_they_part(
    found: torch.Tensor, expected: torch.Tensor, logits_of_steps: list[torch.Tensor], dtype: torch.dtype, name: str
) -> None:
    assert found.shape == expected.shape
    differs = (found != expected).nonzero().flatten()
    if differs.numel():
        step = int(differs[0])
        logits = logits_of_steps[step].float()
        gap = logits[expected[step]] - logits[found[step]]
        tie = 8 * torch.finfo(dtype).eps * logits.abs().max()
        assert gap <= tie, f"{name}, step {step}: another token, {gap:.3f} below eager's; a tie would be within {tie:.3f}"
