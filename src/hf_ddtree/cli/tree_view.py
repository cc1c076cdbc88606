"""Drawing one verified draft tree: its most probable nodes, and the path the target accepted."""

import math
from collections.abc import Callable

from rich.console import Group
from rich.style import Style
from rich.text import Text
from rich.tree import Tree

from hf_ddtree.cli.streaming import depth_style
from hf_ddtree.generation.output import VerifiedTree
from hf_ddtree.tree import DraftTree

LINES = 20
LONGEST_TOKEN = 28
FAINT = Style(dim=True)


def telling_round(rounds: list[VerifiedTree]) -> int:
    """The round to draw: a long accepted path, rather one that a chain of the likeliest tokens misses."""

    def tells(index: int) -> int:
        path = rounds[index].path
        # A most probable child is the next node in preorder.
        return len(path) + 3 * (path != list(range(len(path))))

    # The last round may have been cut short.
    return max(range(max(len(rounds) - 1, 1)), key=tells)


def shown_nodes(tree: DraftTree, path: list[int], lines: int = LINES) -> set[int]:
    """The accepted path and the most probable other nodes, as many as fit; closed under taking parents."""
    order = sorted(range(len(tree)), key=lambda node: (-float(tree.log_probs[node]), node))
    shown = set(path)
    for node in order:
        if len(shown) >= lines:
            break
        shown.add(node)
    return shown


def draw_tree(verified: VerifiedTree, bonus: int, decode: Callable[[list[int]], str]) -> Group:
    """
    Args:
        verified (`VerifiedTree`): a round's tree and accepted path.
        bonus (`int`): the token the target added at the path's end.
        decode (`Callable`): token ids to text.
    """
    tree, accepted = verified.tree, set(verified.path)
    shown = shown_nodes(tree, verified.path)
    tokens, log_probs, depths = tree.token_ids.tolist(), tree.log_probs.tolist(), tree.depths.tolist()

    def label(node: int) -> Text:
        token = _token(decode([tokens[node]]))
        if node == 0:
            return Text.assemble((token, "bold"), ("  anchor", FAINT))
        probability = math.exp(log_probs[node] - log_probs[int(tree.parents[node])])
        if node in accepted:
            return Text.assemble(
                (token, depth_style(depths[node]) + Style(bold=True)),
                ("  accepted", "green"),
                (f"  {probability:.0%}", FAINT),
            )
        return Text.assemble(token, (f"  {probability:.0%}", FAINT))

    branches = {0: Tree(label(0), guide_style=FAINT)}
    for node in sorted(shown - {0}):
        branches[node] = branches[int(tree.parents[node])].add(label(node))
    branches[verified.path[-1]].add(
        Text.assemble((_token(decode([bonus])), "bold"), ("  the target's own token", FAINT))
    )
    hidden = len(tree) - len(shown)
    note = f"{hidden} less probable node{'s' * (hidden != 1)} not shown" if hidden else "every node shown"
    return Group(branches[0], Text(f"{note}; percentages are the drafter's, for each position on its own", FAINT))


def _token(text: str) -> str:
    if len(text) > LONGEST_TOKEN:
        text = text[: LONGEST_TOKEN - 1] + "…"
    return repr(text)
