"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field

from h2o_cpp.generation.embedding import unit_length
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ERRORS, ApiError
from h2o_cpp.serve.generation_response import OutputsResponse
from h2o_cpp.serve.openai_requests import ModelRequest, Prompts, prompt_list
from h2o_cpp.serve.outputs import Output, Outputs
from h2o_cpp.serve.service import Service

router = APIRouter(responses=ERRORS)


class EmbeddingRequest(ModelRequest):
    """One or several texts to embed."""

    ignored = ("user",)
    input: Prompts = Field(description="strings, or token ids")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: little-endian 32-bit floats"
    )
    pooling: Literal["mean", "last", "cls"] | None = Field(
        None, description="of the hidden states; default: the model's"
    )
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="must be the model's own number"
    )


class Embedding(BaseModel):
    """The embedding of one text, scaled to length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The embeddings of all texts."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


@post(router, "/v1/embeddings", EmbeddingRequest, response_model=EmbeddingList)
def create_embeddings(service: Service, body: EmbeddingRequest) -> EmbeddingResponse:
    """Embed each text."""

    def complete(vectors: Any, n_tokens: int) -> EmbeddingList:
        if body.dimensions not in (None, vectors.shape[1]):
            raise ApiError(
                400, f"dimensions must be {vectors.shape[1]} for this model", param="dimensions"
            )
        encode = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
        return EmbeddingList(
            model=service.name,
            data=[Embedding(index=i, embedding=encode(v)) for i, v in enumerate(vectors)],
            usage=EmbeddingUsage(prompt_tokens=n_tokens, total_tokens=n_tokens),
        )

    return EmbeddingResponse(service.embed(prompt_list(body.input), body.pooling), complete)


def _base64(vector: Any) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class EmbeddingResponse(OutputsResponse):
    """The response to a request for embeddings."""

    def __init__(self, outputs: Outputs, body: Callable[[Any, int], BaseModel]) -> None:
        """body: makes the response of float32 [n, n_embd], scaled to length 1, and the number of
        tokens read."""
        super().__init__(outputs)
        self._body = body

    def complete(self, outputs: list[Output]) -> BaseModel:
        in_order = sorted(outputs, key=lambda output: output.index)
        vectors = unit_length(np.stack([output.completion.embedding for output in in_order]))
        return self._body(vectors, sum(len(output.prompt) for output in outputs))
