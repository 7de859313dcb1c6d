"""Greedy generation from prompts of different lengths, padded on the left, with a dynamic and a static cache, against eager attention.

    python examples/generate.py
    python examples/generate.py --size 1b --batch-size 16 --new-tokens 128     # on a GPU
    python examples/generate.py --model path/or/hub-name
    python examples/generate.py --size 1b --batch-size 64 --new-tokens 128 --continuous

--continuous (Transformers 5) adds continuous batching, whose cache is in pages; on a GPU, from Transformers 5.23 on, hf_flash2 decodes from
these pages, and others gather them in every layer.

In float32 every token has to be eager's. In half precision two tokens can be equally likely up to rounding; then sequences part ways, for
sdpa as for hf_flash2, so each new token is held against what eager attention makes of all that stands before it.
"""

import argparse
import logging
import time

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

import hf_flash2
from demo_models import DefaultsFormatter, add_model_arguments, at_least, load_model
from stdlib_data import load_corpus

ENOUGH = 0.99  # of the tokens in half precision: over many layers rounding adds up, of sdpa as of hf_flash2


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=DefaultsFormatter)
    add_model_arguments(parser)
    parser.add_argument("--new-tokens", type=at_least(1), default=32, help="of each text")
    parser.add_argument("--continuous", action="store_true", help="continuous batching, too")
    args = parser.parse_args(argv)
    if args.continuous and int(transformers.__version__.split(".")[0]) < 5:
        parser.error(f"--continuous needs Transformers 5, this is {transformers.__version__}")

    model, tokenizer = load_model(args, "eager", max_length=1024 + args.new_tokens)
    prompts = [pair.prompt for pair in load_corpus().evaluation[: args.batch_size]]
    batch = dict(tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(args.device))
    lengths = batch["attention_mask"].sum(1).tolist()
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, padded on the left; {args.device}, {model.dtype}\n")

    half, expected = model.dtype != torch.float32, None
    for implementation in ("eager", "sdpa", "hf_flash2"):
        for cache in ("dynamic", "static", "paged") if args.continuous and implementation != "eager" else ("dynamic", "static"):
            model.set_attn_implementation(implementation)
            if cache == "paged":
                tokens, seconds = generate_continuously(model, tokenizer(prompts)["input_ids"], args.new_tokens)
            else:
                tokens, seconds = generate(model, batch, cache, args.new_tokens)
            expected = tokens if expected is None else expected
            right = chosen_by_eager(model, batch, tokens) if half else tokens == expected
            verdict = f"{int(right.sum()):,} of {right.numel():,} tokens are eager's{', up to rounding' * half}"
            print(f"{implementation:10} {cache:8} cache {tokens.numel() / seconds:9,.0f} tokens/s   {verdict}")
            if implementation == "hf_flash2" and right.float().mean() < (ENOUGH if half else 1):
                raise SystemExit(f"hf_flash2 with a {cache} cache does not generate eager's tokens")
    kind = "First completion" if args.model else "First completion (random weights write noise)"
    print(f"\nhf_flash2 ran on {hf_flash2.last_backend()}. {kind}:\n{prompts[0]}{tokenizer.decode(tokens[0])}")


def generate(model: PreTrainedModel, batch: dict[str, torch.Tensor], cache: str, new_tokens: int) -> tuple[torch.Tensor, float]:
    """The new tokens [B, new_tokens] and the seconds they took, after two that load kernels and fill the allocator."""
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    model.generate(**batch, do_sample=False, max_new_tokens=2, min_new_tokens=2, **options)
    started = time.perf_counter()
    tokens = model.generate(**batch, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
    tokens = tokens[:, batch["input_ids"].shape[1] :].cpu()  # waits for the device
    return tokens, time.perf_counter() - started


@torch.no_grad()
def chosen_by_eager(model: PreTrainedModel, batch: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """bool [B, new_tokens]: whether no other token is more likely, by more than rounding, after the prompt and the new tokens before it."""
    model.set_attn_implementation("eager")
    right = []
    for ids, mask, new in zip(batch["input_ids"], batch["attention_mask"], tokens, strict=True):
        ids = torch.cat((ids[mask.bool()], new.to(ids.device)))
        logits = model(ids[None, :-1], logits_to_keep=len(new)).logits[0].float()
        chosen = logits.gather(-1, ids[-len(new) :, None]).squeeze(-1)
        rounding = 8 * torch.finfo(model.dtype).eps * logits.abs().amax(-1)
        right.append((logits.amax(-1) - chosen <= rounding).cpu())
    return torch.stack(right)


def generate_continuously(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> tuple[torch.Tensor, float]:
    """The same by continuous batching, of a second run: the first allocates the cache and, on a GPU, records graphs."""
    page_size = 256
    pages = len(prompts) * -(-(max(map(len, prompts)) + new_tokens) // page_size)
    known = transformers.ContinuousBatchingConfig.__dataclass_fields__  # pages are called blocks in older ones
    options = {"page_size" if "page_size" in known else "block_size": page_size, "num_blocks": pages}
    if "auto_switch_to_flash" in known:
        options["auto_switch_to_flash"] = False
    continuous = transformers.ContinuousBatchingConfig(**options)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns that a manager is kept, which is meant
    greedy = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0)
    for _ in range(2):
        started = time.perf_counter()
        answers = model.generate_batch(
            prompts, generation_config=greedy, continuous_batching_config=continuous, persistent_manager=True, progress_bar=False
        )
        seconds = time.perf_counter() - started
    model.destroy_cached_continuous_batching_manager()
    in_order = sorted(answers.values(), key=lambda answer: int(answer.request_id.rsplit("_", 1)[-1]))
    return torch.tensor([answer.generated_tokens for answer in in_order]), seconds


if __name__ == "__main__":
    main()
