"""Requests of lm-evaluation-harness (lm_eval), answered within a budget of each request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from h2o_cpp import Generator, Policy, _core
from h2o_cpp.cli import main
from h2o_cpp.convert import convert
from h2o_cpp.eval.budgeted import BudgetedModel
from h2o_cpp.session import open_session
from random_models import N_CTX, Recipe, float32_tolerance
from scripted_opt import END, scripted_opt

CONTEXT = "It was a bright morning, and the old man went down to the sea with"
CONTINUATION = " his son, who had been a sailor."
TEXT = (CONTEXT + CONTINUATION + " ") * 6


@pytest.fixture(scope="module")
def generator(tiny_opt: Path) -> Iterable[Generator]:
    with Generator(tiny_opt, threads=1) as generator:
        yield generator


@pytest.fixture(scope="module")
def context(generator: Generator) -> list[int]:
    return generator.tokenize(CONTEXT)


@pytest.fixture(scope="module")
def continuation(generator: Generator) -> list[int]:
    return generator.tokenize(CONTINUATION, add_special=False)


def log_likelihood(logits: np.ndarray[Any, Any], tokens: Sequence[int]) -> float:
    """Of tokens, each from the row of logits in front of it."""
    exact = logits.astype(np.float64)
    p = np.exp(exact - exact.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return float(np.log(p[np.arange(len(tokens)), tokens]).sum())


@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_full_cache(
    tiny_opt: Path,
    generator: Generator,
    context: list[int],
    continuation: list[int],
    chunk: int | None,
) -> None:
    """However the context is read; and a continuation longer than what is scored at a time."""
    model = BudgetedModel(tiny_opt, chunk=chunk, threads=1)
    said = generator.stream(context, max_tokens=150, temperature=0, ignore_eos=True)
    assert "".join(said)
    for tokens, is_greedy in ((continuation, False), (said.tokens.tolist(), True)):
        rows = generator.logits([*context, *tokens])[len(context) - 1 : -1]
        total, greedy = model.loglikelihood(context, tokens)
        assert total == pytest.approx(log_likelihood(rows, tokens), rel=1e-9)
        assert greedy == is_greedy
    n = len(context) + len(continuation) - 1  # the last token is never fed
    assert model.usage.requests == 2
    assert model.usage.kept == (n + len(context) + 149) / 2


@pytest.mark.parametrize(
    ("name", "policy"),
    [("h2o", Policy.h2o(4, 5)), ("window", Policy.window(9)), ("sinks", Policy.sinks(4, 5))],
)
def test_a_continuation_is_predicted_from_what_is_kept(
    tiny_opt: Path, context: list[int], continuation: list[int], name: str, policy: Policy
) -> None:
    n = len(context) + len(continuation)
    hh = 9.5 / n  # cut to 9
    core = _core.Model(tiny_opt, device="cpu", threads=1)
    session = open_session(core, policy, n_ctx=n - 1, n_batch=len(context))
    fed = [context, *([token] for token in continuation[:-1])]
    rows = np.concatenate([session.step([(0, np.array(tokens, np.int32))]) for tokens in fed])
    model = BudgetedModel(tiny_opt, hh=hh, policy=name, threads=1)
    total, _ = model.loglikelihood(context, continuation)
    assert total == pytest.approx(log_likelihood(rows, continuation), rel=1e-9)
    assert model.usage.kept == 9
    assert model.usage.cache_bytes == session.cache_bytes
    whole, _ = BudgetedModel(tiny_opt, threads=1).loglikelihood(context, continuation)
    assert total != pytest.approx(whole, rel=1e-3)


def test_the_first_prediction_sees_the_whole_context(
    tiny_opt: Path, context: list[int], continuation: list[int]
) -> None:
    full = BudgetedModel(tiny_opt, threads=1).loglikelihood(context, continuation[:1])
    assert BudgetedModel(tiny_opt, hh=0.1, threads=1).loglikelihood(context, continuation[:1]) == (
        full
    )
    in_chunks = BudgetedModel(tiny_opt, hh=0.1, chunk=4, threads=1)
    assert in_chunks.loglikelihood(context, continuation[:1]) != full


def test_a_budget_of_everything_is_the_full_cache(
    tiny_opt: Path, context: list[int], continuation: list[int]
) -> None:
    full, _ = BudgetedModel(tiny_opt, threads=1).loglikelihood(context, continuation)
    everything = BudgetedModel(tiny_opt, hh=1.0, threads=1)
    total, _ = everything.loglikelihood(context, continuation)
    assert total == pytest.approx(full, rel=1e-12)  # but for the order of a sum in double precision


def test_at_least_one_token_is_kept(tiny_opt: Path, context: list[int]) -> None:
    model = BudgetedModel(tiny_opt, hh=0.01, threads=1)
    model.loglikelihood(context[:3], context[3:6])
    assert model.usage.kept == 1


def test_a_long_text_loses_its_beginning(
    tiny_opt: Path, context: list[int], continuation: list[int]
) -> None:
    n_ctx = len(continuation) + 4
    short = BudgetedModel(tiny_opt, n_ctx=n_ctx, threads=1)
    expected = short.loglikelihood(context[-5:], continuation)
    assert short.usage.truncated == 0
    assert short.loglikelihood(context, continuation) == expected
    assert short.usage.truncated == 1
    text = short.generate(context, max_tokens=4)
    assert text == short.generate(context[4 - n_ctx :], max_tokens=4)
    assert short.usage.truncated == 2
    short.clear_usage()
    assert short.usage.requests == short.usage.truncated == 0


def test_generate(tiny_opt: Path, generator: Generator, context: list[int]) -> None:
    expected = generator.generate(context, max_tokens=40, temperature=0).text
    model = BudgetedModel(tiny_opt, threads=1)
    assert model.generate(context, max_tokens=40) == expected
    middle, late = expected[17:20], expected[25:28]
    assert (
        model.generate(context, max_tokens=40, stop=(late, middle))
        == (expected[: min(expected.index(middle), expected.index(late))])
    )


def test_generate_within_a_fraction_of_the_prompt(tiny_opt: Path, context: list[int]) -> None:
    model = BudgetedModel(tiny_opt, hh=0.5, threads=1)
    n = len(context) // 2
    with Generator(tiny_opt, policy=Policy.h2o(n // 2, n - n // 2), threads=1) as generator:
        expected = generator.generate(context, max_tokens=30, temperature=0).text
    assert model.generate(context, max_tokens=30) == expected
    assert model.usage.kept == n


def test_generation_ends_at_the_end_of_text(tmp_path: Path) -> None:
    path = scripted_opt([*b"abcd", END]).write(tmp_path / "scripted.gguf")
    assert BudgetedModel(path, threads=1).generate(list(b"x"), max_tokens=10) == "abcd"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hh": 0.0}, "hh=0.0"),
        ({"hh": 1.5}, "hh=1.5"),
        ({"hh": "x"}, "hh='x'"),
        ({"policy": "lru"}, "policy 'lru' is not one of"),
        ({"n_ctx": 1}, "n_ctx=1"),
        ({"n_ctx": 4096}, "n_ctx=4096"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_bad_options(tiny_opt: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BudgetedModel(tiny_opt, **options)


def test_bad_requests(tiny_opt: Path) -> None:
    model = BudgetedModel(tiny_opt, n_ctx=8, threads=1)
    for context, continuation in (([], [5]), ([5], []), ([5], [5] * 9)):
        with pytest.raises(ValueError, match="tokens of context"):
            model.loglikelihood(context, continuation)
    with pytest.raises(ValueError, match="max_tokens=8"):
        model.generate([5], max_tokens=8)


def test_without_lm_eval(
    tiny_opt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "h2o_cpp.eval.model", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval.api.instance", None)
    assert main(["eval", str(tiny_opt), "--tasks", "copa"]) == 1
    assert "pip install lm-eval" in capsys.readouterr().err


@pytest.fixture(scope="module")
def lm_eval() -> ModuleType:
    return cast("ModuleType", pytest.importorskip("lm_eval", reason="lm_eval is not installed"))


def requests(kind: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

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
def pair(lm_eval: ModuleType, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("accelerate", "peft"):
        pytest.importorskip(name, reason=f"{name}, which lm_eval's own model needs, is missing")
    from lm_eval.models.huggingface import HFLM

    from h2o_cpp.eval.model import H2oModel

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


def test_rolling_log_likelihoods_equal_those_of_lm_evals_own_model(pair: Pair) -> None:
    """Of texts of less than one window, and of several."""
    texts = [("The sea.",), (CONTEXT + CONTINUATION,), (TEXT,)]
    for (text,), (ours, theirs) in zip(
        texts, pair.answers("loglikelihood_rolling", texts), strict=True
    ):
        n = len(pair.ours.tok_encode(text))
        assert ours == pytest.approx(theirs, rel=0, abs=sqrt(n) * pair.tolerance)
    assert n > 2 * N_CTX


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


# Two documents of each task, in the fields of its dataset, and lm_eval's prompts for them.
DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "copa": [
        {"premise": "It rained.", "choice1": "He sang.", "choice2": "We got wet.",
         "question": "effect", "label": 1},
        {"premise": "She fell.", "choice1": "It was icy.", "choice2": "He sang.",
         "question": "cause", "label": 0},
    ],
    "openbookqa": [
        {"question_stem": "The sea is", "choices": {"text": ["salt", "sweet"], "label": ["A", "B"]},
         "answerKey": "A"},
        {"question_stem": "Snow is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]},
         "answerKey": "B"},
    ],
    "piqa": [
        {"goal": "To boil", "sol1": "heat it", "sol2": "cool it", "label": 0},
        {"goal": "To cut", "sol1": "use a spoon", "sol2": "use a knife", "label": 1},
    ],
    "rte": [
        {"sentence1": "Tom ate.", "sentence2": "Tom slept.", "label": 1},
        {"sentence1": "Ann ran home.", "sentence2": "Ann ran.", "label": 0},
    ],
    "winogrande": [
        {"sentence": "Tom hid as _ was shy.", "option1": "Tom", "option2": "Ann", "answer": "1"},
        {"sentence": "Ann ran as _ was late.", "option1": "Tom", "option2": "Ann", "answer": "2"},
    ],
    "mathqa": [
        {"query": "Question: 1 + 1 ?\nA. 3\nB. 2\nAnswer: ", "gold": 1},
        {"query": "Question: 2 * 3 ?\nA. 6\nB. 5\nAnswer: ", "gold": 0},
        {"query": "Question: 10 * 100 ?\nA. 1\nB. \nAnswer: ", "gold": 0},  # left out
    ],
}  # fmt: skip
PROMPTS: dict[str, list[tuple[Any, Any]]] = {
    "copa": [
        ("It rained therefore", ["  he sang.", "  we got wet."]),
        ("She fell because", ["  it was icy.", "  he sang."]),
    ],
    "openbookqa": [("The sea is", [" salt", " sweet"]), ("Snow is", [" hot", " cold"])],
    "piqa": [
        ("Question: To boil\nAnswer:", [" heat it", " cool it"]),
        ("Question: To cut\nAnswer:", [" use a spoon", " use a knife"]),
    ],
    "rte": [
        ("Tom ate.\nQuestion: Tom slept. True or False?\nAnswer:", [" True", " False"]),
        ("Ann ran home.\nQuestion: Ann ran. True or False?\nAnswer:", [" True", " False"]),
    ],
    "winogrande": [  # two contexts and one continuation
        (["Tom hid as Tom", "Tom hid as Ann"], " was shy."),
        (["Ann ran as Tom", "Ann ran as Ann"], " was late."),
    ],
    "mathqa": [
        ("Question: 1 + 1 ?\nAnswer:", [" 3", " 2"]),
        ("Question: 2 * 3 ?\nAnswer:", [" 6", " 5"]),
    ],
}
GOLD = {"copa": [1, 0], "openbookqa": [0, 1], "piqa": [0, 1], "rte": [1, 0],
        "winogrande": [0, 1], "mathqa": [1, 0]}  # fmt: skip


@pytest.fixture(scope="module")
def directory(lm_eval: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of task files."""
    from h2o_cpp.eval.tasks import LOCAL_TASKS

    assert DOCUMENTS.keys() == LOCAL_TASKS.keys()
    path = tmp_path_factory.mktemp("tasks")
    for name, task in LOCAL_TASKS.items():
        lines = [json.dumps(document) for document in DOCUMENTS[name]]
        (path / task.file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def pairs(prompt: tuple[Any, Any]) -> list[tuple[str, str]]:
    """Contexts and continuations, one of which differs from choice to choice."""
    context, choices = prompt
    if isinstance(context, str):
        return [(context, choice) for choice in choices]
    return [(each, choices) for each in context]


def asked(task: Any) -> list[tuple[str, str]]:
    task.build_all_requests(rank=0, world_size=1)
    return [tuple(request.args) for request in task.instances]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tasks_on_local_files(directory: Path, name: str) -> None:
    """Prompts and right answers; and an example in front is the other document, answered."""
    from h2o_cpp.eval.tasks import load_task

    [task] = load_task(name, directory)["tasks"].values()
    expected = [pair for prompt in PROMPTS[name] for pair in pairs(prompt)]
    assert asked(task) == expected
    for i, gold in enumerate(GOLD[name]):
        answers = [(-1.0, False)] * 2
        answers[gold] = (-0.5, False)
        assert task.process_results(task.dataset["test"][i], answers)["acc"] == 1.0

    task.set_config("num_fewshot", 1)
    examples = ["".join(pairs(p)[g]) for p, g in zip(PROMPTS[name], GOLD[name], strict=True)]
    assert asked(task) == [
        (f"{example}\n\n{context}", choice)
        for example, prompt in zip(reversed(examples), PROMPTS[name], strict=True)
        for context, choice in pairs(prompt)
    ]


def test_scores(tiny_opt: Path, directory: Path) -> None:
    from h2o_cpp.eval.model import H2oModel
    from h2o_cpp.eval.scores import evaluate

    model = H2oModel(tiny_opt, hh=0.5, threads=1)
    right, kept = [], []
    for prompt, gold in zip(PROMPTS["piqa"], GOLD["piqa"], strict=True):
        tokens = [model._encode_pair(*pair) for pair in pairs(prompt)]
        totals = [model.budgeted.loglikelihood(*each)[0] for each in tokens]
        right.append(totals[gold] == max(totals))
        kept += [(len(context) + len(continuation)) // 2 for context, continuation in tokens]
    usage = model.budgeted.usage
    acc, acc_norm = evaluate(model, ["piqa"], data=directory)
    assert [(s.task, s.metric, s.n) for s in (acc, acc_norm)] == [
        ("piqa", "acc", 2),
        ("piqa", "acc_norm", 2),
    ]
    assert acc.value == np.mean(right)
    assert acc.stderr == pytest.approx(np.std(right, ddof=1) / sqrt(2))
    assert acc.kept == np.mean(kept)
    assert acc.cache_bytes == usage.cache_bytes
    assert acc.truncated == 0


def test_every_task_has_its_own_usage(tiny_opt: Path, directory: Path) -> None:
    from h2o_cpp.eval.model import H2oModel
    from h2o_cpp.eval.scores import evaluate

    model = H2oModel(tiny_opt, threads=1)
    alone = [list(evaluate(model, [name], data=directory, limit=1)) for name in ("rte", "copa")]
    [[rte], [copa]] = alone
    assert list(evaluate(model, ["rte", "copa"], data=directory, limit=1)) == [rte, copa]
    assert rte.n == copa.n == 1
    assert rte.kept > copa.kept  # its prompts are longer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"goal": "x"}\n', "line 1 has no field 'sol1'"),
        ("[1, 2]\n", "line 1 is no JSON object"),
        ('{"goal": "x", "sol1": "y", "sol2": "z", "label": 0}\n{"goal', "line 2 is no JSON"),
    ],
)
def test_bad_files(lm_eval: ModuleType, tmp_path: Path, text: str, message: str) -> None:
    from h2o_cpp.eval.tasks import LOCAL_TASKS, load_task

    (tmp_path / LOCAL_TASKS["piqa"].file).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_task("piqa", tmp_path)
    with pytest.raises(FileNotFoundError, match="copa"):
        load_task("copa", tmp_path)
    with pytest.raises(ValueError, match="'boolq' is not one of copa, "):
        load_task("boolq", tmp_path)


