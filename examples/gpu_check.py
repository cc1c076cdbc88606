"""For whoever has a GPU: the shipped pair, or any other, on it. Says whether outputs agree, and where the time goes.

    python examples/gpu_check.py
    python examples/gpu_check.py --device-map balanced          # two GPUs or more
    python examples/gpu_check.py --model Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --dtype bfloat16

The package has been run on CPUs only. With the shipped pair this takes a minute or two; `--device cpu` tries the
script itself. In fp32 every output must be identical; in bf16 a difference is arithmetic where the two best tokens are
close, and the gap is printed.
"""

import argparse
import sys
import time
from importlib.resources import files
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ddtree import DDTreeConfig, DFlashModel

# Kinds of cache that move rows between host and device, or keep them where a graph expects them.
CACHES = ["offloaded", "static", "offloaded_static"]
PROMPTS = ["def quicksort(items):\n", "class Stack:\n    def __init__(self):\n", "import json\n\ndef load(path):\n"]


def timed(model: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[Any, float]:
    """A generate and its seconds, the device's work included."""
    synchronize = torch.cuda.synchronize if ids.device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)
    synchronize()
    return output, time.perf_counter() - start


def first_difference(model: Any, plain: torch.Tensor, other: torch.Tensor) -> float | None:
    """`None` where both are equal, else how far the two best tokens were apart at the first difference."""
    if torch.equal(plain, other):
        return None
    length = min(plain.shape[1], other.shape[1])
    first = int((plain[0, :length] != other[0, :length]).nonzero()[0])
    best = model(plain[:, :first]).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def check_caches(model: Any, drafter: Any, ids: torch.Tensor, budget: int, **kwargs: Any) -> int:
    """Each kind of cache against plain decoding with the same kind; returns how many differ."""
    wrong = 0
    for kind in CACHES:
        kwargs.update(cache_implementation=kind, disable_compile=True)
        plain, plain_seconds = timed(model, ids, **kwargs)
        config = DDTreeConfig(budget=budget, **kwargs)
        output, seconds = timed(model, ids, assistant_model=drafter, generation_config=config)
        gap = first_difference(model, plain, output)
        wrong += gap is not None and (model.dtype == torch.float32 and gap >= 1e-4)
        same = "identical" if gap is None else f"differs where the gap is {gap:.1e}"
        print(f"  {kind} cache, budget {budget}: {plain_seconds / seconds:.2f}x, {same}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = files("hf_ddtree") / "demo_pair"
    parser.add_argument("--model", default=str(shipped / "target"))
    parser.add_argument("--drafter", default=str(shipped / "drafter"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--device-map", help="'balanced' spreads the target over all GPUs")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 63, 255, 511])
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    places = options.device_map or {"": options.device}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, device_map=places)
    drafter = DFlashModel.from_pretrained(options.drafter, dtype=dtype).to(model.get_output_embeddings().weight.device)
    if options.device == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__)
    plain_kwargs = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    wrong = 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(options.device)
        for _ in range(2):
            plain, plain_seconds = timed(model, ids, **plain_kwargs)
        new = plain.shape[1] - ids.shape[1]
        print(f"{prompt.splitlines()[0]!r}: plain {new / plain_seconds:.1f} tokens/s")
        for budget in options.budgets:
            config = DDTreeConfig(budget=budget, return_dict_in_generate=True, **plain_kwargs)
            for _ in range(2):
                output, seconds = timed(model, ids, assistant_model=drafter, generation_config=config)
            stats, gap = output.speculation, first_difference(model, plain, output.sequences)
            wrong += gap is not None and (dtype == torch.float32 and gap >= 1e-4)
            stages = ", ".join(f"{stage} {1000 * s / stats.rounds:.2f}" for stage, s in stats.seconds.items())
            same = "identical" if gap is None else f"differs where the gap is {gap:.1e}"
            print(
                f"  budget {budget}: {plain_seconds / seconds:.2f}x, "
                f"{stats.mean_acceptance_length:.2f} tokens a round, {same}; ms a round: {stages}"
            )
    if options.device == "cuda":
        wrong += check_caches(model, drafter, ids, options.budgets[0], **plain_kwargs)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
