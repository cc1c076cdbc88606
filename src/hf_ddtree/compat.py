"""Every private Transformers name and version difference that the package relies on.

Nothing else in the package reads a version number or a private name of Transformers. A missing name is an
`ImportError` here, at import, with both versions named, rather than a wrong answer later.
"""

import copy
import inspect
import math
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import CompileConfig, GenerationMixin, PreTrainedModel, cache_utils

OLDEST_TRANSFORMERS = "5.20.0"
TRANSFORMERS_VERSION = Version(transformers.__version__)

if Version(OLDEST_TRANSFORMERS) > TRANSFORMERS_VERSION:
    raise ImportError(
        f"hf_ddtree needs transformers >= {OLDEST_TRANSFORMERS}, but {transformers.__version__} is installed: "
        "`pip install -U transformers`."
    )

try:
    from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        _vmap_expansion_sdpa,
        causal_mask_function,
        sliding_window_causal_mask_function,
        sliding_window_overlay,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils.generic import ExplicitEnum
    from transformers.utils.hub import resolve_revision

    for _name in (
        "_prefill",
        "_validate_generation_mode",
        "_update_model_kwargs_for_generation",
        "_has_unfinished_sequences",
        "_valid_auto_compile_criteria",
    ):
        getattr(GenerationMixin, _name)
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"hf_ddtree does not know the internals of transformers {transformers.__version__} ({error}). It is tested "
        f"with {OLDEST_TRANSFORMERS} and every later release up to its own: install one of those, or a newer "
        "hf_ddtree."
    ) from error

#: What `forward` and its outputs call the cache: 5.24 renamed `past_key_values`.
CACHE_NAME = "cache" if Version("5.24.0.dev0") <= TRANSFORMERS_VERSION else "past_key_values"

#: Cache layers that hold nothing, which 5.20 does not have.
EMPTY_CACHE_LAYERS: tuple[type, ...] = tuple(
    getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name)
)

#: The value of `config.model_type` of each drafter that follows Transformers' native DFlash signature.
DFLASH_MODEL_TYPES = ("dflash", "muse_glimmer_assistant")

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_EXPERTS_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "CACHE_NAME",
    "DFLASH_MODEL_TYPES",
    "EMPTY_CACHE_LAYERS",
    "GENERATION_MODES_MAPPING",
    "ExplicitEnum",
    "GenerateDecoderOnlyOutput",
    "active_stream",
    "asks_to_compile",
    "attention_implementation",
    "causal_window",
    "compile_config",
    "decoder_layers",
    "expand_mask_function",
    "extend_model_kwargs",
    "extends_by_length",
    "hands_arguments_on",
    "has_adapters",
    "has_unfinished_sequences",
    "is_dflash_drafter",
    "is_never_compiled",
    "is_stateful",
    "is_user_defined",
    "layers_reading_shared_rows",
    "model_name",
    "pinned_revision",
    "prefill",
    "prompt_length",
    "recurrent_mixers",
    "scans_as_it_steps",
    "set_attention_implementation",
    "supported_modes",
    "tensor_parallel_group",
    "text_config",
    "unserved_parallelism",
]


def is_dflash_drafter(model: Any) -> bool:
    """Whether `model` is a DFlash drafter, ours or a native one; reads the configuration, imports no model code."""
    return getattr(getattr(model, "config", None), "model_type", None) in DFLASH_MODEL_TYPES


