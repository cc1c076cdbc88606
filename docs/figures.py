"""Draws the pictures of the documentation: `python docs/figures.py` writes them to `docs/images/`.

The tree is one round of a small pair trained on the Python standard library's source, with a budget of 13. Tokens,
parents, percentages and the accepted path are as recorded; everything else is derived from them.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"

INK, SOFT, LINE, PAPER = "#1f2933", "#5f6b7a", "#c3cad3", "#ffffff"
ACCEPTED, ACCEPTED_FILL = "#16803c", "#dcf5e4"
BONUS, BONUS_FILL = "#b45309", "#fdefd7"
ANCHOR, REJECTED_FILL = "#243b64", "#f3f5f8"
STAGE_FILL = "#e8f0fb"
SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Node:
    """A draft node: its token, its parent, and the drafter's percentage for the token at that position."""

    token: str
    parent: int
    percent: int


NODES = (
    Node(" def", -1, 100),
    Node(" __", 0, 81),
    Node("init", 1, 96),
    Node("__(", 2, 66),
    Node(",", 3, 65),
    Node(",", 4, 59),
    Node(" name", 5, 73),
    Node(" name", 6, 59),
    Node("self", 3, 24),
    Node("self", 2, 18),
    Node(",", 9, 65),
    Node(" name", 0, 9),
    Node("init", 11, 96),
    Node(" _", 0, 8),
)
PATH = (0, 1, 2, 3, 8)
BONUS_TOKEN = ","


def depth(node: int) -> int:
    return 0 if node == 0 else 1 + depth(NODES[node].parent)


def subtree_end(node: int) -> int:
    """One past the last node of the subtree: the next node that is not deeper."""
    later = (other for other in range(node + 1, len(NODES)) if depth(other) <= depth(node))
    return next(later, len(NODES))


def shown(token: str) -> str:
    """A token with its leading space made visible."""
    return token.replace(" ", "·")


