"""The page of h2o-cpp serve in Chromium: its first paint, and frames while a reply is written.

The cache is shown beside the conversation. Replies are the model's own and a given text with
Markdown, which the model is made to write at the same rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

from h2o_bench.load import quantile
from h2o_bench.results import Row
from h2o_cpp import BUNDLED_MODEL, Generator
from support.page import chromium, end, expect, say
from support.scripted_chat import PLAIN
from support.serving import serving

SIZE = {"width": 1280, "height": 800}
STEP = """## Step {0}

Do **this**, which is `step {0}`, and remember $x^{0}$.

```python
def step(x):
    return x + {0}  # the next one
```

- one
- two

| a | b |
|---|---|
| {0} | 2 |

"""
WATCH = """() => {
  window.frames_ = [];
  const look = (time) => {
    if (document.querySelector(".writing")) frames_.push(time);
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


class Paced:
    """A constraint that lets a fixed number of tokens be chosen a second, or even chooses them."""

    def __init__(self, rate: float, ends: Iterable[int], tokens: Sequence[int] | None) -> None:
        """ends: tokens that are not chosen; tokens: those that are written, None: any."""
        self._pause = 1 / rate
        self._ends = [*ends]
        self._tokens = tokens
        self._n = 0
        self._next = perf_counter()

    def __call__(self, _: Any, mask: Any) -> None:
        self._next = max(self._next + self._pause, perf_counter())
        sleep(self._next - perf_counter() if self._next > perf_counter() else 0)
        mask[:] = 0xFFFFFFFF
        for token in self._ends:
            mask[token // 32] &= ~(1 << (token % 32)) & 0xFFFFFFFF
        if self._tokens is not None:
            token = self._tokens[self._n]
            mask[:] = 0
            mask[token // 32] = 1 << (token % 32)
        self._n += 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--rate", type=float, default=100, metavar="N", help="tokens a second")
    parser.add_argument("--tokens", type=int, default=400, help="of a reply, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=int, default=10, help="of the page, for its first paint")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    options: dict[str, Any] = {"hh": 0.25, "max_sequences": 2, "threads": 1}
    with (
        Generator(args.model, **options) as generator,
        serving(generator, template=PLAIN) as server,
        chromium() as browser,
    ):
        paints = [paint(browser, server.url) for _ in range(args.loads)]
        yield {"table": "first paint", "loads": args.loads, "ms": paints}
        ends = generator.tokenizer.end_tokens
        text = "".join(STEP.format(i) for i in range(args.tokens))
        steps = generator.tokenizer.encode(text, add_special=False)
        submit = server.engine.submit
        for name, tokens in (("the model's own", None), ("Markdown", steps)):
            found: list[Row] = []
            for _ in range(args.rounds):
                paced = partial(submit, constraint=Paced(args.rate, ends, tokens))
                with (
                    patch.object(server.engine, "submit", paced),
                    opened(browser, server.url) as page,
                ):
                    found.append(frames(page, args.tokens))
            cells = {key: [row[key] for row in found] for key in found[0]}
            yield {"table": "frames", "reply": name, **cells}


@contextmanager
def opened(browser: Any, url: str) -> Iterator[Any]:
    """The page in a browser without anything stored."""
    context = browser.new_context(viewport=SIZE)
    page = context.new_page()
    page.goto(url)
    expect(page.get_by_label("Model", exact=True)).not_to_have_value("")
    yield page
    context.close()


def paint(browser: Any, url: str) -> float:
    """Milliseconds from the request to the first text on the screen."""
    with opened(browser, url) as page:
        found = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return float(found)


def frames(page: Any, tokens: int) -> Row:
    """Frames of the page while a reply is written."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        """Processor seconds of the page's main thread."""
        found = devtools.send("Performance.getMetrics")["metrics"]
        return float(sum(one["value"] for one in found if one["name"] == "TaskDuration"))

    page.get_by_label("Length").fill(str(tokens))
    page.evaluate(WATCH)
    begin = busy()
    say(page, "Tell me of the sea.")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    end(page)
    used = busy() - begin
    times = page.evaluate("frames_")
    gaps = [after - before for before, after in pairwise(times)]
    seconds = (times[-1] - times[0]) / 1000
    return {
        "tokens/s": tokens / seconds,
        "frames/s": len(gaps) / seconds,
        "ms between frames, p99": quantile(gaps, 0.99),
        "longest": max(gaps),
        "main thread, % of a processor": 100 * used / seconds,
    }
