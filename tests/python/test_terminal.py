"""No control character of a file, a template or the network reaches a terminal or a log."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h2o_cpp.cli
from h2o_cpp import Chat, Generator
from h2o_cpp.cli import main
from h2o_cpp.files.visible_text import MAX_MESSAGE, message_line, visible, visible_log
from support.hostile_hub import Answer, HostileHub, hostile_hub, listing, sibling, whole
from support.random_search import examples
from support.scripted_chat import PLAIN
from support.scripted_opt import Gguf, Tensor, scripted_opt, string, strings

# Written here once more, other than in the package: what a terminal may obey, besides line breaks
# and tabs, and what turns the direction of a text.
FORBIDDEN = {
    *(chr(code) for code in [*range(32), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"),
    *"\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f",
}
EVIL = "\x1b]0;mine\x07\x1b[2J\x9b31m\r\x08\x7f\u202e"
ESCAPED = r"\x1b]0;mine\x07\x1b[2J\x9b31m\r\x08\x7f\u202e"


def unsafe(text: str) -> set[str]:
    return FORBIDDEN.intersection(text) | set(re.findall("[\ud800-\udfff]", text))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(*arguments: object, bars: bool = False) -> tuple[int, str]:
    """The status and all that a command writes to a terminal; bars: also progress bars, which have
    control characters of their own."""
    out, err = Terminal(), Terminal() if bars else io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as end:
            status = int(str(end.code))
    return status, out.getvalue() + err.getvalue()


@pytest.fixture(scope="module")
def hub() -> Iterator[HostileHub]:
    with pytest.MonkeyPatch.context() as patch, hostile_hub(patch) as running:
        yield running


def hostile_model(text: str, tensor: str = "") -> Gguf:
    """A model that writes `text`, which is also in its metadata; tensor: the name of one more, with
    which the model can only be described."""
    made = scripted_opt([*text.encode()][:60])
    made.keys["general.name"] = string(text)
    made.keys["general.tags"] = strings([text])
    made.keys["tokenizer.chat_template"] = string("{{ raise_exception(messages[0].content) }}")
    made.keys[f"x.{text}"] = string(text)
    if tensor:
        made.tensors[tensor] = Tensor((1,), bytes(4))
    return made


class TestVisible:
    @given(st.text())
    def test_texts_are_harmless_and_others_unchanged(self, text: str) -> None:
        for lines in (False, True):
            shown = visible(text, lines=lines)
            assert not unsafe(shown)
            assert visible(shown, lines=lines) == shown
            assert ("\n" in shown or "\t" in shown) <= lines
            if not unsafe(text) and not {"\n", "\t"}.intersection(text):
                kept = {c for c in text if c not in "\u061c\ufff9\ufffa\ufffb"}
                assert kept <= set(shown)
        assert len(message_line(text * 999)) <= MAX_MESSAGE

    def test_emoji_and_scripts_are_kept(self) -> None:
        text = "naïve 漢字 العربية 👩‍👩‍👧 \u00ad\ufeff"
        assert visible(text) == text
        assert visible("a\tb\r\nc", lines=True) == "a\tb\\r\nc"
        assert visible(EVIL) == ESCAPED

    def test_long_messages_are_cut(self) -> None:
        assert message_line("a" * MAX_MESSAGE) == "a" * MAX_MESSAGE
        assert message_line("a" * (MAX_MESSAGE + 1)) == "a" * (MAX_MESSAGE - 3) + "..."
        assert len(message_line("\x1b" * 10**6)) == MAX_MESSAGE

    def test_logs(self, caplog: pytest.LogCaptureFixture) -> None:
        log = visible_log("h2o_cpp.test_terminal")
        log.setLevel(logging.INFO)
        assert visible_log("h2o_cpp.test_terminal").filters == log.filters
        log.error("%s is %d of %.1f%% %r" + EVIL, EVIL, 3, 4.5, "x")
        log.info("%(name)s", {"name": EVIL + "x" * 9999})
        try:
            raise RuntimeError(EVIL)
        except RuntimeError:
            log.exception("failed")
        assert not unsafe(caplog.text)
        assert f"{ESCAPED} is 3 of 4.5% 'x'{ESCAPED}" in caplog.text
        assert f"RuntimeError: {ESCAPED}" in caplog.text
        assert max(map(len, caplog.text.splitlines())) < MAX_MESSAGE + 200


def test_only_one_module_of_the_command_line_prints() -> None:
    """So that no other way to a terminal is added by accident."""
    found = []
    for path in Path(h2o_cpp.cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name == "print" or re.fullmatch(
                r"sys\.(__)?std(out|err)(__)?(\.buffer)?\.write", name
            ):
                found.append(path.name)
    assert set(found) == {"output.py"}


class TestCommands:
    """Each prints something hostile."""

    def show(self, *arguments: object, status: int = 0, contains: str = r"\x1b") -> str:
        found, shown = on_terminal(*arguments)
        assert found == status, shown
        assert unsafe(shown) == set()
        assert contains in shown
        return shown

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return hostile_model(EVIL).write(tmp_path / f"m{EVIL}.gguf")

    def test_info(self, tmp_path: Path) -> None:
        model = hostile_model(EVIL, EVIL).write(tmp_path / f"m{EVIL}.gguf")
        self.show("info", model, "--metadata", "--tensors", contains=ESCAPED)
        shown = self.show("info", model, "--json", contains="general.tags")
        assert json.loads(shown)["name"] == EVIL

    def test_text_of_a_model(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.show("run", "-m", model, "-p", f"{EVIL[:1]}", "-n", 20, contains=r"\x1b[2J")
        shown = on_terminal("inspect", "-m", model, "-p", EVIL, "-n", 3)[1]
        assert not unsafe(re.sub(r"\x1b\[[\d;]+m", "", shown))  # colors of our own
        self.show("inspect", "-m", model, "-p", EVIL, "--color", "never")
        shown = self.show("run", "-m", model, "-p", EVIL, "-n", 5, "--json", contains="tokens")
        assert json.loads(shown[: shown.rindex("}") + 1])["prompt"] == EVIL
        assert main(["run", "-m", str(model), "-p", "a", "-n", "20"]) == 0
        assert EVIL[:9] in capsys.readouterr().out  # a pipe gets the text itself

    def test_errors(self, model: Path, tmp_path: Path) -> None:
        broken = tmp_path / f"broken{EVIL}.gguf"
        broken.write_bytes(model.read_bytes()[:300])
        (tmp_path / f"{EVIL}.json").write_text(EVIL)
        for command in (
            ["info", broken],
            ["run", "-m", broken, "-p", "x"],
            ["run", "-m", f"nothing{EVIL}", "-p", "x"],
            ["run", "-m", model, "-f", EVIL],
            ["run", "-m", model, "-p", "x", "--json-schema", json.dumps({"type": EVIL})],
            ["run", "-m", model, "-p", "x", "--policy", EVIL],
            ["run", "-m", model, "-p", "x", f"--{EVIL}"],
            ["quantize", model, model, EVIL],
            ["quantize", broken, tmp_path / "q.gguf", "q8_0"],
            ["convert", tmp_path / EVIL],
            ["imatrix", model, tmp_path / EVIL, "-o", tmp_path / "i.gguf"],
            [EVIL],
        ):
            status, shown = on_terminal(*command)
            assert status in (1, 2)
            assert unsafe(shown) == set()
            assert "error: " in shown

    def test_long_error(self, tmp_path: Path) -> None:
        _, shown = on_terminal("run", "-m", "m" * 9000, "-p", "x")
        assert len(shown) == MAX_MESSAGE + 1
        made = scripted_opt([1])
        made.keys["tokenizer.ggml.model"] = string("\x1b" * 9000)
        _, shown = on_terminal("run", "-m", made.write(tmp_path / "m.gguf"), "-p", "x")
        assert len(shown) <= MAX_MESSAGE + 1

    def test_models(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("H2O_MODELS", str(model.parent))
        (model.parent / f"bad{EVIL}.gguf").write_bytes(b"GGUF")
        self.show("models", status=1)
        self.show("models", "--json", status=1)

    @pytest.mark.parametrize("length", [1, 5000])
    def test_chat(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{EVIL * length}\n/load {EVIL}\n/{EVIL}\n"))
        shown = self.show(
            *("chat", "-m", hostile_model("a").write(tmp_path / "m.gguf"), "-t", 1), status=1
        )
        assert max(map(len, shown.splitlines())) <= MAX_MESSAGE

    def test_loaded_conversation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "talk"
        model = scripted_opt([*b"a" * 30], 64)
        model.keys["tokenizer.chat_template"] = string(PLAIN)
        path = model.write(tmp_path / "m.gguf")
        with Generator(path, threads=1) as generator:
            chat = Chat(generator)
            for _ in chat.say(EVIL[:12], max_tokens=2):
                pass
            chat.save(file)
        monkeypatch.setattr("sys.stdin", io.StringIO(f"/load {file}\n/inspect\n"))
        self.show("chat", "-m", path, "-t", 1, contains=r"user: \x1b]0;mine")

    def test_generate(self, model: Path, tmp_path: Path) -> None:
        lines = tmp_path / EVIL
        lines.write_text(json.dumps({"prompt": "a", EVIL: 1, "max_tokens": EVIL}) + f"\n{EVIL}\n")
        self.show("generate", "-m", model, "-i", lines, "-o", tmp_path / "out", status=1)

    def test_generate_to_a_terminal(self, model: Path, tmp_path: Path) -> None:
        lines = tmp_path / "lines"
        lines.write_text(json.dumps({"prompt": "a", "id": EVIL, "max_tokens": 20}))
        command = [sys.executable, "-m", "h2o_cpp", "generate", "-m", str(model), "-i", str(lines)]
        shown = pseudo_terminal([*command, "-o", "-"], stderr=subprocess.DEVNULL)
        assert unsafe(shown) == set()
        assert json.loads(shown)["id"] == EVIL

    def test_pull(
        self, hub: HostileHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("H2O_MODELS", str(tmp_path / "models"))
        data = model.read_bytes()
        error = Answer(403, {"X-Error-Message": "\x1b[2J" + "x" * 5000})
        for files in (
            listing(sibling(f"m{EVIL}.gguf", data)),
            listing(*(sibling(f"{i}{EVIL}.gguf", data) for i in range(99))),
            error,
            Answer(302, {"Location": "file:///\x9b"}),
            whole(b"[]"),
        ):
            hub.listing, hub.file = files, lambda begin: whole(data)
            status, shown = on_terminal("pull", "hf://org/name")
            assert status == 1
            assert unsafe(shown) == set()
            assert len(shown) <= MAX_MESSAGE + 1
        hub.has("m.gguf", data)
        status, shown = on_terminal("pull", "hf://org/name", bars=True)
        assert (status, unsafe(shown)) == (0, {"\r"})


PRINTABLE = st.characters(codec="utf-8")
TEXTS = st.text(st.sampled_from([*sorted(FORBIDDEN), "a", "\n", "é"]) | PRINTABLE, max_size=30)


@settings(max_examples=examples(20))
@given(TEXTS, TEXTS, st.sampled_from(["info", "run", "chat", "models", "quantize", "template"]))
def test_any_text_in_a_model(text: str, name: str, command: str) -> None:
    """Random metadata, names of tensors and files, outputs and errors."""
    text, name = text.replace("\0", "\x01"), re.sub("[\0/\ud800-\udfff]", "", name)[:30]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, f"m{name}.gguf")
        try:
            hostile_model(text or "a", f"t{name}"[:9] if command == "info" else "").write(path)
        except OSError:  # the name is too long
            return
        patch.setenv("H2O_MODELS", folder)
        patch.setattr("sys.stdin", io.StringIO(f"{text}\n"))
        arguments: dict[str, Callable[[], list[object]]] = {
            "info": lambda: ["info", path, "--metadata", "--tensors"],
            "run": lambda: ["run", "-m", path, "-n", 9, f"--prompt=a{text}"],
            "chat": lambda: ["chat", "-m", path, "-t", 1],
            "models": lambda: ["models"],
            "quantize": lambda: ["quantize", path, Path(folder) / f"o{name}", "q8_0"],
            "template": lambda: ["chat", "-m", path, "--template", "{{" + text],
        }
        _, shown = on_terminal(*arguments[command]())
        assert unsafe(shown) == set()


def test_process(tmp_path: Path) -> None:
    """Logs, warnings and uncaught errors of other packages, in a process of its own."""
    code = (
        "import sys, logging, warnings\n"
        "from h2o_cpp import __main__, cli\n"
        f"evil = {EVIL!r}\n"
        "def main():\n"
        "    logging.getLogger('other').warning('log %s', evil)\n"
        "    warnings.warn('warning ' + evil)\n"
        "    raise RuntimeError('error ' + evil)\n"
        "__main__.main = main\n"
        "__main__.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert unsafe(done.stderr) == set()
    for word in ("log", "warning", "RuntimeError: error"):
        assert f"{word} {ESCAPED}" in done.stderr


def test_pseudo_terminal(tmp_path: Path) -> None:
    """A real terminal, also while a model writes."""
    model = hostile_model("\x1b[2Jab").write(tmp_path / "m\x1b[2J.gguf")
    command = [sys.executable, "-m", "h2o_cpp", "run", "-m", str(model), "-p", "a", "-n", "7"]
    text = pseudo_terminal(command)
    assert r"a\x1b[2Jab" in text
    assert unsafe(text) == set()


def pseudo_terminal(command: list[str], stderr: int | None = None) -> str:
    """The output of a command that succeeds on a terminal; stderr: None is there too."""
    main_end, end = pty.openpty()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=end, stderr=end if stderr is None else stderr
    )
    os.close(end)
    shown = b""
    while data := _read(main_end):
        shown += data
    os.close(main_end)
    assert process.wait() == 0
    return shown.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # Linux, after the process has ended
        return b""
