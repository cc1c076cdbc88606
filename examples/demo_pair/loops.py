"""Where a greedy text starts to repeat itself for good: acceptance is only honest before that point."""

import numpy as np

LONGEST_PERIOD, LEAST_REPEATED = 48, 12


def loop_starts(tokens: np.ndarray) -> np.ndarray:
    """For each row of `(rows, length)` tokens the index of its first looped token, `length` where there is none.

    A terminal loop repeats one passage of at most 48 tokens until the end, for at least one whole repetition and at
    least 12 tokens. The passage's first appearance still counts as text.
    """
    rows, length = tokens.shape
    first = np.full(rows, length)
    for period in range(1, min(LONGEST_PERIOD, length - 1) + 1):
        broken = tokens[:, period:] != tokens[:, :-period]
        unbroken_tail = np.where(broken.any(1), broken[:, ::-1].argmax(1), length - period)
        loops = unbroken_tail >= max(period, LEAST_REPEATED)
        first = np.where(loops, np.minimum(first, length - unbroken_tail), first)
    return first
