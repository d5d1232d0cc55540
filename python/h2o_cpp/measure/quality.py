"""The quality of a cache: the perplexity of a text, or of the answers to questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import exp

import numpy as np

from h2o_cpp import _core
from h2o_cpp.arguments import check_context, check_int
from h2o_cpp.measure.perplexity import perplexity, token_losses
from h2o_cpp.measure.retrieval.measurement import answer_logits
from h2o_cpp.model.tokenizer import Tokenizer

LEAST_TOKENS = 100  # of a text and a window, so that a percent is a token
_N_CTX = 2048  # default window: at most this many tokens
_WINDOWS = 2  # windows read by default
# The most tokens of a text, and questions, that a first answer is from.
_FIRST_TOKENS = 512
_FIRST_QUESTIONS = 4


@dataclass(frozen=True)
class TextQuality:
    """A text, read in windows of n_ctx tokens."""

    beginning: list[int]
    tokens: list[int]
    n_ctx: int

    @staticmethod
    def of(model: _core.Model, text: str, n_ctx: int | None, most: int | None) -> TextQuality:
        """Tokenize at most `most` tokens; None: two windows.

        n_ctx: default: the trained length, at most 2048 and the length of the text.

        Raises ValueError for a text of less than a window or LEAST_TOKENS.
        """
        tokenizer = Tokenizer.of_model(model)
        beginning = tokenizer.encode("")
        tokens = tokenizer.encode(text, add_special=False)
        n_text = len(beginning) + len(tokens)
        if n_text < LEAST_TOKENS:
            raise ValueError(f"the text has {n_text} tokens, expected at least {LEAST_TOKENS}")
        n_ctx = check_context(n_ctx, model.n_ctx_train, min(n_text, _N_CTX))
        check_int("n_ctx", n_ctx, LEAST_TOKENS)
        n_text = _WINDOWS * n_ctx if most is None else check_int("text_tokens", most, n_ctx)
        least = n_ctx - len(beginning)
        if len(tokens) < least:
            raise ValueError(
                f"the text has {len(tokens)} tokens, expected at least {least} for n_ctx={n_ctx}"
            )
        return TextQuality(beginning, tokens[:n_text], n_ctx)

    @property
    def n_tokens(self) -> int:
        """Tokens that are read."""
        return len(self.tokens)

    def first_part(self) -> TextQuality:
        """A window of at most 512 tokens."""
        n_ctx = min(self.n_ctx, _FIRST_TOKENS)
        return TextQuality(self.beginning, self.tokens[:n_ctx], n_ctx)

    def quality(
        self, session: _core.Session, progress: Callable[[int], object]
    ) -> tuple[float, int]:
        """The perplexity, and the number of predicted tokens; progress: as for perplexity()."""
        return perplexity(session, self.tokens, beginning=self.beginning, progress=progress)


@dataclass(frozen=True)
class AnswerQuality:
    """Tokens of questions and of their answers, each pair of them at most n_ctx."""

    pairs: list[tuple[list[int], list[int]]]
    n_ctx: int

    @staticmethod
    def of(
        model: _core.Model, questions: Sequence[tuple[str, str]], n_ctx: int | None
    ) -> AnswerQuality:
        """Tokenize questions and answers.

        n_ctx: default: the longest question with its answer, at least LEAST_TOKENS.

        Raises ValueError for an empty question or answer, none, and a pair longer than n_ctx.
        """
        tokenizer = Tokenizer.of_model(model)
        pairs = [
            (tokenizer.encode(question), tokenizer.encode(answer, add_special=False, begins=False))
            for question, answer in questions
        ]
        if not pairs or not all(question and answer for question, answer in pairs):
            raise ValueError("text has an empty question or answer, or none, expected one or more")
        longest = max(len(question) + len(answer) for question, answer in pairs)
        n_ctx = check_context(n_ctx, model.n_ctx_train, max(longest, LEAST_TOKENS))
        if longest > n_ctx:
            raise ValueError(
                f"a question and its answer have {longest} tokens, expected at most n_ctx={n_ctx}"
            )
        return AnswerQuality(pairs, check_int("n_ctx", n_ctx, LEAST_TOKENS))

    @property
    def n_tokens(self) -> int:
        """Tokens that are read."""
        return sum(len(question) + len(answer) for question, answer in self.pairs)

    @property
    def n_common(self) -> int:
        """Tokens with which all questions begin, such as an instruction; 0 if all are the same."""
        questions = [question for question, _ in self.pairs]
        columns = map(set, zip(*questions, strict=False))
        n = sum(1 for _ in takewhile(lambda column: len(column) == 1, columns))
        return n if n < max(map(len, questions)) else 0

    def first_part(self) -> AnswerQuality:
        """The first 4 questions."""
        return AnswerQuality(self.pairs[:_FIRST_QUESTIONS], self.n_ctx)

    def quality(
        self, session: _core.Session, progress: Callable[[int], object]
    ) -> tuple[float, int]:
        """The perplexity of the answers, each read token by token, and their number of tokens."""
        losses = []
        for question, answer in self.pairs:
            logits = answer_logits(session, question, answer)
            losses.append(token_losses(logits, np.asarray(answer, np.int32)))
            progress(len(question) + len(answer))
        all_losses = np.concatenate(losses)
        return exp(min(float(all_losses.mean()), 700)), all_losses.size
