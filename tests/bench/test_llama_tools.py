"""llama.cpp's programs on a GPU, with stand-ins that print what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_bench.llama_tools import LlamaTools

LLAMA_BENCH = """#!/bin/sh
echo "$@" >>{calls}
case "$LD_LIBRARY_PATH" in {directory}*) ;; *) exit 3 ;; esac
cat <<END
[{{"build_commit": "abc", "backends": "CUDA", "gpu_info": "{gpu}", "n_prompt": 512, "n_depth": 128,
   "samples_ns": [2000000000, 1000000000]}},
 {{"build_commit": "abc", "backends": "CUDA", "gpu_info": "{gpu}", "n_prompt": 512, "n_depth": 2048,
   "samples_ns": [500000000, 500000000]}}]
END
"""
BATCHED = """#!/bin/sh
echo "$@" >>{calls}
echo 'a line of a log'
echo '{{"pp": 128, "tg": 8, "pl": 3, "t_tg": 0.16}}'
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    directory.mkdir()
    return directory


def write_programs(directory: Path, gpu: str) -> Path:
    calls = directory / "calls"
    for name, script in (("llama-bench", LLAMA_BENCH), ("llama-batched-bench", BATCHED)):
        path = directory / name
        path.write_text(script.format(calls=calls, directory=directory, gpu=gpu))
        path.chmod(0o755)
    return calls


def test_llama_cpp_programs(programs: Path) -> None:
    calls = write_programs(programs, "H100")
    tools = LlamaTools(programs, "cuda", 20)
    model = Path("model.gguf")
    version, prompts = tools.prefill(model, (512,), 2)
    assert version == "abc CUDA H100"
    assert prompts == {512: [0.5, 0.5]}  # the faster number of tokens per pass
    assert tools.decode(model, (128, 2048), 10, 2) == {128: 0.15, 2048: 0.05}
    assert tools.decode_together(model, (128,), 3, 8) == {128: 0.02}
    *_, batched = calls.read_text().splitlines()
    assert "-c 768" in batched  # three sequences of 136 tokens, each of 256
    write_programs(programs, "")
    with pytest.raises(RuntimeError, match="found no GPU"):
        tools.prefill(model, (512,), 2)
    (programs / "llama-bench").write_text("#!/bin/sh\necho 'no such model' >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="llama-bench: no such model"):
        tools.prefill(model, (512,), 2)
    (programs / "llama-bench").unlink()
    with pytest.raises(RuntimeError, match="No such file"):
        tools.prefill(model, (512,), 2)


def test_llama_cpp_time_is_for_all_runs(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_programs(programs, "H100")
    now = 0.0
    monkeypatch.setattr("h2o_bench.llama_tools.perf_counter", lambda: now)
    tools = LlamaTools(programs, "cuda", 20)
    tools.prefill(Path("model.gguf"), (512,), 2)
    now = 25.0
    (programs / "llama-bench").write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(RuntimeError, match="llama-bench: did not end in time"):
        tools.decode(Path("model.gguf"), (128,), 10, 2)
