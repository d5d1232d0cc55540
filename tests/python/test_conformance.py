"""KVCache reproduces h2o_cases.json, which an independent reference computed."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_cpp import KVCache, Policy, Rope

DOCUMENT: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "h2o_cases.json").read_text()
)

# Eviction only every third step needs spare slots, which a fixed pool does not have.
CASES: dict[str, Any] = {c["id"]: c for c in DOCUMENT["cases"] if c["id"] != "lazy_every_3"}


def policy_of(case: dict[str, Any]) -> Policy:
    match case["policy"]:
        case "full":
            return Policy.full()
        case "window":
            return Policy.window(case["recent"])
        case "sink":
            return Policy.sinks(case["sink"], case["recent"])
        case "h2o":
            return Policy.h2o(case["heavy"], case["recent"])
    raise AssertionError(case["policy"])


class Driver:
    """Feeds a case to a KVCache.

    Key j is the unit vector e_j and query i is log(weights of i), so that the logits are the case's
    up to a constant; values are unit vectors too, so that the output is the attention row.
    """

    def __init__(self, case: dict[str, Any], kv_dtype: str, device: str) -> None:
        self.pad: int = case["left_pad"]
        weights = [[row[self.pad :] for row in head[self.pad :]] for head in case["weights"]]
        self.n = len(weights[0])
        self.n_heads, self.n_kv_heads = case["n_q_heads"], case["n_kv_heads"]
        self.q = np.zeros((self.n, self.n_heads, self.n), np.float32)
        for h, head in enumerate(weights):
            for i, row in enumerate(head):
                self.q[i, h, : i + 1] = np.log(row) * np.sqrt(self.n)
        self.unit = np.repeat(np.eye(self.n, dtype=np.float32)[:, None], self.n_kv_heads, axis=1)
        # Tensor cores take Q and probabilities in f16: a logit is off by 2^-11 of it, and a
        # probability by up to twice the largest such error, and by its own rounding.
        rounds = kv_dtype == "f16" and device.startswith("cuda")
        off = 2**-11 * float(np.abs(self.q).max()) / np.sqrt(self.n)
        self.rtol = float(np.expm1(2 * off)) + 2**-10 if rounds else 0.0
        self.cache = KVCache(
            self.n_heads,
            self.n_kv_heads,
            self.n,
            policy_of(case),
            max_tokens=self.n,
            kv_dtype=kv_dtype,
            device=device,
        )

    def feed(self, begin: int, end: int) -> NDArray[np.float32]:
        kv = self.unit[begin:end]
        return self.cache.attend(self.q[begin:end], kv, kv)

    def kept(self, g: int) -> list[int]:
        return [int(p) + self.pad for p in self.cache.positions(g)]


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])  # unit vectors are exact in both
@pytest.mark.parametrize("name", CASES)
def test_case_is_reproduced(name: str, kv_dtype: str, device: str) -> None:
    case = CASES[name]
    driver = Driver(case, kv_dtype, device)
    done = 0
    for i, (step, expected) in enumerate(zip(case["schedule"], case["expected"], strict=True)):
        n = step["tokens"] - (driver.pad if i == 0 else 0)
        out = driver.feed(done, done + n)
        done += n
        for g in range(driver.n_kv_heads):
            # Where exact sums are equal, rounding decides on a GPU and on ARM, with the same scores
            # kept. A C++ test with exact sums checks that the older of equal scores stays.
            as_recorded = device == "cpu" and platform.machine().lower() in ("x86_64", "amd64")
            if as_recorded or case.get("selection_margin") != 0:
                assert driver.kept(g) == expected["kept"][g]
            if case["policy"] == "h2o" and case["heavy"] > 0:
                np.testing.assert_allclose(
                    driver.cache.scores(g), expected["scores"][g], rtol=driver.rtol, atol=1e-5
                )
        for h in range(driver.n_heads):
            attended = expected["attended"][h // (driver.n_heads // driver.n_kv_heads)]
            row = np.zeros(driver.n)
            row[np.array(attended) - driver.pad] = expected["last_row"][h]
            np.testing.assert_allclose(out[-1, h], row, rtol=driver.rtol, atol=1e-5)


def test_number_of_cases() -> None:
    assert len(CASES) == len(DOCUMENT["cases"]) - 1 == 29


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gqa_sum", "wrong_if_first_query_head_only"),
        ("batch_item_a", "wrong_if_summed_over_batch"),
        ("batch_item_b", "wrong_if_summed_over_batch"),
        ("chunked_prefill_eager", "one_shot_kept"),
    ],
)
def test_results_differ_from_recorded_mistakes(name: str, wrong: str, device: str) -> None:
    case = CASES[name]
    answer = case[wrong] if isinstance(case[wrong][0], list) else [case[wrong]]
    driver = Driver(case, "f32", device)
    done = 0
    for step in case["schedule"]:
        driver.feed(done, done + step["tokens"])
        done += step["tokens"]
        assert [driver.kept(g) for g in range(driver.n_kv_heads)] != answer


@pytest.mark.parametrize("name", CASES)
def test_prompt_in_chunks_with_eviction_after_the_last_equals_one_chunk(
    name: str, device: str
) -> None:
    """Chunks make no difference until the budget is reached."""
    case = CASES[name]
    n_prompt = case["schedule"][0]["tokens"] - case["left_pad"]
    budget = policy_of(case).budget
    whole, parts = Driver(case, "f32", device), Driver(case, "f32", device)
    n_free = n_prompt if budget is None else min(n_prompt, budget)  # tokens before any eviction
    whole.feed(0, n_prompt)
    for i in range(n_free - 1):
        parts.feed(i, i + 1)
    parts.feed(n_free - 1, n_prompt)
    for g in range(whole.n_kv_heads):
        assert whole.kept(g) == parts.kept(g)
        exact = 0 if device == "cpu" else 1e-5  # a GPU uses other kernels for chunks
        np.testing.assert_allclose(whole.cache.scores(g), parts.cache.scores(g), rtol=0, atol=exact)


def test_scores_accumulate_in_full_precision(device: str) -> None:
    """A score that grows by 0.25 in each of 4096 steps would stop at 512 in f16, at 64 in bf16."""
    precision = DOCUMENT["precision"]
    cache = KVCache(1, 1, 4, Policy.h2o(heavy=1, recent=2), kv_dtype="f32", device=device)
    same = np.zeros((1, 1, 4), np.float32)  # equal logits: each of the 4 visible keys gets 0.25
    for _ in range(3):
        cache.attend(same, same, same)
    before = cache.scores()[0]
    for _ in range(4096):
        cache.attend(same, same, same)
    assert cache.positions()[0] == 0
    # `before` is not a multiple of 0.25, so each doubling of the sum rounds once: in total by less
    # than the spacing of floats at the end.
    assert cache.scores()[0] - before == pytest.approx(
        precision["exact"], abs=float(np.spacing(np.float32(1024)))
    )


ROPE_CASES = {c["id"]: c for c in DOCUMENT["rope_cases"]}


@pytest.mark.parametrize("layout", ["halves", "pairs"])
@pytest.mark.parametrize("name", ROPE_CASES)
def test_rope_case_is_reproduced(
    name: str, layout: Literal["halves", "pairs"], device: str
) -> None:
    """Keys are stored rotated to their positions, or unrotated and rotated to their ranks on read.

    The layout only permutes dimensions.
    """
    case = ROPE_CASES[name]
    n_heads, n_kv_heads, head_dim = case["n_q_heads"], case["n_kv_heads"], case["rope"]["head_dim"]
    interleave = np.arange(head_dim).reshape(2, -1).T.ravel()  # halves -> adjacent pairs
    q, k, v = (np.array(case[x], np.float32).transpose(1, 0, 2) for x in "qkv")
    if layout == "pairs":
        q, k = q[..., interleave], k[..., interleave]
    rope = Rope(theta=case["rope"]["theta"], layout=layout, positions=case["position_mode"])
    cache = KVCache(
        n_heads, n_kv_heads, head_dim, policy_of(case), kv_dtype="f32", rope=rope, device=device
    )
    done = 0
    for step, expected in zip(case["schedule"], case["expected"], strict=True):
        rows = slice(done, done + step["tokens"])
        out = cache.attend(q[rows], k[rows], v[rows])
        done = rows.stop
        for g in range(n_kv_heads):
            assert cache.positions(g).tolist() == expected["kept"][g]
            if case["policy"] == "h2o":
                np.testing.assert_allclose(cache.scores(g), expected["scores"][g], atol=1e-5)
        np.testing.assert_allclose(out[-1], expected["out_last"], rtol=0, atol=1e-5)


def test_number_of_rope_cases() -> None:
    assert len(ROPE_CASES) == len(DOCUMENT["rope_cases"]) == 8
