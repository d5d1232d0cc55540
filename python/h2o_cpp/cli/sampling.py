"""Sampling options, with llama.cpp's names as aliases."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from h2o_cpp import _core
from h2o_cpp.cli.argument_types import integer, number, seed
from h2o_cpp.cli.files import read_text
from h2o_cpp.generation.request import StreamOptions
from h2o_cpp.generation.sampling import INTEGERS, NUMBERS, default

# Aliases and help of each option.
_NUMBERS: dict[str, tuple[tuple[str, ...], str]] = {
    "temperature": (("--temp",), "how random; 0 is greedy"),
    "top_k": ((), "choose from the N likeliest tokens; 0 is all"),
    "top_p": ((), "choose from the likeliest tokens of total probability X; 1 is all"),
    "min_p": ((), "leave out tokens less than X times as likely as the likeliest; 0 is none"),
    "repeat_penalty": ((), "penalize tokens that repeat, by this factor; 1 is none"),
    "repeat_last_n": ((), "look for repeats in the last N tokens; -1 is all"),
    "frequency_penalty": ((), "subtracted from the logit of a token for each repeat"),
    "presence_penalty": ((), "subtracted once from the logit of a token that repeats"),
    "dry_multiplier": ((), "penalty of tokens that extend a repetition; 0 is none"),
    "dry_base": ((), "factor of the penalty for each further token of the repetition"),
    "dry_allowed_length": ((), "repetitions of fewer than N tokens are not penalized"),
    "dry_penalty_last_n": ((), "look for repetitions in the last N tokens; -1 is all"),
    "typical_p": (
        ("--typical",),
        "choose from the most typical tokens of total probability X; 1 is all",
    ),
    "top_n_sigma": (
        ("--top-nsigma",),
        "leave out logits more than X standard deviations below the largest; 0 is none",
    ),
    "xtc_probability": ((), "how often all likely tokens except the least likely are left out"),
    "xtc_threshold": ((), "a token is likely from this probability on"),
    "dynatemp_range": ((), "vary --temperature by up to X, by the entropy; 0 is off"),
    "dynatemp_exponent": (("--dynatemp-exp",), "exponent of the entropy"),
    "mirostat": ((), "version 1 or 2 of Mirostat, instead of all filters; 0 is off"),
    "mirostat_tau": (("--mirostat-ent",), "Mirostat's target surprise, in bits"),
    "mirostat_eta": (("--mirostat-lr",), "Mirostat's learning rate"),
}

# llama.cpp's --sampling-seq.
_LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "e": "penalties",
}


def add_sampling(group: argparse._ArgumentGroup) -> None:
    for name, (aliases, meaning) in _NUMBERS.items():
        whole = name in INTEGERS
        group.add_argument(
            f"--{name.replace('_', '-')}",
            *aliases,
            type=integer if whole else number,
            default=default(name),
            metavar="N" if whole else "X",
            help=f"{meaning} (default: %(default)s)",
        )
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        action="append",
        metavar="TEXT",
        help='tokens that contain TEXT end a repetition; may be repeated; "none": no tokens do '
        "(default: line breaks, colons, quotes and asterisks)",
    )
    group.add_argument(
        "-l",
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID(+/-)X",
        help="add X to the logit of a token, as 15043+1 or 2-inf; may be repeated (default: none)",
    )
    order = group.add_mutually_exclusive_group()
    order.add_argument(
        "--samplers",
        type=_names,
        metavar="NAME;...",
        help="only these, in this order: penalties, dry, top_n_sigma, temperature, top_k, typ_p, "
        "top_p, min_p, xtc; or llama.cpp, for its order (default: all, in this order)",
    )
    order.add_argument(
        "--sampling-seq",
        "--sampler-seq",
        dest="samplers",
        type=_sequence,
        default=argparse.SUPPRESS,
        metavar="LETTERS",
        help="--samplers as llama.cpp's letters, such as edskypmxt (default: --samplers)",
    )
    group.add_argument(
        "-s",
        "--seed",
        type=seed,
        metavar="N",
        help="the same seed gives the same output; -1: different each time (default: -1)",
    )


def add_form(group: argparse._ArgumentGroup) -> None:
    """Add the options of an output's form."""
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "-j",
        "--json-schema",
        metavar="SCHEMA",
        help="the output is JSON that fits this schema; {}: any JSON (default: any text)",
    )
    form.add_argument(
        "-jf",
        "--json-schema-file",
        type=Path,
        metavar="FILE",
        help="--json-schema from a file (default: none)",
    )
    form.add_argument(
        "--grammar",
        metavar="GRAMMAR",
        help="the output matches this grammar, llama.cpp's GBNF or llguidance's Lark "
        "(default: none)",
    )
    form.add_argument(
        "--grammar-file",
        type=Path,
        metavar="FILE",
        help="--grammar from a file (default: none)",
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of Generator.stream."""
    options = {name: getattr(args, name) for name in (*NUMBERS, "samplers", "seed")}
    if args.logit_bias is not None:
        options["logit_bias"] = dict(args.logit_bias)
    if args.dry_sequence_breakers is not None:
        texts = args.dry_sequence_breakers
        options["dry_sequence_breakers"] = [] if texts == ["none"] else texts
    return options


def form_options(args: argparse.Namespace) -> dict[str, Any]:
    """The form as an option of Generator.stream, if one is given."""
    options = {}
    for name, text, file in (
        ("schema", args.json_schema, args.json_schema_file),
        ("grammar", args.grammar, args.grammar_file),
    ):
        if text is not None or file is not None:
            options[name] = text if file is None else read_text(file)
    return options


def changed_sampling(args: argparse.Namespace) -> StreamOptions:
    """The options that differ from the default, except the seed."""
    defaults = {name: default(name) for name in NUMBERS}
    changed = {
        name: value
        for name, value in sampling_options(args).items()
        if name != "seed" and value != defaults.get(name)
    }
    return cast(StreamOptions, changed)


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+)([+-].+)", text)
    with suppress(ValueError):
        if match is not None:
            return int(match[1]), float(match[2])
    raise argparse.ArgumentTypeError(
        f"got {text!r}, expected ID+X or ID-X such as 15043+1 or 2-inf"
    )


def _names(text: str) -> list[str] | str:
    if text == "llama.cpp":
        return text
    names = [name for name in text.split(";") if name]
    try:
        _core.Sampling().set_samplers(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _sequence(text: str) -> list[str]:
    unknown = set(text) - _LETTERS.keys()
    if unknown:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected letters of {''.join(_LETTERS)}")
    return [_LETTERS[letter] for letter in text]
