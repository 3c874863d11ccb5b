# SPDX-License-Identifier: Apache-2.0
"""Runs functions in processes of their own, each forked from a clean interpreter.

The nursery is one Python process that has imported the package and never opened a
volume.  A call forks it, so a new process costs a few milliseconds and starts without
threads, mappings or an evaluated CYCLONE_KV_TEST_POINT.  What a call leaves running is
killed with its process group when it ends.

    nursery.call(cases.some_function, path=..., rounds=3)     # in the test

    child = fork(victim, path, point="put.published:kill:1")  # in a function like that
    assert child.wait() == -signal.SIGKILL
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Child", "Nursery", "engine_path", "fork", "stopped"]

TESTS = Path(__file__).resolve().parents[1]
POINT = "CYCLONE_KV_TEST_POINT"


class CallFailed(AssertionError):
    """A function raised, hung or died; the text says what it said."""


class Nursery:
    """The side of the tests."""

    def __init__(
        self, path: Sequence[Path] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        full = {**os.environ, **(environment or {})}
        full.pop(POINT, None)
        parts = [*map(str, path), str(TESTS), full.get("PYTHONPATH", "")]
        full["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "crash.nursery"],
            env=full,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(
        self, function: Callable[..., Any], *, timeout: float = 100, **arguments: Any
    ) -> Any:
        """Runs `function(**arguments)` in a new process; JSON both ways."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        name = f"{function.__module__}:{function.__qualname__}"
        request = {"name": name, "arguments": arguments, "timeout": timeout}
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        if "failure" in reply:
            raise CallFailed(f"{name} {reply['failure']}")
        return reply["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def engine_path() -> str:
    """The file of the engine that the functions of a nursery run on."""
    return importlib.import_module("cyclone_kv._core").__file__ or ""


# ---- the nursery itself ------------------------------------------------------------


def main() -> None:
    for line in sys.stdin:
        reply = _serve(json.loads(line))
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    module, _, function = request["name"].partition(":")
    called = getattr(importlib.import_module(module), function)
    with tempfile.TemporaryFile() as errors:
        child = _fork_group(called, request["arguments"], errors.fileno())
        reply = child.reply(request["timeout"])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
        if reply is None:
            reply = {"failure": f"hung or died, status {status}"}
        if "failure" in reply:
            errors.seek(0)
            reply["failure"] += "\n" + errors.read().decode(errors="replace")[-4000:]
        return reply


def _fork_group(called: Callable[..., Any], arguments: Any, errors: int) -> Child:
    def run() -> Any:
        os.setpgid(0, 0)
        os.dup2(errors, 2)
        return called(**arguments)

    child = _fork(run)
    with contextlib.suppress(OSError):  # whichever of the two comes first
        os.setpgid(child.pid, child.pid)
    return child


# ---- processes ---------------------------------------------------------------------


class Child:
    """A forked process, and the pipe on which it answers once."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._poll = select.poll()  # descriptors may be many
        self._poll.register(pipe, select.POLLIN)
        self._status: int | None = None

    def __del__(self) -> None:
        self.close()

    def reply(self, timeout: float = 60) -> Any:
        """What the function answered; None if it died or said nothing in time."""
        text = b""
        deadline = time.monotonic() + timeout
        while not text.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(left * 1000):
                return None
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                return None
            text += piece
        return json.loads(text)

    def result(self, timeout: float = 60) -> Any:
        """The value that the function returned; its failure is raised here."""
        answer = self.reply(timeout)
        if answer is None:
            self.kill()
            raise CallFailed(f"process {self.pid} hung or died, status {self.wait()}")
        self.wait()
        if "failure" in answer:
            raise CallFailed(answer["failure"])
        return answer["result"]

    def wait(self, timeout: float = 60) -> int:
        """Exit status, negative for a signal; kills what takes too long."""
        deadline = time.monotonic() + timeout
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise CallFailed(f"process {self.pid} did not end in {timeout} s")
            else:
                time.sleep(0.0005)
        return self._status

    def close(self) -> None:
        """Gives the descriptor of the pipe back; there is no answer any more."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> int:
        if self._status is None:
            self.signal(signal.SIGKILL)
        return self.wait()


def fork(
    function: Callable[..., Any], *arguments: Any, point: str | None = None
) -> Child:
    """Starts `function(*arguments)` in a forked process, under a test point if given.

    The caller must not have a volume open: engine handles do not survive a fork.
    """

    def run() -> Any:
        if point is not None:
            os.environ[POINT] = point
        return function(*arguments)

    return _fork(run)


def _fork(run: Callable[[], Any]) -> Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid != 0:
        os.close(writing)
        return Child(pid, reading)
    status = 1
    try:
        os.close(reading)
        try:
            answer: dict[str, Any] = {"result": run()}
            status = 0
        except BaseException:
            answer = {"failure": traceback.format_exc()}
        text = json.dumps(answer).encode() + b"\n"
        while text:
            text = text[os.write(writing, text) :]
    finally:
        os._exit(status)


def stopped(child: Child, timeout: float = 30) -> bool:
    """Waits until the process is stopped; False when it ended instead."""
    for state in _states(child.pid, timeout):
        if state == "T":
            return True
        if state in "ZX":
            return False
    raise CallFailed(f"process {child.pid} neither stopped nor ended in {timeout} s")


def _states(pid: int, timeout: float) -> Iterator[str]:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            yield "X"
            return
        yield text.rpartition(")")[2].split()[0]
        time.sleep(0.001)


if __name__ == "__main__":
    main()
