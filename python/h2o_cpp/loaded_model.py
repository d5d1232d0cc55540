"""LoadedModel: the part of a Generator without chats and snapshots."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp.generation.batch import run_batch
from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.embedding import embed
from h2o_cpp.generation.engine import Engine
from h2o_cpp.generation.request import (
    Pooling,
    Request,
    StreamOptions,
    is_batch,
    make_request,
    make_requests,
    show_options,
    text_tokens,
    token_ids,
)
from h2o_cpp.generation.snapshot import Snapshot
from h2o_cpp.generation.stats import Stats
from h2o_cpp.generation.stream import Generation, Stream
from h2o_cpp.model.arguments import check_int
from h2o_cpp.model.runtime import Runtime
from h2o_cpp.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LoadedModel(Closing):
    """A loaded model: its limits, tokenizer, logits, embeddings and cache. It continues prompts:
    one, many at once, or those of an Engine.
    """

    def __init__(self, runtime: Runtime, seed: int | None) -> None:
        self._open: Runtime | None = runtime
        self.policy = runtime.policy
        self._engine: Callable[[], Engine | None] = lambda: None  # the open one
        self._seeds = random.Random(seed)
        self._finalizer = weakref.finalize(self, runtime.engine.close)  # also at exit of Python

    def _runtime(self) -> Runtime:
        if self._open is None:
            raise RuntimeError("this Generator is closed")
        return self._open

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return Path(self._runtime().model.file.path)

    @property
    def n_ctx(self) -> int:
        """The context: the most tokens of a sequence, prompt included, unless it is endless."""
        return self._runtime().engine.session.n_ctx

    @property
    def n_ctx_train(self) -> int:
        """The trained length in tokens, and the largest n_ctx."""
        return self._runtime().model.n_ctx_train

    @property
    def endless(self) -> bool:
        """Whether an output can continue past n_ctx, with rolling positions."""
        return self._runtime().engine.endless

    @property
    def max_sequences(self) -> int:
        """The most sequences decoded at once."""
        return self._runtime().n_sequences

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self._runtime().model.n_vocab

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer."""
        return self._runtime().tokenizer

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Tokens of a text.

        add_special: add the tokens that the model expects around a text, such as beginning-of-text.
        parse_special: parse special tokens in the text, such as "</s>".
        """
        return self._runtime().tokenizer.encode(
            text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._runtime().tokenizer.decode(token_ids("tokens", tokens))

    def logits(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Logits after each of the n tokens of a text, float32 [n, n_vocab].

        The text is read like a prompt: in chunks of n_batch, each followed by eviction.

        Raises ValueError for no tokens, more than n_ctx tokens unless the Generator is `endless`,
        and tokens outside the vocabulary.
        """
        runtime = self._runtime()
        return runtime.engine.logits(text_tokens(runtime, tokens))

    def embed(
        self,
        text: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
    ) -> NDArray[np.float32]:
        """Embedding of a text or its tokens, float32 [n_embd]; of a list of n, [n, n_embd].

        pooling: the "mean" of the hidden states after the last norm, or that of the "last" token.
        normalize: scale to length 1.

        Texts are read like prompts: in chunks of n_batch, each followed by eviction.

        Raises as stream() does.
        """
        return embed(self._runtime(), text, pooling, normalize)

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

    def stats(self, *, layers: bool = False) -> Stats:
        """What the cache of the last stream holds; layers: also per layer and KV head."""
        runtime = self._runtime()
        engine = runtime.engine
        return Stats.of(runtime.model, engine.session, engine.last_sequence, layers=layers)

    def kept(self, layer: int, kv_head: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Kept positions of one KV head, ascending, int32 [n], and their scores, float32 [n].

        For the last stream. Raises ValueError for an unknown layer or KV head.
        """
        runtime = self._runtime()
        model, engine = runtime.model, runtime.engine
        layer = check_int("layer", layer, 0, model.n_layers - 1)
        kv_head = check_int("kv_head", kv_head, 0, model.n_kv_heads - 1)
        return engine.session.kept(layer, kv_head, engine.last_sequence)

    def close(self) -> None:
        """End all streams after the current token; free the model and the caches."""
        self._open = None
        self._finalizer()
