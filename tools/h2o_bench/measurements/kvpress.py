"""Facts found in a prompt beside kvpress, by what eviction leaves of them.

kvpress (pip install kvpress) evicts in transformers, which reads the same GGUF file in f32. Both
read the same prompts in one piece, question included, evict once to the same number of tokens, and
are then given the right answer token by token. Told is the share of what the fact is worth,
(log-likelihood - absent) / (full - absent), of each prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_bench.results import Row
from h2o_cpp.budget.policy import Policy, fraction_of
from h2o_cpp.measure.budgets import Budgeted, at_budgets
from h2o_cpp.measure.perplexity import token_losses
from h2o_cpp.measure.retrieval.measurement import answer_logits
from h2o_cpp.measure.retrieval.tasks import TASKS, Sample, make_samples
from h2o_cpp.model.session import open_model, open_session
from h2o_cpp.model.tokenizer import Tokenizer

PRESSES = ("SnapKV", "TOVA", "StreamingLLM", "ObservedAttention", "ExpectedAttention")
POLICIES = ("h2o", "mean", "contribution", "question")

Answer = Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]  # returns logits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("-c", "--n-ctx", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--tasks", default="needle,needles,variables,kv", help=", ".join(TASKS))
    parser.add_argument("--threads", type=int, default=2)


def theirs(path: Path, kept: int) -> dict[str, Answer]:
    """The model in transformers: with the full cache, and with presses that keep so many tokens."""
    import kvpress  # type: ignore[import-not-found]
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def answer_with(press: str, prompt: Sequence[int], answer: Sequence[int]) -> Any:
        cache = DynamicCache()
        ratio = 1 - (kept + 0.5) / len(prompt)  # rounded down
        make = getattr(kvpress, f"{press}Press", None)
        with torch.no_grad():
            with nullcontext() if make is None else make(compression_ratio=ratio)(model):
                ids = torch.tensor([prompt])
                logits = [model(ids, past_key_values=cache, logits_to_keep=1).logits[0]]
            for position, token in enumerate(answer[:-1], len(prompt)):
                ids, positions = torch.tensor([[token]]), torch.tensor([[position]])
                out = model(ids, past_key_values=cache, position_ids=positions)
                logits.append(out.logits[0])
        return torch.cat(logits).numpy()

    full: Answer = partial(answer_with, "")
    return {"full, transformers": full} | {
        f"kvpress {name}": partial(answer_with, name) for name in PRESSES
    }


def values(answer: Answer, samples: Sequence[Sample], absent: bool = False) -> NDArray[np.float64]:
    """Mean log-likelihood per token of each sample's answer."""
    prompts = (sample.without_fact if absent else sample.prompt for sample in samples)
    losses = (
        token_losses(answer(prompt, sample.answer), np.asarray(sample.answer, np.int32)).mean()
        for prompt, sample in zip(prompts, samples, strict=True)
    )
    return -np.array([*losses])


def measure(args: argparse.Namespace) -> Iterator[Row]:
    model = open_model(args.model, device="cpu", threads=args.threads)
    tokenizer = Tokenizer.of_model(model)

    def ours(policy: Policy | Sequence[Policy]) -> Answer:
        session = open_session(model, policy, n_ctx=args.n_ctx, n_batch=args.n_ctx)
        return lambda prompt, answer: answer_logits(session, prompt, answer)

    budgeted: list[Budgeted] = [*at_budgets(POLICIES, [args.budget], args.n_ctx)]
    answers = {one.name: ours(one.policy) for one in budgeted}
    try:
        answers |= theirs(args.model, fraction_of(args.n_ctx, args.budget))
    except ImportError as error:
        yield {"cache": "kvpress", "absent": str(error)}
    for task in args.tasks.split(","):
        samples = make_samples(tokenizer, task, n=args.samples, length=args.n_ctx)
        full_cache = ours(Policy.full())
        full, absent = (values(full_cache, samples, absent) for absent in (False, True))
        for name, answer in ({"full": full_cache} | answers).items():
            gains = 1 + (values(answer, samples) - full) / (full - absent).mean()
            yield {"task": task, "cache": name, "share": gains.tolist(), "mean": gains.mean()}
