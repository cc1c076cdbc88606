"""`hf-ddtree report` from a fixed measurement."""

import copy
import json
import sys

import pytest
from typer.testing import CliRunner

from hf_ddtree.cli import app
from hf_ddtree.cli.benchmark.extra import needs
from hf_ddtree.cli.reporting import plots
from hf_ddtree.cli.reporting.plots import draw
from hf_ddtree.cli.reporting.table import markdown, table

PLOTS = ("speedup", "acceptance-length", "accepted", "stages", "context")
STAGES = {"draft": 2.0, "build": 0.25, "verify": 6.0, "accept": 0.5, "commit": 0.25, "other": 0.0}


def estimate(value, spread=0.0):
    return {"value": value, "low": value - spread, "high": value + spread}


def cell(method, budget=None, value=1.0, context=None, temperature=0, identical=4, prompts=4):
    figures = {
        "dataset": "math" if context is None else f"context {context}",
        "temperature": temperature,
        "method": method,
        "budget": budget,
        "context": context,
        "prompts": prompts,
        "tokens_per_second": 100 * value,
        "speedup": estimate(value, 0.25 if budget else 0),
        "speedup_whole": estimate(value),
        "acceptance_length": estimate(2 * value),
        "histogram": {"0": 3, "1": 5, "4": 1},
        "identical": identical,
        "peak_bytes": 2**30,
    }
    if method in ("chain", "tree"):
        nodes = budget if isinstance(budget, int) else 5
        figures |= {"stage_ms": STAGES, "nodes_per_round": float(nodes)}
    return figures


@pytest.fixture
def summary():
    return {
        "format": 1,
        "command": "hf-ddtree bench --data math.jsonl",
        "started": "2026-01-02T03:04:05+00:00",
        "load": 0.5,
        "commit": "abc",
        "names": ["org/target", "org/drafter"],
        "versions": {"python": "3.12", "torch": "2.9", "numba": None},
        "machine": {"cpu": "Some CPU", "cores": 8, "threads": 1, "memory_gib": 16.0, "device": "cpu"},
        "configuration": {"dtype": "float32", "attention": "sdpa", "repeats": 3, "max_new_tokens": 64},
        "failed": {"compiled": "RuntimeError: no compiler"},
        "cells": [
            cell("tree", 31, 2.0, identical=3),
            cell("plain"),
            cell("lookup", value=1.5, temperature=1, identical=None),
            cell("chain", value=1.75),
            cell("tree", 7, 1.25),
            *(
                cell(method, budget, context=n, prompts=1)
                for n in (64, 128)
                for method, budget in [("plain", None), ("tree", 7)]
            ),
        ],
        "differences": [
            {
                "dataset": "math",
                "prompt": 2,
                "temperature": 0,
                "repeat": 1,
                "method": "tree",
                "budget": 31,
                "token": 17,
                "gap": 2e-5,
                "rounding": True,
            }
        ],
    }


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)


def test_markdown(summary):
    text = markdown(summary)
    head, _, rest = text.partition("\n\n### math, greedy, 4 prompts\n\n")
    assert head.splitlines() == [
        "## org/target with org/drafter",
        "",
        "- `hf-ddtree bench --data math.jsonl`",
        "- Some CPU, 8 cores, 1 thread, 16.0 GiB; float32, sdpa attention; 3 repeats, 64 new tokens at most; started "
        "2026-01-02T03:04:05+00:00 under a load of 0.5.",
        "- python 3.12; torch 2.9; commit abc.",
        "- Peak memory 1.00 GiB (largest resident set of the process so far, weights included and whatever ran "
        "before).",
    ]
    assert rest.partition("\n\n")[0].splitlines() == [
        "|                 | tokens/s |             speedup | with prefill | acceptance length | identical |",
        "|-----------------|---------:|--------------------:|-------------:|------------------:|----------:|",
        "| plain           |    100.0 |                1.00 |         1.00 |              2.00 |    4 of 4 |",
        "| chain (ours)    |    175.0 |                1.75 |         1.75 |              3.50 |    4 of 4 |",
        "| draft tree (7)  |    125.0 | 1.25 (1.00 to 1.50) |         1.25 |              2.50 |    4 of 4 |",
        "| draft tree (31) |    200.0 | 2.00 (1.75 to 2.25) |         2.00 |              4.00 |    3 of 4 |",
    ]
    assert "other draws" in text.partition("### math, temperature 1")[2]
    assert (
        "| math, greedy        | draft tree (31) |  31.0 |  2.00 |  0.25 |   6.00 |   0.50 |   0.25 |  0.00 |  9.00 |"
        in text
    )
    assert "compiled could not run: RuntimeError: no compiler" in text
    assert "draft tree (31), math, greedy, prompt 2, repeat 1: token 17, the two best logits 2.0e-05 apart" in text


