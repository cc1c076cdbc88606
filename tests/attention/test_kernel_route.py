"""The kernel as a route of the tree's attention: whole models through it, what it leaves to others and why."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from attention.trees import random_tree
from hf_ddtree.attention import ddtree_attention, planned_mask
from hf_ddtree.attention.lazy_mask import Plan, TreeMask
from hf_ddtree.cache import DDTreeCache
from hf_ddtree.compat import CACHE_NAME, decoder_layers
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import CURRENT_ROUND, TapCollector, TreeRound
from pairs import make_drafter, make_target, plain, prompt, tree

pytest.importorskip("triton")

FP16, BF16 = torch.float16, torch.bfloat16


def target(family: str, dtype: torch.dtype) -> Any:
    # Older Transformers let Gemma 2 run on SDPA, which leaves its softcap out.
    model = make_target(family, implementation="eager" if family == "gemma2" else None)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model.to(dtype)


class Forward:
    """A target's forwards over one tree behind one prefix, by different routes."""

    def __init__(self, model: Any, prefix: int, nodes: int, padding: int = 0):
        self.model, self.prefix, self.padding = model, prefix, padding
        self.tree = random_tree(nodes, seed=nodes)
        self.ids = prompt(prefix)

    def __call__(self, route: str) -> tuple[torch.Tensor, dict[str, int]]:
        cache = DDTreeCache(config=self.model.config)
        mask = torch.ones(1, self.prefix, dtype=torch.long)
        mask[:, : self.padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        verify = TreeVerifier(self.model, TapCollector(decoder_layers(self.model), []), route)
        with torch.no_grad():
            self.model(self.ids, attention_mask=mask, position_ids=positions, **{CACHE_NAME: cache})
            cache.begin()
            longer = torch.cat([mask, mask.new_ones(1, 1)], dim=-1)
            kwargs = {
                CACHE_NAME: cache,
                "attention_mask": longer,
                "position_ids": positions[:, -1:] + 1,
                "use_cache": True,
            }
            return verify(self.tree, kwargs).logits[0].float(), dict(verify.attention_routes)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "gemma2", "gemma3", "gpt_oss"])
