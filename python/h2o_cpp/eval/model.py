"""The model class for lm-evaluation-harness (lm_eval)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm  # type: ignore[import-untyped]

from h2o_cpp.eval.budgeted import BudgetedModel
from h2o_cpp.files.model_file import ModelFile

_MAX_GEN_TOKS = 256  # default, as in lm_eval's own models


@register_model("h2o_cpp")
class H2oModel(TemplateLM):  # type: ignore[misc]  # lm_eval is not typed
    """The model `h2o_cpp` of lm_eval; see BudgetedModel for budgets and eviction.

    The first window of a rolling likelihood has one token of context, so nearly all of its text is
    read under eviction.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | ModelFile,
        *,
        batch_size: object = None,
        max_batch_size: object = None,
        **options: Any,
    ) -> None:
        """Load a model; path and options as for BudgetedModel.

        batch_size, max_batch_size: passed by lm_eval, ignored; requests are processed one by one.
        """
        super().__init__()
        self.budgeted = BudgetedModel(path, **options)
        self._tokenizer = self.budgeted.tokenizer

    @property
    def eot_token_id(self) -> int | None:
        """The end-of-text token, if the vocabulary has one."""
        return self._tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        for token in (self._tokenizer.bos, self._tokenizer.eos):
            if token is not None:
                return token
        raise ValueError("the vocabulary has no token for the beginning or end of a text")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Tokens of a text, by default with the special tokens around it."""
        return self._tokenizer.encode(string, add_special=add_special_tokens is not False)

    def get_model_info(self) -> dict[str, Any]:
        """Information for lm_eval's results."""
        model = self.budgeted
        return {"hh": model.hh, "policy": model.policy, "usage": asdict(model.usage)}

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts in windows of n_ctx; each token is predicted once."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm or None):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.budgeted.n_ctx,
                context_len=1,
            )
            pairs = map(make_disjoint_window, windows)
            answers.append(sum(self.budgeted.loglikelihood(*pair)[0] for pair in pairs))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        answers = []
        for texts, context, continuation in tqdm(requests, disable=disable_tqdm or None):
            answers.append(self.budgeted.loglikelihood(context, continuation))
            self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy outputs, each up to the first stop string. Raises ValueError for sampling."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm or None):
            context, options = request.args
            if options.get("do_sample") and options.get("temperature") != 0:
                raise ValueError("do_sample=True is not supported, expected greedy generation")
            until = options.get("until") or ()
            text = self.budgeted.generate(
                self.tok_encode(context),
                max_tokens=options.get("max_gen_toks", _MAX_GEN_TOKS),
                stop=(until,) if isinstance(until, str) else tuple(filter(None, until)),
            )
            answers.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return answers
