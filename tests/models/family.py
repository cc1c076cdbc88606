"""What a family of targets is to these tests: how to make a tiny random one, and what to feed it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

VOCABULARY = 16
LAYERS = 4
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"

SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
MIXED: dict[str, Any] = dict(sliding_window=6, layer_types=[SLIDING, FULL] * 2)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=24)


@dataclass(frozen=True)
class Image:
    """An image at the start of a prompt.

    Args:
        token_id (`int`): the token that stands for a piece of it; text below has no such token.
        count (`int`): how many of them there are.
        inputs (`Callable`): its pixels and what else the model takes for it.
        types (`str`, *optional*): the argument that marks the image's tokens with ones.
    """

    token_id: int
    count: int
    inputs: Callable[[], dict[str, torch.Tensor]]
    types: str | None = "mm_token_type_ids"


@dataclass(frozen=True)
class Family:
    """One row of the matrix.

    Args:
        name (`str`): of the test.
        title (`str`): what the documentation calls it.
        model_class (`str`): the class of Transformers that is run; a release without it has no such row.
        build (`Callable`): makes the model; fields passed to it override those of its configuration.
        routes (`frozenset[str]`): the ways its layers verify a tree, as the statistics name them.
        window (`str`, *optional*): the configuration's field with the window or chunk of its bounded layers.
        open_routing (`dict`, *optional*): fields with which every expert reads every token, for a model of experts.
        image (`Image`, *optional*): for a model whose prompts start with one.
        seed (`int`): of weights whose greedy text varies and that magnify no rounding in bf16.
        further (`bool`): whether its tests are among the slow ones: it adds no kind of layer to the others.
        fp64_error (`float`): how far off a tree may be in fp64, in standard deviations of the logits. Norms, softmaxes
            and routers of the library are in fp32 whatever the model's dtype, and all of a recurrence is.
    """

    name: str
    title: str
    model_class: str
    build: Callable[..., Any]
    routes: frozenset[str] = frozenset({"attention"})
    window: str | None = None
    open_routing: dict[str, Any] | None = None
    image: Image | None = None
    seed: int = 0
    further: bool = False
    fp64_error: float = 1e-5

    @property
    def present(self) -> bool:
        """Whether the installed release has it."""
        return hasattr(transformers, self.model_class)

    @property
    def text_vocabulary(self) -> int:
        """Tokens below this one are text."""
        return VOCABULARY if self.image is None else 12

    def make(
        self, dtype: torch.dtype = torch.float32, implementation: str | None = None, window: int | None = None
    ) -> Any:
        """A random target. In low precision every expert reads every token.

        A router may choose otherwise where two experts score alike to within rounding, for trees as for a batch; that
        says nothing of the tree, and would be all that is measured.
        """
        fields: dict[str, Any] = dict(self.open_routing or {}) if dtype == torch.bfloat16 else {}
        if window is not None:
            assert self.window is not None, f"{self.name} has no window"
            fields[self.window] = window
        torch.manual_seed(self.seed)
        model = self.build(**fields).eval()
        randomise(model, self.seed)
        if implementation is not None:
            model.set_attn_implementation(implementation)
        if self.open_routing is not None and dtype == torch.float64:
            # The grouped matrix product that experts default to has no fp64.
            model.set_experts_implementation("eager")
        model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
        return model.to(dtype)

    def tokens(self, length: int, seed: int = 0) -> list[int]:
        """Random text."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.text_vocabulary, (length,), generator=generator).tolist()

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Random text, with the image, if the family has one, after its first token or before its only one."""
        text = self.tokens(length, seed)
        if self.image is None:
            return text
        at = min(1, length - 1)
        return [*text[:at], *[self.image.token_id] * self.image.count, *text[at:]]

    def image_inputs(self, ids: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What `generate` and `forward` take for the image in `ids`, of shape `(1, length)`."""
        if self.image is None:
            return {}
        inputs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in self.image.inputs().items()}
        if self.image.types is not None:
            inputs[self.image.types] = (ids == self.image.token_id).long()
        return inputs


def randomise(model: Any, seed: int) -> None:
    """Weights whose next token depends on the whole context: with flat ones a text soon repeats one token."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.empty_like(weight).normal_(0, 0.1 if name.endswith("bias") else 0.5, generator=generator)
        # Gains, biases and sinks differ from unit to unit, around what they are made with.
        weight.data = noise if weight.dim() > 1 else weight.data + noise
    model.get_input_embeddings().weight.data.mul_(0.2)


def known_fields(config_class: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Those of `fields` that the configuration declares: another would be kept as an attribute and mean nothing."""
    declared = {name for cls in config_class.__mro__ for name in getattr(cls, "__annotations__", {})}
    return {name: value for name, value in fields.items() if name in declared}


def text_config(config_class: str, fields: dict[str, Any]) -> Any:
    """A configuration of the shared shape, as far as it knows it, and `fields`."""
    cls = getattr(transformers, config_class)
    # Configurations keep and change the lists and dictionaries they are given.
    own = {key: value.copy() if isinstance(value, (list, dict)) else value for key, value in fields.items()}
    return cls(**{**known_fields(cls, SHAPE), **own})


def causal(
    name: str,
    title: str,
    model: str,
    config: str | None = None,
    routes: frozenset[str] = frozenset({"attention"}),
    window: str | None = None,
    open_routing: dict[str, Any] | None = None,
    seed: int = 0,
    further: bool = False,
    **fields: Any,
) -> Family:
    """A text model named as most are: `{model}ForCausalLM` with `{model}Config`, and its own fields."""
    model_class = f"{model}ForCausalLM"

    def build(**overrides: Any) -> Any:
        cls = getattr(transformers, model_class)
        return cls(text_config(config or f"{model}Config", {**fields, **overrides}))

    if window is None and "sliding_window" in fields:
        window = "sliding_window"
    return Family(name, title, model_class, build, routes, window, open_routing, None, seed, further)
