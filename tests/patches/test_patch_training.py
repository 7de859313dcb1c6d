"""Training with LoRA and AdamW on a patched model follows the run on eager attention loss by loss; on one process and on two. Two processes
that share the heads of a model."""

import copy

import pytest
import ranks
import small_models
import torch
from peft import LoraConfig, get_peft_model
from small_models import FAMILIES
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import hf_flash2

STEPS = 32
RELATIVE_TOLERANCE = 2e-5  # of each loss, float32
TARGETS = {"gpt2": ["c_attn", "c_proj"]}


def with_lora(model, family):
    torch.manual_seed(0)
    targets = TARGETS.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=family == "gpt2")).train()


def train(model, steps=STEPS, first_seed=0) -> list[float]:
    """Losses of AdamW steps on batches that are padded right, left, and not at all in turn; the second half repeats the first."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs = small_models.batch(("right", "left", "dense")[step % 3], seed=first_seed + step % 6)
        loss = model(**inputs, labels=small_models.labels(inputs)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_training_follows_eager(family, packed):
    eager, model = (with_lora(twin, family) for twin in small_models.twins(family))
    report = hf_flash2.patch(model, packed=packed)
    expected, losses = train(eager), train(model)
    assert expected[-1] < 0.8 * expected[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=RELATIVE_TOLERANCE, atol=0)
    torch.testing.assert_close(trained(model), trained(eager), rtol=1e-3, atol=1e-4)
    assert set(report.calls.values()) == {STEPS}


def test_the_comparison_notices_a_wrong_attention(monkeypatch):
    eager, model = (with_lora(twin, "llama") for twin in small_models.twins("llama"))
    hf_flash2.patch(model)
    attend = hf_flash2.patches.rotary.attend
    monkeypatch.setattr(
        hf_flash2.patches.rotary, "attend", lambda *args, **options: attend(*args, **{**options, "scaling": 0.28})
    )  # 0.2887
    expected, losses = train(eager, 3), train(model, 3)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=RELATIVE_TOLERANCE, atol=0)


def test_two_processes_with_ddp(tmp_path):
    """Two ranks with different batches, patched before and after the wrapping: both follow eager, and the ranks stay together."""
    ranks.run("test_patch_training", "ddp_rank", tmp_path)
    weights = [torch.load(tmp_path / f"weights-{rank}.pt") for rank in range(2)]
    assert torch.equal(weights[0], weights[1])


def ddp_rank(rank: int, folder: str) -> None:
    eager = with_lora(small_models.model("llama"), "llama")
    early, late = copy.deepcopy(eager), copy.deepcopy(eager)
    reports = [hf_flash2.patch(early)]
    eager, early, late = (DistributedDataParallel(model) for model in (eager, early, late))
    reports.append(hf_flash2.patch(late))
    expected = torch.tensor(train(eager, steps=6, first_seed=100 * rank))
    for model, report in zip((early, late), reports, strict=True):
        losses = torch.tensor(train(model, steps=6, first_seed=100 * rank))
        torch.testing.assert_close(losses, expected, rtol=RELATIVE_TOLERANCE, atol=0)
        assert set(report.calls.values()) == {6}
    torch.save(trained(late), f"{folder}/weights-{rank}.pt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="each process takes a GPU of its own where there is one")
def test_two_processes_that_share_the_heads(tmp_path):
    """Tensor parallelism, as from_pretrained(tp_plan="auto") sets it up."""
    small_models.model("llama", vocab_size=62).save_pretrained(tmp_path / "model")  # which two can share, too
    ranks.run("test_patch_training", "tensor_parallel_rank", tmp_path)


def tensor_parallel_rank(rank: int, folder: str) -> None:
    inputs = small_models.batch("left")
    real = inputs["attention_mask"].bool()
    expected = small_models.model("llama", vocab_size=62)(**inputs).logits[real]
    for way in ("hf_flash2", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", tp_plan="auto", attn_implementation=way)
        widths = []
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, out, widths=widths: widths.append(out.shape[-1]))
        if way == "sdpa":
            hf_flash2.patch(model)
        logits = model(**inputs).logits
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        torch.testing.assert_close(logits[real], expected, rtol=1e-4, atol=1e-4)
        assert widths == [24], widths  # of 48: half of the heads
        assert hf_flash2.last_backend() == "cpu-reference"
