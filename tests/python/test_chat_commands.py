"""The chat command: /commands, multi-line messages, history."""

from __future__ import annotations

import importlib.util
import io
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

import pytest

from h2o_cpp import Chat, Generator
from h2o_cpp.chat import Chat as _Chat
from h2o_cpp.cli import main
from h2o_cpp.cli.chat import COMMANDS
from h2o_cpp.cli.forgotten import described, lost_messages
from h2o_cpp.generation.stream import Stream
from support.needs import needs
from support.scripted_chat import PLAIN, script, turn

Converse = Callable[..., tuple[int, str, str]]


@pytest.fixture
def converse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Converse:
    """Runs a conversation with a model of these turns: status, stdout and stderr."""

    def chat(lines: str, turns: dict[str, str], *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        model = script(tmp_path, turns)
        status = main(["chat", "-m", str(model), "--threads", "1", *options])
        return status, *capsys.readouterr()

    return chat


HI = {"Hi": "Hello!", "Bye": "."}


def test_help_lists_every_command(converse: Converse, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = converse("/help\n", HI)
    assert (status, out) == (0, "")
    with pytest.raises(SystemExit, match="0"):
        main(["chat", "--help"])
    of_command = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^{name}\b", err, re.MULTILINE)
        assert name in of_command


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/stats now", "/stats takes no argument, got 'now'"),
        ("/save", "expected /save FILE"),
        ("/save --force", "expected /save FILE [--force]"),
        ("/save nowhere/talk", "nowhere: no such directory"),
        ("/load nowhere", "nowhere"),
        ("/budget much", "much: expected a fraction such as 0.2"),
        ("/budget 0.2 best", "policy='best', expected one of"),
        ("/budget 0.2 h2o mean", "got 'mean' too"),
        ("/budget 7.5", "hh=7.5"),
        ("/budget auto", "h2o-cpp advise"),
    ],
)
def test_command_error_leaves_conversation_unchanged(
    converse: Converse, line: str, message: str
) -> None:
    status, out, err = converse(f"Hi\n{line}\nBye\n", HI)
    assert (status, out) == (1, "Hello!\n.\n")
    first, error, last = err.splitlines()
    assert first.startswith("[prompt")
    assert error.startswith("error: ")
    assert message in error
    assert last.startswith("[prompt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/etc/passwd", "/etc/passwd is not a command (/help lists them)"),
        ("/", "/ is not a command"),
        ("/Exit", "/Exit is not a command"),
    ],
)
def test_mistyped_command_has_no_effect(converse: Converse, line: str, message: str) -> None:
    """Not on the status either."""
    status, out, err = converse(f"Hi\n{line}\nBye\n", HI)
    assert (status, out) == (0, "Hello!\n.\n")
    assert err.splitlines()[1].startswith("error: ")
    assert message in err.splitlines()[1]


def test_names_of_commands_in_other_programs(converse: Converse) -> None:
    status, out, err = converse("Hi\n/clear\nHi\n/?\n/bye\nHi\n", HI)
    assert (status, out) == (0, "Hello!\nHello!\n")
    assert "/reset" in err


def test_commands_before_first_message(converse: Converse) -> None:
    status, _, err = converse("/save x\n/inspect\n/stats\n", HI)
    assert status == 1
    assert err.splitlines()[0] == "error: the conversation has not begun, send a message first"
    assert err.splitlines()[1] == "error: nothing has been read yet, send a message first"
    assert err.splitlines()[2].startswith("[0 tokens seen, 0 kept, 0 evicted | cache ")


def test_multi_line_messages(converse: Converse) -> None:
    turns = {"a\nb": "Two.", "/exit": "No.", 'say "" twice': "So."}
    lines = '"""a\nb"""\n"""\n/exit\n"""\n"""say "" twice"""\n'
    status, out, _ = converse(lines, turns)
    assert (status, out) == (0, "Two.\nNo.\nSo.\n")


def test_multi_line_message_without_end_is_an_error(converse: Converse) -> None:
    status, out, err = converse('Hi\n"""Bye\n', HI)
    assert (status, out) == (1, "Hello!\n")
    assert err.splitlines()[-1] == 'error: the message has no closing """'


