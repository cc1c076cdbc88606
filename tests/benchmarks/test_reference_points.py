"""The plain loop that the package is held against is the paper's, and what the script says of the two is right."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ddtree.cli.pair import shipped_pair
from hf_ddtree.tree import build_draft_tree
from pairs import make_drafter, make_target, plain, prompt, tree


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(request.config.rootpath / "benchmarks")
    return importlib.import_module


@pytest.mark.parametrize("budget", [1, 7, 63])
def test_the_plain_loop_is_exact_and_its_rounds_are_the_packages(script: Any, budget: int) -> None:
    target = make_target("qwen3")
    drafter = make_drafter(target)
    settings = dict(max_new_tokens=32, do_sample=False)
    output = tree(target, drafter, prompt(), budget=budget, return_dict_in_generate=True, **settings)
    written_out = script("paper_loop").generate(target, drafter, prompt(), budget, 32)
    assert written_out.sequence == plain(target, prompt(), **settings)[0].tolist()
    assert written_out.acceptance_lengths == output.speculation.acceptance_lengths
    assert budget < 63 or max(written_out.acceptance_lengths) > 1


def test_its_tree_has_the_packages_nodes(script: Any) -> None:
    log_probs = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)
    written_out, ours = script("paper_loop").build(log_probs, 20, anchor=3), build_draft_tree(log_probs, 20, anchor=3)

    def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return set(found)

    assert paths(written_out.tokens, written_out.parents) == paths(ours.token_ids.tolist(), ours.parents.tolist())


def test_the_papers_rounds_on_given_marginals(script: Any) -> None:
    points = script("reference_points")
    certain = torch.full((3, 9), -50.0)
    certain[range(3), [4, 5, 6]] = 0.0
    # Two right, the third wrong; then nothing right; then no pass, for there is room for one token only.
    text = [3, 4, 5, 1, 2, 8]
    assert points.paper_lengths(text, [certain, certain], [3, 1, 1], 3) == [3, 1, 1]
    # All right, but the text ends.
    assert points.paper_lengths([3, 4, 5], [certain], [2], 3) == [2]
    assert points.paper_lengths([3, 4, 5, 6], [certain], [3], 1) == [2], "one node, and the bonus token"


def test_the_clock_counts_outermost_calls(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    points = script("reference_points")
    # The target from 1 to 3, another module from 10 to 14, the target from 15 to 16, from 18 to 20.
    now = iter([1.0, 3.0, 10.0, 14.0, 15.0, 16.0, 18.0, 20.0])
    monkeypatch.setattr(points.time, "perf_counter", lambda: next(now))
    outer, states = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.zeros(1, 2)
    with points.Clock(outer, outer[0], target=outer).running() as clock:
        outer(states)
        outer[0](states)
        outer(states)
        outer(states)
    outer(states)
    assert clock.seconds == 9.0
    assert clock.outside == [15 - 3 - 4, 18 - 16]


def test_what_is_missed(script: Any) -> None:
    aims = script("reference_points").aims
    rows = [{"budget": 7, "same": 2, "prompts": 2}]
    good = {
        "paper's loop": {"tokens/s": 10.0, "outside ms": 9.0},
        "tree 63": {"tokens/s": 12.0, "outside ms": 1.1},
        "tree auto": {"tokens/s": 11.0, "outside ms": 5.0},
        "native chain": {"tokens/s": 11.0, "outside ms": 1.0},
    }
    assert aims(rows, good, 63, "auto") == []
    bad = good | {"tree 63": {"tokens/s": 11.9, "outside ms": 1.2}, "tree auto": {"tokens/s": 10.9, "outside ms": 0.0}}
    assert len(aims([{"budget": 7, "same": 1, "prompts": 2}], bad, 63, "auto")) == 4


def test_the_whole_script(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the shipped pair: the rounds must be the same; how fast they are means nothing here."""
    points = script("reference_points")
    with shipped_pair() as folder:
        sources = [f"--{name}={folder / part}" for name, part in (("model", "target"), ("drafter", "drafter"))]
        sources.append(f"--data={folder / 'prompts.jsonl'}")
        sizes = ["--limit=1", "--budgets", "7", "--max-new-tokens=12", "--repeats=1", "--context=40", "--tree=7"]
        points.main([*sources, *sizes, f"--json={tmp_path / 'points.json'}", "--threads=1"])
    report = json.loads((tmp_path / "points.json").read_text())
    assert [(row["budget"], row["same"], row["prompts"]) for row in report["acceptance"]] == [(7, 1, 1)]
    assert report["acceptance"][0]["package"] == report["acceptance"][0]["paper"] > 1
    assert set(report["speed"]) == {"plain", "paper's loop", "tree 63", "tree 7", "native chain"}
    assert all(figures["tokens/s"] > 0 for figures in report["speed"].values())
    assert "budget 7: " in capsys.readouterr().out
