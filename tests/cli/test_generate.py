"""`hf-ddtree generate` as a user runs it: the text alone on stdout, exactly the target's."""

import pytest
import torch
from transformers import CLIPConfig
from typer.testing import CliRunner

from hf_ddtree.cli import app
from hf_ddtree.cli.pair import Pair
from models.zoo import FAMILIES

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
    assert "layers read trees" not in result.stderr, "there is one way only"


def test_an_automatic_budget(pair, folders):
    options = (*folders.options, "--prompt", PROMPT, "--max-new-tokens", 30, "--device", "cpu", "--budget")
    result = invoke(*options, "auto")
    assert result.exit_code == 0, result.output
    assert result.stdout == plain_text(pair, max_new_tokens=30, do_sample=False)
    assert invoke(*options, 7).stdout == result.stdout
    for wrong in ("many", "-1", "1.5"):
        result = invoke(*options, wrong)
        assert result.exit_code == 2
        assert "neither a whole number from 0 up nor auto" in " ".join(result.stderr.replace("│", "").split())


def test_recurrent_layers_show_in_the_statistics(family_folders):
    options = ("--prompt", "hello", "--max-new-tokens", 8, "--device", "cpu")
    result = invoke(*family_folders("qwen3_next").options, *options)
    assert "layers read trees: 2 by attention, 2 by gated delta rule\n" in result.stderr, result.output


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "muse_glimmer"])
def test_a_target_that_reads_images_too(family_folders, family):
    folders = family_folders(family)
    result = invoke(*folders.options, "--prompt", "hello", "--max-new-tokens", 12, "--device", "cpu")
    assert result.exit_code == 0, result.output
    pair = Pair.load(folders.target, folders.drafter, device="cpu")
    assert type(pair.target).__name__ == FAMILIES[family].model_class
    assert result.stdout == plain_text(pair, "hello", max_new_tokens=12, do_sample=False)


def test_a_target_of_another_kind_is_refused_by_its_configuration(folders, tmp_path):
    CLIPConfig().save_pretrained(tmp_path)
    pair_without_target = ("--model", tmp_path, "--drafter", folders.drafter)
    for text in (
        invoke(*pair_without_target, "--prompt", "hello", "--device", "cpu").stderr,
        CliRunner().invoke(app, ["doctor", str(tmp_path), folders.drafter]).stderr,
    ):
        assert text.startswith(f"Error: {tmp_path} is configured by CLIPConfig") and len(text) < 400


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
