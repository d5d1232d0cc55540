"""Generator: a model with a bounded cache that generates text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from h2o_cpp.generation.grammar import form_of
from h2o_cpp.generation.request import StreamOptions, make_request, show_options
from h2o_cpp.generation.snapshot import Snapshot, SnapshotCache
from h2o_cpp.generation.stream import Stream
from h2o_cpp.loaded_model import LoadedModel
from h2o_cpp.model.arguments import bytes_of, check_bool, check_int
from h2o_cpp.model.chat_template import ChatTemplate, Tool, tool_schemas
from h2o_cpp.model.device import model_and_cache_bytes, open_on_device
from h2o_cpp.model.policy import Policy
from h2o_cpp.model.runtime import open_runtime
from h2o_cpp.model.session import Positions
from h2o_cpp.model.stored_budget import Budget
from h2o_cpp.model.template_messages import Message
from h2o_cpp.reply import Reply, parse_reply

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Generator(LoadedModel):
    """Generates text from a GGUF model with a KV cache of bounded size.

    Thread-safe; several streams may run at once. It remains usable after a stream is dropped,
    closed or interrupted. After close(), every method raises RuntimeError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        hh: Budget = None,
        cache_memory: float | str | None = None,
        recent: float | None = None,
        policy: str | Policy | Sequence[Policy] | None = None,
        n_ctx: int | None = None,
        positions: Positions = "auto",
        n_batch: int = 512,
        kv_dtype: str | tuple[str, str] | None = None,
        device: str = "auto",
        threads: int | None = None,
        seed: int | None = None,
        snapshot_bytes: int | str = 256 * 2**20,
        max_sequences: int | None = None,
        memory: int | str | None = None,
        max_resident: int | str | None = None,
        exact: bool = False,
        prefix_cache: int | str = 256 * 2**20,
        prefix_cache_disk: str | os.PathLike[str] | None = None,
        prefix_cache_disk_bytes: int | str | None = None,
        prefix_ends: bool = False,
        archive: str | tuple[str, str] | None = None,
        archive_pages: int | None = None,
        archive_dir: str | os.PathLike[str] | None = None,
        archive_heads: float | None = None,
    ) -> None:
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
            full.
        kv_dtype: type of the cached keys and values, or a pair (K, V): "f16", "f32", "bf16" or,
            if the head size is divisible by 32, "q8_0", "q5_0" (CPU) or "q4_0". Default: f16,
            unless cache_memory or hh="auto" chooses.
        device: "auto" (the CPU), "cpu", "cuda" or "cuda:N".
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
        exact: on the CPU, multiply F16 and BF16 weights, and in attention, in float32, even if
            faster products exist, which round activations and F16 weights to bf16
            (docs/precision.md).
        prefix_cache: most bytes, or a size, for states of prompts; 0: none. A prompt with the same
            prefix as an earlier one continues from its state, with the same output. States exist
            after any token with a full cache on a CPU, otherwise after a chunk of n_batch tokens
            or the end of a prompt that several requests share.
        prefix_cache_disk: a directory for states that are dropped from memory, and for all of them
            when the Generator closes. After a restart they are reused with the same model, options,
            kernels and version.
        prefix_cache_disk_bytes: most bytes, or a size, in that directory; default: 4 GiB.
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
        if seed is not None:
            seed = check_int("seed", seed, 0, None)
        snapshot_bytes = bytes_of("snapshot_bytes", snapshot_bytes, 0)
        sizes: Any = {
            "hh": hh,
            "cache_memory": cache_memory,
            "recent": recent,
            "policy": policy,
            "n_ctx": n_ctx,
            "kv_dtype": kv_dtype,
            "positions": positions,
            "max_resident": max_resident,
        }
        open_on = partial(
            open_runtime,
            path,
            **sizes,
            n_batch=n_batch,
            threads=threads,
            max_sequences=max_sequences,
            memory=memory,
            exact=exact,
            prefix_cache=bytes_of("prefix_cache", prefix_cache, 0),
            prefix_cache_disk=prefix_cache_disk,
            prefix_cache_disk_bytes=prefix_cache_disk_bytes,
            prefix_ends=check_bool("prefix_ends", prefix_ends),
            archive=archive,
            archive_pages=archive_pages,
            archive_dir=archive_dir,
            archive_heads=archive_heads,
        )
        needed = partial(model_and_cache_bytes, path, **sizes)
        super().__init__(open_on_device(device, lambda name: open_on(device=name), needed), seed)
        self._snapshots = SnapshotCache(snapshot_bytes)

    def __repr__(self) -> str:
        if self._open is None:
            return "<Generator: closed>"
        return f"<Generator: {self.path.name}, n_ctx={self.n_ctx}, {self.policy}>"

    @show_options
    def chat(
        self,
        messages: Sequence[Message],
        *,
        continue_final_message: bool = False,
        template: str | None = None,
        **options: Unpack[StreamOptions],
    ) -> Stream:
        """Stream the assistant's reply to `messages`; options as for stream().

        messages: the conversation; each message is a mapping with "role" and "content".
        continue_final_message: the last message is the beginning of the assistant's reply, and the
            output is the rest.
        template: a Jinja2 chat template, its file, or the name of a built-in one; default: the
            model file's.

        For several turns, use Chat, which keeps the cache between turns.

        Raises ValueError if there is no template or it rejects the messages, and as stream() does.
        """
        chat = self.chat_template(template)
        prompt = chat.prompt(messages, continue_final_message=continue_final_message)
        return self.stream(prompt.tokens, **options)

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
        **options: Unpack[StreamOptions],
    ) -> Reply:
        """The assistant's complete reply to `messages`: content, reasoning and tool calls.

        tools: each {"type": "function", "function": {"name", "description", "parameters"}}; the
            template must support them.
        tool_choice: "required", or the name of the tool to call, which need the extra `grammar`;
            "none": the prompt has no tools. Default, "auto": the model decides.
        documents: passed to the template.
        continue_final_message: as for chat(); the last message decides how the rest is parsed, and
            a tool call that begins there is returned complete.
        tool_parser: the format of tool calls, a name from h2o_cpp.reply; default: from the
            template.

        Otherwise as chat().
        """
        chat = self.chat_template(template, tool_parser=tool_parser)
        if tool_choice == "none":
            tools = None
        schemas = tool_schemas(tools)
        prompt = chat.prompt(
            messages,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
        )
        runtime = self._runtime()
        inside: Any = {"thinking": prompt.thinking, "begun": prompt.begun}
        form, around_form = form_of(options), None
        if tool_choice not in (None, "auto", "none"):
            if form:
                raise ValueError(f"give either tool_choice or {form[0]}, not both")
            name = None if tool_choice == "required" else tool_choice
            options["grammar"] = chat.call_grammar(tools or (), name=name, **inside)
        elif form:
            around_form = chat.form_grammar(tools or (), **inside)
        request = make_request(
            runtime,
            self._seeds,
            prompt.tokens,
            options,
            spelled=chat.spelled,
            around_form=around_form,
        )
        with Stream(self._runtime, request) as stream:
            return parse_reply("".join(stream), chat.format, tools=schemas, **inside)

    def chat_template(
        self, template: str | None = None, *, tool_parser: str | None = None
    ) -> ChatTemplate:
        """The model file's chat template, or another one: its text, its file, or the name of a
        built-in one.

        tool_parser: as for reply().
        """
        return ChatTemplate(template, self._runtime().tokenizer, tool_parser=tool_parser)

    def read(self, prompt: str | Sequence[int], *, parse_special: bool = False) -> Snapshot:
        """Read a common beginning of several prompts, such as a system prompt, and keep its state.

        Its tokens are evicted down to the budget; stream(..., after=snapshot) continues from there.
        While its snapshot is in memory (`snapshot_bytes`), the same prompt is not read again.

        Raises as stream() does.
        """
        options: StreamOptions = {"parse_special": parse_special}
        request = replace(self._request(prompt, None, options), max_tokens=0, keeps_cache=True)
        if not len(request.prompt):
            raise ValueError("the prompt is empty")
        found = self._snapshots.get(request.prompt.tolist())
        if found is None:
            with Stream(self._runtime, request) as stream:
                for _ in stream:
                    pass
                found = stream.save()
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
