"""`hf-ddtree demo` as a user runs it."""

import json

import pytest
from typer.testing import CliRunner

from hf_ddtree.cli import app
from hf_ddtree.cli.measure import Runner

KEYS = {"tokens_per_second", "forwards", "mean_acceptance_length", "identical"}


def invoke(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)], catch_exceptions=False)


def test_one_prompt(folders, tmp_path):
    file = tmp_path / "demo.json"
    result = invoke(
        *folders.options, "--prompt", "hello world", "--max-new-tokens", 24, "--budget", 40, "--json", file
    )
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert list(report) == ["plain", "lookup", "chain", "tree"]
    for mode in report.values():
        assert mode.keys() >= KEYS
        assert mode["identical"] is True
        assert mode["tokens_per_second"] > 0
        assert (mode["tokens"], mode["prompts"]) == (24, 1)
    assert report["plain"]["forwards"] == 24
    assert report["plain"]["mean_acceptance_length"] == report["plain"]["ratio"] == 1.0
    assert report["tree"]["budget"] == 40
    tree = report["tree"]
    assert tree["mean_acceptance_length"] == pytest.approx(23 / (tree["forwards"] - 1))
    assert sum(tree["stage_seconds"].values()) >= tree["seconds"]
    assert "hello world" in result.stdout
    assert "anchor" in result.stdout
    assert "\x1b" not in result.output


def test_full_runs_every_prompt(folders, tmp_path):
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "demo.json"
    prompts.write_text("".join(json.dumps({"file": f"{i}.py", "prompt": "ab" * i}) + "\n" for i in (1, 2, 3)))
    arguments = ("--full", "--prompts", prompts, "--max-new-tokens", 8, "--json", file)
    result = invoke(*folders.options, *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["tree"]["budget"] == 15
    assert {mode["prompts"] for mode in report.values()} == {3}
    assert report["plain"]["forwards"] == 24
    assert "3 prompts, 8 new tokens" in result.stdout


def test_one_token_makes_no_round(folders, tmp_path):
    file = tmp_path / "demo.json"
    result = invoke(*folders.options, "--prompt", "ab", "--max-new-tokens", 1, "--json", file)
    assert result.exit_code == 0, result.output
    assert {mode["forwards"] for mode in json.loads(file.read_text()).values()} == {1}


def test_a_different_output_is_code_1(folders, monkeypatch):
    honest = Runner.run

    def run(self, mode, *args, **kwargs):
        run = honest(self, mode, *args, **kwargs)
        if mode == "lookup":
            run.tokens[5] = (run.tokens[5] + 1) % 16
        return run

    monkeypatch.setattr(Runner, "run", run)
    result = invoke(*folders.options, "--prompt", "ab", "--max-new-tokens", 8)
    assert result.exit_code == 1
    assert "lookup differs from plain decoding, first at new token 5 of prompt" in result.stderr.replace("\n", " ")
    assert "tree differs" not in result.stderr


def test_interruption_is_code_130(folders, monkeypatch):
    monkeypatch.setattr(Runner, "run", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    result = invoke(*folders.options, "--prompt", "ab")
    assert result.exit_code == 130
    assert result.stderr == "\nInterrupted.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x"], "--model and --drafter go together"),
        (["--full", "--prompt", "x"], "--full measures over many prompts"),
        (["--json", "no/such/folder/x.json"], "the folder no/such/folder does not exist"),
        (["--prompts", "no/such/file"], "no/such/file"),
        (["--prompts", "{broken}"], "line 2: expected"),
    ],
)
def test_misuse_is_code_2_and_one_message(folders, tmp_path, arguments, message):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"file": "a", "prompt": "b"}\n{"text": "c"}\n')
    options = [] if "--model" in arguments else folders.options
    result = invoke(*options, *(argument.format(broken=broken) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_missing_pair_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_ddtree.cli.pair.importlib.resources.files", lambda _: tmp_path)
    result = invoke()
    assert result.exit_code == 2
    assert "lacks its demo pair" in result.stderr
