"""Requests: what to continue, how to choose the tokens, and when to end. Checked when made."""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp import _core
from h2o_cpp.generation.record import Record
from h2o_cpp.generation.runtime import Runtime
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.model.arguments import check_float, check_int
from h2o_cpp.model.policy import Policy

_BYTES = bytes | bytearray | memoryview  # collections of integers that are no token ids


class StreamOptions(TypedDict, total=False):
    """The keyword arguments of Generator.stream, which explains them."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    parse_special: bool


class ContextFullError(ValueError):
    """The prompt has more tokens than the context."""


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, checked. A sampler takes memory, so each is made when it is needed."""

    n_vocab: int
    seed: int
    random_state: str | None  # to go on from, instead of the seed
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64

    def __post_init__(self) -> None:
        self.sampler()  # raises ValueError for what is out of range

    def recent(self, tokens: array[int]) -> array[int]:
        """Those of a text's tokens that a repeat counts for."""
        if self.repeat_penalty == 1 or self.repeat_last_n == 0:
            return tokens[:0]
        return tokens if self.repeat_last_n < 0 else tokens[-self.repeat_last_n :]

    def sampler(self) -> _core.Sampler:
        """A new sampler."""
        sampler = _core.Sampler(
            self.n_vocab,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            seed=self.seed,
        )
        if self.random_state is not None:
            sampler.random_state = self.random_state
        return sampler


@dataclass(frozen=True)
class Request:
    """What to generate from, and when to end."""

    prompt: Sequence[int]
    after: Snapshot | None
    sampling: Sampling
    max_tokens: int | None
    stop: Sequence[str]
    ignore_eos: bool
    policy: Policy | Sequence[Policy] | None = None  # of its sequence, instead of the session's
    record: Record | None = None  # what is to be written down of it

    @property
    def notes_logprobs(self) -> bool:
        """Whether the logits of its tokens are written down."""
        return self.record is not None and self.record.n_top is not None

    @property
    def greedy(self) -> bool:
        """Whether nothing is asked of the logits but the likeliest token."""
        sampling = self.sampling
        unchanged = sampling.repeat_penalty == 1 or sampling.repeat_last_n == 0
        return sampling.temperature == 0 and unchanged and not self.notes_logprobs

    def tokens(self) -> list[int]:
        """Of the snapshot it follows, and of the prompt."""
        return [*(() if self.after is None else self.after.tokens), *self.prompt]

    def within(self, n_ctx: int) -> Request:
        """The same request, which ends at n_ctx if it has no other limit, or after as many tokens
        if it is longer already."""
        if self.max_tokens is not None:
            return self
        left = n_ctx - len(self.tokens()) + 1  # the last one is not fed
        return replace(self, max_tokens=left if left > 0 else n_ctx)


def make_request(
    runtime: Runtime,
    seeds: random.Random,
    prompt: str | Sequence[int],
    *,
    after: Snapshot | None,
    policy: Policy | Sequence[Policy] | None,
    record: Record | None,
    max_tokens: int | None = None,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    top_p: float = Sampling.top_p,
    min_p: float = Sampling.min_p,
    repeat_penalty: float = Sampling.repeat_penalty,
    repeat_last_n: int = Sampling.repeat_last_n,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    ignore_eos: bool = False,
    parse_special: bool = False,
) -> Request:
    """A request as Generator.stream explains it, which also says what it raises.

    seeds: for requests that come without a seed.
    policy: of its sequence, instead of the policy of all.
    record: what is to be written down of it.
    """
    tokens = prompt_tokens(runtime, prompt, parse_special, after, endless=policy is not None)
    if max_tokens is not None:
        max_tokens = check_int("max_tokens", max_tokens, 1, None)
    stops = (stop,) if isinstance(stop, str) else () if stop is None else tuple(stop)
    if not all(stops):
        raise ValueError("stop has an empty string, which would end every text at once")
    random_state = None if after is None or seed is not None else after.random_state
    if seed is None:
        seed = seeds.getrandbits(64)
    sampling = Sampling(
        runtime.model.n_vocab,
        seed=check_int("seed", seed, 0, 2**64 - 1),
        random_state=random_state,
        temperature=check_float("temperature", temperature),
        top_k=check_int("top_k", top_k, 0),
        top_p=check_float("top_p", top_p),
        min_p=check_float("min_p", min_p),
        repeat_penalty=check_float("repeat_penalty", repeat_penalty),
        repeat_last_n=check_int("repeat_last_n", repeat_last_n, -1),
    )
    return Request(tokens, after, sampling, max_tokens, stops, ignore_eos, policy, record)


def is_batch(prompt: object) -> bool:
    """Whether it is a list of prompts, and not one prompt: a text, or a list of tokens."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return isinstance(prompt[0], str | Sequence | np.ndarray)


def make_requests(
    runtime: Runtime,
    seeds: random.Random,
    prompts: Sequence[str | Sequence[int]],
    each: Sequence[StreamOptions] | None,
    after: Snapshot | None,
    options: StreamOptions,
) -> list[Request]:
    """A request for every prompt; `each` has options of its own, before those for all."""
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of prompts, got a text")
    if each is None:
        each = [{}] * len(prompts)
    elif len(each) != len(prompts):
        raise ValueError(f"each has {len(each)} options for {len(prompts)} prompts")
    every: list[StreamOptions] = [{**options, **own} for own in each]
    return [
        make_request(runtime, seeds, prompt, after=after, policy=None, record=None, **own)
        for prompt, own in zip(prompts, every, strict=True)
    ]


def prompt_tokens(
    runtime: Runtime,
    prompt: str | Sequence[int],
    parse_special: bool,
    after: Snapshot | None,
    *,
    endless: bool = False,
) -> list[int]:
    """The tokens that a prompt adds to a snapshot, checked; endless: of any length."""
    before = 0 if after is None else len(after.tokens)
    if isinstance(prompt, str):
        tokens = runtime.tokenizer.encode(
            prompt, add_special=not before, parse_special=parse_special, begins=not before
        )
    elif isinstance(prompt, Collection) and not isinstance(prompt, _BYTES):
        tokens = [index(t) for t in prompt]
    else:
        raise TypeError(f"prompt must be text or token ids, got {type(prompt).__name__}")
    unread = before - (0 if after is None else after.n_read)
    if not unread and (len(prompt) == 0 or not tokens):
        raise ValueError(
            "the prompt is empty"
            + (", and the snapshot has no token left to go on from" if before else "")
        )
    n = before + len(tokens)
    if n > runtime.session.n_ctx and not (endless or runtime.endless):
        raise ContextFullError(f"the prompt has {n} tokens, {runtime.limit()}")
    check_vocabulary(tokens, runtime.model.n_vocab)
    return tokens


def text_tokens(runtime: Runtime, tokens: ArrayLike) -> NDArray[np.int32]:
    """The tokens of a text, checked."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        hint = "; tokenize() makes them of a text" if isinstance(tokens, str) else ""
        raise ValueError(f"tokens must be a non-empty sequence of token ids{hint}")
    if ids.size > runtime.session.n_ctx and not runtime.endless:
        raise ValueError(f"{ids.size} tokens, {runtime.limit()}")
    check_vocabulary(ids.tolist(), runtime.model.n_vocab)
    return ids.astype(np.int32)


def check_vocabulary(tokens: Iterable[int], n_vocab: int) -> None:
    """Raises ValueError for a token that is not in the vocabulary."""
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise ValueError(f"token {token} is not in the vocabulary of {n_vocab}")
