"""The operator: what it refuses, compilation, and a launch that depends on shapes alone."""

from typing import Any

import pytest
import torch

from ddtree_attention import TreeTables, tree_attention, unsupported
from ddtree_attention import launch as launching
from ddtree_attention._ops import ops
from problems import DEVICE, TOLERANCE, Problem, Shape, problem

pytestmark = pytest.mark.kernels_ci

SHAPE = Shape((12, 9), (33, 20), (5, 0), key_value_heads=2, group=3, key_dim=32, window=20, softcap=3.0, sinks=True)


def call(case: Problem) -> torch.Tensor:
    return tree_attention(*case.tensors(), **case.settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_operator_is_the_kernel(dtype: torch.dtype) -> None:
    case = problem(SHAPE, dtype)
    output = call(case)
    assert output.dtype == dtype and output.is_contiguous()
    assert torch.allclose(output.double().cpu(), case.expected(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_defaults() -> None:
    """Whole queries, unpadded prefix, the usual scale, nothing else."""
    case = problem(Shape((12,), (33,)), torch.float16)
    case.settings = dict(scale=16**-0.5, window=None, softcap=None, sinks=None)
    assert torch.equal(tree_attention(*case.tensors()[:5]), call(case))


def test_compiles_into_one_graph() -> None:
    case = problem(SHAPE, torch.float16)

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        attended = tree_attention(query * 1, key, value, TreeTables(*tensors[:3]), *tensors[3:], **case.settings)
        return attended.flatten(-2) + 1

    arguments = case.tensors()
    arguments = (*arguments[:3], *case.tree, *arguments[4:])
    expected = layer(*arguments)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)(*arguments), expected)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments), expected)


@pytest.mark.parametrize("shape", [SHAPE, Shape((12,), (33,))], ids=str)
def test_registration(shape: Shape) -> None:
    case = problem(shape, torch.float16)
    settings = [case.settings[name] for name in ("scale", "window", "softcap", "sinks")]
    lengths = case.tensors()[4:] if shape is SHAPE else (case.prefix, None, None)
    arguments = (case.query, case.key, case.value, *case.tree, *lengths, *settings)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.tree_attention.default, arguments, test_utils=checks)


class Recorder:
    """Stands in for a kernel and notes how it is launched, tensors by where they lie."""

    def __init__(self, kernel: Any):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            shown = [(a.dtype, a.shape) if isinstance(a, torch.Tensor) else a for a in args]
            self.launches.append((grid, shown, kwargs))
            self.kernel[grid](*args, **kwargs)

        return run


@pytest.mark.parametrize("splits", [1, 4])
def test_one_launch_serves_every_length(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a CUDA graph: new lengths and trees are written into the same tensors, and nothing else changes."""
    recorders = {
        name: Recorder(getattr(launching, name)) for name in ("tree_attention_forward", "tree_attention_merge")
    }
    for name, recorder in recorders.items():
        monkeypatch.setattr(launching, name, recorder)
    monkeypatch.setattr("ddtree_attention.configs.splits_for", lambda *sizes: splits)
    bucket = Shape((16,), (48,), group=2, max_depth=9)
    static = problem(bucket, torch.float16)
    for nodes, prefix in ((16, 48), (3, 20), (11, 0)):
        case = problem(Shape((nodes,), (prefix,), group=2, max_depth=9), torch.float16)
        width, rows = case.query.shape[2], case.key.shape[2]
        static.query[:, :, :width], static.key[:, :, :rows], static.value[:, :, :rows] = case.tensors()[:3]
        for table, new in zip(static.tree, case.tree, strict=True):
            table[:, :width, ...] = (
                new if new.dim() == 2 else torch.nn.functional.pad(new, (0, 9 - new.shape[-1]), value=-1)
            )
        static.prefix.copy_(case.prefix)
        static.nodes.copy_(case.nodes)
        output = call(static)
        assert torch.allclose(output[:, :nodes].double().cpu(), case.expected(), rtol=1e-3, atol=1e-3)
    for recorder in recorders.values():
        first, *others = recorder.launches or [None]
        assert all(other == first for other in others)
    assert len(recorders["tree_attention_forward"].launches) == 3
    assert len(recorders["tree_attention_merge"].launches) == (3 if splits > 1 else 0)


def test_what_is_not_served_is_named() -> None:
    def states(heads: int = 4, dim: int = 16, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.zeros(1, heads, 8, dim, dtype=dtype, device=DEVICE)

    assert unsupported(states(), states(2), states(2, 32)) is None
    assert unsupported(states(dtype=torch.float32), states(), states()) == "float32 states"
    assert "different dtypes" in str(unsupported(states(), states(), states(dtype=torch.bfloat16)))
    assert unsupported(states(dim=576), states(dim=576), states(dim=512)) == "head dimensions 576 and 512, above 256"
    assert unsupported(states(3), states(2), states(2)) == "3 query heads over 2 key-value heads"
    assert "not contiguous" in str(unsupported(states(8, 8).mT, states(8, 8), states(8, 8)))
    assert "slots" in str(unsupported(states(), states().as_strided((1, 4, 1, 16), (0, 0, 2**25, 1)), states()))
    assert "tensors on meta" in str(unsupported(*(states().to("meta") for _ in range(3))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(query=lambda q: q.float()), "does not serve float32 states"),
        (dict(key=lambda k: k[:, :, :-1]), "`key` must be of shape"),
        (dict(value=lambda v: v[:1]), "`value` must be of shape"),
        (dict(prefix=lambda p: p[:1]), "`prefix` must be of shape"),
        (dict(prefix=lambda p: p.long()), "`prefix` must be a contiguous int32 tensor, got torch.int64"),
        (dict(nodes=lambda n: n[:, None]), "`nodes` must be of shape"),
        (dict(tree=lambda t: t._replace(depths=t.depths[:, :3])), "`depths` must be of shape"),
        (dict(tree=lambda t: t._replace(ancestors=t.ancestors.mT)), "`ancestors` must be of shape"),
        (dict(tree=lambda t: t._replace(subtree_ends=t.subtree_ends.mT.contiguous().mT)), "contiguous int32"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    case = problem(SHAPE, torch.float16)
    for name, function in change.items():
        setattr(case, name, function(getattr(case, name)))
    with pytest.raises(ValueError, match=message):
        call(case)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("window", 0, "`window` must be 1 or more"),
        ("softcap", 0.0, "`softcap` must be above 0"),
        ("sinks", torch.zeros(5), "`sinks` must be of shape"),
    ],
)
def test_wrong_settings(name: str, value: Any, message: str) -> None:
    case = problem(SHAPE, torch.float16)
    case.settings[name] = value
    with pytest.raises(ValueError, match=message):
        call(case)
