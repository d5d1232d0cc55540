"""The model for lm-evaluation-harness (lm_eval), compared with lm_eval's own on one checkpoint."""

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

reference = packages("torch", "transformers", "accelerate", "peft")  # lm_eval's own model
CONTEXT = "It was a bright morning, and the old man went down to the sea with"
CONTINUATION = " his son, who had been a sailor."
TEXT = (CONTEXT + CONTINUATION + " ") * 6


def requests(kind: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


class Pair(NamedTuple):
    """One checkpoint in float32, with contexts of N_CTX tokens: ours and lm_eval's own model."""

    ours: Any
    theirs: Any
    tolerance: float  # of a token's log-likelihood; that of n grows with their square root

    def answers(self, kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[Any, Any]]:
        """Answers of both to the same requests."""
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
    # A log-probability is a logit less the logsumexp of a row, which is as exact as the logits are.
    tolerance = 2 * float32_tolerance(recipe, logits)
    return Pair(
        H2oModel(path, n_ctx=N_CTX, kv_dtype="f32", threads=1),
        HFLM(model, tokenizer=tokenizer, max_length=N_CTX, batch_size=1),
        tolerance,
    )


@reference
def test_log_likelihoods_equal_those_of_lm_evals_own_model(pair: Pair) -> None:
    """Spaces at the seam, no context, more tokens than n_ctx has room for, the greedy text."""
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
def test_rolling_log_likelihoods_equal_those_of_lm_evals_own_model(pair: Pair) -> None:
    """Of texts of less than one window, and of several."""
    texts = [("The sea.",), (CONTEXT + CONTINUATION,), (TEXT,)]
    for (text,), (ours, theirs) in zip(
        texts, pair.answers("loglikelihood_rolling", texts), strict=True
    ):
        n = len(pair.ours.tok_encode(text))
        assert ours == pytest.approx(theirs, rel=0, abs=sqrt(n) * pair.tolerance)
    assert n > 2 * N_CTX


@reference
def test_generated_text_equals_that_of_lm_evals_own_model(pair: Pair) -> None:
    """Also of a context that is too long, and up to the first of several stop strings."""
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


def test_lm_eval_makes_the_model_by_its_name(tiny_opt: Path) -> None:
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
