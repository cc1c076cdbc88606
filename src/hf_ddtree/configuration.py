"""What a user sets: a `GenerationConfig` with a few fields for the tree."""

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

#: The value of `GenerationConfig.speculation_type` that asks for a draft tree; it survives saving as JSON.
SPECULATION_TYPE = "ddtree"

#: The budget that sizes each round's tree by what it costs and brings.
AUTO = "auto"

#: Nodes a round verifies when `budget` is not set, or [`AUTO`]. On a CPU a node costs time from the first one; an
#: accelerator is memory bound up to hundreds of nodes.
DEFAULT_BUDGET: dict[str, int | str] = {"cpu": 15, "accelerator": 511}

MAX_BUDGET = 65_536

#: Under [`AUTO`]: nodes of the first tree of a pair, and of a tree at most.
AUTO_START = {"cpu": 7, "accelerator": 63}
LARGEST_AUTO = {"cpu": 255, "accelerator": 1023}

#: Which code attends over a tree: the Triton kernel where it can, only the kernel, or PyTorch's functions only.
ATTENTION_ROUTES = ("auto", "kernel", "torch")


class DDTreeConfig(GenerationConfig):
    r"""
    A [`~transformers.GenerationConfig`] that makes `generate` verify draft trees (DDTree, hf.co/papers/2604.12989).

    Pass it as `generation_config` beside `assistant_model=<a DFlash drafter>`. Every other field keeps its meaning
    and the output is what `generate` gives without a drafter.

    Args:
        budget (`int` or `str`, *optional*):
            Nodes of the draft tree that a round verifies at most, the root not counted. `0` drafts nothing. `"auto"`
            chooses for each round the number that makes generating fastest, by what rounds have cost and brought so
            far, and drafts nothing while that does not pay. Defaults to `15` on a CPU and `511` on an accelerator.
        max_branching (`int`, *optional*):
            Children a node may have at most. `1` makes the tree a chain. Unlimited by default.
        output_trees (`bool`, *optional*, defaults to `False`):
            Whether the output's `speculation.trees` holds each round's tree and accepted path.
        attention_route (`str`, *optional*):
            What attends over a tree. `"auto"`, the default, takes the Triton kernel in each layer that it serves (fp16
            or bf16, on a CUDA or ROCm device) and PyTorch's attention in the others; `"kernel"` raises where the
            kernel does not serve a layer; `"torch"` never takes it. The gated delta rule of recurrent layers has a
            kernel too, under the same setting. `speculation.attention_routes` says which it was.
        kwargs: fields of [`~transformers.GenerationConfig`].

    Raises:
        ValueError: for a value out of range; the message names the field, the value and the range.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        max_branching: int | None = None,
        output_trees: bool = False,
        attention_route: str | None = None,
        **kwargs: Any,
    ):
        self.budget = budget
        self.max_branching = max_branching
        self.output_trees = output_trees
        self.attention_route = attention_route
        kwargs.setdefault("speculation_type", SPECULATION_TYPE)
        super().__init__(**kwargs)

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """As the parent, and the tree's own fields."""
        super().validate(*args, **kwargs)
        if self.speculation_type != SPECULATION_TYPE:
            raise ValueError(
                f"A DDTreeConfig has `speculation_type={SPECULATION_TYPE!r}`, not {self.speculation_type!r}. For the "
                "native chain pass a plain `GenerationConfig`."
            )
        TreeSettings.read(self)


@dataclass(frozen=True)
class TreeSettings:
    """The tree's fields, read from a [`DDTreeConfig`] or from a plain config that was saved from one."""

    budget: int | str | None
    max_branching: int | None
    output_trees: bool
    attention_route: str

    @classmethod
    def read(cls, config: GenerationConfig) -> "TreeSettings":
        """Raises `ValueError` for a value out of range."""
        budget = getattr(config, "budget", None)
        if budget != AUTO:
            budget = _integer(config, "budget", lowest=0, further=f"{AUTO!r}, ")
        max_branching = _integer(config, "max_branching", lowest=1)
        output_trees = getattr(config, "output_trees", False)
        if not isinstance(output_trees, bool):
            raise ValueError(f"`output_trees` must be True or False, got {output_trees!r}.")
        attention_route = getattr(config, "attention_route", None)
        attention_route = "auto" if attention_route is None else attention_route
        if attention_route not in ATTENTION_ROUTES:
            choices = ", ".join(map(repr, ATTENTION_ROUTES))
            raise ValueError(f"`attention_route` must be one of {choices}, got {attention_route!r}.")
        return cls(budget, max_branching, output_trees, attention_route)

    def budget_on(self, device_type: str) -> int | str:
        """The budget, or the default of a device type (`"cpu"`, `"cuda"`, ...)."""
        return DEFAULT_BUDGET[_side(device_type)] if self.budget is None else self.budget

    def largest_on(self, device_type: str) -> int:
        """Nodes that a tree has at most."""
        budget = self.budget_on(device_type)
        return budget if isinstance(budget, int) else LARGEST_AUTO[_side(device_type)]


def _side(device_type: str) -> str:
    return "cpu" if device_type == "cpu" else "accelerator"


def _integer(config: GenerationConfig, name: str, lowest: int, further: str = "") -> int | None:
    value = getattr(config, name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= MAX_BUDGET:
        raise ValueError(
            f"`{name}` must be {further}a whole number from {lowest} to {MAX_BUDGET}, or None, got {value!r}."
        )
    return value
