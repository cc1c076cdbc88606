"""For whoever has a GPU: are trees verified by CUDA graphs, are these recorded once, and what does a round cost then?

    python benchmarks/gpu_graphs.py
    python benchmarks/gpu_graphs.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --budgets 63 255
    python benchmarks/gpu_graphs.py --device cpu --backend eager     # tries the script without one

For each budget one static cache serves all prompts. The first of them compiles and records; none after it may compile,
record, or skip a CUDA graph. Then each prompt is decoded with a dynamic cache, uncompiled, for the times of a round.
Half a minute for each budget with the shipped pair. The exit code is 1 if something of this does not hold, or if a
text in fp32 is wrong.
"""

import argparse
import sys
from importlib.resources import files
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, StaticCache

from gpu_check import PROMPTS, first_difference, timed
from hf_ddtree import DDTreeConfig, DFlashModel
from hf_ddtree.compat import CACHE_NAME


class Counted:
    """Graphs that were compiled, CUDA graphs that were recorded and skipped since the last look."""

    def __init__(self, device: str):
        self.recorded = 0
        if device == "cuda":
            from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

            record = CUDAGraphTreeManager.record_function

            def counting(*args: Any, **kwargs: Any) -> Any:
                self.recorded += 1
                return record(*args, **kwargs)

            CUDAGraphTreeManager.record_function = counting  # type: ignore[method-assign]
        self._seen = self._now()

    def _now(self) -> dict[str, int]:
        compiled, skipped = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
        return dict(compiled=compiled, recorded=self.recorded, skipped=skipped)

    def since(self) -> dict[str, int]:
        now, seen = self._now(), self._seen
        self._seen = now
        return {name: now[name] - seen[name] for name in now}


def stages(stats: Any) -> str:
    return ", ".join(f"{stage} {1000 * seconds / stats.rounds:.2f}" for stage, seconds in stats.seconds.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = files("hf_ddtree") / "demo_pair"
    parser.add_argument("--target", default=str(shipped / "target"))
    parser.add_argument("--drafter", default=str(shipped / "drafter"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 63, 255])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    options = parser.parse_args(arguments)
    dtype, on_cuda = getattr(torch, options.dtype), options.device == "cuda"
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).to(options.device).eval()
    drafter = DFlashModel.from_pretrained(options.drafter, dtype=dtype).to(options.device)
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"].to(options.device) for text in PROMPTS]
    length = max(ids.shape[1] for ids in prompts) + options.max_new_tokens
    config = CompileConfig(backend=options.backend, mode="reduce-overhead" if options.backend == "inductor" else None)
    settings = dict(max_new_tokens=options.max_new_tokens, do_sample=False)
    asked = dict(assistant_model=drafter)
    counted, wrong = Counted(options.device), 0
    for budget in options.budgets:
        cache = StaticCache(config=target.config, max_cache_len=length)
        ours = DDTreeConfig(budget=budget, compile_config=config, return_dict_in_generate=True, **settings)
        eager = DDTreeConfig(budget=budget, return_dict_in_generate=True, **settings)
        print(f"budget {budget}")
        # The first prompt twice: what is recorded after its first time is recorded again.
        for turn, ids in enumerate([prompts[0], *prompts]):
            plain, _ = timed(target, ids, **settings)
            counted.since()
            output, seconds = timed(target, ids, generation_config=ours, **asked, **{CACHE_NAME: cache})
            found = counted.since()
            cache.reset()
            held = found["compiled"] == 0 if turn else found["compiled"] > 0
            if on_cuda:
                held &= found["skipped"] == 0 and (found["recorded"] == 0 if turn else found["recorded"] > 0)
            gap = first_difference(target, plain, output.sequences)
            right = gap is None or dtype != torch.float32 or gap < 1e-4
            wrong += not (held and right)
            same = "identical" if gap is None else f"differs where the gap is {gap:.1e}"
            print(
                f"  {'first' if turn == 0 else f'prompt {turn}'}: {'as it should be' if held else 'WRONG'}: "
                f"{found['compiled']} compiled, {found['recorded']} recorded, {found['skipped']} skipped; "
                f"{seconds:.2f} s, {same}; ms a round: {stages(output.speculation)}"
            )
            if turn:
                uncompiled, seconds = timed(target, ids, generation_config=eager, **asked)
                print(f"    uncompiled: {seconds:.2f} s; ms a round: {stages(uncompiled.speculation)}")
    print("All right" if not wrong else "SOMETHING IS WRONG")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