class Canvas:
    """An SVG on white paper with round corners, so that it reads on a dark page too."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, stroke: str, width: float = 1.5) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="{width:g}"/>'
        )

    def cell(self, x: float, y: float, w: float, h: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2" fill="{fill}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        fill: str = INK,
        family: str = SANS,
        anchor: str = "middle",
        weight: int = 400,
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" font-family="{family}" '
            f'text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
        )

    def path(self, d: str, stroke: str, width: float = 1.5, dash: str = "", arrow: bool = False) -> None:
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        extra += ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<path d="{d}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{extra}/>')

    def save(self, name: str) -> None:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(self.title)}">'
        )
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" rx="12" fill="{PAPER}"/>'
        text = "\n".join([head, f"<title>{escape(self.title)}</title>", arrow, paper, *self.parts, "</svg>"])
        (IMAGES / name).write_text(text + "\n", encoding="utf-8")


def colours(node: int) -> tuple[str, str, str]:
    """Fill, border and text colour of a node."""
    if node == 0:
        return ANCHOR, ANCHOR, PAPER
    return (ACCEPTED_FILL, ACCEPTED, ACCEPTED) if node in PATH else (REJECTED_FILL, LINE, INK)


def draw_tree() -> None:
    """The tree from left to right, one column a depth, one row a leaf."""
    left, top, column, row, w, h = 24, 66, 114, 54, 88, 36
    bonus_after = PATH[-1]
    rows: dict[int, int] = {}
    leaves = 0
    for node in range(len(NODES)):
        if subtree_end(node) == node + 1:
            ancestor = node
            while ancestor >= 0 and ancestor not in rows:
                rows[ancestor] = leaves
                ancestor = NODES[ancestor].parent
            leaves += 1
    canvas = Canvas(
        left * 2 + 7 * column + w,
        top + leaves * row + 42,
        "A draft tree of 13 nodes in which the target accepted four tokens and added a bonus token",
    )
    canvas.text(
        left, 30, "One round: 13 drafted nodes, verified in one forward of the target", 15, anchor="start", weight=600
    )
    canvas.text(
        left,
        49,
        "Four drafted tokens accepted and one bonus token: acceptance length 5. The likeliest chain gives 4.",
        12,
        SOFT,
        anchor="start",
    )

    def place(node: int) -> tuple[float, float]:
        return left + depth(node) * column, top + rows[node] * row

    def link(x: float, y: float, x2: float, y2: float, colour: str, width: float, dash: str = "") -> None:
        middle = (x + x2) / 2
        canvas.path(f"M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {y2:g} {x2:g} {y2:g}", colour, width, dash)

    order = sorted(range(1, len(NODES)), key=lambda node: node in PATH)
    for node in order:
        (x, y), (x2, y2) = place(NODES[node].parent), place(node)
        good = node in PATH
        link(x + w, y + h / 2, x2, y2 + h / 2, ACCEPTED if good else LINE, 2.5 if good else 1.5)
    x, y = place(bonus_after)
    link(x + w, y + h / 2, x + column, y + h / 2, BONUS, 2.5, "5 4")
    for node in range(len(NODES)):
        x, y = place(node)
        fill, border, ink = colours(node)
        canvas.box(x, y, w, h, fill, border, 2 if node in PATH else 1.2)
        canvas.text(x + w / 2, y + (16 if node else 17), shown(NODES[node].token), 14, ink, MONO, weight=600)
        canvas.text(x + w / 2, y + 30, f"{NODES[node].percent}%" if node else "anchor", 11, ink if node == 0 else SOFT)
    x, y = place(bonus_after)
    canvas.box(x + column, y, w, h, BONUS_FILL, BONUS, 2)
    canvas.text(x + column + w / 2, y + 16, shown(BONUS_TOKEN), 14, BONUS, MONO, weight=600)
    canvas.text(x + column + w / 2, y + 30, "bonus", 11, BONUS)
    legend_y = top + leaves * row + 12
    x = left
    for fill, border, label, width in (
        (ANCHOR, ANCHOR, "anchor: last token of the text", 222),
        (ACCEPTED_FILL, ACCEPTED, "accepted", 100),
        (BONUS_FILL, BONUS, "bonus: the target's own choice", 228),
        (REJECTED_FILL, LINE, "rejected", 95),
    ):
        canvas.box(x, legend_y, 14, 14, fill, border)
        canvas.text(x + 21, legend_y + 11.5, label, 12, SOFT, anchor="start")
        x += width
    canvas.text(x, legend_y + 11.5, "%: drafter's probability, ·: a space", 12, SOFT, anchor="start")
    canvas.save("tree.svg")


def draw_intervals() -> None:
    """The same tree as an indented list, one node a row, beside its mask, one node a row and a column."""
    left, top, row, indent, cell = 24, 92, 27, 26, 25
    mask_left = 462
    count = len(NODES)
    canvas = Canvas(
        mask_left + count * cell + 24,
        top + count * row + 46,
        "The nodes of a draft tree in depth-first preorder, and the mask in which each column is one interval",
    )
    canvas.text(left, 30, "Nodes in depth-first preorder", 14, anchor="start", weight=600)
    canvas.text(left, 49, "number, token, [node, end of its subtree)", 12, SOFT, anchor="start")
    canvas.text(mask_left, 30, "Row sees column: itself or an ancestor", 14, anchor="start", weight=600)
    canvas.text(mask_left, 49, "each column is filled from its node to its subtree's end", 12, SOFT, anchor="start")
    for node in sorted(range(1, count), key=lambda node: node in PATH):
        y, parent_y = top + node * row, top + NODES[node].parent * row
        x = left + 34 + depth(node) * indent
        good = node in PATH
        line = f"M{x - indent + 10:g} {parent_y + 23:g}V{y + 12:g}H{x:g}"
        canvas.path(line, ACCEPTED if good else LINE, 2 if good else 1.3)
    for node in range(count):
        y = top + node * row
        x = left + 34 + depth(node) * indent
        fill, border, ink = colours(node)
        w = 16 + 8.6 * max(3, len(NODES[node].token))
        canvas.text(left + 16, y + 17, str(node), 12, SOFT, MONO, anchor="end")
        canvas.box(x, y + 1, w, 22, fill, border, 1.6 if node in PATH else 1.1)
        canvas.text(x + w / 2, y + 16.5, shown(NODES[node].token), 12.5, ink, MONO, weight=600)
        canvas.text(mask_left - 76, y + 17, f"[{node}, {subtree_end(node)})", 12, SOFT, MONO)
        canvas.text(mask_left + (node + 0.5) * cell, top - 8, str(node), 11, SOFT, MONO)
        canvas.text(mask_left - 10, y + 17, str(node), 11, SOFT, MONO, anchor="end")
    for line in range(count):
        for column in range(count):
            visible = column <= line < subtree_end(column)
            on_path = visible and line in PATH and column in PATH
            fill = ACCEPTED if on_path else "#7f9cc7" if visible else "#eef1f5"
            canvas.cell(mask_left + column * cell + 1, top + line * row, cell - 2, row - 3, fill)
    y = top + count * row + 14
    x = float(mask_left)
    for fill, label, width in (
        (ACCEPTED, "accepted path", 118),
        ("#7f9cc7", "other nodes", 106),
        ("#eef1f5", "not visible", 90),
    ):
        canvas.cell(x, y, 14, 14, fill)
        canvas.text(x + 20, y + 11.5, label, 12, SOFT, anchor="start")
        x += width
    canvas.save("intervals.svg")


STAGES = (
    ("taps", ("states of the", "accepted path"), "target"),
    ("drafter pass", ("one pass fills", "a block of masks"), "drafter"),
    ("marginals", ("top tokens of", "each position"), "drafter"),
    ("draft tree", ("likeliest paths,", "best first"), "host"),
    ("target forward", ("all nodes of", "the tree at once"), "target"),
    ("walk", ("the target's own", "choices"), "host"),
    ("commit", ("keep the path,", "drop the rest"), "target"),
)
PLACES = {
    "target": ("#dbe7fb", "#3b6bb5", "target"),
    "drafter": ("#ece3fa", "#7a4fc0", "drafter"),
    "host": (REJECTED_FILL, "#8a94a3", "neither model"),
}
SURVIVES = "committed cache  ·  drafter's context cache  ·  taps of the accepted path  ·  statistics"


def draw_round() -> None:
    """The stages of a round from left to right, and what goes on to the next one."""
    left, top, w, h, gap = 20, 52, 108, 76, 16
    last = left + 6 * (w + gap) + w
    canvas = Canvas(last + 20, 250, "The seven stages of a round, and what survives it")
    canvas.text(left, 31, "One round, left to right", 15, anchor="start", weight=600)
    for index, (name, lines, place) in enumerate(STAGES):
        x = left + index * (w + gap)
        fill, border, _ = PLACES[place]
        canvas.box(x, top, w, h, fill, border, 1.6)
        canvas.text(x + w / 2, top + 25, name, 14, INK, weight=600)
        for offset, line in enumerate(lines):
            canvas.text(x + w / 2, top + 46 + 17 * offset, line, 12, SOFT)
        if index + 1 < len(STAGES):
            canvas.path(f"M{x + w + 2} {top + h / 2}H{x + w + gap - 3}", SOFT, 1.8, arrow=True)
    y = top + h
    box_y = y + 34
    canvas.path(f"M{last - w / 2} {y + 2}V{box_y + 20}H{last - w + 8}", SOFT, 1.8, arrow=True)
    canvas.path(f"M{left + w - 4} {box_y + 20}H{left + w / 2}V{y + 6}", SOFT, 1.8, arrow=True)
    canvas.box(left + w, box_y, last - left - 2 * w + 4, 40, PAPER, LINE, 1.4)
    canvas.text((left + last) / 2, box_y + 17, "What survives the round", 12.5, INK, weight=600)
    canvas.text((left + last) / 2, box_y + 33, SURVIVES, 12, SOFT)
    x = float(left)
    for fill, border, label in PLACES.values():
        canvas.box(x, box_y + 62, 14, 14, fill, border)
        canvas.text(x + 21, box_y + 73.5, label, 12, SOFT, anchor="start")
        x += 36 + 7.2 * len(label)
    canvas.save("round.svg")


TILE = range(8, 12)
PREFIX_TILES = (("ragged", 0.45), ("no mask", 1.0), ("no mask", 1.0))


def draw_kernel() -> None:
    """One program of the kernel: the rows of four nodes, tiles of the prefix, and the gathered tile of the tree."""
    cell, left, top, wide = 23, 60, 104, 92
    count, first = len(NODES), TILE[0]
    tree_left = left + wide * len(PREFIX_TILES) + 10
    gathered_left = tree_left + count * cell + 92
    ancestors = [node for node in range(first) if node <= first < subtree_end(node)]
    gathered = [*ancestors, *TILE]
    canvas = Canvas(
        gathered_left + len(gathered) * cell + 34,
        top + count * cell + 70,
        "What one program of the kernel reads: tiles of the prefix without a mask, and one gathered tile of the tree",
    )
    canvas.text(
        left - 36, 30, "One program: nodes 8 to 11, all heads of a key-value group", 15, anchor="start", weight=600
    )
    canvas.text(
        left - 36,
        50,
        "Everything that these nodes can see is coloured; nothing else is read.",
        12,
        SOFT,
        anchor="start",
    )
    canvas.text(left + wide * 1.5, top - 30, "prefix, in tiles that end where it ends", 12, SOFT)
    canvas.text(tree_left + count * cell / 2, top - 30, "the tree's keys, in preorder", 12, SOFT)
    band_y, band_h = top + first * cell, len(TILE) * cell
    for index, (label, filled) in enumerate(PREFIX_TILES):
        x = left + index * wide
        canvas.cell(x + 1, top, wide - 2, count * cell, "#eef1f5")
        canvas.cell(x + 1 + (1 - filled) * (wide - 2), band_y, filled * (wide - 2), band_h, "#7f9cc7")
        canvas.text(x + wide / 2, top - 9, label, 11.5, INK if filled < 1 else SOFT)
    for row in range(count):
        canvas.text(left - 10, top + row * cell + 16, str(row), 11, INK if row in TILE else SOFT, MONO, "end")
        for column in range(count):
            visible = column <= row < subtree_end(column)
            fill = "#dfe5ee" if visible else "#f5f7f9"
            if row in TILE and visible:
                fill = ACCEPTED if column in TILE else BONUS
            canvas.cell(tree_left + column * cell + 1, top + row * cell + 1, cell - 2, cell - 2, fill)
    for column in range(count):
        x = tree_left + column * cell + cell / 2
        canvas.text(x, top - 9, str(column), 11, INK if column in gathered else SOFT, MONO)
    right = tree_left + count * cell
    canvas.path(f"M{left - 3} {band_y - 1}H{right + 2}V{band_y + band_h + 1}H{left - 3}z", INK, 1.6)
    middle = band_y + band_h / 2
    canvas.path(f"M{right + 10} {middle:g}H{gathered_left - 30}", SOFT, 1.8, arrow=True)
    canvas.text((right + gathered_left - 20) / 2, middle - 9, "gathered", 12, SOFT)
    canvas.text(gathered_left + len(gathered) * cell / 2, band_y - 46, "the tree in one tile", 13, INK, weight=600)
    for place, column in enumerate(gathered):
        x = gathered_left + place * cell
        canvas.text(x + cell / 2, band_y - 9, str(column), 11, INK, MONO)
        for row in TILE:
            visible = column <= row < subtree_end(column)
            fill = (ACCEPTED if column in TILE else BONUS) if visible else "#eef1f5"
            canvas.cell(x + 1, band_y + (row - first) * cell + 1, cell - 2, cell - 2, fill)
    canvas.text(gathered_left + len(ancestors) * cell / 2, band_y + band_h + 19, f"ancestors of {first}", 11.5, BONUS)
    canvas.text(gathered_left + (len(ancestors) + 2) * cell, band_y + band_h + 36, "own nodes", 11.5, ACCEPTED)
    y, x = top + count * cell + 26, float(left)
    for fill, label, width in (
        ("#7f9cc7", "prefix: every node sees it", 186),
        (BONUS, "ancestors of the first node", 190),
        (ACCEPTED, "the program's own nodes", 190),
        ("#dfe5ee", "seen by other programs' nodes", 200),
    ):
        canvas.cell(x, y, 14, 14, fill)
        canvas.text(x + 20, y + 11.5, label, 12, SOFT, anchor="start")
        x += width
    canvas.save("kernel.svg")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_tree()
    draw_intervals()
    draw_round()
    draw_kernel()
