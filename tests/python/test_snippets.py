"""The code of the pages runs in an otherwise empty directory, and prints what they show."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from gguf import GGUFValueType

from h2o_cpp import BUNDLED_MODEL, Chat, Completion, Generator
from h2o_cpp.cli import main
from support import encoders
from support.changed_gguf import changed
from support.needs import packages
from support.opt_checkpoint import make_checkpoint
from support.pages import PAGES, ROOT, blocks, documented_commands, run
from support.scripted_chat import PLAIN, scripted_chat
from support.scripted_opt import END
from support.shapes import SHAPES
from support.synthetic import write_model

TEXT = "The old man went down to the sea with his son. He had not been there for many years. "
FILES = ("book.txt", "chapter.txt", "text.txt", "treasure.txt")
MODELS = ("model.gguf", "small.gguf", "large.gguf", "tiny-opt.gguf")
# They download, do not end, need an encoder or a model of reasoning, or take minutes.
NOT_RUN = {"pull", "serve", "eval", "embed", "reasoning", "heads"}


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what pages name: texts, and the bundled model with a template."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("H2O_MODELS", str(tmp_path))
    template = {"tokenizer.chat_template": (PLAIN, GGUFValueType.STRING)}
    changed(BUNDLED_MODEL, tmp_path / MODELS[0], template, {})
    for name in MODELS[1:]:
        shutil.copyfile(MODELS[0], name)
    for name in ("NAME.gguf", "SmolLM2-360M-Instruct-Q8_0.gguf"):
        scripted_chat([END] * 128).write(Path(name))
    for name in FILES:
        Path(name).write_text(TEXT * 30)
    Path("prompts.jsonl").write_text('{"id": "q12", "prompt": "The sea"}\n')
    Path("models").mkdir()
    return tmp_path


def commands(page: Path) -> list[list[str]]:
    """The commands of a guide that are run here."""
    if page.parent.name == "measured":
        return []
    return [
        words
        for words in documented_commands(page)
        if words[0] not in NOT_RUN and not {"cuda", "vulkan"} & {*words}
    ]


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if commands(page)],
)
def test_commands(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(page):
        if words[0] == "convert":
            make_checkpoint(Path(words[1]))
        elif words[0] == "chat" and "--file" not in words:
            scripted_chat([END] * 128).write(Path("model.gguf"))  # which soon ends
        elif words[0] == "perplexity":
            Path("book.txt").write_text(TEXT * 110)  # more than the context
        if words[0] in ("convert", "quantize"):
            words.append("--force")
        lines = io.BytesIO(b'{"prompt": "The sea"}\n')
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines))
        assert main(words) == 0, (words, capsys.readouterr().err)
        shutil.copyfile("large.gguf", "model.gguf")


@pytest.mark.usefixtures("in_folder")
def test_lines_of_a_job() -> None:
    """The line of an output on the page has the fields of one that is written."""
    [shown] = blocks("docs/batching.md", "json")
    command, *_ = commands(ROOT / "docs" / "batching.md")
    assert main(command) == 0
    [line] = Path("out.jsonl").read_text().splitlines()
    assert json.loads(shown).keys() == json.loads(line).keys()


@pytest.mark.usefixtures("in_folder")
def test_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(blocks("docs/quickstart.md")) == 3
    run("docs/quickstart.md", {})
    out = capsys.readouterr().out
    assert re.search(r"^\d+ tokens read, 409 kept$", out, re.MULTILINE)
    assert "100 tokens seen;" in out


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python blocks run with a model that has a chat template."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "small.gguf"):
        scripted_chat([END] * 128).write(Path(name))
    names = run("README.md", {})
    assert isinstance(names["chat"], Chat)
    assert len(names["outputs"]) == 2  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_folder")
def test_batching_page(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("docs/batching.md", {"prompts": ["The old man", "It was"]})
    pieces = capsys.readouterr().out
    assert set(re.findall(r"^[01] ", pieces, re.MULTILINE)) == {"0 ", "1 "}
    assert isinstance(names["completion"], Completion)
    assert names["completion"].result().completion_tokens > 0


@pytest.mark.usefixtures("in_folder")
def test_snapshots_of_the_cache_page() -> None:
    names: dict[str, object] = {"generator": Generator("model.gguf", hh=0.2)}
    run("docs/cache.md", names | {"prompt": "The old", "question": "Who?", "system_prompt": "Be."})


@pytest.mark.usefixtures("in_folder")
def test_drafts_page() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 300}
    config = SHAPES["TinyLlama-1.1B"] | sizes | {"max_position_embeddings": 32768}
    write_model(Path("model.gguf"), config, "F32")
    names = run("docs/drafts.md", {"Generator": Generator, "prompt": "The old man"})
    assert isinstance(names["generator"], Generator)


@packages("torch", "transformers", "tokenizers")
@pytest.mark.usefixtures("in_folder")
def test_encoders_page() -> None:
    sizes = {"vocab_size": len(encoders.WORD_PIECES), "hidden_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64}
    scorer = encoders.make("BertForSequenceClassification", **sizes, num_labels=1)
    kinds = {"all-MiniLM-L6-v2": encoders.make("BertModel", **sizes), "bge": scorer}
    for name, model in kinds.items():
        encoders.save(model, Path(name))
        encoders.write_word_pieces(Path(name))
        encoders.pooling(Path(name), "mean_tokens")
    convert, embed, _ = documented_commands(ROOT / "docs" / "encoders.md")
    assert main(convert) == main(["convert", "bge", "-o", "bge-reranker-v2-m3.gguf"]) == 0
    assert main(embed) == 0
    names = run("docs/encoders.md", {})
    assert len(names["vectors"]) == len(names["scores"]) == 2  # type: ignore[arg-type]


@packages("openai", "fastapi", "uvicorn", "prometheus_client")
@pytest.mark.usefixtures("in_folder")
def test_server_page(capsys: pytest.CaptureFixture[str]) -> None:
    """A client, an application, fields of replies, and a list of models."""
    from h2o_cpp.options import GeneratorOptions
    from h2o_cpp.serve.catalog import Catalog
    from h2o_cpp.serve.model_list import read_models
    from h2o_cpp.serve.options import ServiceOptions
    from h2o_cpp.serve.service import Service
    from support.serving import serving_catalog

    with (
        Generator("model.gguf", hh=0.2, threads=1) as generator,
        serving_catalog(Catalog.of(Service(generator, name="model"))) as server,
    ):
        names = run(
            "docs/serving.md", {"Generator": Generator}, {"http://127.0.0.1:8000": server.url}
        )
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        reply = server.ask("/v1/chat/completions", body).json()
    assert capsys.readouterr().out.strip()
    assert callable(names["app"])
    [shown] = blocks("docs/serving.md", "json")
    fields = json.loads(f"{{{shown}}}")
    assert fields["usage"]["prompt_memory"].keys() == reply["usage"]["prompt_memory"].keys()
    [table] = blocks("docs/serving.md", "toml")
    Path("models.toml").write_text(table)
    assert len(read_models(Path("models.toml"), GeneratorOptions(), ServiceOptions())) == 2


@packages("llguidance", "pydantic")
@pytest.mark.usefixtures("in_folder")
def test_grammar_page() -> None:
    run("docs/grammar.md", {"generator": Generator("model.gguf")})


def expected_output(page: str) -> tuple[list[str], re.Pattern[str]]:
    """The command of a page that begins with $, and its output, in which ... is any text."""
    (block,) = blocks(page, "")
    command, output = re.fullmatch(r"\$ h2o-cpp (.*?[^\\])\n(.*)", block, re.DOTALL).groups()  # type: ignore[union-attr]
    pattern = re.escape(output.strip()).replace(re.escape("..."), ".*")
    return shlex.split(command.replace("\\\n", "")), re.compile(pattern, re.DOTALL)


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("page", ["docs/inspect.md", "docs/batching.md"])
def test_printed_output(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of a command is as its page shows it."""
    arguments, output = expected_output(page)
    assert main(arguments) == 0
    assert output.fullmatch(capsys.readouterr().out.strip())
