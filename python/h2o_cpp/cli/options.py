"""Options of the commands that generate: the model, its cache, sampling and the machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from h2o_cpp import Generator, _core
from h2o_cpp.stream import StreamOptions

# The CMake install puts the bundled model beside the extension.
BUNDLED_MODEL = Path(_core.__file__).parent / "models" / "tiny-opt.gguf"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument(
        "-m",
        "--model",
        type=Path,
        default=BUNDLED_MODEL,
        metavar="FILE",
        help="GGUF file (default: the bundled tiny model)",
    )
    parser.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="generate at most N tokens (default: %(default)s)",
    )

    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--hh",
        type=_amount,
        metavar="X",
        help="keep a fraction (0.2) or a number (400) of tokens: half heavy "
        "hitters, half recent (default: keep all)",
    )
    cache.add_argument(
        "--recent", type=_amount, metavar="X", help="how much of it is recent tokens"
    )
    cache.add_argument("--n-ctx", type=int, metavar="N", help="most tokens of a text")
    cache.add_argument(
        "--n-batch",
        type=int,
        default=512,
        metavar="N",
        help="prompt tokens read at a time (default: %(default)s)",
    )
    cache.add_argument(
        "--kv-dtype",
        type=kv_types,
        default="f16",
        metavar="TYPE[,TYPE]",
        help="of the cached K and V: f16, f32, bf16, q8_0 or q4_0 (default: %(default)s)",
    )

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    sampling.add_argument("--top-k", type=int, default=40)
    sampling.add_argument("--top-p", type=float, default=0.95)
    sampling.add_argument("--min-p", type=float, default=0.05)
    sampling.add_argument("--repeat-penalty", type=float, default=1.0)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given again",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end of text")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    machine.add_argument("--threads", type=int, metavar="N")


def open_generator(args: argparse.Namespace) -> Generator:
    """The model as the arguments say."""
    return Generator(
        args.model,
        hh=args.hh,
        recent=args.recent,
        n_ctx=args.n_ctx,
        n_batch=args.n_batch,
        kv_dtype=args.kv_dtype,
        device=args.device,
        threads=args.threads,
    )


def stream_options(args: argparse.Namespace) -> StreamOptions:
    """How to generate, as the arguments say."""
    return {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "seed": args.seed,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
    }


def kv_types(text: str) -> str | tuple[str, str]:
    """One type ("q8_0") or two ("q8_0,q4_0")."""
    k, comma, v = text.partition(",")
    return (k, v) if comma else k


def _amount(text: str) -> float:
    """A number of tokens if it is whole ("400"), otherwise a fraction ("0.2")."""
    try:
        return int(text)
    except ValueError:
        return float(text)
