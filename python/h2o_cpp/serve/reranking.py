"""POST /v1/rerank, as Jina, Cohere and llama.cpp have it."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field

from h2o_cpp.generation.reranking import relevance
from h2o_cpp.serve.embeddings import EmbeddingUsage
from h2o_cpp.serve.endpoint import post
from h2o_cpp.serve.errors import ERRORS
from h2o_cpp.serve.generation_response import OutputsResponse
from h2o_cpp.serve.openai_requests import ModelRequest
from h2o_cpp.serve.outputs import Output, Outputs
from h2o_cpp.serve.schema import NonEmptyList, Schema
from h2o_cpp.serve.service import Service

router = APIRouter(responses=ERRORS)


class Document(Schema):
    """A text."""

    text: str


class RerankRequest(ModelRequest):
    """A query, and documents to sort by their relevance to it."""

    ignored = ("user", "max_tokens_per_doc", "priority")
    query: str
    documents: NonEmptyList[str | Document] = Field(max_length=10_000)
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="only the best")
    return_documents: bool = Field(False, description="repeat the texts")

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class Ranked(BaseModel):
    """The relevance of documents[index], from 0 to 1."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(BaseModel):
    """Documents, the most relevant first."""

    object: str = "list"
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class RankingResponse(OutputsResponse):
    """The response to a request to rank documents."""

    def __init__(self, outputs: Outputs, name: str, body: RerankRequest) -> None:
        super().__init__(outputs)
        self._name, self._request = name, body

    def complete(self, outputs: list[Output]) -> Ranking:
        """Sort the documents; equally relevant ones stay in order."""
        in_order = sorted(outputs, key=lambda output: output.index)
        scores = relevance(np.stack([output.completion.embedding for output in in_order]))
        texts = self._request.texts
        best = np.argsort(-scores, kind="stable")[: self._request.top_n]
        n_tokens = sum(len(output.prompt) for output in outputs)
        return Ranking(
            model=self._name,
            results=[
                Ranked(
                    index=i,
                    relevance_score=scores[i],
                    document=Document(text=texts[i]) if self._request.return_documents else None,
                )
                for i in best
            ],
            usage=EmbeddingUsage(prompt_tokens=n_tokens, total_tokens=n_tokens),
        )


# llama.cpp's paths and Cohere's, besides Jina's.
@post(router, "/rerank", RerankRequest, include_in_schema=False)
@post(router, "/reranking", RerankRequest, include_in_schema=False)
@post(router, "/v1/reranking", RerankRequest, include_in_schema=False)
@post(router, "/v2/rerank", RerankRequest, include_in_schema=False)
@post(
    router,
    "/v1/rerank",
    RerankRequest,
    response_model=Ranking,
)
def rerank(service: Service, body: RerankRequest) -> RankingResponse:
    """Sort documents by their relevance to a query."""
    return RankingResponse(service.rerank(body.query, body.texts), service.name, body)
