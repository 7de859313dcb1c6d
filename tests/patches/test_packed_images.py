"""patch(model, packed=True) of models that see images: their language model runs packed, and everything is as on eager attention of a
padded batch, the gradients of the vision tower too."""

import copy

import image_models
import pytest
import small_models
import tiny_models
import torch
import transformers
from hf_flash2.patches import packed
from small_models import assert_close
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPVisionConfig, LlavaConfig, masking_utils

import hf_flash2
from hf_flash2 import masks, notices

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
IMAGE, VIDEO, BEGIN, END = 250, 251, 252, 253  # tokens
GRIDS = ((1, 4, 6), (1, 8, 4), (1, 4, 4))  # of patches: of each row's image

_ROPE = {"rope_type": "default", "type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TEXT = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
    "vocab_size": 256, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters" if VERSION >= (5, 0) else "rope_scaling": _ROPE,
}  # fmt: skip
_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
# type of the model -> what its vision tower has beside this
TOWERS = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    "glm4v": {"image_size": 64},
}
KINDS = tuple(TOWERS) if VERSION >= (5, 0) else ("qwen2_vl", "qwen2_5_vl")


def make(kind: str) -> torch.nn.Module:
    """The same weights every time, peaked attention; eager, in training mode."""
    names = ("image_start_token_id", "image_end_token_id") if kind == "glm4v" else ("vision_start_token_id", "vision_end_token_id")
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, **dict(zip(names, (BEGIN, END), strict=True))}
    config = AutoConfig.for_model(kind, text_config=_TEXT, vision_config=_TOWER | TOWERS[kind], **tokens)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.train()


