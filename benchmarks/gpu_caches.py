"""For whoever has a GPU: every kind of cache, and a target spread over several GPUs, against plain decoding.

    python benchmarks/gpu_caches.py
    python benchmarks/gpu_caches.py --device-map balanced          # two GPUs or more
    python benchmarks/gpu_caches.py --device-map cpu               # tries the script without one

Offloaded caches move rows between host and device on a stream of their own, which a CPU cannot try. With the shipped
pair this takes a minute. The exit code is 1 if a text in fp32 is wrong.
"""

import argparse
import sys
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_check import PROMPTS, first_difference, timed
from hf_ddtree import DDTreeConfig, DFlashModel

CACHES = (None, "static", "offloaded", "offloaded_static")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = files("hf_ddtree") / "demo_pair"
    parser.add_argument("--model", default=str(shipped / "target"))
    parser.add_argument("--drafter", default=str(shipped / "drafter"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device-map", default="cuda", help="a device, or 'balanced' for all GPUs")
    parser.add_argument("--budget", type=int, default=63)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, device_map=options.device_map)
    drafter = DFlashModel.from_pretrained(options.drafter, dtype=dtype).to(model.get_output_embeddings().weight.device)
    wrong = 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
        print(prompt.splitlines()[0])
        for kind in CACHES:
            if kind is not None and kind.startswith("offloaded") and model.device.type == "cpu":
                print(f"  {kind} cache: needs an accelerator")
                continue
            settings = dict(max_new_tokens=options.max_new_tokens, do_sample=False, cache_implementation=kind)
            plain, plain_seconds = timed(model, ids, disable_compile=True, **settings)
            config = DDTreeConfig(budget=options.budget, **settings)
            output, seconds = timed(model, ids, assistant_model=drafter, generation_config=config)
            gap = first_difference(model, plain, output)
            wrong += gap is not None and dtype == torch.float32 and gap >= 1e-4
            same = "identical" if gap is None else f"differs where the gap is {gap:.1e}"
            print(f"  {kind or 'dynamic'} cache: {plain_seconds / seconds:.2f}x plain, {same}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
