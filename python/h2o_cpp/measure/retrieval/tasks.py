"""Prompts with a fact in them, and an answer that depends on the fact."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from h2o_cpp.model.tokenizer import Tokenizer

# Herman Melville, Moby-Dick (1851).
FILLER = (
    "Some years ago, never mind how long precisely, having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the "
    "watery part of the world. It is a way I have of driving off the spleen and regulating the "
    "circulation. Whenever I find myself growing grim about the mouth; whenever it is a damp, "
    "drizzly November in my soul; whenever I find myself involuntarily pausing before coffin "
    "warehouses, and bringing up the rear of every funeral I meet, then I account it high time to "
    "get to sea as soon as I can. There is nothing surprising in this. If they but knew it, almost "
    "all men in their degree, some time or other, cherish very nearly the same feelings towards "
    "the ocean with me. "
)

_KV_HEAD = (
    "Extract the value corresponding to the specified key in the JSON object below. \n"
    " JSON data:\n{"
)
_NEEDLE = " The secret number is"
_N_NEEDLES = 4
_PLACES = (
    *("river", "mountain", "bridge", "garden", "island", "tower", "forest", "village", "harbor"),
    *("castle", "desert", "market", "station", "library", "temple", "valley"),
)
_N_COMMON = 3  # words, each a tenth of the list
_COMMON = " The most common words of the list are"
_VARIABLES = ("APPLE", "STONE", "RIVER", "CLOUD", "HORSE", "TABLE", "LIGHT", "PAPER")


@dataclass(frozen=True)
class Sample:
    """A prompt in three parts, and its answer, which requires the fact."""

    before: list[int]
    fact: list[int]
    after: list[int]  # ends with the question
    answer: list[int]
    n_question: int = 0  # last tokens of the prompt
    instead: Sequence[int] = ()  # replaces the fact in without_fact

    @property
    def prompt(self) -> list[int]:
        """All tokens before the answer."""
        return [*self.before, *self.fact, *self.after]

    @property
    def without_fact(self) -> list[int]:
        """The same prompt without the fact."""
        return [*self.before, *self.instead, *self.after]


class _Writer:
    """Makes samples of at most `length` tokens, answer included."""

    def __init__(self, tokenizer: Tokenizer, length: int, filler: str, seed: str) -> None:
        self.random = random.Random(seed)
        self.beginning = tokenizer.encode("")
        self.source = tokenizer.encode(filler, add_special=False)
        self.words = sorted(set(re.findall(r"[^\W\d_]{4,}", filler.lower())))
        self._tokenizer = tokenizer
        self._length = length

    def encode(self, text: str) -> list[int]:
        """Tokens of text inside a prompt."""
        return self._tokenizer.encode(text, add_special=False, begins=False)

    def room(self, *parts: Sequence[int]) -> int:
        """Tokens left besides the beginning and these parts."""
        needed = len(self.beginning) + sum(map(len, parts))
        if needed > self._length:
            raise ValueError(
                f"length={self._length}, expected at least {needed} tokens for this task"
            )
        return self._length - needed

    def filler(self, n: int, source: Sequence[int] | None = None) -> list[int]:
        """n tokens of the source from a random offset on, repeated."""
        source = self.source if source is None else source
        start = self.random.randrange(len(source))
        return [source[(start + i) % len(source)] for i in range(n)]

    def copy(self) -> Sample:
        """A passage, filler, and the passage again, which is the answer."""
        source = self.filler(len(self.source))
        n = max(1, min(self._length // 4, len(source) // 2))
        passage, rest = source[:n], source[n:] or source
        filler = self.filler(self.room(passage, passage), rest)
        return Sample(self.beginning, passage, filler, passage)

    def needle(self) -> Sample:
        """A number somewhere in the first half."""
        return self._needle(lambda room: self.random.randint(0, room // 2))

    def recency(self) -> Sample:
        """A number a sixteenth of the text before the question."""
        return self._needle(lambda room: max(0, room - self._length // 16))

    def _needle(self, depth: Callable[[int], int]) -> Sample:
        question = self.encode(_NEEDLE)
        answer = self.encode(f" {self.random.randint(1000, 9999)}")
        fact = [*question, *answer, *self.encode(".")]
        room = self.room(fact, question, answer)
        filler, n_before = self.filler(room), depth(room)
        before, after = filler[:n_before], filler[n_before:]
        return Sample([*self.beginning, *before], fact, [*after, *question], answer, len(question))

    def kv(self) -> Sample:
        """A JSON object with as many pairs as fit; the question asks for one value."""
        key, value = self._word(), self._word()
        head, fact, answer = self.encode(_KV_HEAD), self._pair(key, value), self.encode(value)
        question = self.encode(f'}}\n\nKey: "{key}"\nCorresponding Value: ')
        room = self.room(head, fact, question, answer)
        pairs: list[list[int]] = []
        while len(pair := self._pair(self._word(), self._word())) <= room:
            pairs.append(pair)
            room -= len(pair)
        i = self.random.randint(0, len(pairs))
        return Sample(
            [*self.beginning, *head, *chain.from_iterable(pairs[:i])],
            fact,
            [*chain.from_iterable(pairs[i:]), *question],
            answer,
            len(question),
        )

    def needles(self) -> Sample:
        """Numbers of several places; the question asks for one."""
        places = self.random.sample(_PLACES, _N_NEEDLES)
        numbers = [self.encode(f" {self.random.randint(1000, 9999)}") for _ in places]
        questions = [self.encode(f" The secret number of the {place} is") for place in places]
        facts = [[*q, *n, *self.encode(".")] for q, n in zip(questions, numbers, strict=True)]
        asked = self.random.randrange(_N_NEEDLES)
        return self._scattered(facts, asked, questions[asked], numbers[asked])

    def variables(self) -> Sample:
        """A number assigned to a variable and copied twice; the question asks for the last one."""
        names = self.random.sample(_VARIABLES, 3)
        number = self.encode(f" {self.random.randint(1000, 9999)}")
        first = [*self.encode(f" VAR {names[0]} ="), *number, *self.encode(".")]
        copies = [self.encode(f" VAR {new} = VAR {old}.") for old, new in pairwise(names)]
        question = self.encode(f" The number that VAR {names[2]} stands for is")
        return self._scattered([first, *copies], 0, question, number)

    def common_words(self) -> Sample:
        """A shuffled list of words; the question asks for the three most common ones."""
        if len(self.words) < 2 * _N_COMMON:
            raise ValueError(
                f"the filler has {len(self.words)} words of four or more letters, "
                f"expected at least {2 * _N_COMMON} for common_words"
            )
        common = self.random.sample(self.words, _N_COMMON)
        others = [word for word in self.words if word not in common]
        question, answer = self.encode(_COMMON), self.encode("".join(f" {w}" for w in common))
        room = self.room(question, answer, self.encode("."))
        listed: list[str] = []
        while True:
            i = len(listed) % 10
            word = common[i] if i < _N_COMMON else self.random.choice(others)
            room -= len(self.encode(f" {word}"))
            if room < 0:
                break
            listed.append(word)
        self.random.shuffle(listed)
        with_common, without = (
            [token for word in words for token in self.encode(f" {word}")] + self.encode(".")
            for words in (listed, [word for word in listed if word not in common])
        )
        return Sample(self.beginning, with_common, question, answer, len(question), without)

    def _scattered(
        self, facts: Sequence[list[int]], asked: int, question: list[int], answer: list[int]
    ) -> Sample:
        """Facts in order at random places of the filler; facts[asked] determines the answer."""
        filler = self.filler(self.room(*facts, question, answer))
        cuts = [0, *sorted(self.random.randint(0, len(filler)) for _ in facts), len(filler)]
        parts = [filler[a:b] for a, b in pairwise(cuts)]
        before = [*self.beginning, *parts[0]]
        for fact, part in zip(facts[:asked], parts[1:], strict=False):
            before += [*fact, *part]
        after = [*parts[asked + 1]]
        for fact, part in zip(facts[asked + 1 :], parts[asked + 2 :], strict=True):
            after += [*fact, *part]
        return Sample(before, facts[asked], [*after, *question], answer, len(question))

    def _word(self) -> str:
        return f"{self.random.getrandbits(32):08x}"

    def _pair(self, key: str, value: str) -> list[int]:
        return self.encode(f'"{key}": "{value}", ')


# Tasks by name; each makes one sample.
TASKS: Mapping[str, Callable[[_Writer], Sample]] = {
    "copy": _Writer.copy,
    "needle": _Writer.needle,
    "kv": _Writer.kv,
    "recency": _Writer.recency,
    "needles": _Writer.needles,
    "variables": _Writer.variables,
    "common_words": _Writer.common_words,
}


def make_samples(
    tokenizer: Tokenizer,
    task: str,
    *,
    n: int,
    length: int,
    filler: str = FILLER,
    seed: int = 0,
) -> list[Sample]:
    """n samples of a task, each of at most `length` tokens, answer included.

    Deterministic. Raises ValueError for an unknown task, an empty filler and a length that is too
    short for the task.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r}, expected one of {', '.join(TASKS)}")
    writer = _Writer(tokenizer, length, filler, f"{task} {seed}")
    if not writer.source:
        raise ValueError("the filler has no tokens")
    return [TASKS[task](writer) for _ in range(n)]


def read_samples(tokenizer: Tokenizer, file: Path, n: int) -> list[Sample]:
    """The first n samples of a JSON Lines file with `context` and `answer`.

    Raises OSError, and ValueError with the line's number.
    """
    samples = []
    with file.open(encoding="utf-8") as lines:
        for number, line in zip(range(1, n + 1), lines, strict=False):
            try:
                document = json.loads(line)
                context, answer = str(document["context"]), str(document["answer"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f'{file}:{number}: expected an object with "context" and "answer"'
                ) from None
            if not answer or answer not in context:
                raise ValueError(f"{file}:{number}: the answer is not in the context")
            before, _, rest = context.partition(answer)
            fact, after = (
                tokenizer.encode(part, add_special=False, begins=False) for part in (answer, rest)
            )
            samples.append(Sample(tokenizer.encode(before), fact, after, fact))
    if not samples:
        raise ValueError(f"{file}: the file has no samples")
    return samples