def batch(padding: str) -> dict[str, torch.Tensor]:
    """A row has some text, an image and some more text."""
    generator = torch.Generator().manual_seed(1)
    patches = [t * h * w for t, h, w in GRIDS]
    texts = [torch.randint(IMAGE, (length,), generator=generator) for length in (20, 3, 9)]
    rows = [torch.tensor([5, 9, BEGIN, *[IMAGE] * (n // 4), END, *text]) for n, text in zip(patches, texts, strict=True)]
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        real = slice(longest - len(tokens), None) if padding == "left" else slice(len(tokens))
        ids[row, real], mask[row, real] = tokens, 1
    if padding == "holes":  # in the text before the image
        mask[1, 1] = 0
    labels = small_models.labels({"input_ids": ids, "attention_mask": mask}).masked_fill(ids >= IMAGE, -100)
    of_images = {"pixel_values": torch.randn(sum(patches), 3 * 2 * 4 * 4, generator=generator), "image_grid_thw": torch.tensor(GRIDS)}
    if VERSION >= (5, 0):
        of_images["mm_token_type_ids"] = (ids == IMAGE).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **of_images}


def loss_and_gradients(model: torch.nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    # A bias of k adds the same to all scores of a query: its gradient is rounding alone.
    return {"loss": loss.detach()} | {name: x for name, x in small_models.gradients(model).items() if not name.endswith("k_proj.bias")}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("padding", ["right", "left", "holes"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_every_gradient(kind, padding, checkpointing):
    eager = make(kind)
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs = batch(padding)
    expected = loss_and_gradients(eager, inputs)
    assert any("visual" in name for name in expected)
    assert_close(loss_and_gradients(model, inputs), expected)
    assert report.forwards == {"packed": 1} and report.losses == {"in chunks": 1}
    assert all(report.calls.values()) and not report.skipped  # the vision tower's layers too


@pytest.mark.parametrize("kind", KINDS)
def test_logits_come_out_padded(kind):
    eager = make(kind).eval()
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    inputs = batch("left")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, output = (each(**inputs, use_cache=False) for each in (eager, model))
        torch.testing.assert_close(output.logits[real], expected.logits[real], rtol=0, atol=1e-4)
        assert report.forwards == {"packed": 1} and not output.logits[~real].any()
        model(**inputs, use_cache=True)
        assert report.forwards == {"packed": 1, "with a cache": 1}


def test_unpatched_all_is_as_before():
    model = make("qwen2_5_vl")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hf_flash2.patch(model, packed=True)
    hf_flash2.unpatch(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_patching_again_keeps_the_reports_counters():
    model = make("qwen2_5_vl")
    report = hf_flash2.patch(model, packed=True)
    with hf_flash2.patched(model):
        loss_and_gradients(model, batch("right"))
    loss_and_gradients(model, batch("right"))
    assert report.forwards == {"packed": 1} and hf_flash2.patch(model, packed=True) is report


def text_model(kind: str):
    """(eager, packed, report) of the language model alone, without a cache"""
    eager = make(kind).get_decoder().eval()
    model = copy.deepcopy(eager)
    return eager, model, hf_flash2.patch(model, packed=True)


@pytest.mark.parametrize("axes", [None, 1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_several_axes(kind, axes):
    """With and without one for the text, for the whole batch and for each row."""
    eager, model, report = text_model(kind)
    mask = small_models.key_mask("left")
    inputs = {"input_ids": small_models.batch("dense")["input_ids"], "attention_mask": mask, "use_cache": False}
    if axes == 1:
        inputs["position_ids"] = torch.arange(mask.shape[1])[None] + 3
    elif axes is not None:
        inputs["position_ids"] = torch.randint(40, (axes, *mask.shape), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (each(**inputs).last_hidden_state[mask.bool()] for each in (eager, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert report.forwards == {"packed": 1}


def test_positions_of_another_shape_run_padded():
    _, model, report = text_model("qwen2_5_vl")
    inputs = small_models.batch("right") | {"use_cache": False}
    model(**inputs, position_ids=torch.zeros(3, 1, 1, dtype=torch.int64))
    assert report.forwards == {"with positions that are not [B, S]": 1}


@pytest.mark.skipif(VERSION < (5, 0), reason="not made for Transformers 4.57")
def test_an_image_in_the_padding_runs_padded():
    """Its features come apart from the tokens, one for each of the image, so none may be left out."""
    eager, model, report = text_model("qwen3_vl")
    mask = small_models.key_mask("right")
    inputs = {"input_ids": small_models.batch("dense")["input_ids"], "attention_mask": mask, "use_cache": False}
    for column, route in ((2, "packed"), (-1, "with images in the padding")):
        visual = torch.zeros_like(mask, dtype=torch.bool)
        visual[:, column] = True
        images = {"visual_pos_masks": visual, "deepstack_visual_embeds": [torch.randn(len(mask), 48, generator=torch.manual_seed(0))] * 2}
        report.forwards.clear()
        with torch.no_grad():
            expected, found = (each(**inputs, **images).last_hidden_state[mask.bool()] for each in (eager, model))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert report.forwards == {route: 1}


def test_what_a_decoder_has_a_name_for_may_be_of_rows():
    """As the images that Mllama's cross-attention sees; what it has none for goes on to layers that take no notice."""

    class SeesRows(transformers.LlamaModel):
        def forward(self, *args, cross_attention_states=None, **kwargs):
            return super().forward(*args, **kwargs)

    inputs = small_models.batch("right") | {"use_cache": False}
    rows = torch.ones(small_models.BATCH, 3, 48)
    module = SeesRows(small_models.config("llama")).eval()
    module.config._attn_implementation = "hf_flash2"
    for given in (rows, [rows], (None, rows)):
        mask = inputs["attention_mask"]
        assert packed._reason_to_stay_padded(module, inputs | {"cross_attention_states": given}, mask) == "with cross_attention_states"
        assert packed._reason_to_stay_padded(module, inputs | {"anything_else": given}, mask) is None


def llava(**text) -> transformers.LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
    config = LlavaConfig(vision_config=vision, text_config=small_models.config("llama", **text), image_token_index=60)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")


def test_a_tower_of_another_kind():
    """Llava: the images are the same for all rows, 16 tokens each."""
    eager = llava().train()
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (3, 30), generator=generator)
    ids[:, 4:20] = 60
    mask = (torch.arange(30) < torch.tensor([30, 22, 27])[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    inputs["labels"] = small_models.labels(inputs).masked_fill(ids == 60, -100)
    assert_close(loss_and_gradients(model, inputs), loss_and_gradients(eager, inputs))
    assert report.forwards == {"packed": 1}
    if VERSION < (5, 0):  # there it is its own base model
        assert report.losses is None
        return
    output = model(**inputs)
    assert report.losses == {"in chunks": 2} and output.logits is None
    assert vars(output).keys() & {"image_hidden_states", "image_outputs"}  # for losses of one's own


def test_a_model_that_makes_its_mask_above_the_language_model_is_refused(monkeypatch):
    """PaliGemma, where Transformers has no masks of blocks that ours could read."""
    monkeypatch.delattr(masking_utils, "blockwise_overlay", raising=False)
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )
    text = transformers.GemmaConfig(**{**_TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    config = transformers.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    model = transformers.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match="several models, and its PaliGemmaModel does not hand its attention_mask on as it came"):
        hf_flash2.patch(model, packed=True)


def gives_another(self, input_ids, attention_mask=None, pixel_values=None, **kwargs):
    mask = attention_mask.clone()
    self.get_image_features(pixel_values, attention_mask=attention_mask)
    return self.language_model(input_ids, attention_mask=mask, **kwargs)


def gives_it_once(self, input_ids, attention_mask=None, past_key_values=None, **kwargs):
    if past_key_values is not None:
        return self.language_model(input_ids, past_key_values=past_key_values, **kwargs)
    return self.language_model(input_ids, attention_mask=attention_mask, **kwargs)


def gives_one_that_it_changed(self, input_ids, attention_mask=None, **kwargs):
    causal_mask = masking_utils.create_causal_mask(self.config, None, attention_mask, None)
    causal_mask = causal_mask & causal_mask.roll(1)
    return self.language_model(input_ids, attention_mask=causal_mask, **kwargs)


def gives_one_of_several(self, input_ids, attention_mask=None, **kwargs):
    for causal_mask in (attention_mask, None):
        kwargs = self.language_model(input_ids, attention_mask=causal_mask, **kwargs)
    return kwargs


@pytest.mark.parametrize("forward", [gives_another, gives_it_once, gives_one_that_it_changed, gives_one_of_several])
def test_the_language_model_has_to_be_given_the_mask_itself(forward, monkeypatch):
    model = llava()
    monkeypatch.setattr(type(model.model), "forward", forward)
    with pytest.raises(ValueError, match="its LlavaModel does not hand its attention_mask on as it came"):
        hf_flash2.patch(model, packed=True)


def test_a_language_model_that_nobody_names_is_refused(monkeypatch):
    model = llava()
    monkeypatch.setattr(type(model.model), "get_decoder", lambda self: None)
    with pytest.raises(ValueError, match=r"several models, and its get_decoder\(\) does not say which of them is its language model"):
        hf_flash2.patch(model, packed=True)


# ------------------------------------------------------------------------------------------------------- images that see all of themselves

NEEDS_BLOCKS = pytest.mark.skipif(not hasattr(masking_utils, "blockwise_overlay"), reason="this Transformers has no masks of blocks")


def seeing(kind: str, padding: str, **of_text):
    """(eager, packed, report, a batch with labels)"""
    eager = image_models.model(kind, "eager", **of_text).train()
    model = copy.deepcopy(eager)
    report = hf_flash2.patch(model, packed=True)
    inputs, mask = image_models.batch(kind), tiny_models.attention_mask(padding)
    return eager, model, report, inputs | {"attention_mask": mask, "labels": tiny_models.labels(inputs["input_ids"], mask)}


@NEEDS_BLOCKS
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
@pytest.mark.parametrize("padding", ["left", "right", "holes", "empty"])
@pytest.mark.parametrize("kind", image_models.KINDS)
def test_blocks_go_with_their_tokens(kind, padding, checkpointing):
    eager, model, report, inputs = seeing(kind, padding)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    with notices.record_calls() as calls:
        found = loss_and_gradients(model, inputs)
    assert_close(found, loss_and_gradients(eager, inputs))
    under_a_window = padding == "holes" and hasattr(model.config.get_text_config(), "sliding_window")
    assert report.forwards == {"with padding inside a row, under a sliding window" if under_a_window else "packed": 1}
    assert report.losses == {"in chunks": 1}
    assert {route for of_layer in calls.values() for route in of_layer} <= {"blocks", "padded" if under_a_window else "documents"}
    assert ["blocks"] in [of_layer[:1] for of_layer in calls.values()]


@NEEDS_BLOCKS
@pytest.mark.parametrize("kind", image_models.KINDS)
def test_logits_of_blocks_come_out_padded(kind):
    eager, model, report, inputs = seeing(kind, "right")
    inputs.pop("labels")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected, output = (each.eval()(**inputs, use_cache=False) for each in (eager, model))
        torch.testing.assert_close(output.logits[real], expected.logits[real], rtol=0, atol=1e-4)
        assert report.forwards == {"packed": 1}
        model(**inputs, use_cache=True)
        inputs.pop("attention_mask")
        expected, output = (each(**inputs, use_cache=False) for each in (eager, model))
        torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-4)
    assert report.forwards["packed"] == 1 and report.forwards["with a cache"] == 1


@NEEDS_BLOCKS
def test_pixels_of_gemma3():
    """Two images side by side, of a row whose padding is on the left, see each other, as in eager attention."""
    eager, model, report, inputs = seeing("gemma3", "left")
    ids, types = inputs["input_ids"], torch.zeros_like(inputs["input_ids"])
    for row, column in ((1, 3), (2, 1), (2, 5), (3, 7)):
        ids[row, column : column + 4], types[row, column : column + 4] = image_models.IMAGE, 1
    inputs |= {"token_type_ids": types, "pixel_values": torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    expected = loss_and_gradients(eager, inputs)
    assert any("vision_tower" in name for name in expected)
    assert_close(loss_and_gradients(model, inputs), expected)
    assert report.forwards == {"packed": 1}


@NEEDS_BLOCKS
@pytest.mark.skipif("gemma4" not in image_models.KINDS, reason="this Transformers has no Gemma 4")
def test_what_gemma4_looks_up_for_every_layer_goes_with_its_tokens():
    eager, model, report, inputs = seeing("gemma4", "left", hidden_size_per_layer_input=8, vocab_size_per_layer_input=61)
    expected = loss_and_gradients(eager, inputs)
    assert any("per_layer" in name for name in expected)
    assert_close(loss_and_gradients(model, inputs), expected)
    assert report.forwards == {"packed": 1}


@NEEDS_BLOCKS
def test_masks_that_say_something_else_run_padded():
    """Of one whose attribute was lost nobody knows what its rows were; of several, the tokens have to be the same ones."""
    _, model, report, inputs = seeing("gemma3", "left")
    decoder = model.get_decoder()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    given = {"input_ids": ids, "use_cache": False}
    described = masks.Sequences(mask.bool(), 0, causal=True, block_ids=torch.full_like(ids, -1))
    as_given = masks.mask_of_blocks(described)
    other = masks.attach(mask.flip(1).bool(), masks.Sequences(mask.flip(1).bool(), causal=True))
    both_sides = masks.attach(mask.bool(), masks.Sequences(mask.bool(), causal=False))
    for full in (as_given.clone(), other, both_sides):
        decoder(attention_mask={"full_attention": full, "sliding_attention": as_given}, **given)
    assert report.forwards == {"with a mask that is not [B, S]": 3}
    decoder(attention_mask={"full_attention": None, "sliding_attention": as_given}, **given)
    decoder(attention_mask={"full_attention": None, "sliding_attention": None}, **given)  # nothing is padded
    assert report.forwards == {"with a mask that is not [B, S]": 3, "packed": 1}
