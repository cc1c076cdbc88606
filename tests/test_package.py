"""The package as installed: metadata, shipped files, and what importing it does to the process."""

import importlib.metadata
import importlib.resources
import json
import re
import subprocess
import sys
from typing import Any

import hf_ddtree

# What transformers itself loads lazily and any program that generates has loaded.
TRANSFORMERS = """
import transformers, transformers.generation.utils
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
"""
OPTIONAL = {"datasets", "gguf", "gradio", "matplotlib", "pandas", "rich", "scipy", "triton", "typer"}


def run_fresh(code: str) -> Any:
    """What `code` prints as JSON on its last line, run in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def requirement_names(extra: str | None) -> set[str]:
    names = set()
    for requirement in importlib.metadata.requires("hf_ddtree") or []:
        marker = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if (marker.group(1) if marker else None) == extra:
            names.add(re.match(r"[\w.-]+", requirement).group().replace("_", "-"))
    return names


def test_version_is_the_installed_one():
    assert hf_ddtree.__version__ == importlib.metadata.version("hf_ddtree")


def test_metadata():
    metadata = importlib.metadata.metadata("hf_ddtree")
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {"fast", "bench", "space", "test", "dev", "docs"}
    runtime = {"transformers", "torch", "accelerate", "safetensors", "huggingface-hub", "numpy"}
    assert requirement_names(extra=None) == runtime


def test_command_is_installed():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="hf-ddtree")
    assert callable(command.load())


def test_ships_type_information():
    assert importlib.resources.files("hf_ddtree").joinpath("py.typed").is_file()


def test_ships_a_demo_pair_of_reasonable_size():
    with importlib.resources.as_file(importlib.resources.files("hf_ddtree") / "demo_pair") as folder:
        sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert len([path for path in sizes if path.suffix == ".safetensors"]) == 2, "one target and one drafter"
    assert sum(sizes.values()) < 25e6


def test_import_loads_nothing_optional_and_no_model():
    loaded = run_fresh(
        TRANSFORMERS
        + """
import json, sys
before = set(sys.modules)
import hf_ddtree
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    )
    assert "hf_ddtree" in loaded
    assert not OPTIONAL & {name.partition(".")[0] for name in loaded}
    assert not [name for name in loaded if re.match(r"transformers\.models\.\w+\.modeling_", name)]


def test_import_patches_no_model():
    """All stay as they were: model classes, their modules, registered functions; generation's base gains a mode."""
    changes = run_fresh(
        TRANSFORMERS
        + """
import json
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

def contents(owner):
    return dict(owner) if hasattr(owner, "register") and not isinstance(owner, type) else dict(vars(owner))

owners = {"attention": ALL_ATTENTION_FUNCTIONS, "masks": ALL_MASK_ATTENTION_FUNCTIONS}
for module in (modeling_llama, modeling_qwen3):
    owners[module.__name__] = module
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    for base in {base for cls in classes for base in cls.__mro__ if base.__module__.startswith("transformers.")}:
        owners[base.__qualname__] = base
before = {name: contents(owner) for name, owner in owners.items()}
import hf_ddtree
changes = {}
for name, owner in owners.items():
    after = contents(owner)
    changed = sorted(key for key, value in before[name].items() if after.get(key) is not value)
    added = sorted(after.keys() - before[name].keys())
    if changed or added:
        changes[name] = {"changed": changed, "added": added}
print(json.dumps(changes))
"""
    )
    assert changes == {
        "GenerationMixin": {"changed": ["_validate_generation_mode", "generate"], "added": ["_ddtree_decoding"]},
        "attention": {"changed": [], "added": ["ddtree"]},
        "masks": {"changed": [], "added": ["ddtree"]},
    }
