"""Times and progress of an output in llama.cpp's form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

if TYPE_CHECKING:
    from h2o_cpp.serve.outputs import Output


class Timings(BaseModel):
    """Tokens and times. The first token comes with the prompt and takes no time of its own."""

    cache_n: int  # prompt tokens from the prefix cache
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int

    @staticmethod
    def of(output: Output) -> Timings:
        """The times of a finished output."""
        ended = output.ended
        n_prompt, n_steps = len(output.prompt) - ended.cached_tokens, ended.completion_tokens - 1
        prompt_ms, predicted_ms = ended.prompt_seconds * 1e3, ended.decode_seconds * 1e3
        return Timings(
            cache_n=ended.cached_tokens,
            prompt_n=n_prompt,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_ratio(prompt_ms, n_prompt),
            prompt_per_second=_ratio(n_prompt * 1e3, prompt_ms),
            predicted_n=ended.completion_tokens,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=_ratio(predicted_ms, n_steps),
            predicted_per_second=_ratio(n_steps * 1e3, predicted_ms),
            draft_n=ended.drafted_tokens,
            draft_n_accepted=ended.accepted_tokens,
        )


class PromptProgress(BaseModel):
    """How much of a prompt was read, in llama-server's form."""

    total: int
    cache: int  # from the prefix cache
    processed: int  # with those
    time_ms: int  # without those before the first token was read

    @staticmethod
    def of(output: Output) -> PromptProgress:
        """That of an output so far."""
        n_cached = output.completion.cached_tokens
        return PromptProgress(
            total=len(output.prompt),
            cache=n_cached,
            processed=n_cached + output.completion.prompt_tokens_read,
            time_ms=int(1e3 * output.completion.prompt_seconds),
        )


def _ratio(sum: float, n: float) -> float:
    return max(sum, 0.0) / n if n > 0 else 0.0
