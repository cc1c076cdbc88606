"""Options that several commands take."""

from typing import Annotated

import typer

Budget = Annotated[int | None, typer.Option(min=0, help="Nodes of a draft tree; default: the library's.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, float16 or auto; default: float32 on a CPU, else auto.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; default: the accelerator, if any.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: PyTorch's choice.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Apply the chat template; default: if the tokenizer has one."),
]
