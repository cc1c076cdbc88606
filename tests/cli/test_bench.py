"""`hf-ddtree bench` as a user runs it: what it keeps, how it goes on, what it says."""

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from hf_ddtree.cli import app
from hf_ddtree.cli.benchmark.data import Encoded
from hf_ddtree.cli.benchmark.plan import Grid, methods
from hf_ddtree.cli.benchmark.processes import Processes
from hf_ddtree.cli.benchmark.results import Results
from hf_ddtree.cli.benchmark.run import Bench
from hf_ddtree.cli.comparison import Gap
from hf_ddtree.cli.methods import COMPILED

TEXTS = ("hello world", "abcabc", "Qdeal 01")
METHODS = ["plain", "lookup", "native", "chain", "tree 0", "tree 20"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def options(folders, tmp_path):
    """A grid of two prompts that takes about a second."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": text, "prompt": text}) + "\n" for text in TEXTS))
    settings = ("--max-new-tokens", 10, "--repeats", 1, "--budgets", "0,20", "--limit", 2, "--device", "cpu")
    return [*folders.options, "--data", prompts, "--out", tmp_path / "runs.jsonl", *settings]


def runs(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def units(lines):
    names = ("dataset", "prompt", "temperature", "repeat", "method", "budget")
    return [tuple(line[name] for name in names) for line in lines if line["kind"] == "run"]


def interrupt_after(monkeypatch, count):
    """Ctrl-C once `count` runs are kept."""
    add_run, kept = Results.add_run, []

    def add(self, unit, figures):
        if len(kept) == count:
            raise KeyboardInterrupt
        add_run(self, unit, figures)
        kept.append(unit)

    monkeypatch.setattr(Results, "add_run", add)


def test_an_automatic_budget_beside_a_fixed_one(options, tmp_path):
    result = invoke(*options, "--budgets", "auto,20", "--methods", "tree")
    assert result.exit_code == 0, result.output
    cells = json.loads((tmp_path / "runs.json").read_text())["cells"]
    assert [(cell["method"], cell["budget"]) for cell in cells] == [("plain", None), ("tree", 20), ("tree", "auto")]
    assert all(cell["identical"] == 2 for cell in cells)
    trees = [line for line in runs(tmp_path / "runs.jsonl") if line["kind"] == "run" and line["budget"] == "auto"]
    assert all(sum(line["tree_sizes"]) == line["nodes_verified"] for line in trees)
    assert "draft tree (auto)" in result.stdout


def test_greedy_and_sampled_figures(options, tmp_path):
    result = invoke(*options, "--temperatures", "0,1", "--repeats", 2, "--contexts", "40")
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "runs.json").read_text())
    cells = {(c["dataset"], c["temperature"], c["method"], c["budget"]): c for c in summary["cells"]}
    groups = Counter(key[:2] for key in cells)
    assert groups == {("prompts", 0): len(METHODS), ("prompts", 1): len(METHODS), ("context 40", 0): len(METHODS)}
    for (dataset, temperature, method, _), cell in cells.items():
        count = 1 if dataset == "context 40" else 2
        assert (cell["prompts"], cell["runs"], cell["tokens"]) == (count, 2 * count, 10 * count)
        comparable = temperature == 0 or method not in ("lookup", "native")
        assert cell["identical"] == (count if comparable else None)
        assert cell["speedup"]["value"] > 0 and cell["speedup_whole"]["value"] > 0
        rounds = sum(cell["histogram"].values())
        emitted = sum((int(accepted) + 1) * seen for accepted, seen in cell["histogram"].items())
        assert cell["acceptance_length"]["value"] == pytest.approx(emitted / rounds)
        assert ("stage_ms" in cell) == (method in ("chain", "tree"))
    assert cells["prompts", 0, "plain", None]["speedup"] == {"value": 1, "low": 1, "high": 1}
    assert cells["prompts", 0, "plain", None]["forwards"] == 20
    assert cells["prompts", 0, "tree", 20]["acceptance_length"]["value"] > 1.2
    assert cells["prompts", 0, "tree", 20]["nodes_per_round"] > 10
    assert cells["prompts", 0, "tree", 0]["acceptance_length"]["value"] == 1
    assert cells["context 40", 0, "plain", None]["prompt_tokens"] == cells["context 40", 0, "plain", None]["context"]
    assert summary["differences"] == [] and summary["failed"] == {}
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["machine"]["threads"] == torch.get_num_threads()
    assert summary["configuration"]["methods"] == METHODS
    assert "prompts, temperature 1, 2 prompts" in result.stdout
    assert "\x1b" not in result.output


def test_an_interrupted_measurement_goes_on(options, tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        result = invoke(*options)
    assert result.exit_code == 130
    assert "4 of 12 runs are in" in result.stderr and "goes on from there" in result.stderr
    kept = path.read_bytes()
    # A kill in the middle of a line.
    path.write_bytes(kept + b'{"kind":"run","dataset":"prom')
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(kept)
    done = units(runs(path))
    assert len(done) == len(set(done)) == 12
    before = path.read_bytes()
    assert invoke(*options).exit_code == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--seed", 3], "seed was 0, is 3"),
        (["--max-new-tokens", 11], "max_new_tokens was 10, is 11"),
        (["--budgets", "20"], "methods was ["),
        (["--limit", 1], "data.prompts.prompts was 2, is 1"),
    ],
)
def test_another_measurement_is_not_mixed_in(options, tmp_path, monkeypatch, change, message):
    path = tmp_path / "runs.jsonl"
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        invoke(*options)
    before = path.read_bytes()
    result = invoke(*options, *change)
    assert result.exit_code == 2
    assert message in result.stderr and "--out" in result.stderr
    assert path.read_bytes() == before


def test_what_cannot_run_here_is_said_and_left_out(options, tmp_path, monkeypatch):
    warm_up, path = Bench._warm_up, tmp_path / "runs.jsonl"

    def broken(self, method):
        if method.name == "compiled":
            raise RuntimeError("no working C++ compiler\nand more")
        warm_up(self, method)

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "_warm_up", broken)
        interrupt_after(patch, 3)
        result = invoke(*options, "--compiled")
    assert "compiled cannot run here and is left out: RuntimeError: no working C++ compiler" in result.stderr
    # As it does not run anyway, its absence makes no other measurement.
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "runs.json").read_text())
    assert summary["failed"] == {"compiled": "RuntimeError: no working C++ compiler"}
    assert {cell["method"] for cell in summary["cells"]} == {"plain", "lookup", "native", "chain", "tree"}
    assert "compiled could not run" in result.stdout
    assert len(units(runs(path))) == 12


def test_a_method_of_ours_that_cannot_run_is_an_error(options, monkeypatch):
    def broken(self, method):
        raise ValueError(f"{method.name} is broken")

    monkeypatch.setattr(Bench, "_warm_up", broken)
    result = invoke(*options)
    assert result.exit_code == 2
    assert "plain is broken" in result.stderr


@pytest.mark.parametrize(
    ("method", "rounding", "code"), [("tree", False, 1), ("chain", False, 1), ("tree", True, 0), ("lookup", False, 0)]
)
def test_a_changed_text_is_reported(options, tmp_path, monkeypatch, method, rounding, code):
    honest = Bench._generate

    def altered(self, chosen, prompt, temperature, max_new_tokens):
        run = honest(self, chosen, prompt, temperature, max_new_tokens)
        if chosen.name == method and chosen.budget != 0:
            run.tokens[7:8] = [(token + 1) % 16 for token in run.tokens[7:8]]
        return run

    monkeypatch.setattr(Bench, "_generate", altered)
    monkeypatch.setattr("hf_ddtree.cli.benchmark.run.top_two_gap", lambda target, ids: Gap(0.25, rounding))
    result = invoke(*options)
    assert result.exit_code == code, result.output
    summary = json.loads((tmp_path / "runs.json").read_text())
    off = {(cell["method"], cell["budget"]) for cell in summary["cells"] if cell["identical"] == 0}
    assert off == {(method, 20 if method == "tree" else None)}
    assert [(place["token"], place["gap"]) for place in summary["differences"]] == [(7, 0.25)] * 2
    label = "tree 20" if method == "tree" else method
    said = f"{label} differs from plain decoding at temperature 0, first at new token 7"
    assert (said in result.stderr) == (code == 1)


def test_processes_share_the_prompts_and_the_first_one_merges(options, tmp_path, monkeypatch):
    for rank in (1, 0):
        joined = Processes(rank, 2, "cpu")
        monkeypatch.setattr(Processes, "join", classmethod(lambda cls, device, joined=joined: joined))
        result = invoke(*options)
        assert result.exit_code == 0, result.output
        assert (result.stdout == "") == (rank == 1)
    parts = [units(runs(tmp_path / f"runs.{rank}of2.jsonl")) for rank in (0, 1)]
    assert [{unit[1] for unit in part} for part in parts] == [{0}, {1}]
    summary = json.loads((tmp_path / "runs.json").read_text())
    assert {cell["prompts"] for cell in summary["cells"]} == {2}
    assert summary["configuration"]["processes"] == 2


@pytest.mark.slow
def test_two_real_processes(options, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hf_ddtree", "bench"]
    subprocess.run([*command, *map(str, options)], check=True)
    assert json.loads((tmp_path / "runs.json").read_text())["configuration"]["processes"] == 2


@pytest.mark.slow
def test_no_measured_run_of_the_compiled_forward_compiles(pair, tmp_path):
    grid = Grid(methods([COMPILED, "tree", "native"], [7]), {"a": 4}, [0.0, 1.0], 1)
    results = Results(tmp_path / "runs.jsonl", {"configuration": {"methods": []}})
    bench = Bench(pair, [Encoded("a", [[1, 2, 3], [2] * 9, [3] * 30, [4] * 17])], grid, results, max_new_tokens=12)
    bench.warm_up()
    graphs = counters["stats"]["unique_graphs"]
    bench.measure(shown=False)
    assert results.failed() == {}
    assert counters["stats"]["unique_graphs"] == graphs > 0
    tokens = {(line["prompt"], line["method"]): line["token_ids"] for line in results.lines if "prompt" in line}
    assert all(tokens[prompt, COMPILED] == tokens[prompt, "plain"] for prompt in range(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--out", "results"], "give a name like bench.jsonl"),
        (["--out", "no/such/folder/x.jsonl"], "give a name like bench.jsonl"),
        (["--methods", "tree,beams"], "beams is not one of"),
        (["--budgets", "7,many"], "--budgets takes whole numbers from 0 up and auto"),
        (["--temperatures", "-1"], "--temperatures takes numbers from 0 up"),
        (["--contexts", "0"], "--contexts takes whole numbers from 1 up"),
        (["--contexts", "250"], "has 250 tokens, and --max-new-tokens 10 more pass the target's 256 positions"),
        (["--data", "no/such/file"], "no such file, and none of the data sets that are read from the Hub"),
        (["--chat"], "has no chat template"),
        (["--model", "x"], ""),
    ],
)
def test_misuse_is_code_2_and_one_message(options, tmp_path, change, message):
    result = invoke(*options, *change)
    assert result.exit_code == 2, result.output
    assert message in result.stderr and "Traceback" not in result.output
    assert not (tmp_path / "runs.jsonl").exists()


def test_a_pair_of_one_s_own_needs_prompts(folders):
    result = invoke(*folders.options)
    assert result.exit_code == 2
    assert "--data" in result.stderr


def test_a_missing_extra_is_said_before_anything_runs(options, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    result = invoke(*options)
    assert result.exit_code == 2
    assert 'pip install "hf_ddtree[bench]"' in result.stderr
    assert not (tmp_path / "runs.jsonl").exists()
