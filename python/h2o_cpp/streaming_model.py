"""StreamingModel: the part of a Generator that continues prompts."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, overload

from h2o_cpp.generation.batch import run_batch
from h2o_cpp.generation.engine import Engine
from h2o_cpp.generation.request import (
    Request,
    StreamOptions,
    is_batch,
    make_request,
    make_requests,
    show_options,
)
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.stream import Generation, Stream
from h2o_cpp.loaded_model import LoadedModel
from h2o_cpp.model.runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StreamingModel(LoadedModel):
    """A loaded model that continues prompts: one, many at once, or those of an Engine."""

    def __init__(self, runtime: Runtime, seed: int | None) -> None:
        super().__init__(runtime)
        self._engine: Callable[[], Engine | None] = lambda: None  # the open one
        self._seeds = random.Random(seed)

    @show_options
    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        after: Snapshot | None = None,
        **options: Unpack[StreamOptions],
    ) -> Stream:
        """Continue `prompt`, a text or tokens; iterate over the result for pieces of text.

        after: continue from this snapshot; the prompt is appended to its text and may be empty.
            Without a seed, its random state continues too: the output equals that of an
            uninterrupted stream.

        Options, and their defaults:

        max_tokens=None: the most tokens to generate; None: up to n_ctx, or n_ctx more if the prompt
            is longer; -1: until the end of text, or up to n_ctx if the Generator is not `endless`.
        temperature=0.8: 0 is greedy.
        top_k=40, top_p=0.95, min_p=0.05: 0, 1 and 0 disable them.
        repeat_penalty=1.0: over the last repeat_last_n=64 tokens (-1: all); 1 disables it.
        frequency_penalty=0, presence_penalty=0: subtracted from the logits of these tokens, per
            occurrence and once.
        logit_bias=None: {token: bias}, added to the logits.
        dry_multiplier=0, dry_base=1.75, dry_allowed_length=2: a token that would extend a
            repetition of n tokens is penalized by multiplier * base ** (n - allowed_length).
        dry_penalty_last_n=-1: how many tokens back to search for repetitions; -1: the context.
        dry_sequence_breakers=None: strings whose tokens end a repetition; None: line breaks,
            colons, quotes and asterisks.
        typical_p=1, top_n_sigma=0: 1 and 0 disable them.
        xtc_probability=0, xtc_threshold=0.1: how often all tokens above the threshold, except the
            least likely of them, are removed.
        dynatemp_range=0, dynatemp_exponent=1: temperature plus or minus the range, by entropy.
        mirostat=0, mirostat_tau=5, mirostat_eta=0.1: version 1 or 2, instead of all filters.
        samplers=None: only these, in this order, by llama.cpp's names; "llama.cpp": its order.
            None: penalties, dry, top_n_sigma, temperature, top_k, typ_p, top_p, min_p, xtc.
        seed=None: the same seed, prompt and options give the same output.
        stop=None: strings that end the output and are not part of it. The first complete one
            counts; of several at once, the longest.
        ignore_eos=False: continue after the end-of-text token.
        parse_special=False: parse special tokens in the prompt's text, such as "</s>".
        constraint=None: a function that sets the allowed tokens; see generation.request.
        schema=None: the output is JSON that follows this schema: a dict, JSON text or a pydantic
            model. grammar=None: it matches this grammar, llama.cpp's GBNF or llguidance's Lark.
            regex=None: it matches completely. choice=None: it is one of these strings. At most one
            of these; needs the extra `grammar`. max_tokens may still truncate the output.

        Raises ValueError for an empty prompt, a prompt longer than n_ctx unless the Generator is
        `endless`, and options out of range; TypeError for a prompt that is neither text nor token
        ids.
        """
        return Stream(self._runtime, self._request(prompt, after, options))

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        after: Snapshot | None = None,
        **options: Unpack[StreamOptions],
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        each: Sequence[StreamOptions] | None = None,
        after: Snapshot | None = None,
        **options: Unpack[StreamOptions],
    ) -> list[Generation]: ...
    @show_options
    def generate(
        self,
        prompt: Any,
        *,
        each: Sequence[StreamOptions] | None = None,
        after: Snapshot | None = None,
        **options: Unpack[StreamOptions],
    ) -> Generation | list[Generation]:
        """Continue `prompt` and return the output; options as for stream().

        A list of prompts returns a list of outputs, computed together as by stream_many(), which
        also documents `each`. An empty list has no prompts, unless it continues `after`.
        """
        if each is not None or is_batch(prompt, after):
            requests = make_requests(self._runtime(), self._seeds, prompt, each, after, options)
            return [generation for _, generation in sorted(self.run(requests), key=itemgetter(0))]
        with self.stream(prompt, after=after, **options) as stream:
            for _ in stream:
                pass
        return stream.generation()

    def follow(self, last: Stream, prompt: Sequence[int], options: StreamOptions) -> Stream:
        """For Chat: append `prompt` to the cache of a stream that has ended, and continue."""
        request = self._request([*last.history, *prompt], None, options)
        return Stream(self._runtime, request, follows=last)

    @show_options
    def stream_many(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        each: Sequence[StreamOptions] | None = None,
        after: Snapshot | None = None,
        **options: Unpack[StreamOptions],
    ) -> Iterator[tuple[int, str]]:
        """Continue all prompts, `max_sequences` at a time; yields (prompt's index, piece of text).

        On the CPU, each output equals that of generate() bit for bit.

        each: options per prompt, which override the common ones. The rest as for stream().

        Raises as stream() does, before anything is computed.
        """
        runtime = self._runtime()
        requests = make_requests(runtime, self._seeds, prompts, each, after, options)
        pieces = run_batch(runtime.engine, requests, runtime.n_sequences)
        return ((piece.index, piece.text) for piece in pieces if piece.text)

    @show_options
    def request(
        self,
        prompt: str | Sequence[int],
        *,
        after: Snapshot | None = None,
        **options: Unpack[StreamOptions],
    ) -> Request:
        """A validated request for run(); options and errors as for stream()."""
        request = self._request(prompt, after, options)
        request.submit(self._runtime().engine)  # validate only
        return request

    def _request(
        self, prompt: str | Sequence[int], after: Snapshot | None, options: StreamOptions
    ) -> Request:
        return make_request(self._runtime(), self._seeds, prompt, options, after=after)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Generation]]:
        """Run requests, `max_sequences` at a time; yields (index, output) as each one ends.

        The iterable is read only as fast as requests can start, so it may be endless.
        """
        runtime = self._runtime()
        for piece in run_batch(runtime.engine, requests, runtime.n_sequences):
            if piece.last:
                yield piece.index, Generation.of(piece.state)

    def engine(self, *, max_queue: int = 64) -> Engine:
        """Open an Engine, for requests of many threads or asyncio tasks.

        The Generator's own streams still work.

        max_queue: the most requests waiting for a sequence.

        Raises RuntimeError if an Engine is already open.
        """
        engine = self._engine()
        if engine is not None and not engine.closed:
            raise RuntimeError("this Generator already has an open Engine, close it first")
        engine = Engine(self._runtime, self._seeds, max_queue=max_queue)
        self._engine = weakref.ref(engine)
        return engine
