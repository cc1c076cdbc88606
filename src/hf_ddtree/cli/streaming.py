"""Printing text while it is generated, each token coloured by what it was: drafted and accepted, or a bonus token."""

from typing import Any

import torch
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from hf_ddtree.cli.rounds import RoundCounter

#: Styles of accepted tokens by their depth in the draft tree, the last one for every deeper token.
DEPTH_STYLES = tuple(Style(color=f"color({code})") for code in (34, 36, 38, 33, 63, 99, 134, 170))
PLAIN = Style()


def depth_style(depth: int) -> Style:
    """The style of an accepted token at a depth of 1 or more."""
    return DEPTH_STYLES[min(depth, len(DEPTH_STYLES)) - 1]


class Detokenizer:
    """Token ids one at a time to text, whole characters only."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start, self.printed = 0, 0

    def __call__(self, token_id: int) -> str:
        """The text that this token completes; empty while a character lacks bytes."""
        self.ids.append(token_id)
        text = self._decode(self.start, len(self.ids))
        if text.endswith("\ufffd"):
            return ""
        # Tokens that were printed already stay in the window, since a token's text may depend on the one before it.
        before = self._decode(self.start, self.printed)
        self.start, self.printed = self.printed, len(self.ids)
        return text[len(before) :]

    def rest(self) -> str:
        """What an unfinished last character leaves."""
        return self._decode(self.start, len(self.ids))[len(self._decode(self.start, self.printed)) :]

    def _decode(self, start: int, end: int) -> str:
        return str(self.tokenizer.decode(self.ids[start:end], skip_special_tokens=True))


class TextPrinter(RoundCounter):
    """Streams a generate's text, coloured by token.

    Every token of a round but its last was drafted and accepted; the last is the target's own. Which one is the last
    is known when the next forward begins, so one token is held back until then.

    Args:
        console (`Console`): where to print; without colours the text alone comes out, unchanged.
        tokenizer: the target's.
    """

    def __init__(self, console: Console, tokenizer: Any):
        super().__init__()
        self.console, self.text = console, Detokenizer(tokenizer)
        self._held: int | None = None
        self._depth = 0

    def _forward(self, module: Any, inputs: Any) -> None:
        self._release(PLAIN)
        self._depth = 0
        super()._forward(module, inputs)

    def put(self, value: torch.Tensor) -> None:
        if not self.emitted:
            return
        super().put(value)
        for token_id in value.flatten().tolist():
            self._release(depth_style(self._depth) if self._depth else PLAIN)
            self._held = token_id
            self._depth += 1

    def end(self) -> None:
        self._release(PLAIN)
        self._print(self.text.rest(), PLAIN)
        self._print("\n", PLAIN)

    def _release(self, style: Style) -> None:
        if self._held is not None:
            self._print(self.text(self._held), style)
            self._held = None

    def _print(self, text: str, style: Style) -> None:
        # A segment reaches the terminal as it is, where `Text` would expand tabs.
        if text:
            self.console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)


def legend() -> Text:
    """What the colours mean."""
    depths = range(1, len(DEPTH_STYLES) + 1)
    marks = [(f" {depth}{'+' if depth == len(DEPTH_STYLES) else ''}", depth_style(depth)) for depth in depths]
    return Text.assemble("plain: the target's own; coloured: accepted from the draft, at depth", *marks)
