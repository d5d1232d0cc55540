"""A forked child has no compute threads, so calls that would wait for them raise at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.needs import LINUX

PROGRAM = """
import os, sys
from h2o_cpp import Generator

generator = Generator(sys.argv[1], hh=8, threads=2, max_resident=sys.argv[3] or None)
prompt = [5, 6]
running = generator.stream(prompt, max_tokens=-1, ignore_eos=True)
next(running)
engine = generator.engine()
if sys.argv[2] == "computing":  # the engine's thread is computing
    completion = engine.submit(prompt, max_tokens=-1, ignore_eos=True)
    next(completion)
else:
    completion = engine.submit(prompt, max_tokens=2, ignore_eos=True)
    completion.result()

def child():
    uses = {
        "next": lambda: next(running),
        "stream": lambda: generator.stream(prompt),
        "generate": lambda: generator.generate(prompt),
        "generate many": lambda: generator.generate([prompt, prompt]),
        "submit": lambda: engine.submit(prompt),
        "result": lambda: generator.logits(prompt),
        "save": lambda: running.save(),
        "stats": lambda: generator.stats(),
        "kept": lambda: generator.kept(0, 0),
    }
    for name, use in uses.items():
        try:
            use()
        except RuntimeError as error:
            print(name, "raised:", error)
        else:
            print(name, "did not raise")
    completion.close()
    generator.close()

if pid := os.fork():
    _, status = os.waitpid(pid, 0)
    assert running.finish_reason is None
    assert next(running)  # the parent continues
    print("status", status)
else:
    child()  # then exits and finalizes as usual
"""


@LINUX  # os.fork
@pytest.mark.parametrize(
    ("engine", "max_resident"), [("computing", ""), ("idle", ""), ("idle", "1MiB")]
)
def test_calls_in_forked_child_raise_at_once(llama: Path, engine: str, max_resident: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM]
    done = subprocess.run(
        [*command, str(llama), engine, max_resident], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *lines, status = done.stdout.splitlines()
    assert status == "status 0", done.stdout + done.stderr
    assert len(lines) == 9
    for line in lines:
        assert "raised: the model was opened by another process" in line, line