def test_budget_command_moves_conversation(
    converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversation continues after its re-evaluation with the new budget."""
    messages_at_move: list[list[str]] = []
    moved = _Chat.moved

    def spy(self: Chat, generator: object) -> Chat:
        messages_at_move.append([message["content"] for message in self.messages])
        return moved(self, generator)  # type: ignore[arg-type]

    monkeypatch.setattr(_Chat, "moved", spy)
    lines = "Hi\n/budget\n/budget 20 mean\nBye\n/stats\n/budget full\n/budget\n"
    status, out, err = converse(lines, HI)
    assert (status, out) == (0, "Hello!\n.\n")
    assert messages_at_move == [["Hi", "Hello!"], ["Hi", "Hello!", "Bye", "."]]
    before, changed, *_ = re.findall(r"^\[cache.*\]$", err, re.MULTILINE)
    assert "(100%) | Policy(n_sinks=0, n_heavy=0, n_recent=None)]" in before
    assert "Policy(n_sinks=0, n_heavy=10, n_recent=10, score='mean')" in changed
    seen = turn("Hi") + len("Hello!") + len(")\n") + turn("Bye") + len(".")
    assert f"[{seen} tokens seen, 20 kept, {seen - 20} evicted | cache" in err


def test_save_and_load(converse: Converse, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    status, out, err = converse(f"Hi\n/save {file}\n/reset\n/load {file}\nBye\n", HI)
    assert (status, out) == (0, "Hello!\n.\n")
    assert "user: Hi\nassistant: Hello!\n" in err
    new = len(")\n") + turn("Bye")
    assert err.splitlines()[-1].startswith(f"[prompt {new} tokens")


@pytest.mark.parametrize("again", ["--force {}", "{} --force", "{}  --force"])
def test_save_replaces_another_file_only_by_force(
    converse: Converse, tmp_path: Path, again: str
) -> None:
    file = tmp_path / "two words"
    file.write_text("notes", encoding="utf-8")
    status, _, err = converse(f"Hi\n/save {file}\n", HI)
    assert status == 1
    assert f"error: {file}: the file already exists (--force replaces it)\n" in err
    assert file.read_text(encoding="utf-8") == "notes"
    status, _, err = converse(f"Hi\n/save {again.format(file)}\n", HI)
    assert (status, err.splitlines()[-1]) == (0, f"wrote {file}")
    assert file.read_bytes() != b"notes"


@pytest.mark.parametrize("kind", ["saved", "loaded"])
def test_save_replaces_the_file_of_the_same_conversation(
    converse: Converse, tmp_path: Path, kind: str
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    assert converse(f"Hi\n/save {own}\n/save {other}\n", HI)[0] == 0
    before = own.read_bytes()
    begin = f"Hi\n/save --force {own}\n" if kind == "saved" else f"/load {own}\n"
    assert converse(f"{begin}Bye\n/save {own}\n", HI)[0] == 0
    assert own.read_bytes() != before
    for end in (f"/save {other}", f"/reset\nHi\n/save {own}"):
        status, _, err = converse(f"{begin}{end}\n", HI)
        assert status == 1
        assert "the file already exists" in err


def test_save_and_load_know_the_home_directory(
    converse: Converse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert converse("Hi\n/save ~/talk\n/reset\n/load ~/talk\n", HI)[0] == 0
    assert (tmp_path / "talk").is_file()


def test_load_without_a_file(converse: Converse, tmp_path: Path) -> None:
    status, _, err = converse(f"/load {tmp_path}/none\n", {})
    assert status == 1
    assert err == f"error: {tmp_path}/none: No such file or directory\n"


def test_inspect_command(converse: Converse) -> None:
    status, _, err = converse("Hi\n/inspect\n", HI, "--hh", "8", "--recent", "8")
    assert status == 0
    shown = err.partition("]\n")[2]
    n_evicted = turn("Hi") + len("Hello!") - 8
    assert shown.startswith("·" * n_evicted + "t\nHello!\n")
    assert shown.endswith("recent  · evicted, or kept in fewer heads\n")


def test_default_policy(converse: Converse) -> None:
    """The paper's policy has to be named, as a whole or by a part."""
    for options, is_named in ((), False), (("--policy", "h2o"), True), (("--recent", "9"), True):
        _, _, err = converse("/budget\n/budget 30\n", HI, "--hh", "20", *options)
        budget, changed = (line for line in err.splitlines() if "Policy(" in line)
        assert ("value_norm='output'" not in budget) == is_named
        assert "value_norm='output'" in changed


def test_notes_about_what_is_forgotten(
    tiny_opt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once for each message, also after /reset; none of protected instructions."""
    options = ["--template", PLAIN, "--system", "Be brief.", "-n", "60", "--ignore-eos"]
    options += ["--temperature", "0", "--threads", "1", "--policy", "h2o"]

    def notes(lines: str, *more: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(["chat", "-m", str(tiny_opt), *options, *more]) == 0
        found = capsys.readouterr().err.splitlines()
        return [line.removeprefix("note: ") for line in found if line.startswith("note: the model")]

    def expected(hh: int, protect: Any = None) -> list[str]:
        found, before = [], set[int]()
        with Generator(tiny_opt, hh=hh, threads=1) as generator:
            chat = Chat(generator, template=PLAIN, system="Be brief.", protect=protect)
            for text in asked:
                stream = chat.say(text, max_tokens=60, ignore_eos=True, temperature=0)
                list(stream)
                lost = lost_messages(chat.messages, stream.prompt_memory)
                if lost - before:
                    found.append(described(chat.messages, lost, stream.prompt_memory))
                before = lost
        return found

    asked = [f"Where is ship {i}?" for i in range(3)]
    lines = "\n".join(asked)
    system = "the system prompt (--protect system keeps it)"
    of_two = expected(2)
    assert system in of_two[0]
    assert "earlier turns" in of_two[-1] or "Where is ship" in of_two[-1]
    assert notes(lines, "--hh", "2") == of_two
    assert notes(f"{lines}\n/reset\n{lines}", "--hh", "2") == of_two * 2
    protected = notes(lines, "--hh", "20")
    assert protected == expected(20, "system")
    assert notes(lines, "--hh", "20", "--protect", "system") == protected
    assert notes(lines, "--hh", "20", "--protect", "none") == expected(20)
    assert not any(system in note for note in protected)
    assert not notes(lines, "--hh", "400")


def test_notes_are_not_repeated(
    converse: Converse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that was stopped says nothing about messages; /load begins anew."""
    say = Chat.say

    def stopped(self: Chat, text: str, **options: Any) -> Stream:
        stream = say(self, text, **options)
        if text == "stop":
            stream.close()
        return stream

    monkeypatch.setattr(Chat, "say", stopped)
    monkeypatch.setattr(
        "h2o_cpp.cli.chat.lost_messages", lambda messages, memory: {0} if memory.messages else set()
    )
    file = tmp_path / "talk"
    lines = f"Hi\n/save {file}\nstop\nBye\n"
    for text, n in ((lines, 1), (f"{lines}/load {file}\nBye\n", 2)):
        file.unlink(missing_ok=True)
        _, _, err = converse(text, HI)
        assert err.count("note: the model has forgotten 'Hi'") == n


def test_a_message_that_is_interrupted_before_it_is_sent(
    converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = Chat.say

    def interrupted(self: Chat, text: str, **options: Any) -> Stream:
        if text == "Stop":
            raise KeyboardInterrupt
        return say(self, text, **options)

    monkeypatch.setattr(Chat, "say", interrupted)
    status, out, err = converse("Hi\nStop\nBye\n", HI)
    assert (status, out) == (1, "Hello!\n.\n")
    assert err.splitlines()[1] == "stopped; the message was not sent"


# The command, with stdin as its controlling terminal, so that Ctrl-C is a signal.
_CHAT = """
import fcntl, sys, termios
from h2o_cpp.cli import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main())
"""


class Terminal:
    """A pseudo-terminal that runs a conversation."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self.process = process
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C once the process waits for input: CPython may not see an earlier one."""
        state = Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + 60
        while state.exists() and state.read_text().rpartition(") ")[2][0] != "S":
            assert time.monotonic() < deadline, state.read_text()
            time.sleep(0.01)
        self.type("\x03")

    def wait_for(self, text: str) -> None:
        """Wait until `text` appears in the output after the last match."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if not select([self._descriptor], [], [], 1)[0]:
                continue
            try:
                self.seen += os.read(self._descriptor, 4096).decode()
            except OSError:  # closed by the process
                raise AssertionError(self.seen) from None
        self.seen = self.seen.partition(text)[2]


@contextmanager
def terminal(*arguments: str, state: Path) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _CHAT, "chat", "--threads", "1", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@needs("readline", importlib.util.find_spec("readline") is not None)
def test_terminal_history_interrupt_and_completion(tmp_path: Path) -> None:
    """History persists between conversations; Ctrl-C discards a line; Tab completes."""
    model = str(script(tmp_path, {"Hi": "Hello!"}))
    history = tmp_path / "state" / "h2o-cpp" / "history"
    with terminal("-m", model, state=tmp_path / "state") as first:
        first.wait_for("> ")
        first.type("Hi\n")
        first.wait_for("Hello!")
        first.wait_for("> ")
        first.type("half a mess")
        first.wait_for("half a mess")
        first.interrupt()
        first.wait_for("Ctrl-D or /exit ends")
        first.wait_for("> ")
        first.type("/ex\t\n")
        assert first.process.wait(60) == 0
    assert history.read_text().splitlines()[-2:] == ["Hi", "/exit"]
    assert history.stat().st_mode & 0o777 == 0o600
    with terminal("-m", model, state=tmp_path / "state") as second:
        second.wait_for("> ")
        second.type("\x1b[A\x1b[A\n")  # twice up
        second.wait_for("Hello!")
        second.wait_for("> ")
        second.type("\x04")
        assert second.process.wait(60) == 0


def test_no_history_writes_no_file(tmp_path: Path) -> None:
    model = str(script(tmp_path, {"Hi": "Hello!"}))
    with terminal("-m", model, "--no-history", state=tmp_path / "state") as only:
        only.wait_for("> ")
        only.type("/exit\n")
        assert only.process.wait(60) == 0
    assert not (tmp_path / "state").exists()
