"""Pairs by name: the one that the repository's examples hold, with stand-in folders."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from hf_ddtree.cli import app, pair
from hf_ddtree.cli.pair import check_pair_options, example_pair, load_pair


@pytest.fixture
def examples(folders, tmp_path, monkeypatch):
    """A stand-in for `examples/`, with a tiny pair under the name of the real one."""
    shutil.copytree(folders.target, tmp_path / "examples" / "smollm2" / "target")
    shutil.copytree(folders.drafter, tmp_path / "examples" / "smollm2" / "drafter")
    monkeypatch.setattr(pair, "EXAMPLES", tmp_path / "examples")
    return tmp_path / "examples" / "smollm2"


def test_a_name_stands_for_target_and_drafter(examples):
    loaded = load_pair("smollm2", None, dtype=None, device="cpu")
    assert loaded.target.name_or_path == str(examples / "target")
    assert loaded.drafter.name_or_path == str(examples / "drafter")


def test_a_target_that_was_not_fetched_is_named_with_the_command(examples):
    shutil.rmtree(examples / "target")
    with pytest.raises(FileNotFoundError, match=r"target of the pair smollm2 is missing.*smollm2\.py fetch"):
        check_pair_options("smollm2", None)


def test_an_installation_without_the_examples_says_so(examples):
    shutil.rmtree(examples)
    with pytest.raises(FileNotFoundError, match="needs the drafter of examples/smollm2"):
        example_pair("smollm2")


def test_with_a_drafter_of_its_own_the_name_is_a_folder_as_ever(examples):
    shutil.rmtree(examples)
    check_pair_options("smollm2", "drafter")


def test_bench_keeps_the_name(examples, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "runs.jsonl"
    prompts.write_text('{"id": "a", "prompt": "ab"}\n')
    arguments = ["bench", "--model", "smollm2", "--data", prompts, "--out", out, "--methods", "tree", "--budgets", "7"]
    arguments += ["--repeats", "1", "--max-new-tokens", "4", "--device", "cpu"]
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text().splitlines()[0])["names"] == ["smollm2", "smollm2"]
