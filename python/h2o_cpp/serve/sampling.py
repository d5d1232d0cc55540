"""The sampling options of requests, which include those of llama.cpp and Ollama."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from h2o_cpp.serve.schema import NonEmptyText, Schema

_LEAST_P = 2.0**-126  # the smallest normal float32

_TokenKey = Annotated[str, Field(pattern=r"^\d{1,9}$")]
TopK = Annotated[int, Field(ge=-(2**31), lt=2**31), AfterValidator(lambda k: max(k, 0))]
TopP = Annotated[float, Field(ge=0, le=1), AfterValidator(lambda p: max(p, _LEAST_P))]
TopLogprobs = Annotated[
    int | None,
    Field(ge=0, le=20, description="also for the N most likely tokens at each position"),
]
StopStrings = Annotated[list[NonEmptyText], Field(max_length=16)]
Draft = Annotated[
    bool, Field(description="false: without the drafts that the model is served with")
]
_Ends = Annotated[list[int], Field(min_length=2, max_length=2)]  # of a prompt, in tokens
Protect = Annotated[
    int | Literal["prompt", "system"] | _Ends | None,
    Field(
        description="tokens of the prompt that are never evicted: all, those before the first "
        "message, a number of the first, or of the first and the last"
    ),
]
Seed = Annotated[
    int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: None if seed == -1 else seed)
]


class Sampling(Schema):
    """Sampling options and stop strings. Defaults are those of Generator."""

    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy")
    top_p: TopP | None = Field(None, description="0 is the most likely token")
    seed: Seed | None = Field(
        None, description="the same seed gives the same output; -1 is a random one"
    )
    stop: NonEmptyText | StopStrings | None = Field(
        None, description="strings that end the output and are not part of it"
    )
    top_k: TopK | None = Field(None, description="0 and less are all")
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100, description="1 is none")
    repeat_last_n: int | None = Field(None, ge=-1, lt=2**31)
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="over the last repeat_last_n tokens, prompt included"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="over the same tokens")
    logit_bias: dict[_TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="added to the logits, by token id"
    )
    dry_multiplier: float | None = Field(None, ge=0, le=100, description="0 is none")
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=1, lt=2**31)
    dry_penalty_last_n: int | None = Field(None, ge=-1, lt=2**31)
    dry_sequence_breakers: list[str] | None = Field(None, max_length=64)
    typical_p: float | None = Field(None, gt=0, le=1)
    top_n_sigma: float | None = Field(None, ge=-1, le=1e6, description="0 and -1 are all")
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    dynatemp_range: float | None = Field(None, ge=0, le=100)
    dynatemp_exponent: float | None = Field(None, ge=0, le=100)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=100)
    mirostat_eta: float | None = Field(None, ge=0, le=100)
    samplers: list[str] | Literal["llama.cpp"] | None = Field(
        None, max_length=16, description="only these, in this order, by llama.cpp's names"
    )
    ignore_eos: bool | None = Field(None, description="continue after the end-of-text token")
