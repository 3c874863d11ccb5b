# SPDX-License-Identifier: Apache-2.0
"""vllm-router as a process, in front of workers that only count their requests."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from selection import BLOCK, MODEL

SECONDS = 20.0


class FakeWorker:
    """An OpenAI-like server that says nothing and counts how often it was asked."""

    def __init__(self):
        self.count = 0
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
                self._answer(models if self.path == "/v1/models" else {})

            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path != "/v1/completions":
                    self.send_error(404)
                    return
                worker.count += 1
                choice = {"index": 0, "text": "", "finish_reason": "length"}
                self._answer(
                    {
                        "id": "x",
                        "object": "text_completion",
                        "model": MODEL,
                        "created": 0,
                        "choices": [choice],
                    }
                )

            def _answer(self, value):
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Proxy:
    """vllm-router, policy kv_aware; `sources` are (events, replay) endpoints."""

    def __init__(self, workers, sources):
        self._workers = workers
        self._url = f"http://127.0.0.1:{_free_port()}"
        pairs = list(zip(workers, sources, strict=True))
        program = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long
        self._process = subprocess.Popen(
            [
                program,
                *("--host", "127.0.0.1", "--port", self._url.rsplit(":", 1)[1]),
                *("--worker-urls", *(worker.url for worker in workers)),
                *("--policy", "kv_aware"),
                *_each("--kv-event-source", (f"{w.url}={e}" for w, (e, _) in pairs)),
                *_each(
                    "--kv-event-replay-source", (f"{w.url}={r}" for w, (_, r) in pairs)
                ),
                *("--kv-event-block-size", str(BLOCK), "--kv-event-model", MODEL),
                *("--prometheus-port", str(_free_port())),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def ask(self, tokens, count=1):
        """Send a prompt `count` times; return how many requests each worker got."""
        before = [worker.count for worker in self._workers]
        body = json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": 1}).encode()
        for _ in range(count):
            request = urllib.request.Request(
                self._url + "/v1/completions",
                body,
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=10) as response:
                response.read()
        return [w.count - b for w, b in zip(self._workers, before, strict=True)]

    def until(self, tokens, counts, nudge=lambda: None):
        """Ask until one request is shared out like `counts`; False after a while."""
        deadline = time.monotonic() + SECONDS
        while self.ask(tokens) != counts:
            if time.monotonic() > deadline:
                return False
            nudge()
            time.sleep(0.05)
        return True

    def output(self):
        self._log.seek(0)
        return self._log.read()

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _wait_ready(self):
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self.ask([1, 2, 3])
                return
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"vllm-router is not there:\n{self.output()[-4000:]}"
                    ) from None
                time.sleep(0.05)


def _each(option, values):
    return [part for value in values for part in (option, value)]


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
