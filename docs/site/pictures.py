"""Draws docs/pictures with the bundled model: python docs/site/pictures.py.

What they show is what the engine did, but for the last, whose numbers are those of docs/quality.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from svg import WIDTH, path, picture, rect, text

from h2o_cpp import BUNDLED_MODEL, Generator, Policy, _core
from h2o_cpp.measure.inspection import inspect
from h2o_cpp.model.tokenizer import Tokenizer

DOCS = Path(__file__).resolve().parents[1]
LAYER, HEAD = 3, 1  # one that shows it well
TEXT = "The old man went down to the sea with his son. He had not been there"
HEAVY, RECENT = 4, 4
N_SLOTS = HEAVY + RECENT + 1


@dataclass
class Moment:
    """What one KV head keeps when some tokens have been read."""

    scores: dict[int, float]  # by position
    slots: dict[int, int]  # by position, of all tokens so far
    evicted: int | None  # the position that went last

    def role(self, position: int, n_seen: int) -> str:
        """The color of a token."""
        if position not in self.scores:
            return "none"
        return "recent" if position >= n_seen - RECENT else "heavy"


def moments(generator: Generator, tokens: list[int]) -> list[Moment]:
    """The head after each token. A token goes to the next free slot, then to the victim's."""
    found: list[Moment] = []
    slots: dict[int, int] = {}
    for n in range(1, len(tokens) + 1):
        last = found[-1] if found else None
        free = n - 1 if last is None or last.evicted is None else slots[last.evicted]
        slots[n - 1] = free
        generator.read(tokens[:n])
        positions, scores = generator.kept(LAYER, HEAD)
        kept = dict(zip(map(int, positions), map(float, scores), strict=True))
        there = {*last.scores, n - 1} if last else {n - 1}
        gone = there - kept.keys()
        found.append(Moment(kept, dict(slots), gone.pop() if gone else None))
    return found


def name(piece: str) -> str:
    """A token as it is shown."""
    return piece.strip() or "</s>"


COLUMN = (WIDTH - 24) / N_SLOTS


def slot(i: int, y: float, color: str, words: str, below: str) -> Iterator[str]:
    """The box of a slot."""
    x = 12 + i * COLUMN
    free = color == "none"
    fill = "var(--cell)" if free else f"var(--{color})"
    yield rect(x + 2, y, COLUMN - 4, 34, fill, radius=5, line="var(--line)", dash="4 3" * free)
    yield text(x + COLUMN / 2, y + 22, words, "middle small " + ("dim" if free else "on"))
    yield text(x + COLUMN / 2, y + 50, below, "middle small dim")


def draw_slots(pieces: list[str], now: Moment) -> str:
    """The text so far, and the slots of one head."""
    n = len(pieces)
    parts = [text(16, 26, "The text so far, 18 tokens", "strong")]
    x, y = 14.0, 40.0
    for i, piece in enumerate(pieces):
        width = 15 + 7.4 * len(name(piece))
        if x + width > WIDTH - 14:
            x, y = 14.0, y + 31
        role = now.role(i, n)
        fill = "var(--cell)" if role == "none" else f"var(--{role})"
        parts.append(rect(x, y, width - 3, 25, fill, radius=5))
        parts.append(
            text(x + width / 2 - 1.5, y + 17, name(piece),
                 "middle small " + ("dim" if role == "none" else "on"))
        )  # fmt: skip
        x += width
    parts.append(text(16, y + 62, "The cache of one KV head, 9 slots", "strong"))
    y += 76
    by_slot = {now.slots[p]: p for p in now.scores}
    for i in range(N_SLOTS):
        p = by_slot.get(i)
        if p is None:
            parts += slot(i, y, "none", "free", "")
        else:
            parts += slot(i, y, now.role(p, n), name(pieces[p]), f"at {p}")
    y += 82
    for x, color, words in (
        (16, "heavy", "heavy hitter"), (136, "recent", "recent"),
        (222, "cell", "evicted, or free for the next token"),
    ):  # fmt: skip
        parts.append(rect(x, y - 11, 13, 13, f"var(--{color})", radius=3, line="var(--line)"))
        parts.append(text(x + 19, y, words, "small dim"))
    said = "Of 18 tokens the cache keeps four heavy hitters and the four most recent, in any order"
    return picture(said, y + 18, parts)


