"""Requests: a prompt with validated options."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import INT32_MAX, check_bool, check_int, check_strings, short
from h2o_cpp.budget.policy import Policy, core_policies
from h2o_cpp.generation.grammar import form_of, make_constraint
from h2o_cpp.generation.prompt_memory import NOTHING_DROPPED, PromptParts
from h2o_cpp.generation.record import Record
from h2o_cpp.generation.sampling import NUMBERS, default, make_sampling
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.options import Function, GeneratorOptions, option_names, show_arguments

if TYPE_CHECKING:
    from h2o_cpp.model.chat_turn import ChatTurn
    from h2o_cpp.model.runtime import Runtime

# Options of other engines -> options here.
_ELSEWHERE = {
    "do_sample": "temperature (0 is greedy)",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repetition_penalty": "repeat_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temp": "temperature",
}
_BYTES = bytes | bytearray | memoryview  # collections of integers that are not token ids

ENDLESS = -1  # as max_tokens

Pooling = Literal["mean", "last", "cls"]  # of the hidden states after the last norm
Pooled = Pooling | Literal["rank"]  # or the scores of labels by the last one

ContextFullError = _core.ContextFullError

# Called with the tokens so far and a mask of zeros with a bit per token of the vocabulary; sets the
# bits of allowed tokens: token t is bit t % 32 of mask[t // 32].
Constraint = Callable[[NDArray[np.int32], NDArray[np.uint32]], object]


Protect = int | Literal["prompt"] | tuple[int, int]  # see Generator.stream


class StreamOptions(TypedDict, total=False):
    """The options of Generator.stream, which documents them."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str] | None
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    samplers: Sequence[str] | None
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    parse_special: bool
    constraint: Constraint | None
    schema: Any
    grammar: str | None
    regex: str | None
    choice: Sequence[str] | None
    protect: Protect | None
    draft: bool


class SubmitOptions(StreamOptions, total=False):
    """The options of Engine.submit, which documents those that StreamOptions lacks."""

    hh: float | None
    policy: str | Policy | Sequence[Policy] | None
    after: Snapshot | None
    record: Record | None
    spelled: Sequence[int]
    pooling: Pooled | None
    around_form: str | None
    replies: Sequence[tuple[int, int]]


