"""The gated delta rule's kernels against the recurrence node by node in float64; unreadable memory is full of NaN."""

from dataclasses import dataclass

import pytest
import torch

from ddtree_attention import delta_unsupported, tree_delta_rule
from ddtree_attention._ops import ops
from problems import DEVICE, depths_and_ends, random_parents

pytestmark = pytest.mark.kernels_ci

#: Of outputs, which are rounded to the values' dtype. Corrections are in fp32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass
class Problem:
    """One layer's rule over a random tree; `groups` value heads share a key head."""

    nodes: int
    key_heads: int = 1
    groups: int = 1
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    batch: int = 1
    max_depth: int = 15

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.nodes)
        heads = self.key_heads * self.groups

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(self.batch, *shape, generator=generator, dtype=torch.float64)

        self.parents = random_parents(self.nodes, seed=self.nodes, max_depth=self.max_depth)
        self.query, self.key = (
            torch.nn.functional.normalize(normal(self.nodes, self.key_heads, self.key_dim), dim=-1).float()
            for _ in range(2)
        )
        self.value = normal(self.nodes, heads, self.value_dim).to(self.dtype)
        # From almost none to e^-5 a node, and corrections of any strength up to an overshoot.
        self.decays = -5 * torch.rand(self.batch, self.nodes, heads, generator=generator, dtype=torch.float64).pow(3)
        self.beta = (2 * normal(self.nodes, heads).sigmoid()).to(self.dtype)
        self.state = normal(heads, self.key_dim, self.value_dim).float()

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """As a layer hands them over: cut out of wider projections, whose other columns here are not numbers."""

        def cut(states: torch.Tensor) -> torch.Tensor:
            wide = torch.full_like(states, float("nan"))
            return torch.cat([wide, states, wide], dim=-1).to(DEVICE)[..., states.shape[-1] : -states.shape[-1]]

        sums = torch.zeros_like(self.decays)
        for node, parent in enumerate(self.parents):
            sums[:, node] = self.decays[:, node] + (sums[:, parent] if node else 0)
        ends = torch.tensor(depths_and_ends(self.parents)[1], device=DEVICE)
        query, key = (cut(states).transpose(1, 2) for states in (self.query, self.key))
        sums = sums.transpose(1, 2).float().to(DEVICE)
        return query, key, cut(self.value), self.beta.to(DEVICE), sums, self.state.to(DEVICE), ends

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and corrections, both `(batch, heads, nodes, value_dim)`, in float64."""
        query, key = (t.double().repeat_interleave(self.groups, dim=2) for t in (self.query, self.key))
        states, outputs, corrections = [], [], []
        for node, parent in enumerate(self.parents):
            state = (states[parent] if node else self.state.double()) * self.decays[:, node, :, None, None].exp()
            k = key[:, node, :, :, None]
            off = self.value[:, node].double() - (k.mT @ state)[..., 0, :]
            corrections.append(self.beta[:, node, :, None].double() * off)
            states.append(state + k * corrections[-1][..., None, :])
            outputs.append((query[:, node, :, None] @ states[-1])[..., 0, :])
        return torch.stack(outputs, dim=2), torch.stack(corrections, dim=2)

    def check(self) -> None:
        arguments = self.arguments()
        found, corrections = (tensor.cpu() for tensor in tree_delta_rule(*arguments))
        assert found.dtype == self.dtype and found.shape == self.value.shape and corrections.dtype == torch.float32
        expected, others = self.expected()
        for tensor, wanted, tolerance in (
            (found.transpose(1, 2), expected, TOLERANCE[self.dtype]),
            (corrections, others, 1e-5),
        ):
            # What is not a number fails too.
            assert (tensor - wanted).abs().max() <= tolerance * wanted.abs().max().clamp_min(1)
        assert torch.equal(arguments[5].cpu(), self.state)


@pytest.mark.parametrize(
    "problem",
    [
        # A tile hit and just missed; more than two tiles; several heads, batches and steps of every dimension.
        Problem(1),
        Problem(3, groups=3, key_dim=128, value_dim=64),
        Problem(17, key_heads=2, groups=2, batch=2),
        Problem(32, key_dim=64, value_dim=24),
        Problem(33, groups=2, key_dim=24, value_dim=72),
        Problem(65, key_heads=2, key_dim=8, value_dim=6),
        Problem(130, groups=2),
        # A chain, in which every pair of tiles is on a path, and a bush, in which few are.
        Problem(100, max_depth=100),
        Problem(100, max_depth=1),
        Problem(5, key_dim=256, value_dim=256),
        Problem(40, key_heads=2, groups=3, dtype=torch.bfloat16, value_dim=40),
        Problem(40, dtype=torch.float16),
    ],
    ids=str,
)
def test_each_node_is_its_path(problem: Problem) -> None:
    problem.check()


@pytest.mark.parametrize("decay", [0.0, -1e-6, -30.0, -87.0])
def test_extreme_decays(decay: float) -> None:
    """One branch forgets everything, and its siblings' differences of sums are then large and positive."""
    problem = Problem(45)
    problem.decays[:, 4:9] = decay
    problem.decays[:, [15, 35]] = decay
    problem.check()


def test_like_keys() -> None:
    """A chain that stores under one key again and again: powers of a tile's system would grow to 1e8 and cancel."""
    problem = Problem(64, max_depth=64)
    problem.key[:] = problem.key[:, :1]
    problem.beta[:], problem.decays[:] = 1.0, -1e-3
    problem.check()


def test_a_node_reads_nothing_of_other_branches() -> None:
    problem = Problem(70)
    before = tree_delta_rule(*problem.arguments())[0]
    node = 4
    end = depths_and_ends(problem.parents)[1][node]
    problem.value[:, node] += 1
    changed = (tree_delta_rule(*problem.arguments())[0] != before).flatten(2).any(-1)[0].cpu()
    assert 1 < end - node < 60
    assert changed.nonzero().flatten().tolist() == list(range(node, end))


def test_registration() -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = Problem(7, groups=2, dtype=torch.bfloat16).arguments()
    torch.library.opcheck(ops.tree_delta_rule.default, arguments, test_utils=checks)


def test_what_it_refuses() -> None:
    query, key, value, beta, sums, state, ends = Problem(7, groups=2).arguments()
    assert delta_unsupported(key, value, state) is None
    assert delta_unsupported(key, value, state.double()) == "a delta rule in float64"
    assert "above 256" in (delta_unsupported(key.new_zeros(1, 1, 7, 264), value, state) or "")
    with pytest.raises(ValueError, match="does not serve a delta rule in float64"):
        tree_delta_rule(query, key, value.double(), beta, sums, state, ends)
    with pytest.raises(ValueError, match="`subtree_ends` must be of shape"):
        tree_delta_rule(query, key, value, beta, sums, state, ends[1:])
    with pytest.raises(ValueError, match="`query` must be in float32"):
        tree_delta_rule(query.half(), key, value, beta, sums, state, ends)
    with pytest.raises(ValueError, match="no multiple"):
        tree_delta_rule(query.repeat(1, 3, 1, 1), key.repeat(1, 3, 1, 1), value, beta, sums, state, ends)
