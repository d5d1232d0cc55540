"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field

from h2o_cpp.generation.embedding import unit_length
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ApiError
from h2o_cpp.serve.generation_response import OutputsResponse
from h2o_cpp.serve.outputs import Output, Outputs
from h2o_cpp.serve.requests import ModelRequest, Prompts, prompt_list
from h2o_cpp.serve.service import Service

router = APIRouter()


class EmbeddingRequest(ModelRequest):
    """One or several texts to embed."""

    ignored = ("user",)
    input: Prompts = Field(description="strings, or token ids")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: little-endian 32-bit floats"
    )
    pooling: Literal["mean", "last"] = Field("mean", description="of the hidden states")
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
def create_embeddings(service: Service, body: EmbeddingRequest) -> _Embeddings:
    """Embed each text."""
    return _Embeddings(service, body, service.embed(prompt_list(body.input), body.pooling))


def vectors(outputs: list[Output]) -> Any:
    """The embeddings of finished outputs in the texts' order, float32 [n, n_embd], of length 1."""
    in_order = sorted(outputs, key=lambda output: output.index)
    return unit_length(np.stack([output.completion.embedding for output in in_order]))


class EmbeddingResponse(OutputsResponse):
    """The response to a request for embeddings."""

    def __init__(self, service: Service, outputs: Outputs) -> None:
        super().__init__(outputs)
        self._name = service.name


class _Embeddings(EmbeddingResponse):
    def __init__(self, service: Service, body: EmbeddingRequest, outputs: Outputs) -> None:
        super().__init__(service, outputs)
        self._body = body

    def complete(self, outputs: list[Output]) -> EmbeddingList:
        found = vectors(outputs)
        if self._body.dimensions not in (None, found.shape[1]):
            raise ApiError(
                400, f"dimensions must be {found.shape[1]} for this model", param="dimensions"
            )
        n, _ = self._outputs.count_tokens()
        return EmbeddingList(
            model=self._name,
            data=[Embedding(index=i, embedding=self._encode(v)) for i, v in enumerate(found)],
            usage=EmbeddingUsage(prompt_tokens=n, total_tokens=n),
        )

    def _encode(self, vector: Any) -> list[float] | str:
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        floats: list[float] = vector.tolist()
        return floats
