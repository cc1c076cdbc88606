"""`hf-ddtree report`: the Markdown and the plots of measurements."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_ddtree.cli.benchmark.results import FORMAT, read_lines
from hf_ddtree.cli.benchmark.summary import summarise
from hf_ddtree.cli.console import short_errors, stderr, stdout
from hf_ddtree.cli.reporting.plots import draw
from hf_ddtree.cli.reporting.table import Summary, markdown


def report(
    results: Annotated[list[Path], typer.Argument(help="Summaries or runs that `hf-ddtree bench` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Folder for report.md and the plots; made if need be.")] = None,
) -> None:
    """Print the Markdown of measurements, or write it with plots to a folder."""
    with short_errors():
        summaries = {path: read(path) for path in results}
        sections = [(path, markdown(summary)) for path, summary in summaries.items()]
        if out is None:
            stdout().print("\n\n".join(text for _, text in sections), soft_wrap=True)
            return
        out.mkdir(parents=True, exist_ok=True)
        parts = []
        for path, text in sections:
            prefix = f"{path.stem}-" if len(sections) > 1 else ""
            files = draw(summaries[path], out, prefix)
            images = [f"![{file.stem}]({file.name})" for file in files if file.suffix == ".svg"]
            parts.append("\n\n".join([text, *images]))
        page = out / "report.md"
        page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        stderr().print(f"Written to {page}, with its plots as SVG and PNG beside it.", soft_wrap=True)


def read(path: Path) -> Summary:
    """A summary, or the one of the runs that a measurement has made so far.

    Raises:
        ValueError: if the file is neither.
        OSError: if it cannot be read.
    """
    if path.suffix != ".json":
        lines, _ = read_lines(path)
        if not any(line["kind"] == "run" for line in lines):
            raise ValueError(f"{path} holds no finished run yet.")
        return summarise(lines)
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        known = summary["format"] == FORMAT and summary["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no summary of `hf-ddtree bench`.") from error
    if not known:
        raise ValueError(f"{path} is not of this version of `hf-ddtree bench`: measure again, or report its runs.")
    return summary
