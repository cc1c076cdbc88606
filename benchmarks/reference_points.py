"""The package beside the paper's loop written out plainly, and beside the native chain, in one run on a CPU.

    python benchmarks/reference_points.py --model TARGET --drafter DRAFTER --data prompts.jsonl --json points.json

Greedy, fp32. Three questions, each with its own aim:

1. Acceptance: at each budget, rounds emit what the paper's algorithm emits on the same marginals, round by round.
   (The whole loop written out runs forwards of its own, whose rounding may decide a near tie otherwise.)
2. Speed: at least 1.2 times the tokens/s of the paper's loop, at budget 63 behind a prompt of 2,000 tokens.
3. Overhead: a round's time outside the forwards of target and drafter is at most 1.1 times the native chain's; and
   `--tree` (such as auto) at least reaches the native chain's tokens/s. A round goes from the end of one forward of
   the target to the start of the next. What is due once a generate (checks, the prompt's states, memory given back) is
   shown apart.

Runs alternate and start one method later each time; figures are medians. The exit code is 1 where an aim is missed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import GenerationConfig

import paper_loop
from hf_ddtree import DDTreeConfig
from hf_ddtree.cli.pair import Pair, read_prompts
from hf_ddtree.generation import DDTreeCandidateGenerator

FASTER, OVERHEAD = 1.2, 1.1


class Clock:
    """Seconds spent in the outermost calls of some modules, and between those of one of them.

    Args:
        modules (`nn.Module`): those whose calls count as forwards.
        target (`nn.Module`): the one of them whose forwards bound the rounds.
    """

    def __init__(self, *modules: torch.nn.Module, target: torch.nn.Module):
        self.modules, self.target = modules, target
        self.seconds, self._depth, self._started = 0.0, 0, 0.0
        # Of each round, what was not spent in a forward; and when the target returned last, with `seconds` then.
        self.outside: list[float] = []
        self._returned: tuple[float, float] | None = None

    @contextmanager
    def running(self) -> Iterator["Clock"]:
        handles = [module.register_forward_pre_hook(self._enter) for module in self.modules]
        handles += [module.register_forward_hook(self._leave) for module in self.modules]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        if self._depth == 0:
            self._started = time.perf_counter()
            if module is self.target and self._returned is not None:
                returned, seconds = self._returned
                self.outside.append(self._started - returned - (self.seconds - seconds))
        self._depth += 1

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            now = time.perf_counter()
            self.seconds += now - self._started
            if module is self.target:
                self._returned = now, self.seconds


def acceptance(pair: Pair, prompts: list[torch.Tensor], budgets: list[int], new: int) -> list[dict[str, Any]]:
    """For each budget the mean acceptance length, the paper's on the same marginals, and on how many prompts all
    rounds are the same; beside them, that of the whole loop written out, whose own forwards round otherwise.
    """
    rows = []
    for budget in budgets:
        ours, theirs, loops, same = [], [], [], 0
        for ids in prompts:
            config = settings(new, DDTreeConfig, budget=budget, return_dict_in_generate=True)
            with drafted() as logits:
                output = pair.target.generate(ids, assistant_model=pair.drafter, generation_config=config)
            lengths = output.speculation.acceptance_lengths
            sequence = output.sequences[0].tolist()
            replayed = paper_lengths(sequence[len(sequence) - 1 - sum(lengths) :], logits, lengths, budget)
            same += lengths == replayed
            ours += lengths
            theirs += replayed
            loops += paper_loop.generate(pair.target, pair.drafter, ids, budget, new).acceptance_lengths
        means = {"package": statistics.mean(ours), "paper": statistics.mean(theirs), "loop": statistics.mean(loops)}
        rows.append({"budget": budget, **means, "same": same, "prompts": len(prompts)})
    return rows


@contextmanager
def drafted() -> Iterator[list[torch.Tensor]]:
    """Gathers the logits of each drafter pass, of shape `(depth, vocabulary)`."""
    passes: list[torch.Tensor] = []
    ranking = DDTreeCandidateGenerator.ranking

    def noting(self: Any, states: torch.Tensor, logits: torch.Tensor, budget: int | None = None) -> Any:
        passes.append(logits.clone())
        return ranking(self, states, logits, budget)

    with patch.object(DDTreeCandidateGenerator, "ranking", noting):
        yield passes


def paper_lengths(text: list[int], passes: list[torch.Tensor], lengths: list[int], budget: int) -> list[int]:
    """What each round would have emitted of the target's text with the paper's tree of the same marginals.

    Args:
        text (`list[int]`): from the first round's anchor on.
        passes (`list[torch.Tensor]`): the drafter's logits, of all rounds but those that had no room for a draft.
        lengths (`list[int]`): tokens that the rounds emitted, which tell where each begins.
        budget (`int`): of the trees.
    """
    replayed, start = [], 0
    for number, length in enumerate(lengths):
        logits = passes[number] if number < len(passes) else torch.empty(0, 1)
        tree = paper_loop.build(logits.log_softmax(-1), budget, text[start])
        following = dict(enumerate(text[start + 1 :]))
        path, _ = paper_loop.accept(tree, [following.get(depth, -1) for depth in tree.depths])
        # The token after the last accepted one is the bonus, unless the text ends before.
        replayed.append(min(len(path), len(following)))
        start += length
    return replayed


def settings(new: int, kind: type[GenerationConfig] = GenerationConfig, **fields: Any) -> GenerationConfig:
    return kind(max_new_tokens=new, min_new_tokens=None, do_sample=False, eos_token_id=None, pad_token_id=0, **fields)


def ways(pair: Pair, ids: torch.Tensor, budget: int, tree: int | str, new: int) -> dict[str, Callable[[], Any]]:
    """Each way to generate `new` tokens after `ids`."""
    target, drafter = pair.target, pair.drafter

    def run(config: GenerationConfig, **arguments: Any) -> Callable[[], Any]:
        return lambda: target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **arguments)

    return {
        "plain": run(settings(new)),
        "paper's loop": lambda: paper_loop.generate(target, drafter, ids, budget, new),
        f"tree {budget}": run(settings(new, DDTreeConfig, budget=budget), assistant_model=drafter),
        f"tree {tree}": run(settings(new, DDTreeConfig, budget=tree), assistant_model=drafter),
        "native chain": run(settings(new, speculation_type="dflash"), assistant_model=drafter),
    }


def measure(pair: Pair, runs: dict[str, Callable[[], Any]], new: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians of each way: tokens/s, milliseconds of a round outside the forwards, and those of a generate beside."""
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    head = pair.target.get_output_embeddings()
    for repeat in range(repeats + 1):
        names = list(runs)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            clock = Clock(pair.target, pair.drafter, head, target=pair.target)
            with clock.running():
                started = time.perf_counter()
                runs[name]()
                seconds = time.perf_counter() - started
            if repeat:
                a_round = statistics.median(clock.outside)
                once = seconds - clock.seconds - a_round * len(clock.outside)
                measured[name].append((new / seconds, 1000 * a_round, 1000 * once))
    keys = "tokens/s", "outside ms", "once ms"
    return {
        name: dict(zip(keys, map(statistics.median, zip(*figures, strict=True)), strict=True))
        for name, figures in measured.items()
    }


