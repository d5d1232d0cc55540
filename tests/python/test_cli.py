"""The command line."""

from __future__ import annotations

import fcntl
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import h2o_cpp
from h2o_cpp import BUNDLED_MODEL, Generator
from h2o_cpp.budget.stored_budget import store_budget
from h2o_cpp.cli import llama_cpp_flags, main
from support.hub import Hub
from support.needs import packages

PROMPT = "The old man"
SUMMARY = re.compile(
    r"\[prompt (?P<prompt>\d+) tokens, \d+/s \| generated (?P<generated>\d+) tokens, \d+/s \| "
    r"cache (?P<cache>[\d.]+) MiB, full (?P<full>[\d.]+) MiB \((?P<share>\d+)%\) \| "
    r"(?P<evicted>\d+) evicted of (?P<seen>\d+) \| end: (?P<end>\w+)\]"
)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "h2o_cpp", *arguments]


def test_run_prints_text_and_summary_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hh", "40", "-n", "60", "--seed", "5", "--threads", "1", "--ignore-eos"]
    assert main(["run", PROMPT, *options]) == 0
    out, err = capsys.readouterr()
    with Generator(BUNDLED_MODEL, hh=40, threads=1) as generator:
        expected = generator.generate(PROMPT, max_tokens=60, seed=5, ignore_eos=True)
        stats = generator.stats()
    assert out == f"{PROMPT}{expected.text}\n"
    line = SUMMARY.fullmatch(err.strip())
    assert line is not None, err
    assert int(line["prompt"]) == expected.prompt_tokens
    assert int(line["generated"]) == 60
    assert int(line["seen"]) == stats.tokens_seen == expected.prompt_tokens + 59
    assert int(line["evicted"]) == stats.evictions == stats.tokens_seen - 40
    assert float(line["cache"]) == pytest.approx(stats.cache_bytes / 2**20, abs=0.005)
    assert float(line["full"]) == pytest.approx(stats.full_cache_bytes / 2**20, abs=0.005)
    assert line["end"] == "length"


