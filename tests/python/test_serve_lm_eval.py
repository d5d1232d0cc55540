"""lm-evaluation-harness (local-completions) on the server gives the scores of H2oModel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_cpp import Generator

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra: eval)")
pytest.importorskip("aiohttp", reason="aiohttp is not installed (lm-eval[api])")
pytest.importorskip("tenacity", reason="tenacity is not installed (lm-eval[api])")
pytest.importorskip("transformers", reason="transformers is not installed")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from h2o_cpp.eval.model import H2oModel
from h2o_cpp.eval.tasks import load_task
from support.serving import serving

N_DOCUMENTS = 12


@pytest.fixture(scope="module")
def local_model(tiny_opt: Path) -> H2oModel:
    return H2oModel(tiny_opt, threads=1)


@pytest.fixture(scope="module", params=[1, 4], ids=["one by one", "four at once"])
def server_model(request: pytest.FixtureRequest, tiny_opt: Path, shared: Path) -> Iterator[Any]:
    """lm_eval's own client with the checkpoint's tokenizer."""
    tokenizer = shared / "models" / "tiny-opt-hf"
    with (
        Generator(tiny_opt, max_sequences=2, threads=1) as generator,
        serving(generator) as server,
    ):
        arguments = (
            f"model=tiny,base_url={server.url}/v1/completions,tokenizer={tokenizer},"
            "tokenizer_backend=huggingface,max_retries=1,add_bos_token=True"
        )
        settings = {"batch_size": request.param}
        yield LocalCompletionsAPI.create_from_arg_string(arguments, settings)


@pytest.mark.parametrize("task", ["copa", "piqa"])
def test_tasks(local_model: H2oModel, server_model: Any, task: str, shared: Path) -> None:
    results = [
        lm_eval.evaluate(
            lm=model,
            task_dict=load_task(task, shared / "eval"),
            limit=N_DOCUMENTS,
            log_samples=True,
            bootstrap_iters=0,
        )
        for model in (local_model, server_model)
    ]
    for local, remote in zip(*(found["samples"][task] for found in results), strict=True):
        assert local["doc_id"] == remote["doc_id"]
        assert local["target"] == remote["target"]
        for (mine,), (served,) in zip(local["resps"], remote["resps"], strict=True):
            # The same float64 logarithms, summed in another order.
            assert float(served[0]) == pytest.approx(float(mine[0]), rel=1e-12)
            assert served[1] == mine[1]
    scores = [found["results"][task]["acc,none"] for found in results]
    assert scores[0] == scores[1]


def test_generate_until(local_model: H2oModel, server_model: Any) -> None:
    contexts = ["The old man", "It was a bright morning, and the captain", "Once"]
    options: dict[str, Any] = {"max_gen_toks": 12, "until": [" and", "."], "temperature": 0}
    texts = [
        model.generate_until(
            [Instance("generate_until", {}, (c, {**options}), i) for i, c in enumerate(contexts)]
        )
        for model in (local_model, server_model)
    ]
    assert texts[0] == texts[1]
