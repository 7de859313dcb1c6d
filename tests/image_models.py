"""Small random models whose images, or prefixes, see all of themselves, and batches for them: none needs pixels."""

import torch
import transformers
from tiny_models import BATCH, SEQLEN, tokens
from transformers import PreTrainedModel

VOCABULARY = 61
IMAGE = 60
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
}  # fmt: skip
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model"}
_MOLMO = {"head_dim": 16, "num_key_value_heads": 2, "initializer_range": 0.25}
# type of the model -> its class, its config, and what tells it which tokens are of images
_MODELS = {
    "gemma3": ("Gemma3ForConditionalGeneration", {
        "text_config": _TEXT | _WINDOWS, "vision_config": _TOWER, "image_token_id": IMAGE, "boi_token_index": 58, "eoi_token_index": 59,
        "mm_tokens_per_image": 4,
    }, "token_type_ids"),
    "paligemma": ("PaliGemmaForConditionalGeneration", {
        "text_config": _TEXT | {"model_type": "gemma"}, "vision_config": _SIGLIP, "image_token_id": IMAGE, "projection_dim": 64,
    }, "token_type_ids"),
    "paligemma2": ("PaliGemmaForConditionalGeneration", {
        "text_config": _TEXT | _WINDOWS | {"model_type": "gemma2", "sliding_window": 8}, "vision_config": _SIGLIP, "image_token_id": IMAGE,
        "projection_dim": 64,
    }, "token_type_ids"),
    "gemma4": ("Gemma4ForConditionalGeneration", {
        "text_config": _TEXT | _WINDOWS | {
            "use_bidirectional_attention": "vision", "global_head_dim": 32, "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
        }, "image_token_id": IMAGE, "video_token_id": 59, "audio_token_id": 58, "boi_token_id": 57, "eoi_token_id": 56, "boa_token_id": 55,
    }, "mm_token_type_ids"),
    "molmo2": ("Molmo2ForConditionalGeneration", {
        "text_config": _TEXT | {"additional_vocab_size": 4}, "vision_config": _TOWER | _MOLMO | {"image_size": [16, 16]},
        "adapter_config": _TOWER | _MOLMO | {"text_hidden_size": 64, "vision_feature_layer": [0]}, "image_patch_id": IMAGE,
    }, "mm_token_type_ids"),
}  # fmt: skip
KINDS = [kind for kind, (name, _, _) in _MODELS.items() if hasattr(transformers, name)]


def model(kind: str, implementation: str = "hf_flash2", device="cpu", dtype=torch.float32, **of_text) -> PreTrainedModel:
    """The same weights for every implementation, in evaluation mode."""
    name, config, _ = _MODELS[kind]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**config | {"text_config": config["text_config"] | of_text})
    torch.manual_seed(0)
    made = model_class._from_config(config, attn_implementation=implementation)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return made.to(device, dtype).eval()


def batch(kind: str, device="cpu") -> dict[str, torch.Tensor]:
    """input_ids [BATCH, SEQLEN] and the types of its tokens: one image or two, apart or side by side, the last row without."""
    ids = tokens(device).clamp(max=54)
    types = torch.zeros(BATCH, SEQLEN, dtype=torch.int64, device=device)
    if kind.startswith("paligemma"):  # 0: of the prefix, in PaliGemma 2 no longer than its window
        for row, prefix in enumerate((4, 8 if kind == "paligemma2" else SEQLEN, 7, 0)):
            types[row, prefix:] = 1
        return {"input_ids": ids, "token_type_ids": types}
    for row, images in enumerate(((2, 6), (0, 4), (7,))):
        for start in images:
            types[row, start : start + 3 + row] = 1
    return {"input_ids": ids, _MODELS[kind][2]: types}
