"""The demo's tables: the modes side by side, and where a round's time goes."""

from rich import box
from rich.table import Table
from rich.text import Text

from hf_ddtree.cli.measure import Tally
from hf_ddtree.cli.methods import LOOKUP, NAMES

_WHAT = {
    "plain": "plain",
    "lookup": NAMES[LOOKUP],
    "chain": "DFlash chain",
    "tree": "draft tree",
}


def modes_table(tallies: dict[str, Tally], budget: int | str) -> Table:
    """A row a mode."""
    table = _table("mode", "forwards", "tokens/s", "x plain", "acceptance\nlength", "outside\nloops", "identical")
    plain = tallies["plain"]
    for mode, tally in tallies.items():
        outside = tally.mean_outside_loops(plain)
        identical = tally.difference(plain) is None
        table.add_row(
            f"{_WHAT[mode]} ({budget})" if mode == "tree" else _WHAT[mode],
            str(tally.forwards),
            f"{tally.tokens_per_second:.0f}",
            f"{tally.tokens_per_second / plain.tokens_per_second:.2f}",
            f"{tally.mean_acceptance_length:.2f}",
            "-" if outside is None else f"{outside:.2f}",
            Text("yes", "green") if identical else Text("no", "bold red"),
            style="bold" if mode == "tree" else "",
        )
    return table


def stages_table(seconds: dict[str, float], rounds: int) -> Table:
    """A column a stage of the tree's rounds, the prefill apart.

    Args:
        seconds (`dict[str, float]`): of each stage, `prefill` among them.
        rounds (`int`): rounds that those are the sum over.
    """
    stages = {stage: value for stage, value in seconds.items() if stage != "prefill"}
    total = sum(stages.values())
    table = _table("", *stages, "round")
    per_round = [1000 * value / max(rounds, 1) for value in (*stages.values(), total)]
    table.add_row("ms", *(f"{value:.2f}" for value in per_round))
    table.add_row("share", *(f"{value / total:.0%}" if total else "-" for value in (*stages.values(), total)))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, collapse_padding=True, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
