"""Options that several commands take."""

from typing import Annotated, Any

import typer

from hf_ddtree.configuration import AUTO


def nodes_or_auto(text: str | int) -> int | str:
    """A budget as it is typed.

    Raises:
        BadParameter: unless it is a whole number from 0 up or `auto`.
    """
    if text == AUTO or str(text).isdecimal():
        return AUTO if text == AUTO else int(text)
    raise typer.BadParameter(f"{text!r} is neither a whole number from 0 up nor {AUTO}.")


Budget = Annotated[
    Any | None,
    typer.Option(
        parser=nodes_or_auto, metavar="NODES|auto", help="Nodes of a draft tree, or auto; default: the library's."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, float16 or auto; default: float32 on a CPU, else auto.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; default: the accelerator, if any.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: PyTorch's choice.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Apply the chat template; default: if the tokenizer has one."),
]
