"""The bench's plan, data, files and intervals, each on its own."""

import itertools
import json
import statistics
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hf_ddtree.cli.benchmark import data
from hf_ddtree.cli.benchmark.exactness import unexplained
from hf_ddtree.cli.benchmark.hub import HUB_SETS
from hf_ddtree.cli.benchmark.intervals import ratio_of_medians, ratio_of_sums
from hf_ddtree.cli.benchmark.lists import budgets
from hf_ddtree.cli.benchmark.machine import commit, fingerprint
from hf_ddtree.cli.benchmark.plan import Grid, Method, Unit, methods
from hf_ddtree.cli.benchmark.processes import Processes
from hf_ddtree.cli.benchmark.results import Results, read_lines
from hf_ddtree.cli.benchmark.run import Bench
from hf_ddtree.cli.methods import COMPILED
from hf_ddtree.cli.rounds import TokenCounter

HEADER = {
    "configuration": {"seed": 0, "methods": ["plain"]},
    "versions": {},
    "machine": {"threads": 1},
    "commit": None,
}


def test_plain_decoding_is_always_measured_and_trees_by_budget():
    assert [method.label for method in methods(["tree", "native"], [31, 7, 7])] == [
        "plain",
        "native",
        "tree 7",
        "tree 31",
    ]
    assert methods(["lookup"], [7]) == [Method("plain"), Method("lookup")]
    assert [method.label for method in methods(["tree"], ["auto", 31, 0])] == [
        "plain",
        "tree 0",
        "tree 31",
        "tree auto",
    ]


def test_lists_of_budgets():
    assert budgets("31, auto,7", "--budgets") == [7, 31, "auto"]
    assert budgets("auto", "--budgets") == ["auto"]
    for text in ("7,many", "-1,auto", "Auto", ""):
        with pytest.raises(ValueError, match="--budgets takes whole numbers from 0 up and auto"):
            budgets(text, "--budgets")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_combination_once_and_every_method_first_in_turn(ranks):
    chosen = [Method("plain"), Method("chain"), Method("tree", 7)]
    grid = Grid(chosen, {"a": 4, "long": 1}, [0.0, 1.0], 3, frozenset({"long"}))
    shares = [grid.units(rank, ranks) for rank in range(ranks)]
    combinations = [
        Unit(name, prompt, temperature, repeat, method)
        for name, count, temperatures in (("a", 4, (0.0, 1.0)), ("long", 1, (0.0,)))
        for prompt, temperature, repeat, method in itertools.product(range(count), temperatures, range(3), chosen)
    ]
    assert sorted(unit for share in shares for unit in share) == sorted(combinations)
    for share in shares:
        blocks = [share[start : start + 3] for start in range(0, len(share), 3)]
        assert all(len({unit.block for unit in block}) == 1 for block in blocks)
        assert [block[0].method for block in blocks] == [chosen[turn % 3] for turn in range(len(blocks))]
        assert [block[0].repeat for block in blocks] == sorted(block[0].repeat for block in blocks)


def test_intervals_of_known_numbers():
    assert ratio_of_medians([4, 4, 4], [2, 2, 2]) == (2, 2, 2)
    assert ratio_of_medians([3], [2]) == (1.5, None, None)
    # Of the four draws of two prompts, one gives 3, one 5 / 2 and two 8 / 3.
    assert ratio_of_sums([3, 5], [1, 2]) == pytest.approx((8 / 3, 5 / 2, 3))


def test_intervals_against_every_possible_draw():
    above, below = [3.0, 4.0, 9.0, 2.0], [1.0, 2.5, 2.0, 1.5]
    draws = [
        statistics.median(above[i] for i in draw) / statistics.median(below[i] for i in draw)
        for draw in itertools.product(range(4), repeat=4)
    ]
    estimate = ratio_of_medians(above, below)
    assert estimate.value == 3.5 / 1.75
    assert estimate[1:] == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])), rel=0.02)


def test_a_broken_line_within_the_file_is_no_result(tmp_path):
    path = tmp_path / "runs.jsonl"
    Results(path, HEADER)
    with path.open("a") as file:
        file.write('{"kind": "run"\n{"kind": "run"}\n')
    with pytest.raises(ValueError, match="line 2 is no line of results"):
        read_lines(path)
    path.write_text('{"kind": "run"}\n')
    with pytest.raises(ValueError, match="line 1: not the results of this version"):
        read_lines(path)
    path.write_text("no newline")
    with pytest.raises(ValueError, match="no file of results"):
        Results(path, HEADER)
    assert path.read_text() == "no newline"


def test_every_difference_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    Results(path, HEADER).add_run(Unit("a", 0, 0.0, 0, Method("plain")), {})
    other = json.loads(json.dumps(HEADER))
    other["configuration"]["seed"], other["machine"]["threads"], other["commit"] = 1, 2, "abc"
    with pytest.raises(ValueError, match=r"seed was 0, is 1; machine\.threads was 1, is 2; commit was None, is 'abc'"):
        Results(path, other)


@pytest.mark.parametrize("left", ["", '{"kind":"hea', json.dumps({"kind": "header"}) + "\n"])
def test_a_start_that_came_to_nothing_stands_in_no_way(tmp_path, left):
    path = tmp_path / "runs.jsonl"
    path.write_text(left)
    Results(path, HEADER)
    lines, whole = read_lines(path)
    assert [line["kind"] for line in lines] == ["header"] and lines[0]["configuration"] == HEADER["configuration"]
    assert whole == path.stat().st_size


