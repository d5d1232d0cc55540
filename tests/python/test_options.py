"""Options that commands share: the model, option names and aliases."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

import pytest

from h2o_cpp import BUNDLED_MODEL
from h2o_cpp.cli import _GROUPS, main, make_parser

# Required arguments of each command besides the model.
REQUIRED = {
    "chat": [],
    "generate": ["--input", "in", "--output", "out"],
    "serve": [],
    "info": [],
    "quantize": ["small.gguf", "Q8_0"],
    "advise": ["book.txt"],
    "imatrix": ["book.txt"],
    "perplexity": ["book.txt"],
    "retrieve": [],
    "reasoning": [],
    "heads": [],
    "eval": ["--tasks", "copa"],
    "bench": [],
}
WITH_TEXT = ["run", "embed", "inspect"]  # a single positional argument is a text
NO_MODEL = ["convert", "pull", "models", "completion"]
DEFAULT = ["chat", "generate", "serve", "bench", *WITH_TEXT]  # the bundled model


def parse(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(arguments)


def usage_error(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command; returns the last line of stderr."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("bias", ["5", "5+x", "+1", "5+", "x+1"])
def test_invalid_logit_bias(bias: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = usage_error("run", "x", "--logit-bias", bias, capsys=capsys)
    assert error.endswith(f"got {bias!r}, expected ID+X or ID-X such as 15043+1 or 2-inf")


def parsers() -> dict[str, argparse.ArgumentParser]:
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def test_every_command_is_covered() -> None:
    names = {name for group in _GROUPS.values() for name in group}
    assert names == {*REQUIRED, *WITH_TEXT, *NO_MODEL}


@pytest.mark.parametrize("command", REQUIRED)
def test_model_as_positional_or_option(command: str) -> None:
    """Before or after the other arguments."""
    others = REQUIRED[command]
    expected = vars(parse(command, "m.gguf", *others)) | {"module": None}
    assert expected["model"] == "m.gguf"
    for arguments in (
        ["-m", "m.gguf", *others],
        [*others, "--model", "m.gguf"],
        [*others, "-mm.gguf"],
        ["--model=m.gguf", *others],
    ):
        assert vars(parse(command, *arguments)) | {"module": None} == expected


@pytest.mark.parametrize("command", ["perplexity", "advise"])
def test_text_as_positional_or_option(command: str) -> None:
    for arguments in (
        ["m", "t"],
        ["m", "-t", "1", "t"],
        ["m", "-f", "t"],
        ["-f", "t", "m"],
        ["--file=t", "-m", "m"],
        ["-m", "m", "-t", "1", "t"],
        ["t", "-t", "1", "-m", "m"],
    ):
        args = parse(command, *arguments)
        assert (args.model, args.file) == ("m", Path("t"))


@pytest.mark.parametrize("command", REQUIRED)
def test_model_given_twice_is_an_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    others = REQUIRED[command]
    error = usage_error(command, "a", *others, "-m", "b", capsys=capsys)
    assert error.endswith("MODEL given twice: by -m, and by position")
    error = usage_error(command, *others, "-m", "a", "--model", "b", capsys=capsys)
    assert error.endswith("argument -m/--model: given twice")


@pytest.mark.parametrize("command", WITH_TEXT)
def test_model_and_text_as_positional_or_option(command: str) -> None:
    """Two words are the model and the text; one is what no option gives, else the text."""
    forms: list[tuple[list[str], str | None, str | None]] = [
        (["x"], None, "x"),
        (["-t", "1", "x"], None, "x"),
        (["-"], None, "-"),
        (["-p", "x"], None, "x"),
        (["-f", "x"], None, None),
        (["x", "-m", "m"], "m", "x"),
        (["--model=m", "x"], "m", "x"),
        (["m", "x"], "m", "x"),
        (["m", "-t", "1", "x"], "m", "x"),
        (["-t", "1", "m", "-t", "2", "x", "-t", "3"], "m", "x"),
        (["m", "-"], "m", "-"),
        (["m", "- an item"], "m", "- an item"),
        (["m", "--", "-x"], "m", "-x"),
        (["-m", "m", "--", "-x"], "m", "-x"),
        (["m", "-p", "x"], "m", "x"),
        (["--prompt", "x", "m"], "m", "x"),
        (["m", "-f", "x"], "m", None),
        (["--file=x", "m"], "m", None),
        (["-m", "m", "-f", "x"], "m", None),
    ]
    for words, model, text in forms:
        args = parse(command, *words)
        assert args.model == (model or BUNDLED_MODEL), words
        assert (args.prompt if args.words is None else args.words) == text, words
        assert args.file == (Path("x") if text is None else None), words


@pytest.mark.parametrize("command", WITH_TEXT)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "c"], "must be one argument, got 'b c' too: put it in quotes"),
        (["a", "b", "-m", "m"], "must be one argument, got 'b' too: put it in quotes"),
        (["a", "b", "-p", "x"], "TEXT given twice: by -p, and by position"),
        (["a", "-m", "m", "-f", "x"], "MODEL and TEXT given twice: by -m and -f, and by position"),
        (["a", "-p", "x", "-f", "y"], "not allowed with argument"),
        (["a", "--unknown"], "unrecognized arguments: --unknown"),
        (["-m", "m"], "is required"),
    ],
)
def test_too_many_texts(
    command: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = usage_error(command, *words, capsys=capsys)
    assert message in error.replace("PROMPT", "TEXT")


@pytest.mark.parametrize("command", WITH_TEXT)
def test_model_option_given_twice(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(command, "text", "-m", "a").model == "a"
    error = usage_error(command, "text", "-m", "a", "-m", "b", capsys=capsys)
    assert error.endswith("argument -m/--model: given twice")


@pytest.mark.parametrize("command", [*REQUIRED, *WITH_TEXT])
def test_default_model(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    others = REQUIRED.get(command, ["text"])
    if command in DEFAULT:
        assert parse(command, *others).model == BUNDLED_MODEL
    else:
        assert "required: " in usage_error(command, *others, capsys=capsys)


@pytest.mark.parametrize(
    ("command_line", "attributes"),
    [
        ("run x --ctx-size 64", {"n_ctx": 64}),
        ("run x -c 0", {"n_ctx": 0}),
        ("run x --endless", {"max_tokens": -1}),
        ("chat", {"max_tokens": None}),
        ("perplexity m t --hh 0.1,0.2", {"budget": [0.1, 0.2]}),
        ("retrieve m --budget 0.1,0.2", {"budget": [0.1, 0.2]}),
        ("reasoning m --task walk --hh 0.1", {"tasks": ["walk"], "budget": [0.1]}),
        ("run x --n-predict 5", {"max_tokens": 5}),
        ("run x --predict 5", {"max_tokens": 5}),
        ("run x --temp 0.5", {"temperature": 0.5}),
        ("run x -b 7", {"n_batch": 7}),
        ("run x --batch-size 7", {"n_batch": 7}),
        ("run x -s -1", {"seed": None}),
        ("run x -s 3", {"seed": 3}),
        ("run x -ctk q8_0", {"kv_dtype": ("q8_0", "f16")}),
        ("run x --cache-type-v q4_0", {"kv_dtype": ("f16", "q4_0")}),
        ("run x -ctk q8_0 -ctv q4_0", {"kv_dtype": ("q8_0", "q4_0")}),
        ("run x --kv-dtype f32 -ctv q4_0", {"kv_dtype": ("f32", "q4_0")}),
        ("chat -sys Hello", {"system": "Hello"}),
        ("serve -np 3", {"max_sequences": 3}),
        ("serve -n 7", {"max_tokens": 7}),
        ("serve --n-predict 7", {"max_tokens": 7}),
        ("serve --max-tokens 7", {"max_tokens": 7}),
        ("serve --parallel 3 -a it", {"max_sequences": 3, "name": "it"}),
        ("generate -i a -o b -np 3", {"input": Path("a"), "output": Path("b"), "max_sequences": 3}),
        ("perplexity m t --chunk 2 --max-tokens 9", {"n_batch": 2, "text_tokens": 9}),
        ("advise m t --chunk 2 --max-tokens 9", {"n_batch": 2, "text_tokens": 9}),
        ("retrieve m --length 9 --task kv", {"n_ctx": 9, "tasks": ["kv"]}),
        ("retrieve m --chunk 3 --text t", {"n_batch": 3, "file": Path("t")}),
        ("eval m --task copa --chunk 3", {"tasks": "copa", "n_batch": 3}),
        (
            "bench --prompt 9 --context 8 --tokens 7",
            {"prompt_tokens": 9, "depth": 8, "max_tokens": 7},
        ),
        ("bench -p 9 -d 8 -n 7 -r 2", {"prompt_tokens": 9, "depth": 8, "rounds": 2}),
    ],
)
def test_aliases(command_line: str, attributes: dict[str, object]) -> None:
    """Option names of llama.cpp and earlier names of our own."""
    args = vars(parse(*command_line.split()))
    assert {name: args[name] for name in attributes} == attributes


@pytest.mark.parametrize("command", ["run x", "chat", "serve", "bench", "eval m --tasks t"])
def test_gpu_layers_option_prints_a_note(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("-ngl", "--n-gpu-layers", "--gpu-layers"):
        parse(*command.split(), name, "99")
        (note,) = capsys.readouterr().err.splitlines()
        assert note.startswith(f"note: {name} 99 has no effect: --device")


def test_short_options_have_one_meaning() -> None:
    """A short option means the same in every command, except where llama.cpp's tools differ."""
    dests = defaultdict(set)
    for parser in parsers().values():
        for action in parser._actions:
            for name in action.option_strings:
                if not name.startswith("--"):
                    dests[name].add(action.dest)
    several = {name for name, values in dests.items() if len(values) > 1}
    assert several == {"-p"}  # the prompt; in bench its length
    assert dests["-p"] == {"prompt", "prompt_tokens"}


def test_help_mentions_only_options_of_the_command() -> None:
    others = {  # of the next command
        "imatrix": {"--imatrix"},
        "advise": {"--hh", "--kv-dtype"},
        "heads": {"--archive-heads"},
    }
    for name, parser in parsers().items():
        mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", parser.format_help()))
        options = {option for action in parser._actions for option in action.option_strings}
        assert mentioned - options - others.get(name, set()) == set(), name


def test_help_does_not_list_aliases() -> None:
    for name, parser in parsers().items():
        text = parser.format_help()
        for alias in ("--ctx-size", "--n-predict", "--temp ", "-np", "-ngl", "-ctk", "--chunk "):
            assert alias not in text, name
        assert text.startswith(f"usage: h2o-cpp {name}")
        assert text.partition("\n\n")[0].count("\n") == 0
