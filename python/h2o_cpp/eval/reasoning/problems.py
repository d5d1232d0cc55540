"""Families of problems. Every character is one token of the models trained on them.

A trace goes back to the prompt, or to its own earlier results, at every step, and a wrong step
makes the later ones wrong. Steps of `walk`, `machine` and `rotor` have a count: the rounds left,
and a letter for the step within a round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from string import ascii_letters, ascii_lowercase, ascii_uppercase

_N_EXITS = 3
_MOST_NODES = 12
_MOST_KEYS, _MOST_ROUNDS = 16, 9  # of a count
_REGISTERS = "rstuvwxyz"
_MOST_REGISTERS = 6
_MOST_ITEMS = 44


@dataclass(frozen=True)
class Problem:
    """A prompt and its solution."""

    prompt: str
    trace: str  # all steps
    results: str  # a pattern that finds the result of each step

    def solved(self, output: str) -> bool:
        """Whether the output has the result of every step."""
        return re.findall(self.results, output) == re.findall(self.results, self.trace)


def make_problem(family: str, random: Random, length: int) -> Problem:
    """A problem of about `length` characters, prompt and trace together; 48 or more.

    Raises ValueError for an unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[family](random, length)


def _walk(random: Random, length: int) -> Problem:
    """A walk on a graph: a word says which of three exits to take, and is repeated.

    Prompt "a:bca|A2B0|3a=": node a has the exits b, c and a, the word is 2, 0, the walk begins at a
    and takes 3 rounds. A step is "a:bca3A2": the node, its exits, the count, and the exit's number.
    """
    exits = _graph(random, length)
    keys, rounds = _count(random, length - 5 * len(exits), 8)
    word = {key: random.randrange(_N_EXITS) for key in keys}
    node = random.choice(list(exits))
    listed = "".join(f"{key}{number}" for key, number in word.items())
    prompt = f"{_listed(exits)}|{listed}|{rounds}{node}="
    steps = []
    for left in range(rounds, 0, -1):
        for key, number in word.items():
            steps.append(f"{node}:{exits[node]}{left}{key}{number}")
            node = exits[node][number]
    return Problem(prompt, "".join([*steps, node]), "[a-z](?=:|$)")


def _rotor(random: Random, length: int) -> Problem:
    """A walk on a graph that leaves each node by its exits in turn.

    Prompt "a:bca|3Ba=": node a has the exits b, c and a, the walk begins at a, and takes 3 rounds
    of the steps A to B. A step is "3Aa:bca0": the count, the node, its exits, and the number of the
    exit, which follows that of the last visit.
    """
    exits = _graph(random, length)
    keys, rounds = _count(random, length - 5 * len(exits), 8)
    node = random.choice(list(exits))
    prompt = f"{_listed(exits)}|{rounds}{keys[-1]}{node}="
    turns = dict.fromkeys(exits, 0)
    steps = []
    for left in range(rounds, 0, -1):
        for key in keys:
            turn = turns[node]
            steps.append(f"{left}{key}{node}:{exits[node]}{turn}")
            turns[node] = (turn + 1) % _N_EXITS
            node = exits[node][turn]
    return Problem(prompt, "".join([*steps, node]), "[a-z](?=:|$)")


def _machine(random: Random, length: int) -> Problem:
    """A program that adds and subtracts registers modulo 10, and is repeated.

    Prompt "A+xyB-yx|x3y8|2=": the instructions x = x + y and y = y - x, the registers, 2 rounds. A
    step is "2A+x3y8x1": the count, the operation, its operands, and the result.
    """
    names = random.sample(_REGISTERS, random.randint(2, _between(2, length // 20, _MOST_REGISTERS)))
    keys, rounds = _count(random, length - 2 * len(names), 9)
    program = {key: (random.choice("+-"), *random.sample(names, 2)) for key in keys}
    values = {name: random.randrange(10) for name in names}
    listed = "".join(f"{key}{''.join(line)}" for key, line in program.items())
    prompt = f"{listed}|{''.join(f'{name}{value}' for name, value in values.items())}|{rounds}="
    steps = []
    for left in range(rounds, 0, -1):
        for key, (operation, a, b) in program.items():
            x, y = values[a], values[b]
            values[a] = (x + y if operation == "+" else x - y) % 10
            steps.append(f"{left}{key}{operation}{a}{x}{b}{y}{a}{values[a]}")
    return Problem(prompt, "".join(steps), r"[+-]\w\d\w\d(\w\d)")


def _sort(random: Random, length: int) -> Problem:
    """Sorting by selection.

    Prompt "cab=". A step is "a:cb": the least item, in the order of ASCII, and the others.
    """
    n = 2
    while (n + 2) * (n + 5) // 2 < length and n < _MOST_ITEMS:
        n += 1
    left = random.sample(ascii_letters, max(2, n - random.randint(0, n // 6)))
    prompt = f"{''.join(left)}="
    steps = []
    for least in sorted(left):
        left.remove(least)
        steps.append(f"{least}:{''.join(left)}")
    return Problem(prompt, "".join(steps), "[a-zA-Z](?=:)")


FAMILIES: Mapping[str, Callable[[Random, int], Problem]] = {
    "walk": _walk,
    "rotor": _rotor,
    "machine": _machine,
    "sort": _sort,
}


def _graph(random: Random, length: int) -> dict[str, str]:
    """The exits of each node. Each exit of all nodes together is a permutation of them."""
    n = random.randint(3, _between(3, length // 12, _MOST_NODES))
    nodes = random.sample(ascii_lowercase, n)
    exits = [random.sample(nodes, n) for _ in range(_N_EXITS)]
    return {node: "".join(ends) for node, *ends in zip(nodes, *exits, strict=True)}


def _listed(exits: Mapping[str, str]) -> str:
    return "".join(f"{node}:{ends}" for node, ends in exits.items())


def _count(random: Random, length: int, n_step: int) -> tuple[str, int]:
    """The letters of the steps of a round, and the rounds, of a trace with steps of n_step."""
    steps = max(2, length // n_step)
    least = _between(2, -(-steps // _MOST_ROUNDS), _MOST_KEYS)
    keys = random.randint(least, _between(least, min(steps, least + 6), _MOST_KEYS))
    return ascii_uppercase[:keys], _between(1, steps // keys, _MOST_ROUNDS)


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))
