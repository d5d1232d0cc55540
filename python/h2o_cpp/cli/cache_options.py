"""Options that commands share: the cache, its types, and the number of sequences."""

from __future__ import annotations

import argparse
from typing import Any

from h2o_cpp import _core
from h2o_cpp.budget.policy import POLICIES
from h2o_cpp.cli.argument_types import amount, budget, context, integer, kv_types, number, shares
from h2o_cpp.cli.parser import Arguments, Parser
from h2o_cpp.options import USEFUL_SEQUENCES, Kind, option_names


def add_n_ctx(parser: Arguments, meaning: str, default: str, *aliases: str) -> None:
    parser.add_argument(
        "-c", "--n-ctx", "--ctx-size", *aliases, type=context, metavar="N",
        help=f"{meaning}; 0: the trained length (default: {default})",
    )  # fmt: skip


def add_n_batch(
    parser: Arguments,
    default: int | None,
    meaning: str = "prompt tokens read at a time (default: %(default)s)",
    *aliases: str,
) -> None:
    parser.add_argument(
        "-b",
        "--n-batch",
        "--batch-size",
        *aliases,
        type=integer,
        default=default,
        metavar="N",
        help=meaning,
    )


def add_max_sequences(parser: Arguments, meaning: str, *aliases: str) -> None:
    parser.add_argument(
        "--max-sequences", "-np", "--parallel", *aliases, type=integer, metavar="N", help=meaning
    )


def add_cache(
    parser: Parser, *, n_batch: int | None = None, memory: bool = False, policy: str | None = None
) -> None:
    """Add the options of the cache; n_batch is the default of --n-batch.

    memory: add --cache-memory and the archive, for open_generator.
    policy: of --hh without --policy, for open_generator.
    """
    parser.set_defaults(default_policy=policy)
    cache = parser.add_argument_group("cache")
    if memory:
        cache.add_argument(
            "--cache-memory",
            metavar="X",
            help="instead of --hh: bytes of each sequence's cache, a share of a full f16 cache "
            "(10%%) or a size (64MiB); keeps as many tokens as fit, in f16 or q8_0, by --policy or "
            "else contribution (default: --hh)",
        )
    cache.add_argument(
        "--hh",
        type=budget,
        metavar="X",
        help="keep a fraction (0.2 is 20%%) or a number (400) of tokens: half heavy "
        "hitters, half recent; auto: what advise stored in the file (default: all)",
    )
    cache.add_argument(
        "--recent",
        type=amount,
        metavar="X",
        help="recent part of --hh, a fraction or a number of tokens (default: half of --hh)",
    )
    cache.add_argument(
        "--policy",
        metavar="NAME",
        help=f"which tokens to keep: {', '.join(POLICIES)}; h2o is the paper's, contribution is "
        f"better on most texts (default: {policy or 'h2o'})",
    )
    add_n_ctx(
        cache,
        "the context: maximum length of a sequence, unless positions roll; a fraction --hh refers "
        "to it",
        f"the trained length, up to {_core.DEFAULT_N_CTX}",
    )
    cache.add_argument(
        "--positions",
        choices=("auto", "original", "rolling"),
        default="auto",
        help="positions of a rotary model: in the text (original) or among the kept tokens "
        "(rolling); auto: rolling past the trained length (default: %(default)s)",
    )
    usual, cuda = (_core.default_n_batch(device) for device in ("cpu", "cuda"))
    shown = f"{usual}, with CUDA {cuda}" if n_batch is None else n_batch
    add_n_batch(cache, n_batch, f"prompt tokens read at a time (default: {shown})")
    add_kv_dtype(cache)
    if memory:
        add_archive(cache)
        cache.add_argument(
            "--archive-dir",
            metavar="DIR",
            help="keep the archive in files in DIR, with disk space for n-ctx tokens per sequence "
            "(default: in memory)",
        )


def options_of(args: argparse.Namespace, kind: type[Kind]) -> Kind:
    """The options that the command has, as one value."""
    names = option_names(kind)
    return kind(**{name: value for name, value in vars(args).items() if name in names})


def add_sequences(parser: Parser | argparse._ArgumentGroup, meaning: str) -> None:
    """Add --max-sequences and --memory, for open_generator."""
    at_once = parser.add_mutually_exclusive_group()
    add_max_sequences(at_once, f"{meaning} (default: up to {USEFUL_SEQUENCES}, as memory allows)")
    at_once.add_argument(
        "--memory",
        metavar="SIZE",
        help="as many sequences as have caches that fit in SIZE, such as 4GiB",
    )


def add_kv_dtype(parser: Arguments, default: str | None = None) -> None:
    parser.add_argument(
        "--kv-dtype",
        type=kv_types,
        default=default,
        metavar="TYPE[,TYPE]",
        help="types of the cached K and V: f16, f32, bf16, q8_0, q5_0 (not on CUDA) or q4_0 "
        "(default: f16)",
    )
    for i, (short, long) in enumerate((("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v"))):
        parser.add_argument(
            short,
            long,
            action=_CacheType,
            const=i,
            dest="kv_dtype",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def add_archive(parser: Arguments, *, search: bool = False) -> None:
    """Add the archive's types, pages and heads; search: several shares of heads to choose from."""
    parser.add_argument(
        "--archive",
        type=kv_types,
        metavar="TYPE[,TYPE]",
        help="keep evicted tokens in host memory, in these types of --kv-dtype, in pages of 16; "
        "q3,q2 is the smallest, in pages of 32 (default: no archive)",
    )
    parser.add_argument(
        "--archive-pages",
        type=integer,
        metavar="N",
        help="archived pages that each token attends to (default: 0.75 * sqrt(n-ctx), 16 to 48)",
    )
    if search:
        parser.add_argument(
            "--archive-heads",
            type=shares,
            metavar="X,...",
            help="shares of the KV heads to try an archive of; auto: 0.1,0.2,1 if the heads "
            "command ranked them in the file, otherwise all (default: auto)",
        )
        return
    parser.add_argument(
        "--archive-heads",
        type=number,
        metavar="X",
        help="share of the KV heads with an archive, as the heads command ranked them in the file "
        "(default: all)",
    )


class _CacheType(argparse.Action):
    """llama.cpp's type of K (const 0) or V (const 1) alone."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        both = namespace.kv_dtype or "f16"
        pair = [both, both] if isinstance(both, str) else list(both)
        pair[self.const] = values
        namespace.kv_dtype = tuple(pair)
