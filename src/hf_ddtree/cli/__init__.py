"""The `hf-ddtree` command: what it takes and prints. How trees are decoded is the business of the rooms below."""

import typer

from hf_ddtree.cli.benchmark.command import bench
from hf_ddtree.cli.demo import demo
from hf_ddtree.cli.doctor import doctor
from hf_ddtree.cli.generate import generate
from hf_ddtree.cli.reporting.command import report

app = typer.Typer(
    name="hf-ddtree",
    help="Draft-tree speculative decoding for Hugging Face Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(generate)
app.command()(doctor)
app.command()(bench)
app.command()(report)


def main() -> None:
    """Entry point of the console script and of `python -m hf_ddtree`."""
    app(prog_name="hf-ddtree")
