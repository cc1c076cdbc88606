"""Trees and tables as they are read: in 80 columns, without colours."""

import io

import pytest
import torch
from rich.console import Console

from hf_ddtree import SpeculationStats
from hf_ddtree.cli.measure import MODES, Run, Tally
from hf_ddtree.cli.table import modes_table, stages_table
from hf_ddtree.cli.tree_view import LINES, draw_tree, shown_nodes, telling_round
from hf_ddtree.generation.output import STAGES, VerifiedTree
from hf_ddtree.tree import build_draft_tree


def rendered(renderable, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def random_tree(depth, budget, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(depth, 64, generator=generator)
    return build_draft_tree(logits.log_softmax(-1), budget, anchor=5)


def deepest_path(tree):
    return tree.path(int(tree.depths.argmax()))


@pytest.mark.parametrize(("depth", "budget"), [(1, 1), (3, 12), (15, 63), (15, 511), (31, 200)])
def test_shown_nodes_hang_together_and_hold_the_accepted_path(depth, budget):
    tree = random_tree(depth, budget)
    path = deepest_path(tree)
    shown = shown_nodes(tree, path)
    assert set(path) <= shown
    assert len(shown) == min(len(tree), max(LINES, len(path)))
    assert all(int(tree.parents[node]) in shown for node in shown - {0})


def test_drawing_names_every_accepted_token_and_counts_the_rest():
    tree = random_tree(4, 63)
    path = deepest_path(tree)
    text = rendered(draw_tree(VerifiedTree(tree, path), bonus=9, decode=lambda ids: f"<{ids[0]}>"))
    assert text.count("accepted") == len(path) - 1
    for node in path:
        assert f"'<{int(tree.token_ids[node])}>'" in text
    assert "'<9>'  the target's own token" in text
    assert f"{64 - LINES} less probable nodes not shown" in text


def test_an_empty_tree_can_be_drawn():
    tree = build_draft_tree(torch.empty(0, 1), 0, anchor=5)
    text = rendered(draw_tree(VerifiedTree(tree, [0]), bonus=9, decode=str))
    assert "every node shown" in text


def test_the_round_to_draw_leaves_the_most_probable_chain():
    tree = random_tree(6, 40)
    off_chain = tree.path(
        max(range(len(tree)), key=lambda node: tree.path(node) != list(range(int(tree.depths[node]) + 1)))
    )
    rounds = [VerifiedTree(tree, path) for path in ([0], [0, 1], off_chain, [0, 1], deepest_path(tree))]
    assert telling_round(rounds) == 2, "and never the last, which a stop may have cut"
    assert telling_round(rounds[:1]) == 0


def tallies(**tokens):
    stats = SpeculationStats([4, 4], seconds=dict.fromkeys(STAGES, 0.25), prefill_seconds=0.5)
    text = list(range(9))
    return {
        mode: Tally(mode, [[Run(tokens.get(mode, text), 2.0 if mode == "plain" else 1.0, 0.1, 3, [4, 4], stats)]])
        for mode in MODES
    }


def test_modes_table_fits_and_says_what_differs():
    text = rendered(modes_table(tallies(lookup=[0, 1, 9]), budget=4096))
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["plain"][-1] == rows["DFlash"][-1] == rows["draft"][-1] == "yes"
    assert rows["prompt"][-1] == "no"
    assert rows["draft"][-5:-1] == ["9", "2.00", "4.00", "4.00"]


def test_stages_table_adds_up():
    tally = tallies()["tree"]
    tally.runs[0][0].seconds = 2.0
    assert tally.stage_seconds == {"prefill": 0.5, **dict.fromkeys(STAGES, 0.25), "other": 0.25}
    text = rendered(stages_table(tally.stage_seconds, tally.rounds))
    assert "…" not in text and "prefill" not in text
    milliseconds = next(line.split()[1:] for line in text.splitlines() if line.strip().startswith("ms"))
    assert milliseconds == ["125.00"] * 6 + ["750.00"]


def test_the_first_difference_is_found():
    assert tallies(tree=[0, 1, 9])["tree"].difference(tallies()["plain"]) == (0, 2)
    assert tallies(tree=[0, 1])["tree"].difference(tallies()["plain"]) == (0, 2)
    assert tallies()["tree"].difference(tallies()["plain"]) is None
