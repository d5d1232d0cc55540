"""The options of Generator, each declared once: how caches are set up, the machine, the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from h2o_cpp import _core
from h2o_cpp.arguments import (
    KvDType,
    Positions,
    bytes_of,
    check_bool,
    check_context,
    check_float,
    check_int,
    check_positions,
    dtype_pair,
    short,
    thread_count,
)
from h2o_cpp.budget.cache_memory import ModelShape, fit_cache, slab_bytes
from h2o_cpp.budget.policy import Policy, choose_policy, core_policies
from h2o_cpp.budget.stored_budget import Budget, read_budget
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.files.visible_text import visible_log

_log = visible_log("h2o_cpp")

MAX_ROWS = 65536  # rows of an engine's batch
USEFUL_SEQUENCES = 16  # more at once hardly increase the speed on a CPU
_USEFUL_TEXTS = 64  # the same, of an encoder, which computes short texts whole
_DRAFTS = 16  # the most by default, see Config.default_drafts
_MOST_DRAFTS = 1024

P = ParamSpec("P")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound="Options")


class Options:
    """Declares options, each with its default, and checks them."""

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError, naming the option, if one is invalid for any model."""


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions(Options):
    """Where evicted tokens are kept, and how they are recalled. Generator documents the options."""

    archive: KvDType | None = None
    archive_pages: int | None = None
    archive_dir: str | os.PathLike[str] | None = None
    archive_heads: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in fields(ArchiveOptions):
            value = getattr(self, option.name)
            if self.archive is None and value is not None:
                raise ValueError(f"{option.name}={value!r} needs archive=, its type")
        if self.archive is not None:
            dtype_pair("archive", self.archive)
        if self.archive_pages is not None:
            check_int("archive_pages", self.archive_pages, 1)
        _directory("archive_dir", self.archive_dir)
        share = self.archive_heads
        if share is not None and not 0 < check_float("archive_heads", share) <= 1:
            raise ValueError(f"archive_heads={share!r}, expected a share above 0 and up to 1")