def test_whole_models(family: str, dtype: torch.dtype) -> None:
    """Logits as by PyTorch's attention, every layer by the kernel: full, windows that cut paths, softcap, sinks."""
    forward = Forward(target(family, dtype), prefix=23, nodes=37)
    logits, routes = forward("kernel")
    expected, others = forward("torch")
    assert routes == {"kernel": 4} and set(others) <= {"packed", "eager"}
    difference = (logits - expected).abs().mean(-1) / expected.std(-1)
    assert difference.median() < (0.01 if dtype == FP16 else 0.06)
    # The control: a node's logits are not those of another node.
    shifted = (logits - expected.roll(1, 0)).abs().mean(-1) / expected.std(-1)
    assert shifted.median() > 0.3


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "gpt_oss"])
@pytest.mark.parametrize("padding", [1, 9])
def test_whole_models_with_left_padding(family: str, padding: int) -> None:
    forward = Forward(target(family, FP16), prefix=17, nodes=20, padding=padding)
    logits, routes = forward("kernel")
    expected, _ = forward("torch")
    assert routes == {"kernel": 4}
    assert ((logits - expected).abs().mean(-1) / expected.std(-1)).median() < 0.01


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_generate_says_which_route_it_took(family: str) -> None:
    model = target(family, BF16)
    drafter, ids = make_drafter(model).to(BF16), prompt()
    settings: dict[str, Any] = dict(budget=20, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    output = tree(model, drafter, ids, attention_route="kernel", **settings)
    stats = output.speculation
    assert set(stats.attention_routes) == {"kernel"}
    # A round of only the root is a plain forward, with no tree in it.
    assert 0 < stats.attention_routes["kernel"] <= 4 * stats.rounds
    assert max(stats.acceptance_lengths) > 1
    automatic = tree(model, drafter, ids, **settings)
    # On a CPU nothing was wanted of the kernel, so there is nothing to say about it.
    assert set(automatic.speculation.attention_routes) == {"eager" if family == "gemma2" else "packed"}
    stats.add(automatic.speculation)
    assert set(stats.attention_routes) == {"kernel", *automatic.speculation.attention_routes}


def test_the_automatic_route_on_a_device_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernel where it serves, PyTorch in the other layers, each counted with its reason."""
    monkeypatch.setattr("hf_ddtree.attention.kernel.wanted", lambda *_: True)
    model = target("qwen3_sliding", FP16)
    forward = Forward(model, prefix=12, nodes=15)
    expected, _ = forward("torch")

    def changes_its_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        return args, kwargs | {"attention_mask": mask + 0 if mask is not None else None}

    decoder_layers(model)[1].register_forward_pre_hook(changes_its_mask, with_kwargs=True)
    logits, routes = forward("auto")
    assert routes == {"kernel": 2, "packed (a mask that the model reads or changes)": 2}
    assert ((logits - expected).abs().mean(-1) / expected.std(-1)).median() < 0.01


# ---- one layer at a time


def layer(cls: type[nn.Module], implementation: str = "sdpa") -> Any:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.config = SimpleNamespace(_attn_implementation=implementation)
    module.num_key_value_groups = 2
    return module.eval()


def masked(tree_round: TreeRound, prefix: int, function: Any = causal_mask_function, **kwargs: Any) -> Any:
    nodes = len(tree_round.depths)
    sizes = dict(batch_size=1, q_length=nodes, kv_length=prefix + nodes, q_offset=prefix)
    return planned_mask(**sizes | dict(mask_function=function, dtype=FP16) | kwargs)


def attend(
    module: Any, route: str, function: Any = causal_mask_function, states: Any = None, mask: Any = None, **kwargs: Any
) -> Any:
    """One layer's output over a tree of 9 nodes behind 6 tokens, and the routes counted."""
    drafted = random_tree(9, seed=2)
    tree_round = TreeRound(drafted.depths, drafted.subtree_ends, route)
    token = CURRENT_ROUND.set(tree_round)
    try:
        tree_mask = masked(tree_round, 6, function, **(mask or {}))
        generator = torch.Generator().manual_seed(0)
        shapes = ((1, 4, 9, 16), (1, 2, 15, 16), (1, 2, 15, 16))
        query, key, value = states or (torch.randn(s, generator=generator).to(FP16) for s in shapes)
        output, _ = ddtree_attention(module, query, key, value, tree_mask, scaling=0.25, **kwargs)
        return output, dict(tree_round.routes)
    finally:
        CURRENT_ROUND.reset(token)


CHUNKS = chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
HOLES = torch.ones(1, 15, dtype=torch.bool)
HOLES[0, 3] = False
BIAS = torch.zeros(1, 4, 9, 15, dtype=FP16)


@pytest.mark.parametrize(
    ("module", "kwargs", "reason"),
    [
        (layer(Qwen3Attention), dict(function=CHUNKS), "a mask that is neither causal nor a sliding window"),
        (layer(Qwen3Attention), dict(mask=dict(attention_mask=HOLES)), "padding that is not all on the left"),
        (layer(Qwen3Attention), dict(position_bias=BIAS), "`position_bias` on sdpa attention"),
        (layer(Qwen3Attention, "eager"), dict(softcap=3.0), "`softcap` on eager attention"),
        (layer(Gemma2Attention, "eager"), dict(output_attentions=True), "attention weights as an output"),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_serve(
    module: Any, kwargs: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explicit choice raises and names the reason; the automatic one takes PyTorch's route and counts it."""
    with pytest.raises(ValueError, match=f"does not serve {reason}.*attention_route='auto'"):
        attend(module, "kernel", **kwargs)
    expected, routes = attend(module, "torch", **kwargs)
    (route,) = routes
    monkeypatch.setattr("hf_ddtree.attention.kernel.wanted", lambda *_: True)
    output, routes = attend(module, "auto", **kwargs)
    assert routes == {f"{route} ({reason})": 1}
    assert torch.equal(output, expected)


def test_shapes_and_unknown_eager_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [torch.zeros(shape, dtype=FP16) for shape in ((1, 4, 9, 320), (1, 2, 15, 320), (1, 2, 15, 320))]
    with pytest.raises(ValueError, match="head dimensions 320 and 320, above 256"):
        attend(layer(Qwen3Attention), "kernel", states=wide)

    def other(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.eager_attention_forward", other)
    with pytest.raises(ValueError, match="the eager attention of modeling_qwen3"):
        attend(layer(Qwen3Attention, "eager"), "kernel")


def test_sinks_must_be_passed() -> None:
    """gpt-oss' eager function reads them from the layer; a kernel that was not given them would leave them out."""
    with pytest.raises(ValueError, match="sinks that are not passed"):
        attend(layer(GptOssAttention, "eager"), "kernel")
    assert attend(layer(GptOssAttention, "eager"), "kernel", s_aux=torch.zeros(4, dtype=FP16))[1] == {"kernel": 1}


@pytest.mark.parametrize("window", [1, 4, 40])
def test_windows_come_from_the_mask(window: int) -> None:
    function = sliding_window_causal_mask_function(window)
    output, routes = attend(layer(Qwen3Attention), "kernel", function)
    expected, _ = attend(layer(Qwen3Attention), "torch", function)
    assert routes == {"kernel": 1}
    assert (output - expected).abs().max() < 4e-3
    if window < 40:
        assert (output - attend(layer(Qwen3Attention), "kernel")[0]).abs().max() > 0.05


# ---- the mask that is not made


def lazy(attention_mask: torch.Tensor | None = None, kv_offset: int = 0) -> tuple[TreeMask, TreeRound]:
    drafted = random_tree(9, seed=2)
    tree_round = TreeRound(drafted.depths, drafted.subtree_ends, "kernel")
    token = CURRENT_ROUND.set(tree_round)
    try:
        more = dict(attention_mask=attention_mask, kv_offset=kv_offset, kv_length=20 - kv_offset + 9)
        return masked(tree_round, 20, **more), tree_round
    finally:
        CURRENT_ROUND.reset(token)


def test_a_mask_that_nobody_reads_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**kwargs: Any) -> None:
        raise AssertionError("the dense mask was made")

    monkeypatch.setattr("hf_ddtree.attention.kernel.ddtree_mask", fail)
    mask, _ = lazy()
    assert (mask.shape, mask.dtype, mask.device.type, mask.dim()) == ((1, 1, 9, 29), FP16, "cpu", 4)
    assert "TreeMask" in repr(mask) and mask.to("cpu") is mask
    with pytest.raises(AssertionError, match="the dense mask was made"):
        mask + 1


def test_operations_see_the_numbers_and_end_the_plan() -> None:
    mask, tree_round = lazy()
    token = CURRENT_ROUND.set(TreeRound(tree_round.depths, tree_round.subtree_ends, "torch"))
    try:
        expected = masked(CURRENT_ROUND.get(), 20)  # type: ignore[arg-type]
    finally:
        CURRENT_ROUND.reset(token)
    assert type(expected) is torch.Tensor and isinstance(mask.plan, Plan)
    assert torch.equal(mask.dense(), expected) and mask.dense() is mask.dense()
    assert isinstance(mask.plan, Plan)
    part = mask[..., :7]
    assert type(part) is torch.Tensor and torch.equal(part, expected[..., :7])
    assert mask.plan == "a mask that the model reads or changes"
    mask[..., 0] = 5.0
    assert (mask.dense()[..., 0] == 5).all()


def test_another_device_moves_the_plan() -> None:
    mask, _ = lazy(torch.ones(1, 29, dtype=torch.long))
    moved = mask.to("meta")
    assert isinstance(moved, TreeMask) and isinstance(moved.plan, Plan) and isinstance(mask.plan, Plan)
    assert moved.device.type == moved.plan.prefix.device.type == moved.plan.tables.ancestors.device.type == "meta"
    assert moved.plan.start is not None and moved.plan.start.device.type == "meta"
    assert moved.dense().device.type == "meta"
    assert type(mask.to(torch.float32)) is torch.Tensor


@pytest.mark.parametrize(("padding", "kv_offset", "start"), [(0, 0, 0), (3, 0, 3), (3, 2, 1), (3, 5, 0), (20, 0, 20)])
def test_plan_of_left_padding(padding: int, kv_offset: int, start: int) -> None:
    attention_mask = torch.ones(1, 29, dtype=torch.long)
    attention_mask[:, :padding] = 0
    plan = lazy(attention_mask, kv_offset)[0].plan
    assert isinstance(plan, Plan) and plan.start is not None
    assert (plan.prefix.tolist(), plan.start.tolist(), plan.window) == ([20 - kv_offset], [start], None)
    assert plan.prefix.dtype == plan.start.dtype == torch.int32


# ---- before the first token


def test_an_explicit_choice_that_cannot_be_served_raises_first() -> None:
    model = make_target("qwen3")
    drafter, ids = make_drafter(model), prompt()
    with pytest.raises(ValueError, match=r"does not serve float32 states.*attention_route='auto'"):
        tree(model, drafter, ids, attention_route="kernel", max_new_tokens=4)
    model, drafter = model.to(FP16), drafter.to(BF16)
    holes = torch.ones_like(ids)
    holes[0, 4] = 0
    with pytest.raises(ValueError, match="padding between tokens"):
        tree(model, drafter, ids, attention_route="kernel", max_new_tokens=4, attention_mask=holes)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attention weights as an output"):
        tree(
            model, drafter, ids, attention_route="kernel", max_new_tokens=4, output_attentions=True,
            return_dict_in_generate=True,
        )  # fmt: skip


def test_the_self_test_of_one_route_does_not_stand_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that were wrong on a device is caught although PyTorch's route has passed there."""
    model = target("llama", FP16)
    drafter, ids = make_drafter(model).to(BF16), prompt()
    plain(model, ids, max_new_tokens=2)
    tree(model, drafter, ids, max_new_tokens=2, do_sample=False)

    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        return value[:, :1, : query.shape[2]].transpose(1, 2).repeat(1, 1, 4, 1)

    monkeypatch.setattr("hf_ddtree.attention.kernel.tree_attention", wrong)
    with pytest.raises(ValueError, match="other logits than the same tokens in a row"):
        tree(model, drafter, ids, max_new_tokens=2, do_sample=False, attention_route="kernel")