def test_an_automatic_size_is_a_level_behind_the_sizes(summary, tmp_path):
    summary["cells"].append(cell("tree", "auto", 2.5))
    text = markdown(summary)
    lines = text.splitlines()
    rows = [next(i for i, line in enumerate(lines) if line.startswith(f"| draft tree ({n})")) for n in (7, 31, "auto")]
    assert rows == sorted(rows)
    mine = [cell for cell in summary["cells"] if cell["dataset"] == "math" and not cell["temperature"]]
    axes = needs("matplotlib.figure").Figure().subplots()
    plots._speedup(axes, mine)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["31", "7"]
    levels = {line.get_label(): set(line.get_ydata()) for line in axes.lines if not line.get_label().startswith("_")}
    assert levels["draft tree (auto)"] == {2.5}
    assert {path.stem for path in draw(summary, tmp_path)} == set(PLOTS)


def test_memory_of_each_method_on_a_gpu(summary):
    summary["machine"] |= {"device": "cuda", "gpu": "Some GPU"}
    text = markdown(summary)
    assert "peak memory" in text and "Some GPU, on a host with Some CPU" in text
    assert text.count("1.00 GiB |") == len(summary["cells"])


def test_what_was_not_measured_is_a_dash(summary):
    summary["cells"][0] |= {"tokens_per_second": None, "speedup": None, "acceptance_length": None}
    assert "| draft tree (31) |        - |                   - |" in markdown(summary)


def test_a_table_s_columns():
    assert (
        table(["a", "b"], [["x", "10"], ["long", "2"]]) == "| a    |  b |\n|------|---:|\n| x    | 10 |\n| long |  2 |"
    )


def test_every_plot(summary, tmp_path):
    files = draw(summary, tmp_path)
    assert {file.name for file in files} == {f"{plot}.{kind}" for plot in PLOTS for kind in ("png", "svg")}
    for file in files:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG" if file.suffix == ".png" else b"<?xml") and len(content) > 10_000


def test_no_plot_without_its_figures(summary, tmp_path):
    summary["cells"] = [cell("plain"), cell("chain")]
    assert {file.stem for file in draw(summary, tmp_path)} == {"accepted", "stages"}
    summary["cells"] = [cell("plain"), cell("lookup")]
    assert draw(summary, tmp_path) == []


def test_a_folder_of_several_measurements(summary, tmp_path):
    other = copy.deepcopy(summary) | {"names": ["other", "pair"]}
    for name, content in (("one", summary), ("two", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    out = tmp_path / "new" / "folder"
    result = invoke(tmp_path / "one.json", tmp_path / "two.json", "--out", out)
    assert result.exit_code == 0, result.output
    page = (out / "report.md").read_text()
    assert page.index("org/target with org/drafter") < page.index("one-speedup.svg") < page.index("other with pair")
    assert all((out / f"two-{plot}.png").is_file() for plot in PLOTS)
    result = invoke(tmp_path / "one.json")
    assert result.stdout == markdown(summary) + "\n"


def test_runs_that_are_not_finished(folders, tmp_path, monkeypatch):
    from .test_bench import interrupt_after

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    path = tmp_path / "runs.jsonl"
    options = ("--data", tmp_path / "prompts.jsonl", "--out", path, "--max-new-tokens", 6, "--budgets", 7)
    for count, message in ((0, "holds no finished run yet"), (2, "### prompts, greedy, 1 prompt")):
        with monkeypatch.context() as patch:
            interrupt_after(patch, count)
            CliRunner().invoke(app, ["bench", *folders.options, *map(str, options), "--device", "cpu"])
        result = invoke(path)
        assert result.exit_code == (2 if count == 0 else 0)
        assert message in result.output


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 0, "cells": [1]}', None])
def test_what_is_no_measurement(tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    result = invoke(path)
    assert result.exit_code == 2
    assert str(path) in result.stderr.replace("\n", "") and "Traceback" not in result.output


def test_plots_need_a_package(summary, tmp_path, monkeypatch):
    (tmp_path / "one.json").write_text(json.dumps(summary))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert invoke(tmp_path / "one.json").exit_code == 0
    result = invoke(tmp_path / "one.json", "--out", tmp_path)
    assert result.exit_code == 2
    assert 'pip install "hf_ddtree[bench]"' in result.stderr
