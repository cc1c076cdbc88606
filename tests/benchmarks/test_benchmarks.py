"""The benchmark scripts run from end to end on a CPU: their figures mean nothing here, their logic is the same."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pairs import make_drafter, make_target, prompt

pytest.importorskip("triton")


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script from `benchmarks/`, where the scripts import each other from."""
    monkeypatch.syspath_prepend(request.config.rootpath / "benchmarks")
    return importlib.import_module


def test_gpu_check(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("gpu_check").main(["--dry-run", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["right"] is True
    assert len(report["correctness"]) == 19 and all(case["right"] for case in report["correctness"])
    assert max(case["error"] for case in report["correctness"]) > 1e-5
    (delta,) = report["delta"]
    assert delta["kernel_right"] and delta["kernel"] > 0 and delta["in_pytorch"] > 0
    (times,) = report["times"]
    assert all(times[name] > 0 for name in ("floor", "kernel", "library", "packed", "flex"))
    assert all(times[f"{name}_right"] for name in ("kernel", "library", "packed", "flex"))
    torch_rounds, kernel_rounds = report["rounds"]
    assert set(torch_rounds["routes"]) == {"packed"} and set(kernel_rounds["routes"]) == {"kernel"}
    assert set(kernel_rounds["stages_ms"]) == {"draft", "build", "verify", "accept", "commit"}
    shown = capsys.readouterr().out
    assert all(
        line in shown
        for line in (
            "The kernels and what is written in place",
            "One layer, gated",
            "One layer",
            "Whole texts",
            "All right",
        )
    )


def test_gpu_check_sees_a_wrong_kernel(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check = script("gpu_check")
    monkeypatch.setattr("attention_work.tree_attention", lambda query, *_, **__: query.transpose(1, 2) * 0.9)
    cases = [
        case for case in check.check_kernel(True) if "compiled" not in case["case"] and "graph" not in case["case"]
    ]
    assert len(cases) == 10 and not any(case["right"] for case in cases)


def test_gpu_check_sees_a_wrong_delta_rule(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check = script("gpu_check")
    wrong = lambda query, key, value, *_: (value * 0.9, value.transpose(1, 2).float())  # noqa: E731
    monkeypatch.setattr("hf_ddtree.linear_attention.delta_rule.tree_delta_rule", wrong)
    cases = check.check_delta(True)
    assert len(cases) == 3 and not any(case["right"] for case in cases)
    assert not check.time_delta(True)[0]["kernel_right"]


def test_gpu_check_sees_rows_and_numbers_that_are_wrong(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check = script("gpu_check")
    assert all(case["right"] for case in check.check_between(True))
    monkeypatch.setattr(torch, "_foreach_copy_", lambda targets, sources: None)
    monkeypatch.setattr(torch, "log_softmax", lambda logits, dim, out: out)
    assert [case["right"] for case in check.check_between(True)] == [False, False, True]


def test_gpu_check_says_what_it_needs(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script("gpu_check").main([])
    assert "no GPU is available" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(SystemExit):
        script("gpu_check").main(["--dry-run"])
    assert "needs TRITON_INTERPRET=1" in capsys.readouterr().err


def test_cpu_attention(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("cpu_attention").main(["--repeats", "1", "--threads", "1"]) in (0, 1)
    shown = capsys.readouterr().out
    assert shown.count("library") == 4 and "held to 2.5x" in shown


def test_tree_building(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--budget", "15", "120", "--positions", "4", "--vocabulary", "400", "--repeats", "1"]
    assert script("tree_building").main(sizes) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown] == ["budget 15", "budget 120"]
    assert all("device " in line and "host " in line for line in shown)


def test_round_overhead(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overhead = script("round_overhead")
    target = make_target("qwen3")
    reports = [overhead.measure(target, make_drafter(target), prompt(length), 20, 2) for length in (11, 80)]
    for report in reports:
        assert report["rounds"] == 2 and 0 < report["share"] < 1
        assert report["milliseconds"]["target forward"] > 0 and report["milliseconds"]["tree mask"] > 0
        assert report["calls"]["target forward"] > report["calls"]["walk"] > 0
    kilobytes = [sum(report["kilobytes"][name] for name in ("tree mask", "target's inputs")) for report in reports]
    assert kilobytes[0] == kilobytes[1] > 0
    shown = overhead.table(reports)
    assert "| stage | 11 tokens | 80 tokens |" in shown and "| **share** |" in shown


def test_gpu_caches(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("gpu_caches").main(["--device-map", "cpu", "--max-new-tokens", "12", "--budget", "15"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in shown[1:5]] == [
        "dynamic cache",
        "static cache",
        "offloaded cache",
        "offloaded_static cache",
    ]
    assert all("identical" in line for line in shown[1:3])


def test_cpu_linear(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    linear = script("cpu_linear")
    tiny = linear.model(hidden=72, blocks=1, vocabulary=64)
    monkeypatch.setattr(linear, "SHAPES", [(24, 16)])
    monkeypatch.setattr(linear, "BEYOND_CACHES", 0)
    monkeypatch.setattr(linear, "model", lambda: tiny)
    assert linear.main(["--repeats", "2", "--rows", "1", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "24 x 16, 1 rows", "24 x 16, 3 rows", "forward, 1 rows", "forward, 3 rows",
    ]  # fmt: skip


@pytest.mark.slow
def test_gpu_graphs(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--backend", "eager", "--budgets", "7", "--max-new-tokens", "8"]
    assert script("gpu_graphs").main(arguments) == 0
    shown = capsys.readouterr().out
    assert "first: as it should be: 1 compiled" in shown and shown.count("as it should be: 0 compiled") == 3
    assert shown.count("identical") == 4 and shown.count("uncompiled") == 3 and shown.endswith("All right\n")


@pytest.mark.slow
def test_compiled_forward(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "eager", "--rows", "1", "4", "--prefix", "9", "--repeats", "1"]
    texts = ["--limit", "1", "--budget", "3", "--max-new-tokens", "6"]
    threads = ["--threads", "1"]
    assert script("compiled_forward").main(arguments + texts + threads) == 0
    shown = capsys.readouterr().out
    assert all(shown.count(name) == 3 for name in ("as it is ", "packed ", "both "))
    assert "differs" not in shown and "tree: as it is" in shown
