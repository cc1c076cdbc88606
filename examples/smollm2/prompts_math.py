"""Word problems in the manner of school books, put together from random names, things and numbers."""

import random

from recipe import WORDS

TEMPLATES = [
    "{A} buys {a} {x} at ${b} each and {c} {y} at ${d} each.  How much does {A} pay in total?",
    "{A} went to {p} and bought {a} packs of {x}. Each pack holds {b} {x} and costs ${c}. If {A} paid with a ${h} "
    "bill, how much change did {A} get?",
    "{A} has {h} {x}. {A} gives {a} to {B} and then buys {b} more. How many {x} does {A} have now?",
    "{A} has {r} {x} as {B}.  {B} has {a} {x}.  {C} has {b} more {x} than {A} and {B} together.  "
    "How many {x} do they have altogether?",
    "A {j} makes {a} {x} every day. {A} sells them for ${b} each and spends ${c} a day on supplies. "
    "How much profit does the {j} make in {d} days?",
    "A {v} travels at {s} miles per hour for {d} hours and then at {t} miles per hour for {e} hours. "
    "How far does the {v} travel?",
    "{A} reads {a} pages every day from Monday to Friday and {b} pages on each day of the weekend. "
    "How many pages does {A} read in {d} weeks?",
    "{A} earns ${a} an hour and works {b} hours a week. {A} saves {q}% of the money. "
    "How much does {A} save in {d} weeks?",
    "There are {h} {x} in a box. {q}% of them are red, and half of the others are blue. How many {x} are neither red "
    "nor blue?",
    "{A} is {a} years old. {B} is {b} years older than {A}, and {C} is twice as old as {B}. "
    "How old will {C} be in {d} years?",
    "A {j} needs {a} {x} for each of {b} tables. {A} already has {c} {x}. Each new one costs ${d}. "
    "How much will it cost to get the rest?",
    "{A} runs {a} laps around a track every {D}. Each lap is {s} meters. How many meters does {A} run in {d} weeks?",
    "The price of a ticket is ${h}.  Children pay {q}% less.  How much do {a} adults and {b} children pay in total?",
    "{A} fills a tank with {a} gallons of water each minute, but it loses {d} gallons each minute through a hole. "
    "How many minutes does it take to fill a tank of {h} gallons?",
    "On {D}, {A} sold {a} {x}. The next day {A} sold {r} {x}. On the third day {A} sold {b} {x}. "
    "How many {x} did {A} sell over the three days?",
    "{A}, {B}, and {C} share {h} {x}. {A} gets {a} {x}, and {B} gets twice as many as {A}. How many does {C} get?",
    "A recipe needs {d} cups of flour for {a} {x}. How many cups of flour does {A} need to make {h} {x}?",
    "{A} has ${h}. {A} spends ${a} on {x} and a third of what is left on {y}. How much money does {A} have left?",
    "A school has {a} classes with {b} students each. {q}% of the students take the bus, and the others walk. "
    "How many students walk to school?",
    "{A} wants to buy {a} {x} that cost ${b} each. Every second one costs only {q}% of the price. "
    "How much does {A} need to pay?",
    "{A} starts a {d}-hour drive at 8 AM. The {v} uses {e} gallons of gas an hour, and gas costs ${b} a gallon. "
    "How much does the gas cost?",
    "In a garden there are {a} rows of {x} with {b} in each row. {A} picks {c} of them in the morning and {d} in the "
    "afternoon. How many {x} are left?",
    "{A}'s dog eats {a} cups of food every morning and {b} cups every evening. A bag holds {h} cups. "
    "How many days does a bag last?",
    "{A} downloads a file of {h} GB at {d} GB per minute. Halfway through, the computer restarts, which takes "
    "{a} minutes. How long does it take in all?",
]
OPENINGS = [
    "{A} has {a} ", "{A} buys {a} ", "A {j} has ", "{A} and {B} ", "{A} went to {p} ", "There are {a} ", "A {v} ",
    "{A} is ", "{A} earns ", "{A} wants to ", "In a ", "Every day, {A} ", "{A}'s ", "If {A} has {a} ", "On {D}, {A} ",
    "A {j} makes ", "{A} makes {a} ", "{A} needs ", "The ", "{A} runs ", "{A} sells {a} ", "A store sells ",
    "{A} took ",
]  # fmt: skip


def fill(template: str, source: random.Random) -> str:
    first, second, third = source.sample(WORDS["names"], 3)
    one, other = source.sample(WORDS["things"], 2)
    return template.format(
        A=first, B=second, C=third, x=one, y=other, p=source.choice(WORDS["places"]), j=source.choice(WORDS["jobs"]),
        v=source.choice(WORDS["vehicles"]), r=source.choice(WORDS["ratios"]), D=source.choice(WORDS["days"]),
        a=source.randint(3, 30), b=source.randint(2, 20), c=source.randint(2, 15), d=source.randint(2, 9),
        e=source.randint(2, 6), h=source.choice([40, 50, 60, 80, 100, 120, 150, 200, 240, 300, 500, 1000]),
        q=source.choice([10, 15, 20, 25, 30, 40, 50, 60, 75]), s=source.choice([30, 40, 50, 55, 60, 65, 100, 200]),
        t=source.choice([20, 35, 45, 70, 75, 80]),
    )  # fmt: skip


def problem(source: random.Random) -> str:
    """A finished problem, a second condition added to some."""
    return fill(source.choice(TEMPLATES), source)


def opening(source: random.Random) -> str:
    """The beginning of a problem that the target is to finish writing itself."""
    return fill(source.choice(OPENINGS), source)
