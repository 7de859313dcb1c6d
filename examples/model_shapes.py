"""Models to run the examples on, from a configuration alone: random weights, three families, three sizes.

The shapes exercise what an attention kernel has to get right: grouped key heads (llama, mistral), a sliding window shorter than the text
(mistral), a fused projection and learned positions (gpt2).
"""

from transformers import GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig

from stdlib_data import END_ID, PAD_ID

MODEL_TYPES = ("llama", "mistral", "gpt2")
# hidden size, layers, query heads, key heads, MLP size, vocabulary
SIZES = {
    "tiny": (128, 2, 4, 2, 384, 2048),  # 0.9 M parameters: seconds on a CPU
    "small": (768, 12, 12, 4, 2048, 8192),  # 90 M parameters
    "1b": (2048, 16, 32, 8, 8192, 8192),  # Llama 3.2 1B's shape; 1.0 B parameters with this vocabulary, 1.2 B with its own
}


def vocab_size(size: str) -> int:
    return SIZES[size][-1]


def make_config(model_type: str, size: str, max_length: int, **overrides) -> PretrainedConfig:
    """A configuration of one family and size for sequences of up to max_length tokens. No dropout: runs are to be compared."""
    hidden, layers, heads, heads_k, mlp, vocabulary = SIZES[size]
    common = {
        "vocab_size": vocabulary,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "tie_word_embeddings": False,
    } | overrides
    if model_type == "gpt2":
        return GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, n_inner=mlp, n_positions=max_length,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **common,
        )  # fmt: skip
    common |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads_k,
        "intermediate_size": mlp,
        "max_position_embeddings": max_length,
    }
    if model_type == "mistral":
        return MistralConfig(sliding_window=max(2, max_length // 4), **common)
    return LlamaConfig(**common)
