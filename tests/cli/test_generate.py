"""`hf-ddtree generate` as a user runs it: the text alone on stdout, exactly the target's."""

import io

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_ddtree import SpeculationStats
from hf_ddtree.cli import app
from hf_ddtree.cli.generate import print_stats

from .conftest import LAYERS, save_target

PROMPT = "hello world"


def invoke(*arguments, **kwargs):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], catch_exceptions=False, **kwargs)


def plain_text(pair, prompt=PROMPT, seed=0, **settings):
    torch.manual_seed(seed)
    inputs = pair.tokenizer(prompt, return_tensors="pt")
    output = pair.target.generate(**inputs, **settings)
    return pair.decode(output[0, inputs["input_ids"].shape[1] :].tolist()) + "\n"


def test_greedy_text_and_statistics(pair, folders):
    result = invoke(*folders.options, "--prompt", PROMPT, "--max-new-tokens", 30, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout == plain_text(pair, max_new_tokens=30, do_sample=False)
    assert "30 tokens in " in result.stderr
    assert "verify" in result.stderr


@pytest.mark.parametrize(
    ("routes", "line"),
    [
        ({"attention": 2, "gated delta rule": 6}, "2 by attention, 6 by gated delta rule\n"),
        ({"paths": 3}, "3 by paths\n"),
        ({"attention": 2}, None),
        ({}, None),
    ],
)
def test_recurrent_layers_show_in_the_statistics(routes, line):
    console = Console(file=io.StringIO(), width=120)
    print_stats(console, SpeculationStats(acceptance_lengths=[2], routes=routes), tokens=3, seconds=1.0)
    printed = console.file.getvalue()
    assert ("layers read trees: " in printed) == (line is not None)
    assert line is None or line in printed


def test_prompt_from_standard_input_without_statistics(pair, folders):
    options = ("--prompt", "-", "--max-new-tokens", 12, "--no-stats", "--device", "cpu")
    result = invoke(*folders.options, *options, input=PROMPT)
    assert result.stdout == plain_text(pair, max_new_tokens=12, do_sample=False)
    assert result.stderr == ""


def test_sampling_with_a_seed_is_the_target_s_own(pair, folders):
    options = ("--temperature", 0.8, "--top-p", 0.9, "--top-k", 20, "--seed", 3, "--max-new-tokens", 20)
    result = invoke(*folders.options, "--prompt", PROMPT, "--device", "cpu", *options)
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "max_new_tokens": 20}
    assert result.stdout == plain_text(pair, seed=3, **settings)
    assert result.stdout != plain_text(pair, max_new_tokens=20, do_sample=False)


@pytest.mark.parametrize("option", [None, "--chat", "--no-chat"])
def test_chat_template(pair, folders, tmp_path, option):
    save_target(tmp_path)
    pair.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}Q {{ m['content'] }} A {% endfor %}")
    options = ("--model", tmp_path, "--drafter", folders.drafter, "--prompt", PROMPT, "--device", "cpu")
    result = invoke(*options, "--max-new-tokens", 12, *([option] if option else []))
    prompt = PROMPT if option == "--no-chat" else f"Q {PROMPT} A "
    assert result.stdout == plain_text(pair, prompt, max_new_tokens=12, do_sample=False), result.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model", "no/such/folder/here", "no/such/folder/here"),
        ("--drafter", "{target}", ""),
        ("--drafter", "no/such/folder/here", "no/such/folder/here"),
        ("--prompt", "", "The prompt has no tokens"),
        ("--chat", None, "has no chat template"),
    ],
)
def test_misuse_is_code_2_and_one_message(folders, option, value, message):
    arguments = {"--model": folders.target, "--drafter": folders.drafter, "--prompt": "x", "--device": "cpu"}
    arguments[option] = value.format(target=folders.target) if value is not None else None
    result = invoke(*(part for pair in arguments.items() for part in pair if part is not None))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_drafter_of_another_target_is_refused(folders, tmp_path):
    save_target(tmp_path, layers=LAYERS + 1)
    options = ("--model", tmp_path, "--drafter", folders.drafter, "--prompt", PROMPT, "--device", "cpu")
    result = invoke(*options)
    assert result.exit_code == 2
    assert f"trained for {LAYERS} target layers" in result.stderr.replace("\n", " ")
