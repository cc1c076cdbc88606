"""Streamed text is the decoded text, and its colours are those of the rounds."""

import io

import pytest
from rich.console import Console

from hf_ddtree.cli.measure import MODES, Runner
from hf_ddtree.cli.streaming import PLAIN, Detokenizer, TextPrinter, depth_style


class Bytes:
    """A tokenizer of one byte a token."""

    def decode(self, token_ids, **_):
        return bytes(token_ids).decode("utf-8", errors="replace")


class Recorder(TextPrinter):
    """Keeps what it would print, with the style."""

    def _print(self, text, style):
        if not hasattr(self, "printed"):
            self.printed = []
        if text:
            self.printed.append((text, style))


def test_characters_come_whole():
    text = "a é 漢字 🙂 b"
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert set(pieces) == {*text, ""}
    assert detokenizer.rest() == ""


def test_an_unfinished_character_is_printed_at_the_end():
    detokenizer = Detokenizer(Bytes())
    assert [detokenizer(byte) for byte in b"a\xe6\xbc"] == ["a", "", ""]
    assert detokenizer.rest() == "\ufffd"


@pytest.mark.parametrize("mode", MODES)
def test_colours_follow_the_rounds(pair, mode):
    recorder = Recorder(Console(file=io.StringIO()), pair.tokenizer)
    run = Runner(pair, max_new_tokens=40, budget=60).run(mode, "hello world", recorder)
    first = len(run.tokens) - sum(run.acceptance_lengths)
    expected = []
    for length in (first, *run.acceptance_lengths):
        expected += [depth_style(depth) for depth in range(1, length)] + [PLAIN]
    *tokens, (end, _) = recorder.printed
    assert [text for text, _ in tokens] == [pair.decode([token]) for token in run.tokens]
    assert [style for _, style in tokens] == expected
    assert end == "\n"
    if mode == "tree":
        assert depth_style(1) in expected


@pytest.mark.parametrize("colour", [False, True])
def test_tabs_brackets_and_long_lines_come_out_unchanged(colour):
    text = "a\tb [bold]c[/bold] :smile: " + "x" * 200
    console = Console(file=io.StringIO(), width=40, force_terminal=colour, color_system="256" if colour else None)
    printer = TextPrinter(console, Bytes())
    for byte in text.encode():
        printer._print(printer.text(byte), depth_style(1))
    written = console.file.getvalue()
    assert (written == text) is not colour
    assert "".join(piece.partition("m")[2] for piece in written.split("\x1b[")) == text if colour else True
