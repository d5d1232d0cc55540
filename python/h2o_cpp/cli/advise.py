"""Find the smallest cache that costs little on your text: the budget for --hh.

The text is a file, or questions and answers, one {"question": ..., "answer": ...} per line of a
.jsonl file, whose answers are then measured. Measures the perplexity with the full cache, and
bisects the budget of each policy. A first answer, from a short part of the text, comes soon; Ctrl-C
keeps the best answer so far. If perplexity does not always fall as the budget grows, a
budget below the advised one may be as good. Types of K and V are compared by bytes. --archive also
finds the smallest cache whose evicted tokens are archived; among several shares of heads, the one
with the fewest bytes of cache and archive. Where all questions begin alike, the smallest cache that
protects their beginning is found too. --write stores the advice (with --archive, that with an
archive) in the metadata of the model file, which the other commands then apply with --hh auto and
llama.cpp ignores.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp.arguments import KvDType, types_text
from h2o_cpp.budget.stored_budget import store_budget
from h2o_cpp.cli.argument_types import names, number
from h2o_cpp.cli.cache_options import add_archive, add_n_batch, add_n_ctx, options_of
from h2o_cpp.cli.comparison import figure_for
from h2o_cpp.cli.files import STANDARD, check_outputs, read_text
from h2o_cpp.cli.options import (
    add_json,
    add_model,
    add_store,
    add_text,
    add_text_tokens,
    add_threads,
    stores,
)
from h2o_cpp.cli.output import cache_text, mebibytes, put, put_json, tell
from h2o_cpp.cli.parser import Parser
from h2o_cpp.files.model_file import ModelFile
from h2o_cpp.measure.advice import Advice, AdviceOptions, Archived, Needle, advice_steps
from h2o_cpp.measure.plots import draw_budgets
from h2o_cpp.options import ArchiveOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    add_text(parser)
    parser.add_argument(
        "--loss", type=number, default=0.01, metavar="X",
        help="allowed increase of perplexity, a fraction (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", type=names, default=["h2o", "mean", "contribution"],
        metavar="NAME,...",
        help="policies to try (default: h2o,mean,contribution)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtypes", type=_types, metavar="TYPE[+TYPE],...",
        help="types of K and V to try, or pairs of them: q8_0+q4_0 (default: f16,q8_0)",
    )  # fmt: skip
    add_n_ctx(parser, "tokens of a window", "as trained, at most 2048")
    add_text_tokens(parser, "two windows")
    add_n_batch(
        parser, 1, "tokens per chunk, each followed by eviction: more is faster, 1 is as in decode "
        "(default: %(default)s)", "--chunk",
    )  # fmt: skip
    add_archive(parser, search=True)
    add_threads(parser)
    add_json(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot perplexity against bytes (default: no)"
    )
    add_store(parser, "the advice, for --hh auto,")


def run(args: argparse.Namespace) -> int:
    file, text = ModelFile.find(args.model), _read(args.file)
    stored = stores(args, file.path)
    check_outputs(plot=args.plot, json=STANDARD if args.json else None)
    figure = None if args.plot is None else figure_for(args.plot, 6)
    found = _last_answer(args, file, text)
    if args.json:
        put_json(asdict(found))
    else:
        _print(found)
    if figure is not None:
        _draw(found, figure)
        figure.savefig(args.plot)
    if stored:
        advised = found.archived or found
        store_budget(
            found.model,
            args.output,
            hh=advised.hh,
            policy=found.policy,
            n_ctx=found.n_ctx,
            loss=advised.loss,
            kv_dtype=found.kv_dtype,
            **({} if found.archived is None else archive_of(found.archived)),
        )
        tell(f"wrote {args.output or found.model}, for --hh auto")
    return 0


def _read(file: Path) -> str | list[tuple[str, str]]:
    """A text, or questions and answers."""
    text = read_text(file)
    if file.suffix != ".jsonl":
        return text
    pairs = []
    for place, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            question, answer = one["question"], one["answer"]
        except (ValueError, TypeError, KeyError):
            question = answer = None
        if not isinstance(question, str) or not isinstance(answer, str):
            raise ValueError(f'{file}: line {place} is not {{"question": "...", "answer": "..."}}')
        pairs.append((question, answer))
    return pairs


def _last_answer(
    args: argparse.Namespace, file: ModelFile, text: str | list[tuple[str, str]]
) -> Advice:
    """The final answer, or the best one so far when Ctrl-C is pressed."""
    found: Advice | None = None
    options = replace(options_of(args, AdviceOptions), policies=args.policy)
    with tqdm(unit="token", disable=None, leave=False) as bar:
        steps = advice_steps(file, text, options, bar.update)
        try:
            said = ""
            for found, seconds_left in steps:
                if not found.is_final and said != (said := _options(found)):
                    bar.clear()
                    tell(
                        f"so far: {said} ({found.loss:+.2%}); the last answer takes "
                        f"{_duration(seconds_left)}, Ctrl-C keeps this one"
                    )
        except KeyboardInterrupt:
            if found is None:
                raise
            tell("interrupted: this is the best answer so far")
    assert found is not None
    return found


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s more" if seconds < 90 else f"about {seconds / 60:.0f} min more"


def _options(found: Advice) -> str:
    types = "" if found.kv_dtype == "f16" else f" --kv-dtype {types_text(found.kv_dtype)}"
    return f"--hh {found.hh:g} --policy {found.policy}{types}"


def _draw(found: Advice, figure: Figure) -> None:
    """Plot perplexity against bytes."""
    axes = figure.subplots()
    points = [
        (
            f"{row.policy} {types_text(row.kv_dtype)}"
            + (" + archive" if row.archive else "")
            + (" + protect" if row.protect else ""),
            row.all_bytes / found.full_cache_bytes,
            row.perplexity,
        )
        for row in found.curve[1:]
    ]
    draw_budgets(axes, points, found.full_perplexity)
    axes.set_xlabel("bytes, fraction of the full cache in f16")
    axes.set_ylabel("perplexity")


def _print(found: Advice) -> None:
    put("| policy | K, V | budget | kept | perplexity | of full | cache |")
    put("|---|---|---|---|---|---|---|")
    several = len({row.archive_heads for row in found.curve if row.archive is not None}) > 1
    for row in found.curve:
        archive = "" if row.archive is None else f", archive {types_text(row.archive)}"
        if several and row.archive_heads is not None:
            archive += f" of {100 * row.archive_heads:g}% of the heads"
        put(
            f"| {row.policy}{f', protect {row.protect}' if row.protect else ''} "
            f"| {types_text(row.kv_dtype)}{archive} | {row.budget:g} | {row.kept} "
            f"| {row.perplexity:.3f} | {row.perplexity / found.full_perplexity:.3f} "
            f"| {cache_text(row.cache_bytes, row.archive_bytes)} |"
        )
    put()
    put(f"{found.tokens} tokens predicted, in windows of {found.n_ctx}")
    if found.hh == 1 and found.kv_dtype == "f16":
        put(f"advice: the full cache; every smaller one costs more than {found.most_loss:.1%}")
    else:
        put(f"advice: {_options(found)}")
        _print_costs(found, found, mebibytes(found.cache_bytes))
        put(f"  {_facts(found.needle, found.needle_in_archive)}")
    if (one := found.protected) is not None:
        best = replace(found, hh=one.budget)
        put(f"with the questions' beginning protected: {_options(best)} --protect {one.protect}")
        _print_size(found, one.perplexity, mebibytes(one.cache_bytes))
    if (with_archive := found.archived) is not None:
        arguments = archive_of(with_archive) | {"archive": types_text(with_archive.archive)}
        options = "".join(
            f" --{name.replace('_', '-')} {value}"
            for name, value in arguments.items()
            if value is not None
        )
        best = replace(found, hh=with_archive.hh)
        put(f"with an archive: {_options(best)}{options}")
        sizes = cache_text(with_archive.cache_bytes, with_archive.archive_bytes)
        _print_costs(found, with_archive, sizes)
        put(f"  {_facts(with_archive.needle)}")


def archive_of(one: Archived) -> dict[str, Any]:
    """The options of its archive, as for Generator."""
    names = [field.name for field in fields(ArchiveOptions)]
    return {name: getattr(one, name) for name in names if hasattr(one, name)}


def _print_costs(found: Advice, one: Advice | Archived, memory: str) -> None:
    _print_size(found, one.perplexity, memory)
    needle = one.needle
    put(f"  needle      {needle.found:.2f}, full {needle.full:.2f}, absent {needle.absent:.2f}")
    put(
        f"  speed       {one.tokens_per_second:.0f} tokens/s, full "
        f"{found.full_tokens_per_second:.0f}, measured here after {found.n_ctx} tokens "
        f"({found.backend})"
    )


def _print_size(found: Advice, perplexity: float, memory: str) -> None:
    loss = perplexity / found.full_perplexity - 1
    put(f"  perplexity  {perplexity:.3f}, full {found.full_perplexity:.3f} ({loss:+.2%})")
    put(f"  cache       {memory}, full {mebibytes(found.full_cache_bytes)}")


def _facts(needle: Needle, in_archive: Needle | None = None) -> str:
    """A sentence on a fact that the prompt states once."""
    share = needle.share
    if share is None:
        return "The model does not find a fact in its prompt, even with the full cache."
    if share >= 0.9:
        return f"A fact that is not repeated is found ({share:.0%} is left)."
    lost = "lost" if share < 0.5 else "found less often"
    text = f"A fact that is not repeated is {lost} at this budget ({share:.0%} is left)"
    if in_archive is not None and in_archive.share is not None:
        text += f"; with --archive q8_0, {in_archive.share:.0%} is left"
    return f"{text}."


def _types(text: str) -> list[KvDType]:
    """Types and pairs of types: "f16,q8_0+q4_0"."""
    pairs = [part.partition("+") for part in text.split(",")]
    return [(k, v) if plus else k for k, plus, v in pairs]