def test_local_files_by_category(tmp_path):
    path = tmp_path / "mixed.jsonl"
    rows = [{"prompt": f"p{i}", "category": "math" if i % 2 else "code"} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = data.read([str(path)], limit=2)
    assert [(part.name, part.texts) for part in found] == [("mixed/code", ["p0", "p4"]), ("mixed/math", ["p1", "p5"])]
    with pytest.raises(ValueError, match="Two data sets are called 'mixed/code'"):
        data.read([str(path), str(path)])


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "x"}', '{"prompt": 3}'])
def test_a_line_that_is_no_prompt(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2: expected"):
        data.read([str(path)])


def test_the_paper_s_data_sets(monkeypatch):
    fields = ("problem", "question", "question_content", "problem_statement", "instruction")
    row = {name: name for name in fields} | {"input": "", "prompt": "text"}
    calls = {}

    def load_dataset(path, name=None, *, split=None, data_files=None):
        calls[path, name] = data_files or split
        rows = [row | {"prompt": ["turn 1", "turn 2"]} if "mt_bench" in path else row, row | {"input": "more"}]
        return rows[:1] if "mt_bench" in path else rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("hf_ddtree.cli.benchmark.hub.hf_hub_download", lambda *names, repo_type: "/".join(names))
    found = {part.name: part.texts for part in data.read(list(HUB_SETS))}
    assert len(found) == len(calls) == 10
    assert found["mt-bench"] == ["turn 1"]
    assert found["alpaca"] == ["instruction", "instruction\n\nmore"]
    assert found["swe-bench-lite"] == ["problem_statement"] * 2
    assert found["math500"][0].startswith("problem\n") and "boxed" in found["gsm8k"][0]
    assert found["humaneval"][0].endswith("text") and found["mbpp"][0].startswith("text")
    assert calls["openai/gsm8k", "main"] == "test"
    assert calls["json", None] == {"test": "livecodebench/code_generation_lite/test.jsonl"}


def test_the_hub_s_data_sets_need_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install \"hf_ddtree\[bench\]\""):
        data.read(["gsm8k"])


def test_contexts_repeat_the_data():
    parts = [data.Encoded("a", [[1, 2], [3]]), data.Encoded("b", [[4]])]
    first, second = data.contexts(parts, [3, 9])
    assert (first.name, first.prompts, first.context) == ("context 3", [[1, 2, 3]], 3)
    assert second.prompts == [[1, 2, 3, 4, 1, 2, 3, 4, 1]]


def test_other_weights_have_another_fingerprint(pair):
    assert fingerprint(pair.target) == fingerprint(pair.target) != fingerprint(pair.drafter)


def test_the_commit_is_the_package_s_own(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)

    assert commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "__init__.py").write_text("")
    # An installed package that happens to lie in a checkout of something else.
    assert commit(tmp_path) is None
    git("add", ".")
    git("commit", "-qm", "first")
    clean = commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "__init__.py").write_text("changed = True\n")
    assert commit(tmp_path) == clean + "+"


def test_processes_that_do_not_find_each_other(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = SimpleNamespace(num_processes=1, process_index=0, device="cpu", wait_for_everyone=None)
    monkeypatch.setattr("accelerate.PartialState", lambda **_: alone)
    with pytest.raises(ValueError, match="2 processes were started, but they cannot talk to each other"):
        Processes.join("cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Processes.join("cpu") == Processes(device="cpu")
    assert Processes().file(tmp_path / "a.jsonl") == tmp_path / "a.jsonl"
    assert Processes(1, 2).file(tmp_path / "a.jsonl") == tmp_path / "a.1of2.jsonl"


def test_plain_decoding_is_counted_without_a_hook(pair, tmp_path, monkeypatch):
    """The counter of the compiled forward, here of one that is not compiled."""
    monkeypatch.setattr("hf_ddtree.cli.methods.compile_config", lambda: None)
    grid = Grid([Method(COMPILED)], {"a": 1}, [0.0], 1)
    encoded = [data.Encoded("a", [[1, 2, 3]])]
    hooks = []
    monkeypatch.setattr(pair.target, "register_forward_pre_hook", hooks.append)
    bench = Bench(pair, encoded, grid, Results(tmp_path / "runs.jsonl", HEADER), max_new_tokens=9)
    run = bench._generate(Method(COMPILED), [1, 2, 3], 0.0, 9)
    assert (run.forwards, run.acceptance_lengths, len(run.tokens)) == (9, [1] * 8, 9)
    assert 0 < run.first_seconds < run.seconds
    assert hooks == [] and TokenCounter().forwards == 0


@pytest.mark.parametrize(
    ("place", "dtype", "said"),
    [
        ({"method": "tree", "temperature": 0, "gap": 0.5, "rounding": False}, "float32", True),
        ({"method": "tree", "temperature": 0, "gap": 1e-6, "rounding": True}, "float32", False),
        ({"method": "chain", "temperature": 1, "gap": None, "rounding": False}, "float32", True),
        ({"method": "chain", "temperature": 1, "gap": None, "rounding": False}, "bfloat16", False),
        ({"method": "compiled", "temperature": 0, "gap": 0.5, "rounding": False}, "float32", False),
    ],
)
def test_what_rounding_does_not_explain(place, dtype, said):
    place = {"dataset": "a", "prompt": 0, "budget": None, "token": 3, **place}
    assert bool(unexplained({"configuration": {"dtype": dtype}, "differences": [place]})) == said