def show_options(function: Function, kind: type = StreamOptions) -> Function:
    """Make help() show the options in **options, of this kind, with their defaults."""
    defaults: dict[str, object] = dict.fromkeys(kind.__annotations__)
    defaults.update(ignore_eos=False, parse_special=False, draft=True, spelled=(), replies=())
    for name in NUMBERS:
        defaults[name] = default(name)
    kinds = kind.__annotations__.items()
    return show_arguments(
        function,
        {name: (defaults[name], getattr(one, "__forward_arg__", one)) for name, one in kinds},
    )


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it."""

    prompt: NDArray[np.int32]
    after: Snapshot | None
    sampling: _core.Sampling
    seeded: bool  # otherwise the random state of `after` continues
    max_tokens: int | None  # None: n_ctx; ENDLESS
    stop: Sequence[str]
    ignore_eos: bool
    constraint: Constraint | None
    policy: Policy | Sequence[Policy] | None = None  # of this sequence, instead of the session's
    record: Record | None = None  # collects data about the sequence
    keeps_cache: bool = False  # until it is saved, regardless of later sequences
    spelled: Sequence[int] = ()  # special tokens to include in the text
    pooling: Pooled | None = None  # compute the prompt's embedding instead of an output
    protect: tuple[int, int] = (0, 0)  # the first and the last tokens of the prompt
    drafts: bool = True  # if the engine has any
    replies: Sequence[tuple[int, int]] = ()  # parts of the prompt that earlier outputs generated
    parts: PromptParts = NOTHING_DROPPED  # of a conversation

    def of_turn(self, turn: ChatTurn) -> Request:
        """The request for a turn of a conversation, whose tokens the prompt has."""
        return replace(self, replies=turn.prompt.replies, parts=PromptParts.of(turn))

    def submit(
        self,
        engine: _core.Engine,
        *,
        eager: bool = False,
        group: int = 0,
        begin: bool = True,
        follows: _core.Generation | None = None,
    ) -> _core.Generation:
        """Submit the request. If eager and not `begin`, it starts with Engine.begin().

        Raises ValueError if the engine rejects it.
        """
        return engine.submit(
            self.prompt,
            after=None if self.after is None else self.after.data,
            follows=follows,
            sampling=self.sampling,
            seeded=self.seeded,
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_end=self.ignore_eos,
            spelled=self.spelled,
            policies=() if self.policy is None else core_policies(self.policy),
            protect=self.protect,
            replies=self.replies,
            trace=None if self.record is None else self.record.core,
            pooling=self.pooling or "none",
            constraint=self.constraint,
            drafts=self.drafts,
            keeps_cache=self.keeps_cache,
            eager=eager,
            group=group,
            begin=begin,
        )


def make_request(
    runtime: Runtime,
    seeds: random.Random,
    prompt: str | Sequence[int],
    options: StreamOptions,
    *,
    after: Snapshot | None = None,
    around_form: str | None = None,
    timeout: float | None = None,
) -> Request:
    """A validated request; prompt, options and errors as for Generator.stream.

    seeds: source of seeds for requests without one.
    around_form: as for Engine.submit.
    timeout: as for make_constraint.
    """
    check_names(options)
    if after is not None and not isinstance(after, Snapshot):
        raise TypeError(f"after={short(after)}, expected a Snapshot, from read() or load()")
    seed, constraint = options.get("seed"), options.get("constraint")
    if constraint is not None and not callable(constraint):
        raise TypeError(f"constraint={constraint!r}, expected a function of (tokens, mask)")
    form = form_of(options)
    if form is not None:
        constraint = make_constraint(runtime.tokenizer, *form, around=around_form, timeout=timeout)
    parse_special = check_bool("parse_special", options.get("parse_special", False))
    sampling = make_sampling(options)
    sampling.seed = seeds.getrandbits(64) if seed is None else check_int("seed", seed, 0, 2**64 - 1)
    return Request(
        _prompt_tokens(runtime, prompt, parse_special, after),
        after,
        sampling,
        seeded=seed is not None,
        max_tokens=_token_limit(options.get("max_tokens")),
        stop=_stop_strings(options.get("stop")),
        ignore_eos=check_bool("ignore_eos", options.get("ignore_eos", False)),
        constraint=constraint,
        protect=protected_ends(options.get("protect")),
        drafts=check_bool("draft", options.get("draft", True)),
    )


def make_requests(
    runtime: Runtime,
    seeds: random.Random,
    prompts: Sequence[str | Sequence[int]],
    each: Sequence[StreamOptions] | None,
    after: Snapshot | None,
    options: StreamOptions,
) -> list[Request]:
    """A request per prompt; `each` has options per prompt, which override `options`."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray):
        raise TypeError(f"prompts={short(prompts)}, expected a list of prompts")
    if each is None:
        each = [{}] * len(prompts)
    elif not isinstance(each, Sequence) or not all(isinstance(own, Mapping) for own in each):
        raise TypeError(f"each={short(each)}, expected a list of options, a dict for each prompt")
    elif len(each) != len(prompts):
        raise ValueError(f"each has {len(each)} options for {len(prompts)} prompts")
    every: list[StreamOptions] = [{**options, **own} for own in each]
    requests = [
        make_request(runtime, seeds, prompt, own, after=after)
        for prompt, own in zip(prompts, every, strict=True)
    ]
    for request in requests:
        request.submit(runtime.engine)  # validates only
    return requests


def is_batch(prompt: object, after: Snapshot | None = None) -> bool:
    """Whether it is a list of prompts rather than one prompt, which continues `after`.

    An empty list has no prompts; after a Snapshot, it is a prompt of no tokens.
    """
    if isinstance(prompt, np.ndarray) and (prompt.ndim != 1 or not prompt.size):
        return prompt.ndim > 1 or prompt.dtype.kind == "U"
    if not isinstance(prompt, list | tuple | np.ndarray):
        return False
    if not len(prompt):
        return after is None
    return isinstance(prompt[0], str | Sequence | np.ndarray)


