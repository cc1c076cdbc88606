"""For whoever has a GPU: the shipped pair, or any other, on it. Says whether outputs agree, and where the time goes.

    python examples/gpu_check.py
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = files("hf_ddtree") / "demo_pair"
    parser.add_argument("--model", default=str(shipped / "target"))
    parser.add_argument("--drafter", default=str(shipped / "drafter"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 63, 255, 511])
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device)
    drafter = DFlashModel.from_pretrained(options.drafter, dtype=dtype).to(options.device)
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
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