@dataclass(frozen=True, kw_only=True)
class CacheOptions(ArchiveOptions):
    """How the cache of each sequence is set up. Generator documents the options."""

    hh: Budget = None
    cache_memory: float | str | None = None
    recent: float | None = None
    policy: str | Policy | Sequence[Policy] | None = None
    n_ctx: int | None = None
    positions: Positions = "auto"
    n_batch: int | None = None
    kv_dtype: KvDType | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positions(self.positions)
        if self.n_batch is not None:
            check_int("n_batch", self.n_batch, 1)
        if isinstance(self.hh, str):
            if self.hh != "auto":
                raise ValueError(
                    f"hh={self.hh!r}, expected a fraction, a number of tokens or 'auto'"
                )
            for name in ("policy", "recent"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"hh='auto' includes a policy, expected hh as a number with {name}="
                    )
        named = self.policy is None or isinstance(self.policy, str)
        if self.cache_memory is not None and not (self.hh is self.recent is None and named):
            raise ValueError(
                "cache_memory cannot be combined with hh, recent or a Policy, expected at most a "
                "policy's name"
            )

    def for_model(self, file: ModelFile) -> CacheOptions:
        """The same options with nothing left to choose: `policy` is a Policy or one per layer,
        n_ctx and kv_dtype are known, and what `hh="auto"` takes from the file is included.

        Raises ValueError for options that do not suit the model.
        """
        if self.archive is not None and self.hh is self.cache_memory is self.policy is None:
            raise ValueError(
                f"archive={self.archive!r} needs a budget such as hh=0.2, which evicts tokens"
            )
        options = self
        if self.hh == "auto":
            stored = read_budget(file)
            if self.kv_dtype is not None:
                stored["kv_dtype"] = self.kv_dtype
            if self.archive is not None:
                stored = {name: stored[name] for name in stored if "archive" not in name}
            options = replace(self, **stored)
        n_ctx = check_context(self.n_ctx, file.config.n_ctx_train)
        positions = self.positions
        if options.archive is not None and positions == "auto":
            positions = "original"  # as the core does with an archive
        policy: Policy | Sequence[Policy]
        if self.cache_memory is not None and file.config.is_encoder:
            raise ValueError(
                f"cache_memory={self.cache_memory!r} is for caches, and an encoder has none"
            )
        if self.cache_memory is not None:
            policy, kv_dtype = fit_cache(
                ModelShape.of(file.config),
                self.cache_memory,
                self.policy if isinstance(self.policy, str) else None,
                n_ctx=n_ctx,
                kv_dtype=self.kv_dtype,
                positions=positions,
            )
        else:
            assert not isinstance(options.hh, str)
            kv_dtype = "f16" if options.kv_dtype is None else options.kv_dtype
            policy = choose_policy(options.hh, options.recent, options.policy, n_ctx)
        return replace(
            options, hh=None, cache_memory=None, recent=None, policy=policy, n_ctx=n_ctx,
            positions=positions, kv_dtype=kv_dtype,
        )  # fmt: skip

    def resolve(self, file: ModelFile) -> _core.SessionOptions:
        """For the core, with one sequence. Raises as for_model() does."""
        return self.for_model(file).core()

    def slab_bytes(self, file: ModelFile) -> int:
        """Bytes of one sequence's cache; n sequences need at most n times as much. 0: an encoder,
        which has none."""
        if file.config.is_encoder:
            return 0
        chosen = self.for_model(file)
        return slab_bytes(
            ModelShape.of(file.config),
            chosen.policies,
            n_ctx=chosen.context,
            kv_dtype=chosen.types,
            positions=chosen.positions,
        )

    def rows_on(self, device: str) -> int:
        """n_batch, or the default of a device, as Generator or the core names it."""
        return _core.default_n_batch(device) if self.n_batch is None else self.n_batch

    def core(self) -> _core.SessionOptions:
        """For the core, with one sequence; `policy` and `n_ctx` must be known."""
        options = _core.SessionOptions()
        options.policies = core_policies(self.policies)
        options.n_ctx = check_int("n_ctx", self.context, 1)
        options.n_batch = self.n_batch or 0  # what suits the device
        options.n_sequences = 1
        options.set_dtypes(*dtype_pair("kv_dtype", self.types))
        options.set_positions(self.positions)
        if self.archive is not None:
            options.set_archive(
                *dtype_pair("archive", self.archive),
                pages=self.archive_pages or 0,
                directory=_directory("archive_dir", self.archive_dir),
                heads=1.0 if self.archive_heads is None else self.archive_heads,
            )
        return options

    @property
    def policies(self) -> Policy | Sequence[Policy]:
        """`policy` after for_model()."""
        if self.policy is None or isinstance(self.policy, str):
            raise TypeError(f"policy={self.policy!r}, expected a Policy, or a list of them")
        return self.policy

    @property
    def context(self) -> int:
        """`n_ctx` after for_model()."""
        if self.n_ctx is None:
            raise TypeError("n_ctx is missing, expected a number of tokens")
        return self.n_ctx

    @property
    def types(self) -> KvDType:
        """`kv_dtype`, or its default."""
        return "f16" if self.kv_dtype is None else self.kv_dtype


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options):
    """Where a model is computed. Generator documents the options."""

    device: str = "auto"
    threads: int | None = None
    max_resident: int | str | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)
        thread_count(self.threads)
        check_bool("exact", self.exact)
        _ = self.resident_bytes

    @property
    def resident_bytes(self) -> int:
        """max_resident in bytes; 0: no limit."""
        return 0 if self.max_resident is None else bytes_of("max_resident", self.max_resident)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """How many sequences run, and which states are kept. Generator documents the options."""

    seed: int | None = None
    snapshot_bytes: int | str = 256 * 2**20
    max_sequences: int | None = None
    memory: int | str | None = None
    prefix_cache: int | str = 256 * 2**20
    prefix_cache_disk: str | os.PathLike[str] | None = None
    prefix_cache_disk_bytes: int | str | None = None
    prefix_ends: bool = False
    draft: str | os.PathLike[str] | None = None
    draft_max: int | None = None
    draft_tokens: int = 512
    lossless: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            # random.Random takes no integer of NumPy.
            object.__setattr__(self, "seed", check_int("seed", self.seed, 0, None))
        bytes_of("snapshot_bytes", self.snapshot_bytes, 0)
        if self.memory is not None and self.max_sequences is not None:
            raise ValueError("give either max_sequences or memory, not both")
        if self.max_sequences is not None:
            check_int("max_sequences", self.max_sequences, 1)
        size = self.prefix_cache_disk_bytes
        if size is not None and self.prefix_cache_disk is None:
            raise ValueError(
                f"prefix_cache_disk_bytes={size!r} needs prefix_cache_disk, the directory"
            )
        self.prefixes()
        if self.draft is not None and not isinstance(self.draft, str | os.PathLike):
            raise TypeError(f"draft={self.draft!r}, expected 'lookup', 'mtp', a model or None")
        if self.draft_max is not None:
            check_int("draft_max", self.draft_max, 1, _MOST_DRAFTS)
        check_int("draft_tokens", self.draft_tokens, 1)
        if check_bool("lossless", self.lossless) and self.draft is not None:
            raise ValueError(
                f"draft={self.draft!r} cannot be combined with lossless, which has its own drafts"
            )

    @property
    def max_drafts(self) -> int:
        """Rows of a step that may be drafts, at most."""
        if not self.lossless and self.draft is None:
            return 0
        return _DRAFTS if self.draft_max is None else self.draft_max

    def max_drafts_of(self, file: ModelFile) -> int:
        """Rows of a step of a model that may be drafts."""
        usual = self.draft_max is None and self.max_drafts > 0
        return file.config.default_drafts if usual else self.max_drafts

    @property
    def draft_model(self) -> str | os.PathLike[str] | None:
        """The model that proposes drafts, if one does."""
        return None if self.draft in ("lookup", "mtp") else self.draft

    def sequences(self, each: int, n_batch: int) -> tuple[int, int]:
        """The most sequences at once, and how many of them are allocated at the beginning.

        each: bytes of a sequence's cache; 0: an encoder.
        """
        most = _most_sequences(n_batch + self.max_drafts)
        if each == 0:
            if self.memory is not None:
                raise ValueError(f"memory={self.memory!r} is for caches, and an encoder has none")
            n = self.max_sequences or min(_USEFUL_TEXTS, most)
            return n, n
        if self.memory is not None:
            n = min(bytes_of("memory", self.memory) // each, most)
            if n == 0:
                raise ValueError(
                    f"memory={self.memory!r} is too small for the cache of one sequence"
                )
            return n, n
        if self.max_sequences is None:  # allocated when needed
            return max(1, min(USEFUL_SEQUENCES, _core.available_memory() // 2 // each, most)), 1
        return self.max_sequences, self.max_sequences

    def prefixes(self) -> _core.PrefixCacheOptions:
        """For the core."""
        options = _core.PrefixCacheOptions()
        options.max_bytes = bytes_of("prefix_cache", self.prefix_cache, 0)
        options.ends = check_bool("prefix_ends", self.prefix_ends)
        if directory := _directory("prefix_cache_disk", self.prefix_cache_disk):
            size = self.prefix_cache_disk_bytes
            default = _core.DEFAULT_PREFIX_DISK_BYTES
            n_bytes = bytes_of("prefix_cache_disk_bytes", default if size is None else size, 0)
            options.set_disk(directory, n_bytes, _log.warning)
        return options


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions(CacheOptions, MachineOptions, EngineOptions):
    """All options of Generator, which documents them."""

    def __post_init__(self) -> None:
        if self.n_batch is not None:
            check_int("n_batch", self.n_batch, 1, MAX_ROWS)
        super().__post_init__()
        budget = (self.hh, self.recent, self.cache_memory, self.policy)
        if self.lossless and all(part is None for part in budget):
            object.__setattr__(self, "hh", self.draft_tokens)
        n_batch = check_int("n_batch", self.rows_on(self.device), 1, MAX_ROWS - self.max_drafts)
        most = _most_sequences(n_batch + self.max_drafts)
        if self.max_sequences is not None and self.max_sequences > most:
            raise ValueError(
                f"max_sequences={self.max_sequences}, expected at most {most} with "
                f"n_batch={n_batch}"
            )

    @property
    def policy_name(self) -> str | None:
        """The name of the policy; None if it has none."""
        return self.policy if isinstance(self.policy, str) else None

    def with_policy(self, policy: str | None) -> GeneratorOptions:
        """These options, with this policy if they have a budget without one.

        A lossless draft's cache keeps the paper's: it is filled from another, without values.
        """
        has_budget = self.hh not in (None, "auto") and self.recent is None and self.policy is None
        if policy is None or self.lossless or not has_budget:
            return self
        return replace(self, policy=policy)


def _most_sequences(n_rows: int) -> int:
    """The most sequences, each with a row of a step in addition to a chunk and drafts."""
    return MAX_ROWS - n_rows + 1


@dataclass(frozen=True, kw_only=True)
class GeneratorArguments(GeneratorOptions):
    """The arguments of Generator, for type checkers."""

    path: str | os.PathLike[str] = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class _CapacityArguments(CacheOptions):
    """The arguments of capacity(), for type checkers."""

    model: str | os.PathLike[str] = field(kw_only=False)
    memory: int | str = field(kw_only=False)


def option_names(options: type[Options]) -> list[str]:
    """The names of options, in the order of their classes."""
    declared = (vars(one).get("__annotations__", {}) for one in options.__mro__)
    return [name for names in declared for name in names]


def make_options(kind: type[Kind], options: Mapping[str, Any]) -> Kind:
    """Options from keyword arguments. Raises TypeError for unknown names, with a suggestion, and
    as `kind` does."""
    names = option_names(kind)
    for name in options:
        if name not in names:
            from difflib import get_close_matches  # for an error

            close = get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"there is no option {name!r}{hint}")
    return kind(**options)


def method_with(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Declares that a method takes these arguments, where it has **options."""
    return partial(_with, arguments)  # type: ignore[arg-type]


def function_with(
    arguments: Callable[P, object],
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Declares that a function takes these arguments, where it has **options."""
    return partial(_with, arguments)  # type: ignore[arg-type]


def _with(arguments: type[Options], function: Function) -> Function:
    declared = {one.name: one for one in fields(arguments)}  # type: ignore[arg-type]
    named = {name: declared[name] for name in option_names(arguments)}
    return show_arguments(function, {name: (one.default, one.type) for name, one in named.items()})


def show_arguments(function: Function, arguments: Mapping[str, tuple[object, object]]) -> Function:
    """Makes help() show these arguments in **options, each with its default and type."""
    shown = signature(function)
    others = [p for p in shown.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (default, kind) in arguments.items()
        if name not in shown.parameters
    ]
    vars(function)["__signature__"] = shown.replace(parameters=[*others, *options])
    return function


@function_with(_CapacityArguments)
def capacity(model: str | os.PathLike[str], memory: int | str, **options: Any) -> int:
    """How many sequences' caches fit in `memory`: "4GiB", "1.5GB" or a number of bytes; may be 0.

    The memory is only for caches, not for weights, activations and archives. The other arguments
    are those of Generator.

    Raises FileNotFoundError and ValueError.
    """
    n_bytes = bytes_of("memory", memory)
    each = make_options(CacheOptions, options).slab_bytes(ModelFile.find(model))
    if each == 0:
        raise ValueError(f"{model}: an encoder, which has no cache")
    return n_bytes // each


def check_device(device: object) -> str:
    """A device's name. Raises TypeError; the core checks which devices exist."""
    if not isinstance(device, str):
        names = "'auto', 'cpu', 'cuda', 'cuda:N', 'vulkan' or 'vulkan:N'"
        raise TypeError(f"device={device!r}, expected {names}")
    return device


def _directory(name: str, directory: str | os.PathLike[str] | None) -> str:
    """The path of an optional directory; "" for None.

    Raises ValueError for an empty path, and TypeError for what is no path.
    """
    if directory is None:
        return ""
    if not isinstance(directory, str | bytes | os.PathLike):
        raise TypeError(f"{name}={short(directory)}, expected a directory")
    path = os.fspath(directory)
    if not path:
        raise ValueError(f"{name} is empty, expected a directory")
    return path