def prefill(model: PreTrainedModel, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """`generate`'s own reading of the prompt, chunked or not, from an empty cache or one that holds a part of it."""
    kept = model_kwargs.get("logits_to_keep")
    if getattr(text_config(model), "num_kv_shared_layers", None) and isinstance(kept, int) and kept:
        # Gemma 4 spares its last layers the tokens before; asked in this form for the same logits, it does not.
        model_kwargs = {**model_kwargs, "logits_to_keep": torch.arange(-kept, 0)}
    return model._prefill(input_ids, generation_config, model_kwargs)


def prompt_length(input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> int:
    """Tokens of the sequence before generation; `input_ids` may be all of them or those not in the cache yet."""
    mask = model_kwargs.get("attention_mask")
    return mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", input_ids.shape[1])


def extend_model_kwargs(
    model: PreTrainedModel, outputs: Any, model_kwargs: dict[str, Any], new: int
) -> dict[str, Any]:
    """`model_kwargs` after `new` tokens: positions, masks and token types as long as the sequence."""
    return model._update_model_kwargs_for_generation(
        outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=new
    )


def extends_by_length(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether [`extend_model_kwargs`] does the same for tokens at once as one by one, and needs no outputs for it."""
    shared = _is_shared(model, "_update_model_kwargs_for_generation")
    return shared and CACHE_NAME in model_kwargs and not any("token_type_ids" in key for key in model_kwargs)


def hands_arguments_on(model: PreTrainedModel) -> bool:
    """Whether a forward takes what is not as long as the sequence as the call before it did."""
    return _is_shared(model, "prepare_inputs_for_generation") and not model.is_remote_code()


def _is_shared(model: PreTrainedModel, method: str) -> bool:
    """Whether a model has the method that all do."""
    return getattr(getattr(model, method), "__func__", None) is getattr(GenerationMixin, method)


def has_unfinished_sequences(model: PreTrainedModel, finished: bool, device: torch.device) -> bool:
    """Under `synced_gpus`: whether any process still generates. Every process asks at the same time."""
    return model._has_unfinished_sequences(finished, synced_gpus=True, device=device)


def tensor_parallel_group(model: PreTrainedModel) -> Any:
    """The processes that each hold a part of every layer, as the library loaded the model; `None` if it is whole."""
    mesh, size = getattr(model, "_device_mesh", None), getattr(model, "_tp_size", None)
    return mesh.get_group("tp") if mesh is not None and size is not None and size > 1 else None


def unserved_parallelism(model: PreTrainedModel) -> str | None:
    """The setting of `DistributedConfig` under which one process does not see every layer's states of all tokens."""
    distributed = getattr(model.config, "distributed_config", None)
    if isinstance(distributed, dict):
        distributed = SimpleNamespace(**distributed)
    if (getattr(distributed, "pp_size", None) or 1) > 1:
        return "pp_size"
    return "enable_sequence_parallel" if getattr(distributed, "enable_sequence_parallel", False) else None


def all_modules(root: nn.Module) -> list[nn.Module]:
    """What `root.modules()` gives, in another order and a quarter of the time: each generate looks at all of them."""
    found: dict[int, nn.Module] = {}
    left: list[nn.Module | None] = [root]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            left.extend(module._modules.values())
    return list(found.values())


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether PEFT has put layers of its own into the model; tells without importing it."""
    return any(type(module).__module__.startswith("peft.tuners.") for module in all_modules(model))


def is_user_defined(cache: Any) -> bool:
    """Whether the cache was passed to `generate`, not made by it."""
    return getattr(cache, "_is_user_defined", False)


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether the model says that its state cannot be rolled back."""
    return getattr(model, "_is_stateful", False)


def supported_modes(model: PreTrainedModel) -> Any:
    """The generation modes a model restricts itself to, or `None`."""
    return getattr(model, "_supported_generation_modes", None)


def model_name(model: PreTrainedModel) -> str:
    """The repository or folder a model came from, or its class."""
    return repr(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def attention_implementation(config: Any) -> str:
    """The attention implementation that modules with this configuration look up."""
    return config._attn_implementation


def set_attention_implementation(config: Any, name: str) -> None:
    """Sets it for this configuration alone, without the library's checks and recursion (6 microseconds, not 600)."""
    config._attn_implementation_internal = name


def pinned_revision(source: Any, options: dict[str, Any]) -> Any:
    """The commit behind `options["revision"]` of a Hub repository, which then needs no further look-up."""
    names = ("token", "local_files_only", "cache_dir")
    return resolve_revision(source, options.get("revision"), **{n: options[n] for n in names if options.get(n)})


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the model's language part."""
    return model.config.get_text_config(decoder=True)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the language model's decoder layers, first to last.

    Raises:
        ValueError: if no module list of `config.num_hidden_layers` layers is found.
    """
    count = text_config(model).num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for root in (decoder, model):
        for name, module in root.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count and name.rpartition(".")[2] in _LAYER_LISTS:
                return module
    raise ValueError(
        f"No list of {count} decoder layers was found in {type(model).__name__} (looked for modules named "
        f"{', '.join(_LAYER_LISTS)}), so the drafter's taps have nothing to read."
    )


def layers_reading_shared_rows(model: PreTrainedModel) -> set[int]:
    """Indices of the layers that attend to keys and values of an earlier one, and keep none in the cache."""
    config = text_config(model)
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return {index for index, mode in enumerate(modes) if mode == "reuse"}
    # Before these modes it was the last layers that shared.
    first = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return set(range(first, config.num_hidden_layers))


def compile_config() -> CompileConfig:
    """What makes `generate` compile its decoding forward on every device; by itself it does not on a CPU."""
    config = CompileConfig()
    config._compile_all_devices = True
    return config


def asks_to_compile(model: PreTrainedModel, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    """Whether a call has a `compile_config` and all that `generate` wants for compiling, on every device."""
    if generation_config.compile_config is None:
        return False
    # The library skips a config on a CPU unless it says this; one that is given is meant.
    generation_config, config = copy.copy(generation_config), copy.copy(generation_config.compile_config)
    config._compile_all_devices = True
    generation_config.compile_config = config
    return model._valid_auto_compile_criteria(model_kwargs, generation_config)


def is_never_compiled(model: PreTrainedModel) -> bool:
    """Whether `generate` leaves this model uncompiled whatever is asked."""
    return "llama4" in model.config.model_type


_LAYER_LISTS = ("layers", "h", "blocks")


def active_stream(model: PreTrainedModel) -> int | None:
    """Which of a decoder layer's outputs is its own, where it has several, stacked in front (AltUp); else `None`."""
    return getattr(text_config(model), "altup_active_idx", None)


def recurrent_mixers(model: PreTrainedModel) -> dict[int, list[nn.Module]]:
    """The modules of the decoder layers that keep recurrent states in the cache, by the cache layer they use.

    They are told by their code: a method of the class updates a convolution's or a recurrence's state in the cache. A
    module inside such a module belongs to it and is not listed.
    """
    found: dict[int, list[nn.Module]] = {}

    def collect(module: nn.Module) -> None:
        # A module that lacks an attribute takes long to say so.
        index: Any = vars(module).get("layer_idx")
        if index is not None and _updates_recurrent_states(type(module)):
            if all(module is not other for other in found.setdefault(index, [])):
                found[index].append(module)
        else:
            for child in module._modules.values():
                if child is not None:
                    collect(child)

    collect(decoder_layers(model))
    return found


_RECURRENT_UPDATES = {"update_conv_state", "update_recurrent_state"}


def _updates_recurrent_states(module_class: Any) -> bool:
    return not _RECURRENT_UPDATES.isdisjoint(_names_used(module_class))


def scans_as_it_steps(mixer: nn.Module) -> bool:
    """Whether a recurrent mixer moves on by several tokens at once as it does by one after the other.

    Mamba-1's scan over several tokens starts from an empty state. Mamba-2's keeps the time steps within limits that a
    single step, which is what decoding takes, does not keep.
    """
    mixer_class: Any = type(mixer)
    limits = getattr(mixer, "time_step_limit", None)
    unlimited = limits is None or tuple(limits) == (0.0, math.inf)
    return unlimited and "mamba_selective_scan" not in _names_used(mixer_class)


@cache
def _names_used(module_class: Any) -> frozenset[str]:
    """Names of globals and attributes that the code of a class of modules uses."""
    # Decorators of the library hide the code behind a wrapper; accelerate replaces the instance's method only.
    methods = (
        inspect.unwrap(method)
        for base in module_class.__mro__[: module_class.__mro__.index(nn.Module)]
        for method in vars(base).values()
        if isinstance(method, FunctionType)
    )
    return frozenset(name for method in methods for name in _names(method.__code__))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def causal_window(mask_function: Any) -> tuple[bool, int | None]:
    """Whether a mask function is the library's causal one and nothing more, and its sliding window, if it has one."""
    if mask_function is causal_mask_function:
        return True, None
    parts = _closure(mask_function, like=sliding_window_causal_mask_function(1)).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return False, None
    window = _closure(parts[0], like=sliding_window_overlay(1)).get("sliding_window")
    return window is not None, window


def _closure(function: Any, like: Any) -> dict[str, Any]:
    """The variables that `function` closes over, if it is the same code as `like`."""
    code = getattr(function, "__code__", None)
    if code is not like.__code__ or function.__closure__ is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__, strict=True)}


def expand_mask_function(mask_function: Any, use_vmap: bool, *indices: Any) -> Any:
    """One of the library's mask functions at index vectors of batch, head, query and key: shape `(B, H, Q, K)`."""
    if use_vmap:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():
            return _vmap_expansion_sdpa(mask_function)(*indices)
    batch, head, query, key = indices
    return mask_function(
        batch[:, None, None, None], head[None, :, None, None], query[None, None, :, None], key[None, None, None, :]
    )
