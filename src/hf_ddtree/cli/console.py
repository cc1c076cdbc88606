"""Where output goes and how failures read: results on stdout, everything else on stderr, no tracebacks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

T = TypeVar("T")

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def stdout() -> Console:
    """A console that prints text as it is: no markup, no emoji codes, no guessed highlighting."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def short_errors() -> Iterator[None]:
    """Turns what a user can cause into one message and an exit code; anything else is a bug with its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        stderr().print("\nInterrupted.")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of a pipe has seen enough; typer ends quietly.
        raise
    except (ValueError, OSError, ImportError) as error:
        stderr().print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(MISUSED) from None


def quiet_transformers(warnings: bool = False) -> None:
    """No loading bars and, unless `warnings` is set, no advice: a command's own output is what its user reads."""
    transformers.logging.disable_progress_bar()
    if not warnings:
        transformers.logging.set_verbosity_error()


def with_progress(
    work: Sequence[T], done: int = 0, name: Callable[[T], str] = lambda _: "", shown: bool = True
) -> Iterator[T]:
    """Hands out pieces of work under a bar on standard error, gone at the end.

    Args:
        work (`Sequence`): the pieces left.
        done (`int`): pieces that an earlier call has done.
        name (`Callable`): what a piece is called beside the bar.
        shown (`bool`): whether there is a bar.
    """
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeRemainingColumn())
    details = TextColumn("{task.description}", style="dim")
    # Redrawn between runs only: a thread that redraws would take time from what is measured.
    with Progress(
        *columns, details, console=stderr(), auto_refresh=False, transient=True, disable=not shown
    ) as progress:
        task = progress.add_task("", total=done + len(work), completed=done)
        for piece in work:
            progress.update(task, description=name(piece), refresh=True)
            yield piece
            progress.update(task, advance=1, refresh=True)
