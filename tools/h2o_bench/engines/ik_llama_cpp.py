"""ik_llama.cpp, by running its llama-bench for each request."""

from __future__ import annotations

import json
import resource
import subprocess
from typing import Any

from h2o_bench.engines.serving import Engine, serve


class IkLlamaCpp(Engine):
    """A model file and the llama-bench that loads it."""

    def __init__(self, path: str, *, program: str, threads: int, repack: bool) -> None:
        """Load the model once. Raises RuntimeError.

        repack: whether weights are repacked for its kernels at load.
        """
        self._command = [program, "-m", path, "-t", str(threads), "-r", "2", "-o", "json"]
        self._command += ["-rtr", str(int(repack))]
        self._repack = repack
        self._n_tokens = 0
        self._last = self._run("-p", "1", "-n", "0")
        super().__init__(n_vocab=0)

    def prefill(self, n: int) -> list[float]:
        return [self._seconds("-p", str(n), "-n", "0")]

    def decode(self, n_context: int, n: int) -> list[float]:
        """Read the context, then n tokens; each step is the mean."""
        return [self._seconds("-p", "0", "-n", "0", "-gp", f"{n_context},{n}") / n] * n

    def batch(self, n_texts: int, n_prompt: int, n: int) -> list[float]:
        """Not supported: raises RuntimeError."""
        raise RuntimeError("llama-bench decodes a single sequence")

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    @property
    def peak_rss_bytes(self) -> int:
        """Returns the peak of the largest llama-bench so far."""
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024

    @property
    def version(self) -> str:
        return f"{self._last['build_commit']}{', repacked' if self._repack else ''}"

    def _seconds(self, *arguments: str) -> float:
        """Seconds of the second run, after a warm-up."""
        found = self._run(*arguments)
        self._n_tokens = found["n_prompt"] + found["n_gen"]
        return float(found["samples_ns"][-1]) / 1e9

    def _run(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.splitlines() or ["no output"])[-1])
        (found,) = json.loads(done.stdout)
        return dict(found)


if __name__ == "__main__":
    serve(IkLlamaCpp)
