"""Terminal loops, against the definition spelled out."""

import pytest

from hf_ddtree.cli.loops import lengths_outside, loop_start

TEXT = list(range(100, 140))


def defined_loop_start(tokens):
    """Every start and period tried: the tail from `start` repeats what lies `period` before it, long enough."""
    for start in range(len(tokens)):
        for period in range(1, min(48, start) + 1):
            repeats = all(tokens[i] == tokens[i - period] for i in range(start, len(tokens)))
            if repeats and len(tokens) - start >= max(period, 12):
                return start
    return len(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [7],
        TEXT,
        TEXT + [1] * 13,
        TEXT + [1] * 12,
        TEXT + [1, 2, 3] * 6,
        TEXT + [1, 2, 3] * 6 + [9],
        TEXT + list(range(20)) * 2,
        TEXT + list(range(20)) * 2 + [0, 1, 2],
        TEXT + list(range(200, 249)) * 3,
        [5] * 64,
    ],
)
def test_loop_start(tokens):
    assert loop_start(tokens) == defined_loop_start(tokens)


def test_a_loop_begins_after_the_passage_it_repeats():
    assert loop_start(TEXT + [1, 2, 3] * 6) == len(TEXT) + 3


def test_rounds_count_if_they_begin_before_the_loop():
    assert lengths_outside([3, 4, 2, 5], prefilled=1, loop=9) == [3, 4, 2]
    assert lengths_outside([3, 4, 2, 5], prefilled=1, loop=8) == [3, 4]
    assert lengths_outside([3, 4], prefilled=1, loop=1) == []
