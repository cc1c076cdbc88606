"""The benchmark scripts run from end to end on a CPU: their figures mean nothing here, their logic is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(request: pytest.FixtureRequest, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folder = request.config.rootpath / "benchmarks"
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_gpu_check(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    done = run(request, "gpu_check.py", "--dry-run", "--json", str(tmp_path / "report.json"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["right"] is True
    assert len(report["correctness"]) == 21 and all(case["right"] for case in report["correctness"])
    assert max(case["error"] for case in report["correctness"]) > 1e-5
    (times,) = report["times"]
    assert all(times[name] > 0 for name in ("floor", "kernel", "library", "packed", "flex"))
    assert all(times[f"{name}_right"] for name in ("kernel", "library", "packed", "flex"))
    torch_rounds, kernel_rounds = report["rounds"]
    assert set(torch_rounds["routes"]) == {"packed"} and set(kernel_rounds["routes"]) == {"kernel"}
    assert set(kernel_rounds["stages_ms"]) == {"draft", "build", "verify", "accept", "commit"}
    for line in ("The kernel against float64", "One layer", "Whole texts", "All right"):
        assert line in done.stdout


def test_gpu_check_says_what_it_needs(request: pytest.FixtureRequest) -> None:
    for arguments, message in (
        (["--dry-run"], "needs TRITON_INTERPRET=1"),
        ([], "no GPU is available"),
    ):
        done = run(request, "gpu_check.py", *arguments, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 2 and message in done.stderr


def test_cpu_attention(request: pytest.FixtureRequest) -> None:
    done = run(request, "cpu_attention.py", "--repeats", "2", "--threads", "1")
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.count("library") == 4 and "held to 2.5x" in done.stdout