def draw_step(pieces: list[str], before: Moment, now: Moment) -> str:
    """One token is read: it attends, scores grow, the lightest goes."""
    new = len(pieces) - 1
    after = {**now.scores}
    evicted = now.evicted
    assert evicted is not None
    # What the evicted token's score grew by is not to be had: the rest of one row of each head.
    gained = {p: after[p] - before.scores.get(p, 0.0) for p in after}
    gained[evicted] = 1.0 - sum(gained.values())  # one query head for each KV head: a row sums to 1
    total = {p: before.scores.get(p, 0.0) + gained[p] for p in gained}
    by_slot = {now.slots[p]: p for p in total}
    most = max(total.values())
    parts = [text(16, 26, f"1  “{name(pieces[new])}” moves into the free slot", "strong")]
    for i in range(N_SLOTS):
        p = by_slot[i]
        role = "recent" if p >= new - RECENT + 1 else "heavy"
        parts += slot(i, 38, role, name(pieces[p]), "new" if p == new else "")
    parts.append(text(16, 116, "2  It attends to all of them", "strong"))
    for i in range(N_SLOTS):
        x = 12 + (i + 0.5) * COLUMN
        parts.append(text(x, 138, f"{100 * gained[by_slot[i]]:.0f}%", "middle small"))
    parts.append(text(16, 170, "3  Each score grows by the attention received", "strong"))
    base, scale = 262.0, 70 / most
    for i in range(N_SLOTS):
        p = by_slot[i]
        x = 12 + i * COLUMN + COLUMN / 4
        old, more = before.scores.get(p, 0.0) * scale, gained[p] * scale
        parts.append(rect(x, base - old, COLUMN / 2, old, "var(--dim)", opacity=0.55))
        parts.append(rect(x, base - old - more, COLUMN / 2, more, "var(--full)"))
        parts.append(text(x + COLUMN / 4, base + 15, f"{total[p]:.2f}", "middle small dim"))
    parts.append(text(16, 306, "4  Of those that are not recent, the lowest score goes", "strong"))
    for i in range(N_SLOTS):
        p = by_slot[i]
        role = "recent" if p >= new - RECENT + 1 else "heavy"
        if p == evicted:
            parts += slot(i, 318, "none", name(pieces[p]), "out")
            x = 12 + i * COLUMN
            parts.append(path([(x + 8, 335), (x + COLUMN - 8, 335)], "var(--ink)", width=1.5))
        else:
            parts += slot(i, 318, role, name(pieces[p]), "")
    parts.append(
        text(16, 392, "Its slot is where the next token goes. Nothing is moved.", "small dim")
    )
    said = (
        f"The token {name(pieces[new])} attends to nine slots, scores grow, and of the heavy "
        f"hitters {name(pieces[evicted])} has the lowest and is evicted"
    )
    return picture(said, 408, parts)


def areas_kept(evicted_at: NDArray[np.int32], n_recent: int) -> dict[str, str]:
    """Of a map with a column for each position and a row for each token read: what is kept.

    A token is recent for n_recent rows and kept for its score after, until it is evicted.
    """
    n = len(evicted_at)
    areas = {"recent": "", "heavy": ""}
    for p, evicted in enumerate(map(int, evicted_at)):
        end = evicted - 1 if evicted else n  # rows [p, end) have it
        middle = min(p + n_recent, end)
        areas["recent"] += f"M{p} {p}h1V{middle}h-1z"
        if middle < end:
            areas["heavy"] += f"M{p} {middle}h1V{end}h-1z"
    return areas


