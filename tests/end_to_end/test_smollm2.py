"""A real LLM with a real drafter, as the example in `examples/smollm2/smollm2.py` runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2" / "smollm2.py"


@pytest.mark.slow
@pytest.mark.skipif(not (EXAMPLE.parent / "drafter").is_dir(), reason="the drafter is in the repository only")
def test_greedy_output_is_plain_generates(shared_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "smollm2"
    subprocess.run([sys.executable, EXAMPLE, "fetch", "--target", target], check=True)
    command = [sys.executable, EXAMPLE, "run", "--target", target, "--limit", "8", "--budget", "63"]
    command += ["--prompts", shared_folder / "data" / "prompts.jsonl"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    print(done.stdout)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 8
    for result in results:
        assert result["identical"] or result["gap_at_first_difference"] < 1e-4
    rounds = sum(result["rounds"] for result in results)
    # The example's README has 3.6 (code) and 3.3 (math).
    assert sum(result["acceptance_length"] * result["rounds"] for result in results) / rounds > 3.0
