# SPDX-License-Identifier: Apache-2.0
"""`lmcache server` as a child process, with an L2 adapter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engines import ROOT

START_SECONDS = 120
CHUNK = 64  # tokens


class Server:
    """A server in a process group of its own, on free ports of 127.0.0.1."""

    def __init__(self, adapter, *, arguments=(), environment=None):
        self.port, http, metrics = free_ports(3)
        command = [str(Path(sys.executable).with_name("lmcache")), "server"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-port", str(http), "--prometheus-port", str(metrics)]
        command += ["--l1-size-gb", "1", "--l1-init-size-gb", "1"]
        command += ["--eviction-policy", "LRU", "--chunk-size", str(CHUNK)]
        command += ["--supported-transfer-mode", "auto", *arguments]
        command += ["--l2-adapter", json.dumps(adapter)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            | {"LMCACHE_TRACK_USAGE": "false"}
            | (environment or {}),
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while "cache server is running" not in self.output():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(
                    f"the server did not start:\n{self.output()[-6000:]}"
                )
            time.sleep(0.1)

    def output(self):
        """Everything that the server printed so far."""
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text()

    def settle(self, text, count=1, timeout=20.0):
        """Wait until the server has printed `text` so often."""
        deadline = time.monotonic() + timeout
        while self.output().count(text) < count:
            assert time.monotonic() < deadline, self.output()[-6000:]
            time.sleep(0.1)

    def close(self):
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self.kill()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self._log.close()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
