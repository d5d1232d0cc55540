"""Options that commands share: the model, its cache, sampling, the machine and what is measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Protocol

from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.cli.argument_types import amount, budget, kv_types, names
from h2o_cpp.cli.files import read_text
from h2o_cpp.generation.request import Sampling, StreamOptions
from h2o_cpp.model.policy import POLICIES


class _Arguments(Protocol):
    """A parser, or a group of its arguments."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


# What find_model takes.
MODEL = "GGUF file, a directory that has one, or hf://org/name"

# What the options of Sampling mean.
_SAMPLING = {
    "temperature": "how random; 0 is greedy",
    "top_k": "choose from the N likeliest tokens; 0 is all",
    "top_p": "choose from the likeliest that share probability X; 1 is all",
    "min_p": "leave out those less than X times as likely as the first; 0 is none",
    "repeat_penalty": "for tokens that repeat; 1 is none",
    "repeat_last_n": "how many tokens back a repeat counts; -1 is all",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    add_model(parser)
    parser.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="generate at most N tokens; -1: until the text ends (default: %(default)s)",
    )

    add_cache(parser)

    sampling = parser.add_argument_group("sampling")
    for name, meaning in _SAMPLING.items():
        default: int | float = getattr(Sampling, name)
        sampling.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="N" if isinstance(default, int) else "X",
            help=f"{meaning} (default: %(default)s)",
        )
    sampling.add_argument(
        "-s",
        "--seed",
        type=int,
        metavar="N",
        help="the same seed gives the same text (default: different each time)",
    )
    sampling.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given again (default: none)",
    )
    sampling.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on after the end of text (default: end there)",
    )

    add_machine(parser, resident=True)


def add_model(parser: _Arguments) -> None:
    """Add --model."""
    parser.add_argument(
        "-m",
        "--model",
        default=BUNDLED_MODEL,
        metavar="MODEL",
        help=f"{MODEL} (default: the bundled tiny model)",
    )


def add_cache(parser: argparse.ArgumentParser, *, n_batch: int = 512) -> None:
    """Add the group of what the cache keeps; n_batch is the default of --n-batch."""
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--hh",
        type=budget,
        metavar="X",
        help="keep a fraction (0.2) or a number (400) of tokens: half heavy "
        "hitters, half recent; auto: what the file recommends (default: keep all)",
    )
    cache.add_argument(
        "--recent",
        type=amount,
        metavar="X",
        help="how much of it is recent tokens, a fraction or a number (default: half of --hh)",
    )
    cache.add_argument(
        "--policy",
        metavar="NAME",
        help=f"keep --hh by another policy, one of {','.join(POLICIES)} (default: h2o)",
    )
    cache.add_argument(
        "-c",
        "--n-ctx",
        type=int,
        metavar="N",
        help="the context: what --hh is a share of, and the most tokens of a text whose positions "
        "do not roll (default and limit: as trained)",
    )
    cache.add_argument(
        "--positions",
        choices=("auto", "original", "rolling"),
        default="auto",
        help="of a rotary model; auto: rolling past the trained length (default: %(default)s)",
    )
    cache.add_argument(
        "--n-batch",
        type=int,
        default=n_batch,
        metavar="N",
        help="prompt tokens read at a time (default: %(default)s)",
    )
    add_kv_dtype(cache)


def add_machine(parser: argparse.ArgumentParser, *, resident: bool = False) -> None:
    """Add the group of where to compute; with `resident`, --max-resident too."""
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N (default: %(default)s)",
    )
    if resident:
        machine.add_argument(
            "--max-resident",
            metavar="SIZE",
            help="most memory for weights on the device, such as 2GiB; layers that do not fit are "
            "read anew for every pass (default: all stay)",
        )
    add_threads(machine)


def add_policies(parser: _Arguments) -> None:
    """Add --policy, of those to compare."""
    parser.add_argument(
        "--policy",
        type=names,
        default=["h2o", "window", "sinks"],
        metavar="NAME,...",
        help=f"of {','.join(POLICIES)} (default: h2o,window,sinks); the full cache is always "
        "measured",
    )


def add_kv_dtype(parser: _Arguments) -> None:
    """Add --kv-dtype."""
    parser.add_argument(
        "--kv-dtype",
        type=kv_types,
        default="f16",
        metavar="TYPE[,TYPE]",
        help="of the cached K and V: f16, f32, bf16, q8_0 or q4_0 (default: %(default)s)",
    )


def add_threads(parser: _Arguments) -> None:
    """Add --threads."""
    parser.add_argument(
        "-t",
        "--threads",
        type=int,
        metavar="N",
        help="of the CPU (default: one for each core)",
    )


def add_csv(parser: _Arguments) -> None:
    """Add --csv, the file for write_csv."""
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write the table here too (default: nowhere)",
    )


def open_generator(
    args: argparse.Namespace, *, max_sequences: int | None = None, memory: str | None = None
) -> Generator:
    """The model as the arguments say, for so many sequences."""
    return Generator(
        args.model,
        hh=args.hh,
        recent=args.recent,
        policy=args.policy,
        positions=args.positions,
        n_ctx=args.n_ctx,
        n_batch=args.n_batch,
        kv_dtype=args.kv_dtype,
        device=args.device,
        threads=args.threads,
        max_sequences=max_sequences,
        memory=memory,
        max_resident=args.max_resident,
    )


def stream_options(args: argparse.Namespace) -> StreamOptions:
    """How to generate, as the arguments say."""
    return {
        "max_tokens": None if args.max_tokens == -1 else args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "repeat_last_n": args.repeat_last_n,
        "seed": args.seed,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
    }


def read_prompt(text: str, file: Path | None) -> str:
    """A text, or that of stdin ("-") or of a file without the last newline."""
    if file is not None:
        return read_text(file).removesuffix("\n")
    return sys.stdin.read().removesuffix("\n") if text == "-" else text
