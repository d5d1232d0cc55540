"""The lm-evaluation-harness model equals lm_eval's HFLM on the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from h2o_cpp.convert import convert
from support.needs import packages
from support.random_models import N_CTX, Recipe, float32_tolerance

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra: eval)")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from h2o_cpp.eval.model import H2oModel

reference = packages("torch", "transformers", "accelerate", "peft")  # needed by HFLM
CONTEXT = "It was a bright morning, and the old man went down to the sea with"
CONTINUATION = " his son, who had been a sailor."
TEXT = (CONTEXT + CONTINUATION + " ") * 6


def requests(kind: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


class Pair(NamedTuple):
    """H2oModel and HFLM of one checkpoint in float32, with n_ctx=N_CTX."""

    ours: Any
    theirs: Any
    tolerance: float  # of a token's log-likelihood; times sqrt(n) for n tokens

    def answers(self, kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[Any, Any]]:
        """The answers of both models to the same requests."""
        ask = requests(kind, arguments)
        return list(
            zip(getattr(self.ours, kind)(ask), getattr(self.theirs, kind)(ask), strict=True)
        )


@pytest.fixture(scope="module")
def pair(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM

    source = shared / "models" / "tiny-opt-hf"
    path = tmp_path_factory.mktemp("converted") / "model.gguf"
    convert(source, path, "f32")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    config = model.config
    recipe = Recipe(
        "OPT",
        config.hidden_size,
        config.num_attention_heads,
        config.ffn_dim,
        n_layers=config.num_hidden_layers,
    )
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(TEXT).input_ids[:N_CTX]])).logits.numpy()
    # A log-probability is a logit minus the logsumexp of its row, which is as exact as the logits.
    tolerance = 2 * float32_tolerance(recipe, logits)
    return Pair(
        H2oModel(path, n_ctx=N_CTX, kv_dtype="f32", threads=1),
        HFLM(model, tokenizer=tokenizer, max_length=N_CTX, batch_size=1),
        tolerance,
    )


@reference
def test_loglikelihood_equals_hflm(pair: Pair) -> None:
    """Spaces at the boundary, no context, more tokens than n_ctx, the greedy continuation."""
    [(greedy, _)] = pair.answers("generate_until", [(CONTEXT, {"max_gen_toks": 12, "until": []})])
    texts = [
        (CONTEXT, CONTINUATION),
        (CONTEXT + " ", CONTINUATION),
        (CONTEXT + " \n ", "his"),
        ("", "The old man"),
        (TEXT, CONTINUATION),
        ("Crème brûlée, naïve", " 文字"),
        (CONTEXT, greedy),
    ]
    answers = pair.answers("loglikelihood", texts)
    for (_, continuation), (ours, theirs) in zip(texts, answers, strict=True):
        n = len(pair.ours.tok_encode(continuation))
        assert ours[0] == pytest.approx(theirs[0], rel=0, abs=sqrt(n) * pair.tolerance)
        assert ours[1] == theirs[1]
    assert [ours[1] for ours, _ in answers] == [False] * 6 + [True]


@reference
def test_loglikelihood_rolling_equals_hflm(pair: Pair) -> None:
    """For texts shorter than one window, and of several windows."""
    texts = [("The sea.",), (CONTEXT + CONTINUATION,), (TEXT,)]
    for (text,), (ours, theirs) in zip(
        texts, pair.answers("loglikelihood_rolling", texts), strict=True
    ):
        n = len(pair.ours.tok_encode(text))
        assert ours == pytest.approx(theirs, rel=0, abs=sqrt(n) * pair.tolerance)
    assert n > 2 * N_CTX


@reference
def test_generate_until_equals_hflm(pair: Pair) -> None:
    """Includes a context longer than n_ctx, and several stop strings."""
    texts = [
        (CONTEXT, {"max_gen_toks": 20, "until": []}),
        (CONTEXT, {"max_gen_toks": 20, "until": [" the", ","], "do_sample": False}),
        (CONTEXT, {"max_gen_toks": 20, "until": " and", "temperature": 0.0}),
        (TEXT, {"max_gen_toks": 20, "until": []}),
    ]
    answers = pair.answers("generate_until", texts)
    assert all(ours == theirs for ours, theirs in answers), answers
    everything, stopped = answers[0][0], answers[1][0]
    assert everything.startswith(stopped)
    assert len(stopped) < len(everything)


def test_model_is_registered_in_lm_eval(tiny_opt: Path) -> None:
    arguments = f"path={tiny_opt},hh=0.25,policy=window,n_ctx=64,threads=1"
    model = get_model("h2o_cpp").create_from_arg_string(arguments, {"batch_size": 1})
    assert isinstance(model, H2oModel)
    [(total, greedy)] = model.loglikelihood(requests("loglikelihood", [("The old man", " went")]))
    assert total < 0
    assert isinstance(greedy, bool)
    n = len(model.tok_encode("The old man went"))
    usage = model.get_model_info()["usage"]
    assert usage["kept"] == n // 4
    assert usage["requests"] == 1


def test_sampling_is_rejected(tiny_opt: Path) -> None:
    ask = requests("generate_until", [("The", {"do_sample": True, "temperature": 0.8})])
    with pytest.raises(ValueError, match="greedy"):
        H2oModel(tiny_opt, threads=1).generate_until(ask)
