"""Small functions put together from steps: pick some items, change them, gather them; their examples are computed."""

import random
from collections.abc import Callable
from typing import Any

from recipe import WORDS

Step = tuple[str, str, Callable[[Any], Any]]


def is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def number_filters(k: int) -> list[Step]:
    return [
        ("even", "even numbers", lambda n: n % 2 == 0),
        ("odd", "odd numbers", lambda n: n % 2 == 1),
        ("positive", "positive numbers", lambda n: n > 0),
        ("negative", "negative numbers", lambda n: n < 0),
        ("prime", "prime numbers", is_prime),
        ("large", f"numbers that are greater than {k}", lambda n: n > k),
        ("small", f"numbers that are less than {k}", lambda n: n < k),
        ("divisible", f"numbers that are divisible by {k}", lambda n: n % k == 0),
        ("two_digit", "numbers that have exactly two digits", lambda n: 10 <= abs(n) < 100),
        ("nonzero", "numbers that are not zero", lambda n: n != 0),
    ]


def word_filters(k: int) -> list[Step]:
    return [
        ("long", f"words that have more than {k} letters", lambda w: len(w) > k),
        ("short", f"words that have at most {k} letters", lambda w: len(w) <= k),
        ("vowel", "words that begin with a vowel", lambda w: w[0] in "aeiou"),
        ("consonant", "words that begin with a consonant", lambda w: w[0] not in "aeiou"),
        ("palindrome", "words that are palindromes", lambda w: w == w[::-1]),
        ("even_length", "words of even length", lambda w: len(w) % 2 == 0),
        ("containing_a", "words that contain the letter 'a'", lambda w: "a" in w),
    ]


NUMBER_MAPS: list[Step] = [
    ("", "", lambda n: n),
    ("", "", lambda n: n),
    ("squares", "the squares of ", lambda n: n * n),
    ("doubles", "twice the value of ", lambda n: 2 * n),
    ("absolutes", "the absolute values of ", abs),
    ("digit_sums", "the sums of the digits of ", lambda n: sum(map(int, str(abs(n))))),
]
WORD_MAPS: list[Step] = [
    ("", "", lambda w: w),
    ("", "", lambda w: w),
    ("lengths", "the lengths of ", len),
    ("reversed", "the reversed forms of ", lambda w: w[::-1]),
    ("upper", "the upper case forms of ", str.upper),
    ("first_letters", "the first letters of ", lambda w: w[0]),
]
NUMBER_GATHERS: list[Step] = [
    ("sum", "the sum of", sum),
    ("count", "the number of", len),
    ("list", "a list of", list),
    ("sorted", "a sorted list of", sorted),
    ("largest", "the largest of", lambda v: max(v, default=None)),
    ("smallest", "the smallest of", lambda v: min(v, default=None)),
    ("unique", "the set of", lambda v: sorted(set(v))),
    ("total", "the running total of", lambda v: [sum(v[: i + 1]) for i in range(len(v))]),
]
WORD_GATHERS: list[Step] = [
    ("list", "a list of", list),
    ("sorted", "an alphabetically sorted list of", sorted),
    ("count", "the number of", len),
    ("joined", "a string that joins, with spaces between them,", lambda v: " ".join(map(str, v))),
    ("last", "the last of", lambda v: v[-1] if v else None),
]
FORMS = [
    "Return {gather} {map}the {filter} in {what}.",
    "Given {what}, return {gather} {map}the {filter}.",
    "Write a function that takes {what} and returns {gather} {map}the {filter}.\n    {empty}",
    "You are given {what}.\n    Your task is to find {gather} {map}the {filter} in it.\n    {empty}",
    "This function should find {gather} {map}all {filter} in the given input.",
    "For {what}, compute {gather} {map}the {filter}.\n    The order of the items stays the same.",
]
EMPTY = ["If there are none, return the empty result.", "The input may be empty.", "Do not change the input.", ""]
KINDS = {int: "int", str: "str", list: "List", type(None): "Optional[int]"}


def composed(source: random.Random) -> str:
    """The head of such a function, with one to three examples."""
    numbers = source.random() < 0.6
    k = source.randint(2, 12) if numbers else source.randint(2, 6)
    filters, maps, gathers = (
        (number_filters(k), NUMBER_MAPS, NUMBER_GATHERS) if numbers else (word_filters(k), WORD_MAPS, WORD_GATHERS)
    )
    (pick, picked, keeps), (change, changed, turn), (gather, gathered, collect) = map(
        source.choice, (filters, maps, gathers)
    )
    argument = source.choice(["numbers", "lst", "nums", "arr", "values"] if numbers else ["words", "strings", "lst"])
    what = source.choice(
        ["a list of integers", "an array of integers", f"the list {argument}", "a list of numbers"]
        if numbers
        else ["a list of strings", "a list of words", f"the list {argument}"]
    )
    parts = [part for part in (gather, pick, change) if part]
    if source.random() < 0.3:
        source.shuffle(parts)
    name = "_".join(parts)
    sentence = source.choice(FORMS).format(
        gather=gathered, map=changed, filter=picked, what=what, empty=source.choice(EMPTY)
    )

    shown, result = [], None
    for _ in range(source.randint(0, 3)):
        size = source.randint(2, 7)
        given = [source.randint(-20, 60) for _ in range(size)] if numbers else source.sample(WORDS["words"], size)
        result = collect([turn(item) for item in given if keeps(item)])
        arrow = source.random() < 0.3
        shown.append(f"    {name}({given}) => {result!r}" if arrow else f"    >>> {name}({given})\n    {result!r}")
    kind = "int" if numbers else "str"
    typed = source.random() < 0.6
    returns = f" -> {'List[' + kind + ']' if isinstance(result, list) else KINDS[type(result)]}" if shown else ""
    signature = f"def {name}({argument}: List[{kind}]){returns}:" if typed else f"def {name}({argument}):"
    imports = "from typing import List\n\n\n" if typed else source.choice(["", "\n\n"])
    body = "\n".join([f'    """ {sentence.strip()}', *shown, '    """'])
    return f"Complete this Python function:\n\n{imports}{signature}\n{body}\n"