def _prompt_tokens(
    runtime: Runtime, prompt: str | Sequence[int], parse_special: bool, after: Snapshot | None
) -> NDArray[np.int32]:
    """The tokens of a prompt, which continues `after`."""
    begins = after is None or not after.tokens
    if isinstance(prompt, str):
        if not prompt:  # not even a beginning-of-text token
            return np.zeros(0, np.int32)
        tokens = runtime.tokenizer.encode(
            prompt, add_special=begins, parse_special=parse_special, begins=begins
        )
    elif isinstance(prompt, Collection) and not isinstance(prompt, _BYTES):
        tokens = token_ids("prompt", prompt)
    else:
        raise TypeError(f"prompt must be text or token ids, got {type(prompt).__name__}")
    _check_vocabulary(tokens, runtime.model.n_vocab)
    return np.asarray(tokens, np.int32)


def text_tokens(runtime: Runtime, tokens: ArrayLike) -> NDArray[np.int32]:
    """Validated tokens of a text."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        hint = "; tokenize() makes them of a text" if isinstance(tokens, str) else ""
        raise ValueError(f"tokens must be a non-empty sequence of token ids{hint}")
    _check_vocabulary(ids.tolist(), runtime.model.n_vocab)
    return ids.astype(np.int32)


def token_ids(name: str, tokens: object) -> list[int]:
    """Token ids as ints. Raises TypeError naming the argument."""
    other = isinstance(tokens, str | _BYTES | Mapping | Set)
    if not isinstance(tokens, Collection) or other or getattr(tokens, "ndim", 1) == 0:
        raise TypeError(f"{name}={short(tokens)}, expected a list of token ids")
    if {*map(type, tokens)} <= {int}:  # in a fraction of the time
        return [*tokens]
    for i, token in enumerate(tokens):
        if isinstance(token, bool | np.ndarray) or not hasattr(token, "__index__"):
            raise TypeError(f"{name}[{i}]={short(token)}, expected a token id (an int)")
    return [index(token) for token in tokens]


def _check_vocabulary(tokens: Sequence[int], n_vocab: int) -> None:
    if not tokens or (min(tokens) >= 0 and max(tokens) < n_vocab):
        return
    wrong = next(token for token in tokens if not 0 <= token < n_vocab)
    raise ValueError(f"token {wrong} is not in the vocabulary of {n_vocab}")


def check_names(options: Mapping[str, object], *, others: bool = False) -> None:
    """Raises TypeError for names that are no StreamOptions, with a suggestion.

    others: allow those that are not similar to the name of an option.
    """
    names = StreamOptions.__annotations__
    for name in (name for name in options if name not in names):
        if name in option_names(GeneratorOptions):
            raise TypeError(f"{name} is an option of Generator, not of an output")
        from difflib import get_close_matches  # for an error

        close = get_close_matches(name, names, n=1, cutoff=0.8 if others else 0.6)
        meant = _ELSEWHERE.get(name, *close)
        if meant or not others:
            hint = f"; did you mean {meant}?" if meant else ""
            raise TypeError(f"there is no option {name!r}{hint}")


def check_sampling(options: StreamOptions) -> None:
    """Raises TypeError and ValueError for sampling options as Generator.stream does."""
    check_names(options)
    make_sampling(options)
    if options.get("seed") is not None:
        check_int("seed", options["seed"], 0, 2**64 - 1)


def _token_limit(max_tokens: int | None) -> int | None:
    if max_tokens is None:
        return None
    number = check_int("max_tokens", max_tokens, ENDLESS, None)
    if number == 0:
        raise ValueError("max_tokens=0, expected 1 or more, or -1 for no limit")
    return min(number, INT32_MAX)


def protected_ends(protect: object) -> tuple[int, int]:
    """The numbers of protected tokens at the beginning and the end of a prompt."""
    match protect:
        case None:
            return 0, 0
        case "prompt":
            return INT32_MAX, 0
        case [first, last]:
            return check_int("protect", first, 0), check_int("protect", last, 0)
        case str():
            raise ValueError(
                f"protect={protect!r}, expected 'prompt', a number of tokens or (first, last)"
            )
    return check_int("protect", protect, 0), 0


def _stop_strings(stop: object) -> list[str]:
    if stop is None:
        return []
    expected = "a string or a list of strings"
    strings = [stop] if isinstance(stop, str) else check_strings("stop", stop, expected)
    if not all(strings):
        raise ValueError("stop has an empty string, expected non-empty strings")
    for string in strings:
        try:
            string.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"stop={string!r} has an unpaired surrogate, expected valid Unicode"
            ) from None
    return [*strings]
