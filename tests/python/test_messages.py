"""Error messages for invalid arguments: one sentence with the argument, got and expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_cpp import Chat, Generator, KVCache, Policy, Snapshot, capacity
from h2o_cpp.generation.record import Record

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Setup:
    """Generators and a chat to call with invalid arguments."""

    def __init__(self, path: Path, llama: Path) -> None:
        self.path, self.llama = path, llama
        self.rotary = Generator(llama, threads=1)
        self.full = Generator(path, n_ctx=64, threads=1)
        self.small = Generator(path, n_ctx=64, hh=8, threads=1)
        self.engine = self.full.engine()
        self.chat = Chat(self.full, template=TEMPLATE)

    def open(self, **options: Any) -> Generator:
        return Generator(self.path, threads=1, **({"n_ctx": 64} | options))

    def generate(self, **options: Any) -> object:
        return self.full.generate("a", **({"max_tokens": 1} | options))

    def say(self, messages: Any, **options: Any) -> object:
        return self.full.chat(messages, **({"template": TEMPLATE} | options))


@pytest.fixture(scope="module")
def setup(tiny_opt: Path, llama: Path) -> Setup:
    return Setup(tiny_opt, llama)


ROW = np.zeros((1, 2, 8))

# A call and a part of its error message.
CASES: list[tuple[Callable[[Any], object], str]] = [
    # Mistakes that first-time users made.
    (
        lambda p: p.open(policy="streaming"),
        "policy='streaming', expected one of h2o, window, sinks",
    ),
    (
        lambda p: p.generate(max_new_tokens=5),
        "there is no option 'max_new_tokens'; did you mean max_tokens?",
    ),
    (lambda p: p.generate(stop=5), "stop=5, expected a string or a list of strings"),
    (lambda p: p.generate(after="x"), "after='x', expected a Snapshot"),
    (lambda p: KVCache(4, 2, 64, policy="h2o"), "policy='h2o', expected a Policy such as"),  # type: ignore[arg-type]
    (lambda p: Chat("x.gguf"), "generator='x.gguf', expected a Generator"),  # type: ignore[arg-type]
    (lambda p: p.full.generate([["a"]]), "prompt[0]='a', expected a token id (an int)"),
    (lambda p: p.full.detokenize(["a"]), "tokens[0]='a', expected a token id (an int)"),
    (lambda p: p.full.tokenize(5), "text=5, expected a str"),
    (
        lambda p: p.small.load(p.full.read("Hello there")),
        "has another policy: in layer 0 it keeps everything, this cache 0 sinks, 4 heavy hitters "
        "and 4 recent tokens; open it with the hh, policy and n_ctx",
    ),
    (
        lambda p: p.rotary.load(Generator(p.llama, hh=8, threads=1).read([5, 6])),
        "has another policy: in layer 0 it keeps 0 sinks, 4 heavy hitters and 4 recent tokens, this"
        " cache everything; open it with the hh, policy and n_ctx",
    ),
    (
        lambda p: Generator(p.llama, hh=8, positions="rolling", threads=1).load(
            Generator(p.llama, hh=8, threads=1).read([5, 6])
        ),
        "the snapshot has auto positions, this session rolling",
    ),
    (lambda p: p.full.stream("a").save(), "nothing has been read yet: ask for a piece"),
    # Generation options.
    (lambda p: p.generate(max_length=5), "no option 'max_length'; did you mean max_tokens?"),
    (lambda p: p.generate(temp=0.1), "no option 'temp'; did you mean temperature?"),
    (lambda p: p.generate(do_sample=True), "did you mean temperature (0 is greedy)?"),
    (lambda p: p.generate(hh=0.2), "hh is an option of Generator, not of an output"),
    (lambda p: p.generate(n_ctx=9), "n_ctx is an option of Generator"),
    (lambda p: p.generate(temperature="hot"), "temperature='hot', expected a number"),
    (lambda p: p.generate(temperature=-1), "temperature is -1, expected 0 (greedy) or more"),
    (lambda p: p.generate(top_k=-1), "top_k=-1, expected an integer, 0 or more"),
    (lambda p: p.generate(top_p=2), "top_p is 2, expected above 0, up to 1 (all)"),
    (lambda p: p.generate(min_p=2), "min_p is 2, expected 0 (all) to 1"),
    (lambda p: p.generate(repeat_penalty=0), "repeat_penalty is 0, expected above 0"),
    (lambda p: p.generate(repeat_last_n=-2), "repeat_last_n=-2, expected an integer, -1 or"),
    (lambda p: p.generate(seed="x"), "seed='x', expected an integer, 0 to"),
    (lambda p: p.generate(max_tokens=0), "max_tokens=0, expected 1 or more, or -1 for no limit"),
    (lambda p: p.generate(max_tokens="5"), "max_tokens='5', expected an integer"),
    (lambda p: p.generate(stop=""), "stop has an empty string, expected non-empty strings"),
    (lambda p: p.generate(ignore_eos="no"), "ignore_eos='no', expected True or False"),
    (lambda p: p.generate(parse_special=3), "parse_special=3, expected True or False"),
    (lambda p: p.generate(constraint=5), "constraint=5, expected a function of (tokens, mask)"),
    # Prompts.
    (lambda p: p.full.generate(None), "prompt must be text or token ids, got NoneType"),
    (lambda p: p.full.generate(b"a"), "prompt must be text or token ids, got bytes"),
    (lambda p: p.full.generate([1.5]), "prompt[0]=1.5, expected a token id"),
    (lambda p: p.full.generate([3, "a"]), "prompt[1]='a', expected a token id"),
    (lambda p: p.full.generate({"a": 1}), "prompt={'a': 1}, expected a list of token ids"),
    (lambda p: p.full.generate({3, 4}), "prompt={3, 4}, expected a list of token ids"),
    (lambda p: p.full.generate(np.array(5)), "prompt=array(5), expected a list of token ids"),
    (lambda p: p.full.generate([-1]), "token -1 is not in the vocabulary of 4096"),
    (lambda p: p.full.generate(""), "the prompt is empty"),
    (lambda p: p.full.embed([]), "text is an empty list, expected at least one text"),
    (lambda p: p.full.generate([5] * 65), "the prompt has 65 tokens, n_ctx is 64"),
    (lambda p: p.full.generate(["a"], each=5), "each=5, expected a list of options"),
    (lambda p: p.full.generate(["a"], each=[5]), "each=[5], expected a list of options"),
    (lambda p: p.full.generate(["a", "b"], each=[{}]), "each has 1 options for 2 prompts"),
    (lambda p: p.full.stream_many("a"), "prompts='a', expected a list of prompts"),
    (lambda p: p.full.stream_many(5), "prompts=5, expected a list of prompts"),
    (lambda p: list(p.full.run(["a"])), "requests[0]='a', expected what Generator.request()"),
    (lambda p: list(p.full.run(5)), "requests=5, expected what Generator.request() gives"),
    (lambda p: p.full.detokenize(5), "tokens=5, expected a list of token ids"),
    (lambda p: p.full.detokenize("abc"), "tokens='abc', expected a list of token ids"),
    (lambda p: p.full.logits("abc"), "token ids; tokenize() makes them of a text"),
    (lambda p: p.full.kept(99, 0), "layer=99, expected an integer, 0 to 5"),
    # Conversations.
    (lambda p: p.say("hello"), "messages='hello', expected a list of messages such as {'role'"),
    (lambda p: p.say({"role": "user", "content": "a"}), "expected a list of messages such as"),
    (lambda p: p.say(["hello"]), "messages[0]='hello', expected a list of messages"),
    (lambda p: p.say([{"content": "a"}]), "messages[0]={'content': 'a'} has no role"),
    (lambda p: p.say([]), "messages is empty, expected a list of messages"),
    (lambda p: p.say([{"role": "user"}], template=5), "template=5, expected text (a str)"),
    (lambda p: p.chat.say(5), "text=5, expected text (a str)"),
    (lambda p: Chat(p.full, system=5, template=TEMPLATE), "system=5, expected text"),  # type: ignore[arg-type]
    (lambda p: p.chat.save("x"), "the conversation has not begun, send a message first"),
    # Engine.
    (lambda p: p.engine.submit("a", record=5), "record=5, expected a Record"),
    (lambda p: p.engine.submit("a", timeout="x"), "timeout='x', expected a number"),
    (lambda p: p.engine.submit("a", hh=0.5).result(), "needs scores of heavy hitters, which this"),
    (lambda p: p.full.engine(), "this Generator already has an open Engine, close it first"),
    (lambda p: Record(n_top=-2), "n_top=-2, expected an integer, 0 or more"),
    (
        lambda p: p.full.reply([{"role": "user"}], tools=5, template=TEMPLATE),
        "tools=5 is not a list, expected {'type': 'function'",
    ),
    (
        lambda p: p.full.reply([{"role": "user"}], tool_choice="search", template=TEMPLATE),
        "tool_choice='search', expected tools to choose from",
    ),
    # Opening a model.
    (lambda p: Generator(""), "path is empty, expected a GGUF file"),
    (lambda p: p.open(exact=np.array([1, 0])), "exact=array([1, 0]), expected True or False"),
    (lambda p: p.open(prefix_cache_disk=5), "prefix_cache_disk=5, expected a directory"),
    (lambda p: p.open(cache_memory="200%"), "cache_memory='200%', expected a share above 0"),
    (lambda p: Generator(5), "path=5, expected the path of a GGUF file"),  # type: ignore[arg-type]
    (lambda p: p.open(hh=1), "hh=1 is one token, expected 1.0 for all of n_ctx"),
    (lambda p: p.open(hh=-1), "hh=-1, expected a fraction from 0 to 1 or a number of tokens"),
    (lambda p: p.open(hh="0.2"), "hh='0.2', expected a fraction, a number of tokens or 'auto'"),
    (lambda p: p.open(recent=0.1), "recent=0.1 is a part of hh, which is not given"),
    (
        lambda p: p.open(hh=0.2, recent=0.5),
        "recent=0.5 is 32 tokens, expected at most the 12 of hh=0.2",
    ),
    (lambda p: p.open(policy="window"), "policy='window' needs hh, the budget, such as"),
    (lambda p: p.open(policy=5), "policy=5, expected a name, a Policy, or a list"),
    (lambda p: p.open(policy=["h2o"]), "policy=['h2o'], expected a name, a Policy, or a list"),
    (lambda p: p.open(policy=Policy.window(4), hh=0.2), "give either a Policy or hh, not both"),
    (lambda p: p.open(n_ctx=10**11), "n_ctx=100000000000, expected an integer, 0 to 2147483647"),
    (lambda p: p.open(n_ctx="2k"), "n_ctx='2k', expected an integer"),
    (lambda p: p.open(n_ctx=9999), "n_ctx=9999, expected at most the trained length, 2048"),
    (lambda p: p.open(n_batch=10**6), "n_batch=1000000, expected an integer, 1 to 65536"),
    (lambda p: p.open(positions=5), "positions=5, expected 'auto', 'original' or 'rolling'"),
    (lambda p: p.open(kv_dtype="int8"), "kv_dtype is 'int8', expected one of f32, f16"),
    (lambda p: p.open(kv_dtype=8), "kv_dtype=8, expected a type or a pair of types"),
    (lambda p: p.open(device=0), "device=0, expected 'auto', 'cpu', 'cuda', 'cuda:N'"),
    (
        lambda p: p.open(device="tpu"),
        "device is 'tpu', expected auto, cpu, cuda, cuda:N, vulkan or",
    ),
    (lambda p: Generator(p.path, threads=5000), "threads=5000, expected an integer, 1 to 1024"),
    (lambda p: p.open(seed="x"), "seed='x', expected an integer, 0 or more"),
    (lambda p: p.open(snapshot_bytes="x"), "snapshot_bytes='x', expected bytes"),
    (lambda p: p.open(max_sequences=70000), "max_sequences=70000, expected at most 65025 with"),
    (lambda p: p.open(memory="4 gigs"), "memory='4 gigs', expected bytes or a size"),
    (lambda p: p.open(memory=-1), "memory=-1, expected bytes or a size such as 4GiB"),
    (lambda p: capacity(p.path, None), "memory=None, expected bytes"),  # type: ignore[arg-type]
    # Policies, caches and snapshots.
    (
        lambda p: Policy.h2o(4, 4, score="max"),  # type: ignore[arg-type]
        "score='max', expected one of sum, mean, inverse, question, random",
    ),
    (lambda p: Policy.h2o(4, 4, decay=2), "decay=2, expected 0 to 1"),
    (lambda p: Policy.window(0), "window: n is 0, expected at least 1"),
    (lambda p: KVCache(4, 2, 64, Policy.full()), "Policy.full() needs max_tokens"),
    (lambda p: KVCache(4, 3, 64, Policy.window(4)), "4 heads cannot share 3 kv_heads evenly"),
    (
        lambda p: KVCache(4, 2, 8, Policy.window(4)).attend(ROW, ROW, ROW),
        "q has shape [1, 2, 8], expected [n, 4, 8] with the same n",
    ),
    (lambda p: Snapshot.of("x"), "data='x', expected the bytes of a snapshot"),  # type: ignore[arg-type]
    (lambda p: p.full.load(5), "path=5, expected the path of a snapshot"),
    (lambda p: Snapshot.of(b"x"), "this is no snapshot"),
]

# Internal names and jargon that must not appear in messages.
_INTERNAL = re.compile(
    r"_core\.|make_request|incompatible|object has no attribute|^\[\w+\] |pybind"
)


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: CASES[i][1][:40])
def test_message_names_argument_got_and_expected(setup: Setup, case: int) -> None:
    call, expected = CASES[case]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        call(setup)
    message = str(error.value)
    assert expected in message
    assert not _INTERNAL.search(message)
    assert "\n" not in message
    assert len(message) < 300
