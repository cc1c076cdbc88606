"""The builder for accelerators: the heap's tree, fixed shapes, and nothing read on the host before it is asked for."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ddtree.round import ancestors_or_self
from hf_ddtree.tree import DeviceTree, build_from_scorer, build_from_top, rank_children, top_marginals
from hf_ddtree.tree.device import DeviceBuilder, DeviceMarginals
from tree.test_builders import MarkovScorer, assert_same, log_prob_tables

CPU = torch.device("cpu")
#: Operations whose result's shape, or whose effect on Python, depends on values.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "item", "equal", "is_nonzero"}


def build(table: torch.Tensor, budget: int, anchor: int = 7) -> tuple[DeviceTree, Any]:
    """The builder's tree of a table of log-probabilities, and the heap's."""
    values, ids = rank_children(table, budget)
    tree = DeviceMarginals(values, ids).build(budget, anchor)
    assert len(tree) == budget + 1
    return tree, build_from_top(values, ids, budget, builder="heap", anchor=anchor)


@settings(derandomize=True, deadline=None, max_examples=120)
@given(log_prob_tables(max_depth=9, max_vocab=9), st.integers(1, 150))
def test_the_heap_tree_ties_included(table: torch.Tensor, budget: int) -> None:
    tree, expected = build(table, budget)
    on_host = tree.on_host()
    on_host.validate()
    assert_same(on_host, expected)


@pytest.mark.parametrize(("depth", "vocab", "budget"), [(15, 3000, 511), (63, 97, 64), (1, 300, 255), (7, 31, 63)])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_full_size_trees_equal_the_heap(depth: int, vocab: int, budget: int, spread: float, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(depth * vocab + budget)
    logits = (spread * torch.randn(depth, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    values, ids = top_marginals(logits, budget)
    tree = DeviceMarginals(values, ids).build(budget, 0)
    assert tree.on_host().num_drafted == budget
    assert_same(tree.on_host(), build_from_top(values, ids, budget, builder="heap", anchor=0))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(log_prob_tables(max_depth=4, max_vocab=5), st.integers(1, 200))
def test_padding_hangs_below_the_root_and_is_seen_by_no_real_node(table: torch.Tensor, budget: int) -> None:
    tree, expected = build(table, budget)
    count = len(expected)
    assert tree.count.tolist() == [count]
    for name in ("token_ids", "depths", "subtree_ends"):
        assert torch.equal(getattr(tree, name)[1:count], getattr(expected, name)[1:]), name
    padding = torch.arange(count, budget + 1)
    assert bool((tree.depths[count:] == 1).all()) and bool((tree.nodes[1, count:] == 0).all())
    assert bool((tree.token_ids[count:] == int(rank_children(table, 1)[1][0, 0])).all())
    visible = ancestors_or_self(tree.subtree_ends)
    assert torch.equal(visible[:count, :count], expected.visibility())
    assert not visible[:count, count:].any()
    assert [row.nonzero().flatten().tolist() for row in visible[count:]] == [[0, node] for node in padding.tolist()]


def test_the_registered_builder() -> None:
    values, ids = top_marginals(3 * torch.randn(6, 90, generator=torch.Generator().manual_seed(0)), 40)
    trees = [build_from_top(values, ids, 40, max_branching=3, builder=name, anchor=5) for name in ("device", "heap")]
    assert_same(*trees)
    with pytest.raises(ValueError, match="'device' reads independent marginals; for MarkovScorer use 'levelwise'"):
        build_from_scorer(MarkovScorer(torch.zeros(2, 4, 3)), 5, builder="device")


def test_tokens_that_may_not_be_drafted() -> None:
    """Masks of `-inf`, of the lowest number of a dtype, and anything as improbable."""
    masked = torch.tensor([[-0.1, torch.finfo(torch.float32).min, -math.inf], [-(2.0**18), -math.inf, -math.inf]])
    tree = DeviceMarginals(masked, torch.tensor([[4, 5, 6], [7, 8, 9]])).build(6, 3).on_host()
    assert tree.token_ids.tolist() == [3, 4]
    nothing = DeviceMarginals(torch.full((2, 3), -math.inf), torch.zeros(2, 3, dtype=torch.long)).build(6, 3)
    assert nothing.on_host().token_ids.tolist() == [3] and len(nothing) == 7


def test_the_anchor_may_be_on_the_device() -> None:
    values, ids = top_marginals(torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), 5)
    made = DeviceBuilder(5, CPU)
    assert torch.equal(made(values, ids, torch.tensor([8])).nodes, made(values, ids, 8).nodes)
    with pytest.raises(ValueError, match="at most 511 deep, got 512 positions"):
        made(values[:1].expand(512, -1), ids[:1].expand(512, -1), 8)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[-0.5, math.nan]], "NaN"),
        ([[math.nan], [-1.0]], "NaN"),
        ([[-1.0, -0.5]], "sorted from the most probable token down"),
        ([[0.5, -1.0]], "must be at most 0, got 0.5"),
    ],
)
def test_an_unfit_table_raises_when_it_reaches_the_host(table: list[list[float]], message: str) -> None:
    values = torch.tensor(table)
    tree = DeviceMarginals(values, torch.zeros_like(values, dtype=torch.long)).build(9, 0)
    assert bool((tree.nodes[0] >= 0).all()) and bool(tree.faulty)
    with pytest.raises(ValueError, match=message):
        tree.on_host()
    with pytest.raises(ValueError, match=message):
        tree.on_host_with(torch.arange(3))


def test_a_fault_that_the_caller_knows_comes_first() -> None:
    def explain() -> None:
        raise ValueError("the drafter's fault")

    values, ids = torch.tensor([[-0.5, -1.0]]), torch.tensor([[1, 2]])
    for faulty in (False, True):
        tree = DeviceMarginals(values, ids, torch.tensor([faulty]), explain).build(2, 0)
        if not faulty:
            assert tree.on_host().token_ids.tolist() == [0, 1, 2]
        else:
            with pytest.raises(ValueError, match="the drafter's fault"):
                tree.on_host()


def test_numbers_come_along() -> None:
    tree, expected = build(torch.randn(3, 9, generator=torch.Generator().manual_seed(1)).log_softmax(-1), 12)
    on_host, numbers = tree.on_host_with(torch.arange(13) * 3)
    assert_same(on_host, expected)
    assert numbers == list(range(0, 39, 3))
    assert expected.on_host_with(torch.tensor([4, 5])) == (expected, [4, 5])


class Watch(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_building_reads_no_value_and_its_operations_depend_on_shapes_alone() -> None:
    generator, made = torch.Generator().manual_seed(0), DeviceBuilder(63, CPU)
    tables = [torch.randn(15, 200, generator=generator) * 3, torch.zeros(15, 200), torch.full((15, 200), math.nan)]
    ran = []
    for table in tables:
        values, ids = top_marginals(table, 63)
        with Watch() as watch:
            made(values, ids, 3)
        ran.append(watch.names)
    assert ran[0] == ran[1] == ran[2]
    assert not READS & set(ran[0])


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")])
def test_shapes_are_enough(mode: Any) -> None:
    """Tensors without values: a look at one raises, and on another device than the CPU so does a CPU tensor's part."""
    made = DeviceBuilder(63, CPU)
    with mode():
        made.one = made.other = torch.empty(made.one.shape, dtype=torch.long)
        tree = made(torch.empty(15, 63), torch.empty(15, 63, dtype=torch.long), 3)
        assert tree.nodes.shape == (5, 64) and tree.count.shape == tree.faulty.shape == (1,)
        with pytest.raises((DataDependentOutputException, NotImplementedError, RuntimeError)):
            tree.on_host()


def test_it_compiles_without_a_break() -> None:
    made = DeviceBuilder(31, CPU)
    compiled = torch.compile(lambda values, ids: made(values, ids, 3).nodes, fullgraph=True, backend="eager")
    for seed in range(2):
        logits = (3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(seed))).round()
        values, ids = top_marginals(logits, 31)
        assert torch.equal(compiled(values, ids), made(values, ids, 3).nodes)