def test_a_task_that_lm_eval_does_not_have(lm_eval: ModuleType) -> None:
    from h2o_cpp.eval.tasks import load_task

    with pytest.raises(ValueError, match="'guesswork' is not one of lm_eval's"):
        load_task("guesswork", None)


def test_lm_eval_makes_the_model_by_its_name(lm_eval: ModuleType, tiny_opt: Path) -> None:
    from lm_eval.api.registry import get_model

    from h2o_cpp.eval.model import H2oModel

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


def test_sampling_is_refused(lm_eval: ModuleType, tiny_opt: Path) -> None:
    from h2o_cpp.eval.model import H2oModel

    ask = requests("generate_until", [("The", {"do_sample": True, "temperature": 0.8})])
    with pytest.raises(ValueError, match="greedy"):
        H2oModel(tiny_opt, threads=1).generate_until(ask)


def test_command(
    tiny_opt: Path, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(tiny_opt), "--data", str(directory), "--tasks", "copa,piqa"]
    arguments += ["--hh", "0.4", "--num-fewshot", "1", "--limit", "1", "--threads", "1"]
    assert main([*arguments, "--json", str(tmp_path / "o.json")]) == 0
    _, _, *table = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "o.json").read_text(encoding="utf-8"))
    assert written["settings"]["hh"] == 0.4
    scores = written["scores"]
    assert [(s["task"], s["metric"]) for s in scores] == [
        ("copa", "acc"),
        ("piqa", "acc"),
        ("piqa", "acc_norm"),
    ]
    for score, row in zip(scores, table, strict=True):
        assert row.startswith(f"| {score['task']} | {score['metric']} | {score['value']:.4f} |")
        assert f"| {score['kept']:.1f} |" in row
    for wrong in (["--tasks", "copa,boolq"], ["--limit", "0"], ["--num-fewshot", "-1"]):
        assert main([*arguments, *wrong]) == 1
        assert capsys.readouterr().out == ""  # nothing is scored before all is known to be there
