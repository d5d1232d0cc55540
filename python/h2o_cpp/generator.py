"""Generator: a model with its bounded cache, and text from it."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable, Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp import _core
from h2o_cpp.arguments import number, whole
from h2o_cpp.chat_template import ChatTemplate, Message
from h2o_cpp.policy import Policy, budget_policy
from h2o_cpp.session import Positions, chunks, open_session
from h2o_cpp.snapshot import Snapshot, SnapshotCache
from h2o_cpp.stats import Stats
from h2o_cpp.stream import (
    ContextFullError,
    Engine,
    Generation,
    Request,
    Stream,
    StreamOptions,
    Text,
)
from h2o_cpp.tokenizer import TextTokenizer
from h2o_cpp.turn import Turn

if TYPE_CHECKING:
    from typing_extensions import Unpack

_BYTES = bytes | bytearray | memoryview  # collections of integers that are no token ids


class Generator:
    """Streams text from a GGUF model within a fixed memory budget.

    Safe to share between threads: they take turns, one stream at a time. A stream that is dropped,
    closed or interrupted leaves it usable. Every method raises RuntimeError after close().
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        hh: float | None = None,
        recent: float | None = None,
        policy: str | Policy | Sequence[Policy] | None = None,
        n_ctx: int | None = None,
        positions: Positions = "auto",
        n_batch: int = 512,
        kv_dtype: str | tuple[str, str] = "f16",
        device: str = "auto",
        threads: int | None = None,
        seed: int | None = None,
        snapshot_bytes: int = 256 * 2**20,
    ) -> None:
        """Load a model.

        hh: what the cache keeps, a fraction of n_ctx or a number of tokens (2 or more); half heavy
            hitters and half recent tokens, as the paper's "H2O (20 %)" is hh=0.2. None: the full
            cache.
        recent: how much of hh is recent tokens instead of half, a fraction of n_ctx or a number.
        policy: the name of another way to keep hh ("window", "sinks", "mean", ...: see
            h2o_cpp.policy.POLICIES); or, instead of hh, a Policy, or one for each layer.
        n_ctx: the context, of which hh is a fraction; default and limit: as trained. A text ends
            there, prompt included, unless its positions can roll.
        positions: of the tokens of a rotary model. "original": where they are in the text.
            "rolling": their ranks among what the cache keeps, so that a text never ends. "auto":
            original up to the trained length, and then rolling, where the policy evicts. Models
            with learned positions, as OPT, have the original ones.
        n_batch: prompt tokens read at a time. A prompt up to this long is attended to in full and
            evicted after; a longer one is read in chunks with eviction after each.
        kv_dtype: type of the cached keys and values, or a pair (K, V): "f16", "f32", "bf16" or,
            where 32 divides the head size, "q8_0" or "q4_0".
        device: "auto", "cpu", "cuda" or "cuda:N".
        threads: of the CPU; default: one for each processor.
        seed: makes the whole series of generations repeatable; default: different each time.
        snapshot_bytes: most memory for snapshots of texts that were read(), 256 MiB.

        Raises FileNotFoundError, ValueError (a file or an option that makes no sense) and
        MemoryError.
        """
        by_name = policy is None or isinstance(policy, str)
        if not by_name and (hh is not None or recent is not None):
            raise ValueError("give either a Policy or hh, not both")
        n_threads = 0 if threads is None else whole("threads", threads, 1)
        n_batch = whole("n_batch", n_batch, 1)
        model = _core.Model(os.fspath(path), device=device, threads=n_threads)
        n_ctx = model.n_ctx_train if n_ctx is None else whole("n_ctx", n_ctx, 1)
        self.policy: Policy | Sequence[Policy] = (
            budget_policy(hh, recent, n_ctx, policy)
            if policy is None or isinstance(policy, str)
            else policy
        )
        tokenizer = TextTokenizer.of_model(model)
        session = open_session(
            model,
            self.policy,
            n_ctx=n_ctx,
            n_batch=n_batch,
            kv_dtype=kv_dtype,
            positions=positions,
        )
        self._open: Engine | None = Engine(model, session, tokenizer)
        self._turn = Turn()
        self._seeds = random.Random(seed)
        self._snapshots = SnapshotCache(whole("snapshot_bytes", snapshot_bytes, 0, None))

    def _engine(self) -> Engine:
        if self._open is None:
            raise RuntimeError("this Generator is closed")
        return self._open

    @property
    def n_ctx(self) -> int:
        """The context: the most tokens of a text, prompt included, unless it is endless."""
        return self._engine().session.n_ctx

    @property
    def endless(self) -> bool:
        """Whether a text can go on past n_ctx: its positions can roll."""
        return self._engine().session.can_roll(0)

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self._engine().model.n_vocab

    def __repr__(self) -> str:
        if self._open is None:
            return "<Generator: closed>"
        name = os.path.basename(self._open.model.file.path)
        return f"<Generator: {name}, n_ctx={self.n_ctx}, {self.policy}>"

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        parse_special: bool = False,
        after: Snapshot | None = None,
    ) -> Stream:
        """Continue `prompt`, a text or its tokens; iterate over the result for pieces of text.

        max_tokens: at most this many; default: until the end of text or of the context, if it
            has one (see `endless`).
        temperature: 0 is greedy. top_k, top_p, min_p: 0, 1 and 0 switch them off.
        repeat_penalty: for the last repeat_last_n tokens (-1: all); 1 is none.
        seed: the same seed, prompt and options give the same text.
        stop: strings that end the text; they are not part of it.
        ignore_eos: go on after the end-of-text token.
        parse_special: special tokens that the prompt spells, as "</s>", are those tokens.
        after: go on from this snapshot; the prompt then follows its text, and may be empty. Without
            a seed its random numbers go on too: the text is the one that would have been.

        Raises ValueError for an empty prompt, one longer than the context, and options out of
        range, TypeError for a prompt that is neither text nor token ids.
        """
        model = self._engine().model
        tokens = self._prompt(prompt, parse_special, after)
        if max_tokens is not None:
            max_tokens = whole("max_tokens", max_tokens, 1, None)
        stops = (stop,) if isinstance(stop, str) else () if stop is None else tuple(stop)
        if not all(stops):
            raise ValueError("stop has an empty string, which would end every text at once")
        random_state = None if after is None or seed is not None else after.random_state
        if seed is None:
            seed = self._seeds.getrandbits(64)
        sampler = _core.Sampler(
            model.n_vocab,
            temperature=number("temperature", temperature),
            top_k=whole("top_k", top_k, 0),
            top_p=number("top_p", top_p),
            min_p=number("min_p", min_p),
            repeat_penalty=number("repeat_penalty", repeat_penalty),
            repeat_last_n=whole("repeat_last_n", repeat_last_n, -1),
            seed=whole("seed", seed, 0, 2**64 - 1),
        )
        if random_state is not None:
            sampler.random_state = random_state
        request = Request(tokens, after, sampler, max_tokens, stops, ignore_eos)
        return Stream(self._engine, self._turn, request)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[StreamOptions]) -> Generation:
        """Continue `prompt` and return the whole text; options as for stream().

        Without max_tokens the text ends at n_ctx, endless or not.
        """
        after = options.get("after")
        tokens = self._prompt(prompt, options.get("parse_special", False), after)
        if options.get("max_tokens") is None:
            n_read = len(tokens) + (0 if after is None else len(after.tokens))
            options["max_tokens"] = max(1, self.n_ctx - n_read + 1)  # the last is not fed
        with self.stream(tokens, **options) as stream:
            text = "".join(stream)
        return Generation(
            text=text,
            finish_reason=stream.finish_reason or "cancelled",
            finish_message=stream.finish_message,
            prompt_tokens=stream.prompt_tokens,
            completion_tokens=len(stream.tokens),
            prompt_seconds=stream.prompt_seconds,
            decode_seconds=stream.decode_seconds,
        )

    def _prompt(
        self, prompt: str | Sequence[int], parse_special: bool, after: Snapshot | None
    ) -> list[int]:
        """The tokens that a prompt adds to a snapshot, checked."""
        engine = self._engine()
        before = 0 if after is None else len(after.tokens)
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt, add_special=not before, parse_special=parse_special)
        elif isinstance(prompt, Collection) and not isinstance(prompt, _BYTES):
            tokens = [index(t) for t in prompt]
        else:
            raise TypeError(f"prompt must be text or token ids, got {type(prompt).__name__}")
        unread = before - (0 if after is None else after.n_read)
        if not unread and (len(prompt) == 0 or not tokens):
            raise ValueError("the prompt is empty")
        n = before + len(tokens)
        if n > engine.session.n_ctx and not self.endless:
            raise ContextFullError(f"the prompt has {n} tokens, {engine.limit()}")
        _check_vocabulary(tokens, engine.model.n_vocab)
        return tokens

    def chat(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        **options: Unpack[StreamOptions],
    ) -> Stream:
        """Stream the assistant's reply to `messages`; options as for stream().

        messages: the conversation, each a mapping with "role" and "content".
        template: a Jinja2 chat template; default: the file's own.

        For a conversation of several turns, Chat keeps the cache from one to the next.

        Raises ValueError if there is no template or it refuses the messages, and as stream() does.
        """
        return self.stream(self.chat_template(template).tokens(messages), **options)

    def chat_template(self, template: str | None = None) -> ChatTemplate:
        """The file's chat template, or another one for the same vocabulary."""
        return ChatTemplate(template, self._engine().tokenizer)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Tokens of a text.

        add_special: with the tokens that the model wants around a text, as beginning-of-text.
        parse_special: special tokens that the text spells, as "</s>", are those tokens.
        """
        return self._engine().tokenizer.encode(
            text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        model, _, tokenizer = self._engine()
        _check_vocabulary(tokens, model.n_vocab)
        return tokenizer.decode(tokens)

    def logits(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Logits after each token of a text, float32 [n, n_vocab].

        The text is read as a prompt is: in chunks of n_batch, with eviction after each.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            hint = "; tokenize() makes them of a text" if isinstance(tokens, str) else ""
            raise ValueError(f"tokens must be a non-empty sequence of token ids{hint}")
        engine = self._engine()
        model, session, _ = engine
        if ids.size > session.n_ctx and not self.endless:
            raise ValueError(f"{ids.size} tokens, {engine.limit()}")
        _check_vocabulary(ids.tolist(), model.n_vocab)
        with self._turn.hold():
            session.reset(0)
            parts = chunks(session, ids.astype(np.int32))
            return np.concatenate([session.score(0, part) for part in parts])

    def read(self, prompt: str | Sequence[int], *, parse_special: bool = False) -> Snapshot:
        """Read a prompt that texts are going to begin with, as a system prompt, and keep it.

        The prompt is read on its own, and evicted to the budget; stream(..., after=snapshot) goes
        on from there. A prompt that was read before is not read again: its snapshot is still in
        memory, unless others have needed the room (`snapshot_bytes`).

        Raises as stream() does.
        """
        tokens = self._prompt(prompt, parse_special, None)
        with self._turn.hold():
            found = self._snapshots.get(tokens)
            if found is None:
                session = self._engine().session
                session.reset(0)
                for part in chunks(session, np.asarray(tokens, np.int32)):
                    session.step([(0, part)])
                found = Snapshot.take(session, tokens, random_state=None)
                self._snapshots.add(found)
            return found

    def save(self, path: str | os.PathLike[str] | None = None) -> Snapshot:
        """A snapshot of the text that was streamed last, also written to `path`.

        Raises RuntimeError if there is none.
        """
        with self._turn.hold(changes=False) as last:
            if not isinstance(last, Text):
                raise RuntimeError("nothing has been streamed yet")
            snapshot = last.snapshot(self._engine().session)
        if path is not None:
            snapshot.save(path)
        return snapshot

    def load(self, source: str | os.PathLike[str] | Snapshot) -> Snapshot:
        """A snapshot, of a file or another Generator, that stream(..., after=...) can go on from.

        Raises FileNotFoundError, and ValueError for a damaged file and for a snapshot of another
        model, policy or cache type.
        """
        snapshot = source if isinstance(source, Snapshot) else Snapshot.open(source)
        with self._turn.hold():
            self._engine().session.load(0, snapshot.data)
        return snapshot

    def stats(self, *, layers: bool = False) -> Stats:
        """What the cache holds now, measured; layers: with every layer and KV head of it."""
        model, session, _ = self._engine()
        return Stats.of(model, session, layers=layers)

    def kept(self, layer: int, kv_head: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Kept positions of a layer and KV head, ascending, and their scores."""
        model, session, _ = self._engine()
        layer = whole("layer", layer, 0, model.n_layers - 1)
        kv_head = whole("kv_head", kv_head, 0, model.n_kv_heads - 1)
        return session.kept(layer, kv_head, 0)

    def close(self) -> None:
        """Free model and cache; waits for another thread's stream, ends one of this thread."""
        with self._turn.hold():
            self._open = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_vocabulary(tokens: Iterable[int], n_vocab: int) -> None:
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise ValueError(f"token {token} is not in the vocabulary of {n_vocab}")
