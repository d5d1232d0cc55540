"""Generator: a model with a bounded cache that generates text."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from h2o_cpp.arguments import bytes_of, check_int
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.generation.batch import run_batch
from h2o_cpp.generation.closing import Closing
from h2o_cpp.generation.embedding import default_pooling, embed
from h2o_cpp.generation.engine import Engine
from h2o_cpp.generation.grammar import form_of
from h2o_cpp.generation.lazy_constraint import LazyConstraint
from h2o_cpp.generation.request import (
    Pooling,
    Protect,
    Request,
    StreamOptions,
    is_batch,
    make_request,
    make_requests,
    show_options,
    text_tokens,
    token_ids,
)
from h2o_cpp.generation.reranking import rerank
from h2o_cpp.generation.snapshot import Snapshot, SnapshotCache
from h2o_cpp.generation.stats import Stats
from h2o_cpp.generation.stream import Generation, Stream
from h2o_cpp.model.runtime import Runtime, open_runtime
from h2o_cpp.model.tokenizer import Tokenizer
from h2o_cpp.options import GeneratorArguments, GeneratorOptions, make_options, method_with

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o_cpp.model.chat_template import ChatTemplate
    from h2o_cpp.model.chat_turn import ChatTurn, Tool
    from h2o_cpp.model.template_messages import Message
    from h2o_cpp.model.truncation import Truncation
    from h2o_cpp.reply import Reply


class Generator(Closing):
    """Generates text from a GGUF model with a KV cache of bounded size.

    Thread-safe; several streams may run at once. It remains usable after a stream is dropped,
    closed or interrupted. After close(), every method raises RuntimeError.
    """

    @method_with(GeneratorArguments)
    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Load a model.

        path: a GGUF file; a directory with one, such as a downloaded repository or the Hub's cache;
            the name of a pulled model; or hf://org/name[/file.gguf][:TYPE][@revision], which is
            downloaded and needs the extra `pull`.
        hh: the budget, a fraction of n_ctx or a number of tokens (2 or more): half heavy hitters,
            half recent tokens. The paper's "H2O (20%)" is hh=0.2. None: the full cache. "auto":
            the budget, and archive, that `h2o-cpp advise` stored in the file.
        cache_memory: instead of hh, the bytes of each sequence's cache: a fraction of a full f16
            cache (0.1 or "10%") or a size ("64MiB"). Keeps all tokens, in f16 or else q8_0, if they
            fit; otherwise as many as fit in q8_0, chosen by `policy` (default "contribution").
        recent: the recent part of hh, a fraction of n_ctx or a number of tokens; default: half.
        policy: a name, for another choice of the hh tokens ("window", "sinks", "mean", ...: see
            h2o_cpp.policy.POLICIES); or, instead of hh, a Policy, or a list of one per layer.
        n_ctx: the context in tokens. A fraction hh refers to it, and an output ends there, prompt
            included, unless it is endless. Default: the trained length, at most 4096. 0: the
            trained length, which is also the maximum.
        positions: for rotary models. "original": in the text. "rolling": among the kept tokens, so
            that an output can be endless. "auto": original up to the trained length, then rolling,
            if the policy evicts. Models with learned positions, such as OPT, support only original.
        n_batch: prompt tokens per chunk. Eviction follows each chunk; within a chunk, attention is
            full. Default: 512, with CUDA 2048.
        kv_dtype: type of the cached keys and values, or a pair (K, V): "f16", "f32", "bf16" or,
            if the head size is divisible by 32, "q8_0", "q5_0" (not on CUDA) or "q4_0". Default:
            f16, unless cache_memory or hh="auto" chooses.
        device: "auto" (the CPU), "cpu", "cuda", "cuda:N", "vulkan" or "vulkan:N".
        threads: CPU threads; default: one per core.
        seed: makes the series of outputs reproducible; default: random.
        snapshot_bytes: most bytes, or a size, for the snapshots that read() keeps.
        max_sequences: the most sequences decoded at once; their caches are allocated now. Further
            requests wait. Default: up to 16 within half of the available memory, allocated when
            needed.
        memory: instead of max_sequences, the memory for all caches: "4GiB", or bytes.
        max_resident: most memory for weights on the device, "2GiB" or bytes. Layers that do not
            fit are read again in every forward pass, once for all sequences; for a mixture of
            experts, the most used experts stay, with CUDA those of the first layers. Default: all
            weights stay.
        exact: on the CPU, multiply with weights and in attention in float32, which is slower.
            By default, activations are rounded to 8 bits for quantized weights, and on some
            processors with F16 weights to bf16 (docs/precision.md).
        prefix_cache: most bytes, or a size, for states of prompts; 0: none. A prompt with the same
            prefix as an earlier one continues from its state, with the same output. States exist
            after any token with a full cache on a CPU, otherwise after a chunk of n_batch tokens
            or the end of a prompt that several requests share.
        prefix_cache_disk: a directory for states that are dropped from memory, and for all of them
            when the Generator closes. After a restart they are reused with the same model, options,
            kernels and version.
        prefix_cache_disk_bytes: most bytes, or a size, in that directory; default: 4 GiB.
        draft: guess the next tokens, and verify the guesses in one forward pass: the output is the
            same, bit for bit. "lookup": from earlier occurrences of the last tokens; "mtp": by the
            file's layer for multi-token prediction; otherwise by a smaller model with the same
            vocabulary, as for `path`. Where no gain is expected, nothing is guessed. Not with
            Vulkan, nor with layers that share a cache. None: no drafts.
        draft_max: the most tokens that are guessed at once, for all sequences together; default:
            16, or 4 if layers are recurrent; with CUDA 7 at most.
        draft_tokens: how many tokens of each text the cache of a draft model keeps, as hh.
        lossless: keep all tokens: the output is the full cache's, bit for bit. The budget (hh,
            recent and policy; default: draft_tokens) is that of a second cache, with which the
            model guesses the next tokens, so that the full cache is read once for several. Meant
            for contexts so long that reading it takes most of the time (docs/drafts.md). CPU only;
            not with draft, an archive, or layers that are recurrent, share a cache or have a
            window.
        prefix_ends: with a budget, also keep the states at the ends of outputs, as Chat does. An
            output then depends on whether such a state is still stored.
        archive: keep evicted tokens in host memory, in addition to the budget, in a type of
            kv_dtype ("q8_0") or a pair (K, V). The smallest is ("q3", "q2"), 19% of f16. Outputs
            then end at n_ctx. None: evicted tokens are lost.
        archive_pages: how many pages of 16 archived tokens (32 with keys in q3) each token attends
            to, per layer and KV head; the pages with the largest estimate of q.k are chosen. None:
            0.75 * sqrt(n_ctx), 16 to 48.
        archive_dir: a directory for the archive instead of memory. Each sequence has an unnamed
            file there, with disk space for n_ctx tokens allocated at the start. CPU only.
        archive_heads: the share of the KV heads (of layers without a window) that have an archive,
            those that `h2o-cpp heads` ranked first in the file. None: all.

        Raises FileNotFoundError; ValueError and TypeError for an invalid file or option; OSError if
        the Hub fails; MemoryError.
        """
        made = make_options(GeneratorOptions, options)
        runtime = open_runtime(ModelFile.find(path), made)
        self._open: Runtime | None = runtime
        self.policy = runtime.policy
        self._engine: Callable[[], Engine | None] = lambda: None  # the open one
        self._seeds = random.Random(made.seed)
        self._finalizer = weakref.finalize(self, runtime.engine.close)  # also at exit of Python
        self._snapshots = SnapshotCache(bytes_of("snapshot_bytes", made.snapshot_bytes, 0))

    def __repr__(self) -> str:
        if self._open is None:
            return "<Generator: closed>"
        return f"<Generator: {self.path.name}, n_ctx={self.n_ctx}, {self.policy}>"

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
    def has_archive(self) -> bool:
        """Whether evicted tokens are archived, so that later ones can attend to them."""
        return self._runtime().has_archive

    @property
    def max_sequences(self) -> int:
        """The most sequences decoded at once."""
        return self._runtime().n_sequences

    @property
    def default_pooling(self) -> Pooling:
        """The pooling of embed() by default; ValueError for a model that only scores pairs."""
        return default_pooling(self._runtime().pooling_type)

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder, such as BERT: it embeds or scores texts, but generates
        none."""
        return self._runtime().model.is_encoder

    @property
    def n_labels(self) -> int:
        """Labels that the model scores pairs of texts by; 0: it does not."""
        return self._runtime().model.n_labels

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
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> NDArray[np.float32]:
        """Embedding of a text or its tokens, float32 [n_embd]; of a list of n, [n, n_embd].

        pooling: the "mean" of the hidden states after the last norm, or that of the "last" token or
            the first ("cls"); by default as the file says, else the mean.
        normalize: scale to length 1.

        Texts are read like prompts: in chunks of n_batch, each followed by eviction. Encoders read
        them whole.

        Raises as stream() does.
        """
        return embed(self._runtime(), text, pooling, normalize)

    def rerank(self, query: str, documents: Sequence[str]) -> NDArray[np.float32]:
        """Relevance of each of the n documents to a query, float32 [n] from 0 to 1.

        Needs a model that scores pairs of texts, such as bge-reranker or Qwen3-Reranker. Raises
        ValueError for another one, and as stream() does.
        """
        return rerank(self._runtime(), query, documents)

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

        max_tokens=None: the most tokens to generate; None: n_ctx; -1: until the end of text. A
            sequence ends at n_ctx, with its prompt, unless the Generator is `endless`.
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
        protect=None: tokens of the prompt that are never evicted, inside the budget: "prompt", all
            of them; a number, the first ones; (first, last), both ends. Heavy hitters and recent
            tokens share the rest. With `after`, the number that the snapshot was read with.
        draft=True: False turns off the Generator's drafts.
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
    def chat(
        self,
        messages: Sequence[Message],
        *,
        continue_final_message: bool = False,
        template: str | None = None,
        truncation: Truncation = "error",
        **options: Unpack[StreamOptions],
    ) -> Stream:
        """Stream the assistant's reply to `messages`; options as for stream().

        messages: the conversation; each message is a mapping with "role" and "content".
        continue_final_message: the last message is the beginning of the assistant's reply, and the
            output is the rest.
        template: a Jinja2 chat template, its file, or the name of a built-in one; default: the
            model file's.
        truncation: "auto": if the conversation has more than n_ctx tokens and the Generator is not
            `endless`, its oldest turns are dropped, but never the system's messages or the last of
            the user. "error": ValueError.

        For several turns, use Chat, which keeps the cache between turns.

        Raises ValueError if there is no template or it rejects the messages, and as stream() does.
        """
        turn = self._fitting(
            self.chat_template(template),
            messages,
            truncation,
            continue_final_message=continue_final_message,
        )
        request = self._request(turn.prompt.tokens, None, options)
        return Stream(self._runtime, request.of_turn(turn))

    @show_options
    def reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template: str | None = None,
        tool_parser: str | None = None,
        truncation: Truncation = "error",
        **options: Unpack[StreamOptions],
    ) -> Reply:
        """The assistant's complete reply to `messages`: content, reasoning and tool calls, and the
        `generation` with token counts.

        tools: each {"type": "function", "function": {"name", "description", "parameters"}}; in the
            system's message if the template has no known format of calls.
        tool_choice: "required", or the name of the tool to call, which need the extra `grammar`;
            "none": the prompt has no tools. Default, "auto": the model decides.
        documents: passed to the template.
        continue_final_message: as for chat(); the last message decides how the rest is parsed, and
            a tool call that begins there is returned complete.
        tool_parser: the format of tool calls, a name from h2o_cpp.reply; default: from the
            template.

        Otherwise as chat().
        """
        turn = self._fitting(
            self.chat_template(template, tool_parser=tool_parser),
            messages,
            truncation,
            tools=None if tool_choice == "none" else tools,
            documents=documents,
            continue_final_message=continue_final_message,
        )
        must_call = tool_choice not in (None, "auto", "none")
        given = form_of(options)
        if must_call and given:
            raise ValueError(f"give either tool_choice or {given[0]}, not both")
        form = turn.form(
            must_call=must_call,
            called_tool=None if tool_choice == "required" else tool_choice,
            has_form=given is not None,
            is_free=not (options.get("ignore_eos") or options.get("constraint")),
        )
        if form.grammar is not None:
            options["grammar"] = form.grammar
        if form.trigger is not None:
            options["constraint"] = LazyConstraint(self.tokenizer, *form.trigger)
        request = make_request(
            self._runtime(), self._seeds, turn.prompt.tokens, options, around_form=form.around
        )
        request = replace(request.of_turn(turn), spelled=turn.template.spelled)
        with Stream(self._runtime, request) as stream:
            reply = turn.parse("".join(stream))
        reply.generation = stream.generation()
        return reply

    def _fitting(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        truncation: Truncation,
        **given: Any,
    ) -> ChatTurn:
        """The turn of a conversation, or of what fits; given: as for ChatTemplate.turn()."""
        from h2o_cpp.model.truncation import check_truncation, fitting_turn

        limited = check_truncation(truncation) == "auto" and not self.endless
        most = self.n_ctx if limited else None  # otherwise the engine says what does not fit
        return fitting_turn(template, messages, most=most, truncation=truncation, **given)

    def chat_template(
        self, template: str | None = None, *, tool_parser: str | None = None
    ) -> ChatTemplate:
        """The model file's chat template, or another one: its text, its file, or the name of a
        built-in one.

        tool_parser: as for reply().
        """
        from h2o_cpp.model.chat_template import ChatTemplate  # imported when first used

        return ChatTemplate(template, self._runtime().tokenizer, tool_parser=tool_parser)

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

    def read(
        self,
        prompt: str | Sequence[int],
        *,
        parse_special: bool = False,
        protect: Protect | None = None,
    ) -> Snapshot:
        """Read a common beginning of several prompts, such as a system prompt, and keep its state.

        Its tokens are evicted down to the budget; stream(..., after=snapshot) continues from there.
        While its snapshot is in memory (`snapshot_bytes`), the same prompt is not read again.

        protect: as for stream(), and the same number is for streams that continue from there.

        Raises as stream() does.
        """
        options: StreamOptions = {"parse_special": parse_special, "protect": protect}
        request = replace(self._request(prompt, None, options), max_tokens=0, keeps_cache=True)
        if not len(request.prompt):
            raise ValueError("the prompt is empty")
        is_shared = request.protect == (0, 0)  # otherwise another cache
        found = self._snapshots.get(request.prompt.tolist()) if is_shared else None
        if found is None:
            with Stream(self._runtime, request) as stream:
                for _ in stream:
                    pass
                found = stream.save()
            if is_shared:
                self._snapshots.add(found)
        return found

    def save(self, path: str | os.PathLike[str] | None = None) -> Snapshot:
        """A snapshot of the last stream, also written to `path`.

        Raises RuntimeError if there was no stream, or something else was computed since.
        """
        state = self._runtime().engine.last()
        if state is None:
            raise RuntimeError("nothing has been streamed yet")
        return Snapshot.take(state, path)

    def load(self, source: str | os.PathLike[str] | Snapshot) -> Snapshot:
        """A snapshot from a file or another Generator, for stream(..., after=...).

        Raises FileNotFoundError, and ValueError for a damaged file and for a snapshot of another
        model, policy or cache type.
        """
        snapshot = source if isinstance(source, Snapshot) else Snapshot.open(source)
        request = replace(self._request([], snapshot, {}), max_tokens=0)
        with Stream(self._runtime, request) as stream:  # raises if it does not fit the cache
            for _ in stream:
                pass
        return snapshot

    def stats(self, *, layers: bool = False) -> Stats:
        """Returns what the cache of the last stream holds; layers: also per layer and KV head."""
        runtime = self._runtime()
        return Stats.of(runtime.model, runtime.engine, layers=layers)

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
