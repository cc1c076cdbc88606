"""A random pair in a folder: small enough to generate with in milliseconds, its text one character a token."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, logging

from hf_ddtree import DFlashConfig, DFlashModel
from hf_ddtree.cli.pair import Pair
from hf_ddtree.compat import text_config
from models.zoo import FAMILIES

ALPHABET = "abcdehlorwAQ01 \n"
LAYERS, WIDTH, BLOCK = 3, 32, 6


@dataclass
class Folders:
    target: str
    drafter: str

    @property
    def options(self) -> list[str]:
        return ["--model", self.target, "--drafter", self.drafter]


def save_target(folder: Path, layers: int = LAYERS) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(ALPHABET),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(ALPHABET)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command quietens Transformers for its process, which other tests share."""
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("pair")
    save_target(root / "target")
    config = DFlashConfig(
        vocab_size=len(ALPHABET),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        block_size=BLOCK,
        mask_token_id=1,
        target_layer_ids=[0, 1],
        num_target_layers=LAYERS,
    )
    DFlashModel(config).save_pretrained(root / "drafter")
    return Folders(str(root / "target"), str(root / "drafter"))


@pytest.fixture(scope="session")
def family_folders(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    """Makes the pair of a family of the zoo, which has the same vocabulary and width."""

    @functools.cache
    def make(family: str) -> Folders:
        root = tmp_path_factory.mktemp(family)
        target = FAMILIES[family].make()
        target.save_pretrained(root / "target")
        save_tokenizer(root / "target")
        drafter = DFlashModel.from_pretrained(folders.drafter, num_target_layers=text_config(target).num_hidden_layers)
        drafter.save_pretrained(root / "drafter")
        return Folders(str(root / "target"), str(root / "drafter"))

    return make


@pytest.fixture(scope="session")
def pair(folders: Folders) -> Pair:
    return Pair.load(folders.target, folders.drafter, device="cpu")
