"""Switch a model that is already loaded to hf_flash2, check it, measure it, and put it back exactly as it was.

python examples/patch_existing_model.py
python examples/patch_existing_model.py --size 1b --batch-size 16          # on a GPU
python examples/patch_existing_model.py --model path/or/hub-name
"""

import argparse
import time

import torch

import hf_flash2
from demo_models import DefaultsFormatter, add_model_arguments, load_model
from stdlib_data import load_corpus


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=DefaultsFormatter)
    add_model_arguments(parser)
    parser.add_argument("--previous", choices=("eager", "sdpa"), default="sdpa", help="what the model runs before it is patched")
    args = parser.parse_args(argv)

    model, tokenizer = load_model(args, args.previous)
    texts = [pair.prompt + pair.completion for pair in load_corpus().evaluation[: args.batch_size]]
    batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=1024, return_token_type_ids=False)
    batch = dict(batch.to(args.device))
    padding = 1 - batch["attention_mask"].float().mean().item()
    print(f"batch {list(batch['input_ids'].shape)}, {padding:.0%} padding, {args.device}, {model.dtype}\n")

    before, before_ms = forward(model, batch)
    hf_flash2.patch(model)
    _, patched_ms = forward(model, batch)
    print(f"patched. One forward: {args.previous} {before_ms:.1f} ms, hf_flash2 {patched_ms:.1f} ms")
    print(hf_flash2.patch(model), "\n")  # patching again changes nothing: the same report, with the calls that were made since

    comparison = hf_flash2.verify(model, batch)
    print(f"verified: {comparison}\n")

    hf_flash2.unpatch(model)
    after, _ = forward(model, batch)
    if not torch.equal(before, after):
        raise RuntimeError(f"unpatch left something behind: the logits moved by {(before - after).abs().max():.3g}")
    print(f"unpatched: the logits are bit for bit those of {args.previous} again")

    with hf_flash2.patched(model):
        forward(model, batch)
    print(f"the same for one block: `with hf_flash2.patched(model):` ran on {hf_flash2.last_backend()}")
    if not comparison.ok:
        raise SystemExit(comparison.verdict)


@torch.no_grad()
def forward(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Logits, and the milliseconds of the fastest of three runs."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        logits = model(**batch, use_cache=False).logits
        logits[0, 0, 0].item()  # waits for the device
        times.append(time.perf_counter() - started)
    return logits, min(times) * 1e3


if __name__ == "__main__":
    main()
