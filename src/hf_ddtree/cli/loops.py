"""Where a greedy text starts to repeat itself for good: drafting a loop is too easy to count."""

LONGEST_PERIOD, LEAST_REPEATED = 48, 12


def loop_start(tokens: list[int]) -> int:
    """Index of the first token of a terminal loop, `len(tokens)` where there is none.

    A terminal loop repeats one passage of at most 48 tokens until the end, for at least one whole repetition and at
    least 12 tokens. The passage's first appearance is not part of it.
    """
    first = len(tokens)
    for period in range(1, min(LONGEST_PERIOD, len(tokens) - 1) + 1):
        start = len(tokens)
        while start > period and tokens[start - 1] == tokens[start - 1 - period]:
            start -= 1
        if len(tokens) - start >= max(period, LEAST_REPEATED):
            first = min(first, start)
    return first


def lengths_outside(acceptance_lengths: list[int], prefilled: int, loop: int) -> list[int]:
    """The acceptance lengths of the rounds that began before the loop.

    Args:
        acceptance_lengths (`list[int]`): of every round, in order.
        prefilled (`int`): tokens before the first round.
        loop (`int`): index of the loop's first token.
    """
    outside, position = [], prefilled
    for length in acceptance_lengths:
        if position >= loop:
            break
        outside.append(length)
        position += length
    return outside
