"""The proof of `budget="auto"` runs from end to end on the shipped pair; its figures mean nothing here."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("scipy")


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script from `benchmarks/`, where the scripts import each other from."""
    monkeypatch.syspath_prepend(request.config.rootpath / "benchmarks")
    return importlib.import_module


def run(script: Any, path: Path, *options: str) -> dict[str, Any]:
    arguments = ["--json", str(path), "--threads", "1", "--budgets", "0,7", *options]
    assert script("auto_budget").main(arguments) in (0, 1)
    return json.loads(path.read_text())


def test_measured(script: Any, tmp_path: Path) -> None:
    options = ("--limit", "2", "--max-new-tokens", "8", "--random-drafter")
    report = run(script, tmp_path / "report.json", *options)
    assert report["computed_costs"] is None and report["identical"] == len(report["rows"]) == 2
    assert set(report["tokens_per_second"]) == {"plain", "0", "7", "auto"}
    for name in ("auto_over_best", "auto_over_plain"):
        assert 0 < report[name]["low"] <= report[name]["value"] <= report[name]["high"]
    assert all(len(row["sizes"]) <= 7 for row in report["rows"])


def test_by_token(script: Any, tmp_path: Path) -> None:
    options = ("--limit", "2", "--max-new-tokens", "12", "--by-token")
    report = run(script, tmp_path / "report.json", *options)
    assert report["identical"] == len(report["rows"]) == 2
    assert all(row["tokens"] == 12 and set(row["seconds"]) == {"plain", "0", "7", "auto"} for row in report["rows"])


def test_turns_are_a_token_each_and_time_is_everyones_own(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    by_token, log, now = script("by_token"), [], [0.0]
    monkeypatch.setattr(by_token.time, "perf_counter", lambda: now[0])
    from hf_ddtree.generation import output

    def job(name: str, tokens: int, seconds: float) -> Any:
        def generate(streamer: Any) -> float:
            start = output.time.perf_counter()
            for _ in range(tokens):
                now[0] += seconds
                log.append(name)
                streamer.put(None)
            return output.time.perf_counter() - start

        return generate

    runners = by_token.in_turn({"short": job("short", 2, 1.0), "long": job("long", 4, 3.0)})
    assert "".join(name[0] for name in log) == "lsslll"
    assert {name: runner.seconds for name, runner in runners.items()} == {"short": 2.0, "long": 12.0}
    assert {name: runner.output for name, runner in runners.items()} == {"short": 2.0, "long": 12.0}
    assert output.time.perf_counter() == now[0]


def test_simulated(script: Any, tmp_path: Path) -> None:
    options = ("--limit", "2", "--max-new-tokens", "300", "--record-tokens", "24", "--simulate", "h200-8b")
    report = run(script, tmp_path / "report.json", *options, "--repeats", "2")
    assert report["computed_costs"] == "h200-8b" and report["best_budget"] == 7
    # The recorded trees hold 7 nodes, which a GPU verifies for the price of one.
    assert report["auto_over_plain"]["low"] > 1.5 and report["auto_over_best"]["value"] > 0.9
    assert max(max(row["sizes"]) for row in report["rows"]) == 7


def test_a_smaller_tree_is_replayed_as_it_would_have_gone(script: Any) -> None:
    """Against real rounds: the walk over a recorded tree cut to a size is the walk over the tree of that size."""
    replay = script("budget_replay")
    from hf_ddtree.tree import build_draft_tree

    log_probs = torch.randn(5, 30, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)
    large = build_draft_tree(log_probs, 63)
    deepest = int(large.depths.argmax())
    tokens = [*large.token_ids[large.path(deepest)[1:]].tolist(), 29]
    for nodes in (0, 1, 7, 31, 63):
        small = build_draft_tree(log_probs, nodes)
        walk = replay._walk(large.cut(nodes), tokens)
        accepted = 0
        while (child := small.children[walk.path[accepted]].get(tokens[accepted])) is not None:
            accepted += 1
            assert walk.path[accepted] == child
        assert len(walk.path) == accepted + 1 and walk.last_token == tokens[accepted]


def test_costs_are_those_that_were_computed(script: Any) -> None:
    """Forward floors of docs and notes: milliseconds at 513 rows behind 512, 2k, 8k and 32k tokens."""
    curve = script("budget_replay").CURVES["h200-8b"]
    found = [1000 * curve.forward(513, context) - curve.other for context in (512, 2048, 8192, 32768)]
    assert found == pytest.approx([10.2, 10.8, 13.2, 22.6], rel=0.04)
    assert 1000 * curve.forward(100, 100) - curve.other == pytest.approx(3.52, rel=0.05)
