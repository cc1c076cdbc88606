"""Where output goes and how failures read: results on stdout, everything else on stderr, no tracebacks."""

from collections.abc import Iterator
from contextlib import contextmanager

import transformers
import typer
from rich.console import Console
from rich.text import Text

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