def test_run_reads_prompt_from_stdin() -> None:
    done = subprocess.run(
        command("run", "-", "-n", "5", "--temperature", "0"),
        input=PROMPT + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(PROMPT)
    assert SUMMARY.fullmatch(done.stderr.strip())


def test_run_reads_prompt_from_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n", encoding="utf-8")
    options = ["-n", "5", "--temperature", "0"]
    assert main(["run", PROMPT, *options]) == 0
    expected = capsys.readouterr().out
    assert main(["run", "-f", str(tmp_path / "prompt.txt"), *options]) == 0
    assert capsys.readouterr().out == expected
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    assert main(["run", "-f", str(tmp_path / "prompt.txt")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path / 'prompt.txt'}: not UTF-8 text")


def test_short_options_and_repeat_penalty(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-n", "80", "--repeat-penalty", "1.5", "--repeat-last-n", "-1", "--temperature", "0"]
    assert main(["run", PROMPT, "-c", "90", "-t", "1", "-s", "7", *options]) == 0
    out, _ = capsys.readouterr()
    with Generator(BUNDLED_MODEL, n_ctx=90, threads=1) as generator:
        penalty: dict[str, float] = {"repeat_penalty": 1.5, "temperature": 0}
        texts = [
            generator.generate(PROMPT, max_tokens=80, seed=7, repeat_last_n=n, **penalty).text  # type: ignore[call-overload]
            for n in (-1, 8)
        ]
    assert texts[0] != texts[1]
    assert out == f"{PROMPT}{texts[0]}\n"


def test_parse_special(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = []
    for options in ([], ["--parse-special"]):
        assert main(["run", "</s>", "-n", "1", *options]) == 0
        line = SUMMARY.fullmatch(capsys.readouterr().err.strip())
        assert line is not None
        prompts.append(int(line["prompt"]))
    with Generator(BUNDLED_MODEL, threads=1) as generator:
        expected = [len(generator.tokenize("</s>", parse_special=on)) for on in (False, True)]
    assert prompts == expected
    assert prompts[0] > prompts[1]


def test_run_stops_at_stop_string(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", PROMPT, "--seed", "1", "--stop", "e", "-n", "400"]) == 0
    out, err = capsys.readouterr()
    assert "e" not in out.removeprefix(PROMPT)
    assert "end: stop" in err


def test_summary_names_the_option_that_ended_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", PROMPT, "-c", "6", "-n", "-1", "--ignore-eos"]) == 0
    assert "end: the context is full: --n-ctx is 6" in capsys.readouterr().err


def test_interrupt_prints_summary_and_exits_with_130() -> None:
    arguments = command("run", PROMPT, "-n", "2000", "--ignore-eos")
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        # The output does not fit into the pipe, so the process cannot end before the interrupt.
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(len(PROMPT) + 20):
            process.stdout.read(1)  # generation has started
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"end: cancelled" in err


def test_closed_pipe_is_not_an_error() -> None:
    arguments = " ".join(f"'{word}'" for word in command("run", PROMPT, "-n", "2000"))
    done = subprocess.run(
        ["sh", "-c", f"{arguments} | head -c 20"], capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", PROMPT, "-m", "nowhere.gguf"], "nowhere.gguf"),
        (["run", ""], "empty"),
        pytest.param(
            ["serve", "--tls-cert", "none.pem"],
            "error: none.pem: No such file or directory\n",
            marks=packages("fastapi", "uvicorn"),
        ),
        (["run", "-f", "none.txt"], "error: none.txt: No such file or directory\n"),
        (["info", "nowhere.gguf"], "nowhere.gguf"),
        (["info", str(Path(__file__).parent)], "no GGUF model"),
    ],
)
def test_errors_are_one_line_with_exit_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_missing_device(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong argument of a build without CUDA, else a failure."""
    status = main(["run", PROMPT, "--device", "cuda:99"])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    if "this build has no CUDA back end" in err:
        assert status == 2
    else:
        assert status == 1
        assert "cuda" in err.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["jump"], "jump"),
        (["run"], "one of the arguments PROMPT -p/--prompt -f/--file is required"),
        (["run", PROMPT, "--hh", "lots"], "expected a fraction such as 0.2 or a number of tokens"),
        (["run", PROMPT, "--temprature", "0"], "--temprature; did you mean --temperature?"),
        (["rnu", PROMPT], "; did you mean run?"),
        (["run", PROMPT, "-hf"], "argument -hf: expected OWNER/REPO"),
        (["run", PROMPT, "--verbosely"], "unrecognized arguments: --verbosely\n"),
        (["run", PROMPT, "--prefix", "x"], "unrecognized arguments: --prefix\n"),
        (["run", "The", "old", "man"], "got 'old man' too: put it in quotes"),
        (["run", "-f", "prompt.txt", "-p", PROMPT], "not allowed with"),
        (["perplexity", "-m", "a"], "required: FILE"),
        (["info"], "required: MODEL"),
        (
            ["run", PROMPT, "-c", "x"],
            "argument -c/--n-ctx/--ctx-size: expected an integer, got 'x'",
        ),
        (["--vers"], "COMMAND"),
        (["perplexity", "a", "b", "--budget", "0.1,x"], "expected fractions such as 0.1,0.2"),
        (["convert", "a", "-o", "-"], "a GGUF file cannot be written to stdout"),
        (["quantize", "a", "-", "Q8_0"], "a GGUF file cannot be written to stdout"),
        (["imatrix", "a", "b", "-o", "-"], "a GGUF file cannot be written to stdout"),
        (["advise", "a", "b", "-o", "-"], "a GGUF file cannot be written to stdout"),
    ],
)
def test_usage_errors_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    err = capsys.readouterr().err
    assert "usage: h2o-cpp" in err
    assert message in err


def usage_error(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr of a command with a usage error."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    return capsys.readouterr().err.splitlines()[-1]


def test_model_as_prompt_is_a_usage_error(
    tmp_path: Path,
    tiny_opt: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A single argument that names a model is rejected, unless --model is given."""
    pulled = tmp_path / ".pulled"
    pulled.mkdir()
    (pulled / "tiny.gguf").symlink_to(tiny_opt)
    monkeypatch.setenv("H2O_MODELS", str(pulled))
    file = tmp_path / "stories.gguf"
    file.symlink_to(tiny_opt)
    for command in ("run", "inspect"):
        for model in (str(file), str(tmp_path), "hf://org/name", "stories.gguf", "tiny"):
            error = usage_error(command, model, capsys=capsys)
            assert f"{model} is a model, and " in error
            assert error.endswith(f'is missing; did you mean: h2o-cpp {command} {model} "..."')
    for arguments in (["-p", "a.gguf"], [str(file), "-m", str(tiny_opt)], ["What is a.gguf"]):
        assert main(["run", *arguments, "-n", "1"]) == 0
        assert ".gguf" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "embed", "inspect"])
def test_model_before_the_text(
    command: str, tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equals -m, also with the text from a file or an option."""
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    more = {"run": ["-s", "1", "-n", "9", "--json"]}.get(command, [])
    outputs = []
    for words in (
        ["-m", str(tiny_opt), PROMPT],
        [str(tiny_opt), PROMPT],
        [str(tiny_opt), "-p", PROMPT],
        ["-f", str(tmp_path / "prompt.txt"), str(tiny_opt)],
    ):
        assert main([command, *words, "-t", "1", *more]) == 0
        out = capsys.readouterr().out
        outputs.append(json.loads(out)["text"] if command == "run" else out)
    assert outputs[0]
    assert len(set(outputs)) == 1
    assert main([command, "The", PROMPT]) == 1
    assert capsys.readouterr().err.startswith("error: The: no such file or pulled model")


@pytest.mark.parametrize("flag", llama_cpp_flags.ANSWERS)
def test_llama_cpp_flags_are_explained(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([flag], [flag, "1"], [f"{flag}=1"]):
        error = usage_error("run", *more, capsys=capsys)
        assert error.endswith(f"error: {flag} is a llama.cpp flag: {llama_cpp_flags.ANSWERS[flag]}")


@pytest.mark.parametrize("option", ["--json-schema={}", "--grammar=root ::= [a]"])
@pytest.mark.parametrize("command", ["run", "chat", "generate"])
def test_missing_extra_is_one_line(
    command: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("A\n"))
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "A"}\n')
    given = {
        "run": ["A"],
        "chat": ["--template", "chatml"],
        "generate": ["-i", str(lines), "-o", str(tmp_path / "out.jsonl")],
    }
    assert main([command, *given[command], option]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: grammars need llguidance: pip install 'h2o-cpp[grammar]'"


def test_common_llama_cpp_flags_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    """In h2o-cpp run, which has none of them."""
    flags = (
        "-e --color --in-prefix --numa --prompt-cache --chat-template -np -sp -sys "
        "--verbose-prompt -cnv"
    )
    for flag in flags.split():
        assert f"{flag} is a llama.cpp flag: " in usage_error("run", PROMPT, flag, capsys=capsys)


def test_hf_repo_flag(hub: type[Hub], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["-hf", "org/name"], ["--hf-repo=org/name:small"]):
        assert main(["info", *arguments]) == 0
        assert "small.gguf: GGUF v3" in capsys.readouterr().out


def test_prompt_option_equals_positional(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for arguments in ([PROMPT], ["-p", PROMPT], ["--prompt", PROMPT]):
        assert main(["run", *arguments, "-n", "9", "-s", "1", "-t", "1"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1


@pytest.mark.parametrize("command", ["run", "chat", "perplexity", "advise", "quantize", "convert"])
def test_help_shows_default_of_every_option(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    entries = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    assert len(entries) > 2
    for entry in entries:
        assert (
            "(default" in entry or "--help" in entry or "as an option" in entry or "--file" in entry
        )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"h2o-cpp {h2o_cpp.__version__}\n"


def test_info(tiny_opt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tiny_opt), "--tensors", "--metadata"]) == 0
    out = capsys.readouterr().out
    for fact in ("opt", "2,048", "3,849,216", "37 Q8_0, 63 F32", "gpt2", "blk.5.ffn_down.weight"):
        assert fact in out
    assert main(["info", str(tiny_opt), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["architecture"] == "opt"
    assert document["parameters"] == 3_849_216
    assert len(document["tensors"]) == 100
    with Generator(tiny_opt, n_ctx=1000, hh=0.2) as generator:
        stats = generator.stats()
    assert document["cache"] == {
        "n_tokens": 1000,
        "full": stats.full_cache_bytes,
        "hh_20": stats.cache_bytes,
    }
    assert "budget" not in document


def test_info_shows_stored_budget(
    tiny_opt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    store_budget(tiny_opt, path, hh=0.25, policy="mean", n_ctx=512, loss=0.0123, kv_dtype="q8_0")
    assert main(["info", str(path)]) == 0
    expected = "--hh auto is 0.25 by mean in q8_0, which costs 1.23% at 512 tokens"
    assert re.search(rf"^  budget +{re.escape(expected)}$", capsys.readouterr().out, re.MULTILINE)
    assert main(["info", str(path), "--json"]) == 0
    budget = json.loads(capsys.readouterr().out)["budget"]
    assert budget == {
        "hh": 0.25, "policy": "mean", "n_ctx": 512, "loss": 0.0123, "kv_dtype": "q8_0"
    }  # fmt: skip


def names_in(value: object) -> Iterator[str]:
    """The keys of nested JSON objects, except those of GGUF metadata."""
    if isinstance(value, dict):
        yield from value
        value = [item for key, item in value.items() if key != "metadata"]
    if isinstance(value, list):
        for item in value:
            yield from names_in(item)


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "MODEL", "--memory", "1GiB"],
        ["run", "The", "-m", "MODEL", "-n", "2"],
        ["generate", "-m", "MODEL", "-i", "LINES", "-o", "OUT", "-n", "2"],
        ["advise", "MODEL", "TEXT", "-c", "100", "--policy", "mean", "--kv-dtypes", "f16"],
        ["perplexity", "MODEL", "TEXT", "-c", "32", "--budget", "0.5", "--policy", "h2o"],
        ["retrieve", "MODEL", "--budget", "0.5", "--length", "128", "--samples", "1"],
        ["models"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_json_keys_are_identifiers(
    arguments: list[str],
    tiny_opt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "lines").write_text('{"prompt": "The"}\n')
    (tmp_path / "text").write_text("The old man went down to the sea with his son. " * 20)
    (tmp_path / "tiny.gguf").symlink_to(tiny_opt)
    monkeypatch.setenv("H2O_MODELS", str(tmp_path))
    files = {
        "MODEL": tiny_opt,
        **{name: tmp_path / name.lower() for name in ("LINES", "TEXT", "OUT")},
    }
    assert main([*(str(files.get(word, word)) for word in arguments), "--json"]) == 0
    names = set(names_in(json.loads(capsys.readouterr().out)))
    assert len(names) > 3
    assert [name for name in names if not name.isidentifier()] == []


def test_info_of_vocabulary_only_file(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = shared / "tokenizers" / "ggml-vocab" / "ggml-vocab-gpt-2.gguf"
    assert main(["info", str(file)]) == 0
    assert "50,257" in capsys.readouterr().out