def draw_policies(model: _core.Model) -> str:
    """Which positions a head keeps, after each token of a text, by three policies."""
    tokenizer = Tokenizer.of_model(model)
    with Generator(BUNDLED_MODEL, threads=1) as generator:
        story = "The old man went down to the sea with his son."
        written = generator.generate(story, max_tokens=240, temperature=0, ignore_eos=True)
        tokens = tokenizer.encode(story + written.text)[:240]
    n, budget, side = len(tokens), 48, 152.0
    parts = []
    for i, (label, policy, colors) in enumerate((
        (f"window({budget})", Policy.window(budget), ("recent", "recent")),
        (f"sinks(4, {budget - 4})", Policy.sinks(4, budget - 4), ("sink", "recent")),
        (f"h2o({budget // 2}, {budget // 2})", Policy.h2o(budget // 2, budget // 2),
         ("heavy", "recent")),
    )):  # fmt: skip
        x, y = 16 + i * (side + 16), 40.0
        parts.append(text(x + side / 2, 26, label, "middle strong"))
        parts.append(rect(x, y, side, side, "var(--cell)"))
        found = inspect(model, tokenizer, tokens, policy, n_batch=1)
        assert policy.n_recent is not None
        for color, areas in areas_kept(found.evicted_at[LAYER, HEAD], policy.n_recent).items():
            parts.append(
                f'<path transform="translate({x:g} {y:g}) scale({side / n:.5f})" '
                f'style="fill: var(--{colors[color == "recent"]})" d="{areas}"/>'
            )
    parts.append(text(16, 212, "across: position in the text, 0 to 239", "small dim"))
    parts.append(text(16, 229, "down: tokens read so far; a colored cell is a token that is kept",
                      "small dim"))  # fmt: skip
    said = (
        "A window keeps a diagonal band; sinks the band and the first four tokens; H2O a narrower "
        "band and vertical stripes, tokens that stay for their scores"
    )
    return picture(said, 244, parts)


def draw_memory() -> str:
    """Bytes of the slots in use against the length of a text."""
    left, top, wide, high = 44.0, 44.0, WIDTH - 154.0, 210.0
    n_ctx, most = 2048, 10.0
    parts = [text(16, 26, "MiB of cache in use, by tokens of the text", "strong")]

    def at(n: float, mib: float) -> tuple[float, float]:
        return left + wide * n / n_ctx, top + high * (1 - mib / most)

    for mib in (0, 2, 4, 6, 8, 10):
        parts.append(path([at(0, mib), at(n_ctx, mib)], "var(--line)", width=1))
        parts.append(text(left - 8, at(0, mib)[1] + 4, str(mib), "end small dim"))
    for n in (0, 512, 1024, 1536, 2048):
        parts.append(text(at(n, 0)[0], top + high + 18, str(n), "middle small dim"))
    for hh, color in ((None, "full"), (0.4, "sink"), (0.2, "heavy"), (0.1, "recent")):
        with Generator(BUNDLED_MODEL, hh=hh, threads=1) as generator:
            bytes_ = generator.stats().cache_bytes
            budget = generator.policy.budget if isinstance(generator.policy, Policy) else None
        slots = n_ctx if budget is None else budget + 1
        mib = bytes_ / 2**20
        parts.append(path([at(0, 0), at(slots, mib), at(n_ctx, mib)], f"var(--{color})", width=3))
        x, y = at(n_ctx, mib)
        label = "full" if hh is None else f"hh={hh}"
        parts.append(text(x + 8, y + 4, f"{label}: {mib:.2f}", "small strong"))
    said = (
        "A full cache grows with the text; with a budget it stops growing when its slots are full"
    )
    return picture(said, top + high + 36, parts)


def draw_needle() -> str:
    """How likely the answer is, by what is kept: from the table in docs/quality.md."""
    page = (DOCS / "quality.md").read_text(encoding="utf-8")
    _, section = page.split("\n## What is found again\n")
    rows = {}
    for name in ("h2o", "full cache", "fact absent"):
        row = re.search(rf"^\| {name} \|(.+)\|$", section, re.MULTILINE)
        assert row is not None, name
        rows[name] = [cell.strip() for cell in row[1].split("|")]
    parts = []
    y = 26.0
    for first, title in (
        (0, "A number said once, somewhere in the first half"),
        (3, "A number said just before the question"),
    ):
        parts.append(text(16, y, title, "strong"))
        bars = [("full cache", rows["full cache"][first], "full")]
        for i, budget in ((2, "40%"), (1, "20%"), (0, "10%")):
            bars.append((f"h2o, {budget}", rows["h2o"][first + i], "heavy"))
        bars.append(("never said", rows["fact absent"][first], "dim"))
        for label, log_likelihood, color in bars:
            y += 25
            share = math.exp(float(log_likelihood))
            parts.append(text(104, y + 5, label, "end small"))
            parts.append(rect(112, y - 8, 330, 17, "var(--cell)", radius=3))
            parts.append(rect(112, y - 8, 330 * share, 17, f"var(--{color})", radius=3))
            parts.append(text(450, y + 5, f"{100 * share:.0f}%", "small"))
        y += 42
    said = "With an early fact evicted the answer is about as unlikely as if it had never been said"
    return picture(said, y - 18, parts)


def main() -> None:
    """Write all of them."""
    policy = Policy.h2o(heavy=HEAVY, recent=RECENT)
    with Generator(BUNDLED_MODEL, policy=policy, n_batch=1, threads=1) as generator:
        tokens = generator.tokenize(TEXT)
        pieces = [generator.detokenize([token]) for token in tokens]
        found = moments(generator, tokens)
    model = _core.Model(BUNDLED_MODEL, device="cpu", threads=1)
    drawn = {
        "slots": draw_slots(pieces, found[-1]),
        "step": draw_step(pieces, found[-2], found[-1]),
        "policies": draw_policies(model),
        "memory": draw_memory(),
        "needle": draw_needle(),
    }
    for file, svg in drawn.items():
        (DOCS / "pictures" / f"{file}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
