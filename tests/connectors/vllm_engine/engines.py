# SPDX-License-Identifier: Apache-2.0
"""Start, drive and end engines as child processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# Tests that run in another environment name vLLM's.
PYTHON = os.environ.get("CKV_VLLM_PYTHON", sys.executable)
START_SECONDS = 240
ANSWER_SECONDS = 120


class Engine:
    """A vLLM engine in a process group of its own."""

    def __init__(self, model, tiers=None, *, threads="0-1", **settings):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # The default keeps one core back; on two cores every engine gets the same.
            "VLLM_CPU_OMP_THREADS_BIND": threads,
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        settings |= {"model": str(model), "tiers": tiers}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long
        self._process = subprocess.Popen(
            [PYTHON, str(HERE / "serve.py"), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=environment,
            cwd=HERE,
            start_new_session=True,
        )
        started = time.monotonic()
        self._answer(START_SECONDS)
        self.start_seconds = time.monotonic() - started

    def ask(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_SECONDS)

    def generate(self, ids, tokens=8):
        return self.ask(ids=list(ids), tokens=tokens)

    def flush(self):
        """Let the engine step until its stores are done and its events are out."""
        for first in (1, 2, 3):
            self.generate([first, 5, 6], tokens=2)
            time.sleep(0.2)

    def output(self):
        """Everything that the engine printed so far."""
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text()

    def close(self):
        if self._process.poll() is None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(120)  # killed, it would leave its shared memory
        self.kill()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self._log.close()

    def _answer(self, timeout):
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.kill()
            what = "ended" if ready else f"did not answer within {timeout} s"
            raise RuntimeError(f"the engine {what}:\n{self.output()[-6000:]}")
        return json.loads(line)
