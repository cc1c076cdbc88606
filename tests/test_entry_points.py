"""Transformers' own entry points take a drafter by name once the package is imported; other models load as before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    logging,
    pipeline,
)
from transformers.pipelines import base as pipelines_base

import hf_ddtree
from cli.conftest import ALPHABET, save_target
from drafters.checkpoints import write, zlab_config, zlab_weights
from hf_ddtree import DDTreeConfig, DFlashConfig, DFlashModel
from pairs import make_drafter, make_target, prompt

PROMPT, NEW = "hello world", 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    save_target(folder)
    return str(folder)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("drafter"), _config(), zlab_weights()))


def _config(**overrides: Any) -> dict[str, Any]:
    return zlab_config(**{"num_target_layers": 3, "vocab_size": len(ALPHABET), **overrides})


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


class TestAutoClasses:
    @pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
    @pytest.mark.parametrize("shards", [1, 3])
    def test_a_drafter(self, auto_class: Any, shards: int, tmp_path: Path) -> None:
        weights = zlab_weights()
        folder = write(tmp_path, _config(), weights, shards)
        model = auto_class.from_pretrained(folder)
        assert type(model) is DFlashModel and not model.training
        assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())

    def test_the_raw_file_is_read(self, tmp_path: Path) -> None:
        """Qwen3's configuration class drops the window unless `use_sliding_window` is set, as it is in no drafter."""
        sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
        folder = write(tmp_path, _config(**sliding), zlab_weights())
        assert AutoConfig.from_pretrained(folder).sliding_window is None
        config = AutoModel.from_pretrained(folder).config
        assert isinstance(config, DFlashConfig)
        assert (config.sliding_window, config.causal_layers) == (64, [True, False])

    def test_another_family_named_in_the_file(self, tmp_path: Path) -> None:
        folder = write(tmp_path, _config(model_type="gpt_oss"), zlab_weights())
        config = AutoModel.from_pretrained(folder).config
        assert (config.layer_types, config.attention_bias) == (["full_attention"] * 2, False)

    def test_loading_arguments(self, drafter: str, tmp_path: Path) -> None:
        nested = write(tmp_path / "inner", _config(), zlab_weights()).parent
        model, info = AutoModel.from_pretrained(
            pretrained_model_name_or_path=nested,
            subfolder="inner",
            dtype=torch.bfloat16,
            device_map="cpu",
            output_loading_info=True,
        )
        assert model.dtype == torch.bfloat16 and not info["missing_keys"]
        assert AutoModel.from_pretrained(drafter, block_size=4).config.block_size == 4
        config = DFlashConfig.from_pretrained(drafter, block_size=3)
        assert AutoModel.from_pretrained(drafter, config=config).config.block_size == 3

    def test_another_class_of_configuration_is_refused(self, drafter: str) -> None:
        with pytest.raises(ValueError, match=r"Qwen3Config.*DFlashConfig"):
            AutoModel.from_pretrained(drafter, config=AutoConfig.from_pretrained(drafter))

    def test_an_unsupported_relative_is_refused_by_name(self, tmp_path: Path) -> None:
        folder = write(tmp_path, _config(architectures=["FlashMapDraftModel"]), zlab_weights())
        with pytest.raises(ValueError, match="FlashMap"):
            AutoModel.from_pretrained(folder)

    def test_plain_models_load_as_before(self, target: str) -> None:
        assert type(AutoModel.from_pretrained(target)) is Qwen3Model
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        assert type(model) is Qwen3ForCausalLM and model.dtype == torch.bfloat16
        config = Qwen3Config.from_pretrained(target, rms_norm_eps=1e-3)
        assert AutoModelForCausalLM.from_pretrained(target, config=config).config.rms_norm_eps == 1e-3

    def test_errors_of_plain_models_are_the_library_s(self, tmp_path: Path) -> None:
        with pytest.raises((OSError, ValueError), match=r"config\.json"):
            AutoModel.from_pretrained(tmp_path)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(OSError, match="valid JSON"):
            AutoModel.from_pretrained(tmp_path)

    def test_a_repository_s_own_code_on_request(self, tmp_path: Path) -> None:
        folder = write(tmp_path, _config(), zlab_weights())
        (folder / "dflash.py").write_text(
            "from transformers import Qwen3Config, Qwen3Model\n"
            "class DFlashDraftModel(Qwen3Model):\n    config_class = Qwen3Config\n"
        )
        assert type(AutoModel.from_pretrained(folder)) is DFlashModel
        model = AutoModel.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__name__ == "DFlashDraftModel"


class TestPipeline:
    @pytest.mark.parametrize("given", ["object", "name", "at init"])
    def test_text_is_the_target_s_own(self, target: str, drafter: str, given: str) -> None:
        expected = pipeline("text-generation", model=target)(PROMPT, generation_config=_plain())
        config = DDTreeConfig(budget=15, max_new_tokens=NEW, do_sample=False)
        assistant: Any = DFlashModel.from_pretrained(drafter) if given == "object" else drafter
        at_init = {"generation_config": config} if given == "at init" else {}
        writer = pipeline("text-generation", model=target, assistant_model=assistant, **at_init)
        with hf_ddtree.record() as stats:
            assert writer(PROMPT, **({} if at_init else {"generation_config": config})) == expected
        assert stats.rounds and stats.nodes_verified

    @pytest.mark.parametrize(
        ("of_target", "of_drafter"),
        [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16)],
        ids=str,
    )
    def test_dtype(self, target: str, drafter: str, of_target: torch.dtype, of_drafter: torch.dtype) -> None:
        writer = pipeline("text-generation", model=target, assistant_model=drafter, dtype=of_target)
        assert writer.model.dtype == of_target
        assert writer.assistant_model.dtype == of_drafter
        assert writer.assistant_model.device == writer.model.device
        assert not writer.assistant_model.training

    def test_a_drafter_of_another_target(self, target: str, tmp_path: Path) -> None:
        other = str(write(tmp_path, _config(num_target_layers=5), zlab_weights()))
        with pytest.raises(ValueError, match=r"trained for 5 target layers, the target has 3"):
            pipeline("text-generation", model=target, assistant_model=other)

    def test_ordinary_assistants_as_before(self, target: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(target)
        loaded, tokenizer = pipelines_base.load_assistant_model(model, target, None)
        assert type(loaded) is Qwen3ForCausalLM and tokenizer is None
        assert pipelines_base.load_assistant_model(model, None, None) == (None, None)
        with pytest.raises(OSError, match="no/such/folder"):
            pipelines_base.load_assistant_model(model, "no/such/folder", None)


def _plain() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW, do_sample=False)


@pytest.mark.parametrize("field", ["own_embedding", "own_head", "sample_from_anchor"])
def test_the_native_chain_takes_the_base_layout_only(field: str) -> None:
    model = make_target()
    relative = make_drafter(model, **{field: True})
    with pytest.raises(ValueError, match=r"DDTreeConfig"):
        model.generate(prompt(), assistant_model=relative, speculation_type="dflash", max_new_tokens=4)


def test_subclasses_of_auto_classes_keep_their_own_mapping(target: str) -> None:
    class Own(AutoModelForCausalLM):
        _model_mapping = AutoModel._model_mapping

    assert type(Own.from_pretrained(target)) is Qwen3Model