def aims(rows: list[dict[str, Any]], speeds: dict[str, dict[str, float]], budget: int, tree: int | str) -> list[str]:
    """What is missed, in words."""
    ours, loop, native = speeds[f"tree {budget}"], speeds["paper's loop"], speeds["native chain"]
    missed = [f"budget {row['budget']}: rounds differ" for row in rows if row["same"] < row["prompts"]]
    if ours["tokens/s"] < FASTER * loop["tokens/s"]:
        missed.append(f"under {FASTER} times the paper's loop")
    if ours["outside ms"] > OVERHEAD * native["outside ms"]:
        missed.append(f"over {OVERHEAD} times the native chain's time outside forwards")
    if speeds[f"tree {tree}"]["tokens/s"] < native["tokens/s"]:
        missed.append(f"tree {tree} is slower than the native chain")
    return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--budgets", type=int, nargs="+", default=[7, 15, 63])
    parser.add_argument("--budget", type=int, default=63, help="of the speed comparison")
    parser.add_argument("--tree", default="auto", help="a budget to hold against the native chain")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    pair = Pair.load(options.model, options.drafter, dtype="float32", device="cpu")
    texts = read_prompts(options.data)
    prompts = [pair.inputs(text.text)["input_ids"] for text in texts[:: max(1, len(texts) // options.limit)]]
    rows = acceptance(pair, prompts[: options.limit], options.budgets, options.max_new_tokens)
    for row in rows:
        print(f"budget {row['budget']}: {row['package']:.3f} tokens a round, the paper's {row['paper']:.3f}, "
              f"the same rounds on {row['same']} of {row['prompts']} prompts; "
              f"its whole loop {row['loop']:.3f}")  # fmt: skip
    long = torch.cat(prompts * (options.context // sum(ids.shape[1] for ids in prompts) + 1), dim=-1)
    tree = int(options.tree) if options.tree.isdigit() else options.tree
    runs = ways(pair, long[:, : options.context], options.budget, tree, options.max_new_tokens)
    speeds = measure(pair, runs, options.max_new_tokens, options.repeats)
    for name, figures in speeds.items():
        print(f"{name}: {figures['tokens/s']:.2f} tokens/s; outside forwards {figures['outside ms']:.2f} ms a round "
              f"and {figures['once ms']:.1f} ms once")  # fmt: skip
    missed = aims(rows, speeds, options.budget, tree)
    print("All aims are met." if not missed else f"Missed: {'; '.join(missed)}.")
    if options.json:
        options.json.write_text(json.dumps({"acceptance": rows, "speed": speeds, "missed": missed}, indent=1) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
