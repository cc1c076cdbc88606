"""Loading a target, its tokenizer and its drafter; the pair shipped in the package, and the repository's examples."""

import importlib.resources
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from hf_ddtree import DFlashModel

# Pairs of the repository that are too large for the wheel.
EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE_PAIRS = ("smollm2",)


@dataclass
class Pair:
    """A target and the drafter that was trained for it."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    tokenizer: Any

    @classmethod
    def load(
        cls,
        target: str,
        drafter: str,
        *,
        dtype: str | None = None,
        device: str | None = None,
        gguf_file: str | None = None,
    ) -> "Pair":
        r"""
        Args:
            target, drafter (`str`): folders, or repositories of the Hub.
            dtype (`str`, *optional*):
                `"float32"`, `"bfloat16"`, `"float16"` or `"auto"`, the checkpoint's. Defaults to `"float32"` on a CPU
                and `"auto"` elsewhere.
            device (`str`, *optional*): defaults to the accelerator, or to the CPU where there is none.
            gguf_file (`str`, *optional*): file in `target` to read weights and tokenizer from.

        Raises:
            ValueError, OSError: if either cannot be read; the message names it.
        """
        device = device or default_device()
        dtype = dtype or default_dtype(device)
        tokenizer = AutoTokenizer.from_pretrained(target, **({"gguf_file": gguf_file} if gguf_file else {}))
        model = load_target(target, dtype=dtype, device=device, gguf_file=gguf_file)
        return cls(model, DFlashModel.from_pretrained(drafter, dtype=dtype).to(device).eval(), tokenizer)

    def inputs(self, text: str, chat: bool | None = None, **template: Any) -> Any:
        r"""
        A prompt as `generate` takes it, on the target's device.

        Args:
            text (`str`): the prompt.
            chat (`bool`, *optional*): whether to apply the chat template; by default if the tokenizer has one.
            template: variables of the chat template.

        Raises:
            ValueError: if there is no template to apply, or nothing to continue.
        """
        has_template = getattr(self.tokenizer, "chat_template", None) is not None
        if chat and not has_template:
            raise ValueError(f"The tokenizer of {self.tokenizer.name_or_path} has no chat template: drop --chat.")
        if has_template and chat is not False:
            turn = [{"role": "user", "content": text}]
            inputs = self.tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, return_tensors="pt", return_dict=True, **template
            )
        else:
            inputs = self.tokenizer(text, return_tensors="pt")
        if inputs["input_ids"].shape[1] == 0:
            raise ValueError("The prompt has no tokens: give some text to continue.")
        return inputs.to(self.target.device)

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids))


def default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def default_dtype(device: str) -> str:
    """fp32 on a CPU, and the checkpoint's dtype elsewhere."""
    return "float32" if torch.device(device).type == "cpu" else "auto"


def load_target(
    source: str, *, dtype: str | None = None, device: str | None = None, gguf_file: str | None = None
) -> PreTrainedModel:
    """A causal language model, or the model around one that reads images too; arguments as in [`Pair.load`].

    Raises:
        ValueError, OSError: if it cannot be read, or is a model of another kind.
    """
    device = device or default_device()
    options: dict[str, Any] = {"dtype": dtype or default_dtype(device)}
    auto_class: Any = AutoModelForCausalLM
    if gguf_file is not None:
        # The file has its own configuration, always a causal language model's.
        options["gguf_file"] = gguf_file
    else:
        config = type(AutoConfig.from_pretrained(source))
        if config not in MODEL_FOR_CAUSAL_LM_MAPPING:
            if config not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
                raise ValueError(
                    f"{source} is configured by {config.__name__}, for which Transformers has no causal language "
                    "model and none that reads images with text: a target must be one of the two."
                )
            auto_class = AutoModelForImageTextToText
    return auto_class.from_pretrained(source, **options).to(device).eval()


@dataclass
class Prompt:
    """A prompt, the file it was cut from, and the kind of prompt it is."""

    text: str
    file: str = "prompt"
    category: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Reads JSON lines of `{"file": ..., "prompt": ...}`; a `category` may be beside them, and an `id` for the file.

    Raises:
        ValueError: for a line of another form; the message gives its number.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            name = row.get("file", row.get("id", f"prompt {number}"))
            if not isinstance(row["prompt"], str):
                raise TypeError
            prompts.append(Prompt(row["prompt"], str(name), row.get("category")))
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: expected {{"file": ..., "prompt": ...}}, got {line[:60]!r}.'
            ) from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts


@contextmanager
def shipped_pair() -> Iterator[Path]:
    """The folder with `target/`, `drafter/` and `prompts.jsonl` that the wheel brings.

    Raises:
        FileNotFoundError: if this installation lacks it.
    """
    with importlib.resources.as_file(importlib.resources.files("hf_ddtree") / "demo_pair") as folder:
        for part in ("target/config.json", "drafter/config.json", "prompts.jsonl"):
            if not (folder / part).is_file():
                raise FileNotFoundError(
                    f"This installation of hf_ddtree lacks its demo pair: {folder / part} is missing. Reinstall the "
                    "wheel, or name a pair of your own with --model, --drafter and --prompt."
                )
        yield folder


def shipped_prompts() -> list[Prompt]:
    """The prompts of the shipped pair, held out from its training."""
    with shipped_pair() as folder:
        return read_prompts(folder / "prompts.jsonl")


def example_pair(name: str) -> tuple[Path, Path]:
    """Target and drafter of a pair that this checkout of the repository has in `examples/`.

    Raises:
        FileNotFoundError: if there is no such pair, or its target was not fetched yet; the message says how.
    """
    folder = EXAMPLES / name
    target, drafter = folder / "target", folder / "drafter"
    if not (drafter / "config.json").is_file():
        raise FileNotFoundError(
            f"--model {name} without --drafter needs the drafter of examples/{name}, which a checkout of the "
            f"repository installed with `pip install -e .` has, but not this installation: {drafter} is missing. "
            "Name a drafter with --drafter."
        )
    if not (target / "config.json").is_file():
        raise FileNotFoundError(
            f"The target of the pair {name} is missing at {target}: fetch it with `python {folder / name}.py fetch`."
        )
    return target, drafter


def check_pair_options(model: str | None, drafter: str | None) -> None:
    """Raises `ValueError` where only one of the two is given, or `FileNotFoundError` where a named pair is missing."""
    if model in EXAMPLE_PAIRS and drafter is None:
        example_pair(model)
    elif (model is None) != (drafter is None):
        raise ValueError(
            "--model and --drafter go together: a drafter serves the target it was trained for. A name that stands "
            f"for both: {', '.join(EXAMPLE_PAIRS)}."
        )


def load_pair(model: str | None, drafter: str | None, *, dtype: str | None, device: str | None) -> Pair:
    """The named pair, or the shipped one where neither is named; as [`Pair.load`]."""
    check_pair_options(model, drafter)
    if model is not None:
        target, drafter = (model, drafter) if drafter is not None else map(str, example_pair(model))
        return Pair.load(target, drafter, dtype=dtype, device=device)
    with shipped_pair() as folder:
        return Pair.load(str(folder / "target"), str(folder / "drafter"), dtype=dtype, device=device)
