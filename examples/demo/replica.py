# SPDX-License-Identifier: Apache-2.0
"""One replica of the demo: a model in a process of its own, driven over a pipe.

`demo.py` starts it.  It reads one JSON command a line from standard input and writes
JSON events, one a line, to standard output; an event of kind ``result`` or ``error``
ends a command.  End of input ends the process.

The part that uses cyclone_kv is `Replica.read` and `Replica.answer`; both go through
`cyclone_kv.connectors.transformers.PrefixStore`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import DynamicCache

    from cyclone_kv import Cache

# All replicas must compute with the same number of threads: it changes roundings.
THREADS = 2
STEP = 256  # tokens computed at once, and tokens in a block
CAPACITY = "256MiB"
CHAT_HEAD = "<|im_start|>user\n"
CHAT_TAIL = "\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


class Replica:
    """A model, and once `open` was called the tier behind it."""

    def __init__(self, model_folder: str) -> None:
        start = time.perf_counter()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        from cyclone_kv.connectors.transformers import model_identity

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(THREADS)
        import_seconds = time.perf_counter() - start

        start = time.perf_counter()
        self.model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self.identity = model_identity(self.model, block_tokens=STEP)
        model_seconds = time.perf_counter() - start

        start = time.perf_counter()
        self._warm_up()
        self.cache: Cache | None = None
        send(
            event="ready",
            import_seconds=import_seconds,
            model_seconds=model_seconds,
            warm_up_seconds=time.perf_counter() - start,
            namespace=self.identity.namespace(),
        )

    def _warm_up(self) -> None:
        """Compute something unrelated, so that no measured step is the first one."""
        past, _ = self._step(list(range(STEP)), None)
        past, _ = self._step(list(range(24)), past)
        self._step([0], past)

    def _step(
        self, ids: list[int], past: DynamicCache | None
    ) -> tuple[DynamicCache, torch.Tensor]:
        """Run the model over `ids` after `past`; return the last token's logits."""
        import torch

        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([ids]),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.past_key_values, output.logits[0, -1]

    def _document(self, text: str, tokens: int) -> list[int]:
        """Return the first `tokens` token ids of a prompt that begins with `text`."""
        ids: list[int] = self.tokenizer.encode(CHAT_HEAD + text)[:tokens]
        if len(ids) < tokens:
            raise ValueError(f"the text has {len(ids)} tokens, the demo needs {tokens}")
        return ids

    def _prefill(
        self,
        ids: list[int],
        past: DynamicCache | None,
        first: int,
        after_step: Callable[[int, DynamicCache], None],
    ) -> DynamicCache | None:
        """Compute `ids` from token `first` on, in steps."""
        for start in range(first, len(ids), STEP):
            past, _ = self._step(ids[start : start + STEP], past)
            after_step(min(start + STEP, len(ids)), past)
        return past

    def open(self, volume: str) -> dict[str, Any]:
        """Open the volume, creating it if it is not there."""
        from cyclone_kv import Cache, CacheConfig
        from cyclone_kv.connectors.transformers import PrefixStore

        start = time.perf_counter()
        config = CacheConfig.for_kv_tier(capacity=CAPACITY)
        self.cache = Cache.open(volume, config, namespace=self.identity.namespace())
        self.store = PrefixStore(self.cache, self.identity)
        return {"seconds": time.perf_counter() - start}

    def read(self, *, text: str, tokens: int, at_end: bool = False) -> dict[str, Any]:
        """Compute a document in steps and store it block by block.

        Each block is stored as soon as its step is computed, or, with `at_end`, all of
        them one after another in the end.
        """
        ids = self._document(text, tokens)
        stored = 0
        store_seconds = 0.0

        def store_block(end: int, past: DynamicCache) -> None:
            nonlocal stored, store_seconds
            block = end // STEP
            send(event="storing", block=block)
            mark = time.perf_counter()
            stored = self.store.store(ids[:end], past)
            store_seconds += time.perf_counter() - mark
            if stored == end:
                send(event="stored", block=block, done=block, of=tokens // STEP)

        def show_step(end: int, _: DynamicCache) -> None:
            send(event="progress", done=end // STEP, of=tokens // STEP)

        start = time.perf_counter()
        past = self._prefill(ids, None, 0, show_step if at_end else store_block)
        if at_end and past is not None:
            for end in range(STEP, tokens + 1, STEP):
                store_block(end, past)
        return {
            "tokens": stored,
            "blocks": stored // STEP,
            "bytes": stored // STEP * self.store.layout.block_bytes,
            "compute_seconds": time.perf_counter() - start - store_seconds,
            "store_seconds": store_seconds,
            "keys": [key.hex() for key in self.store.keys(ids)],
        }

    def lookup(self, text: str, tokens: int) -> dict[str, Any]:
        """Ask how much of a document is stored."""
        ids = self._document(text, tokens)
        start = time.perf_counter()
        found = self.store.lookup(ids)
        return {"tokens": found, "seconds": time.perf_counter() - start}

    def answer(
        self,
        *,
        text: str,
        tokens: int,
        question: str,
        new_tokens: int,
        tier: bool,
        keep: str | None = None,
        compare: str | None = None,
    ) -> dict[str, Any]:
        """Answer `question` about a document, with or without the tier.

        The time to the first token runs from the token ids of the prompt to the first
        token of the answer.  Finding and reading blocks is part of it.
        """
        import torch
        from transformers import DynamicCache

        document = self._document(text, tokens)
        tail = self.tokenizer.encode(
            CHAT_TAIL.format(question=question), add_special_tokens=False
        )
        start = time.perf_counter()
        past, reused = DynamicCache(), 0
        bytes_read = 0
        if tier:
            bytes_read = -self._counter("payload_bytes_read")
            start = time.perf_counter()
            past, reused = self.store.load(document)
        load_seconds = time.perf_counter() - start
        past = self._prefill(
            document,
            past,
            reused,
            lambda end, _: send(event="progress", done=end // STEP, of=tokens // STEP),
        )
        past, logits = self._step(tail, past)
        answer = [int(logits.argmax())]
        first_seconds = time.perf_counter() - start
        if tier:
            bytes_read += self._counter("payload_bytes_read")
        all_logits = [logits]
        while len(answer) < new_tokens and answer[-1] != self.tokenizer.eos_token_id:
            past, logits = self._step(answer[-1:], past)
            answer.append(int(logits.argmax()))
            all_logits.append(logits)
        result: dict[str, Any] = {
            "reused": reused,
            "computed": len(document) - reused + len(tail),
            "question_tokens": len(tail),
            "first_token_seconds": first_seconds,
            "load_seconds": load_seconds if tier else 0.0,
            "bytes_read": bytes_read,
            "answer": answer,
            "text": self.tokenizer.decode(answer, skip_special_tokens=True).strip(),
        }
        stacked = torch.stack(all_logits).contiguous()
        if keep:
            save_logits(keep, stacked)
        if compare:
            other = load_logits(compare, stacked)
            result["logits_equal"] = other is not None and torch.equal(stacked, other)
        if tier:
            # What had to be computed is stored now, after the answer; the tokens of
            # question and answer behind the document do not fill a block.
            result["stored_after"] = self.store.store(document, past)
        return result

    def check(self) -> dict[str, Any]:
        """Read every block of the volume and verify its checksum."""
        assert self.cache is not None
        report = self.cache.verify()
        return {
            "blocks": report.entries_checked,
            "damaged": report.damaged_payloads + report.unreadable,
            "faults": report.structure_faults,
            "first_fault": report.first_fault,
            "corrupt": self._counter("corrupt"),
        }

    def _counter(self, name: str) -> int:
        """Return a counter of the engine: what this process did since it opened."""
        assert self.cache is not None
        return self.cache.stats().process[name]

    def close(self) -> None:
        """Close the volume."""
        if self.cache is not None:
            self.cache.close()


def save_logits(path: str, logits: torch.Tensor) -> None:
    """Keep logits for a comparison in another process."""
    from safetensors.torch import save_file

    save_file({"logits": logits}, path)


def load_logits(path: str, like: torch.Tensor) -> torch.Tensor | None:
    """Read logits back; None if they have another shape or type than `like`."""
    from safetensors.torch import load_file

    logits = load_file(path)["logits"]
    return logits if (logits.shape, logits.dtype) == (like.shape, like.dtype) else None


def send(**event: object) -> None:
    """Write one event; a single write, so that a kill leaves whole lines."""
    os.write(CHANNEL, (json.dumps(event) + "\n").encode())


def serve(replica: Replica) -> None:
    """Run commands until the input ends."""
    for line in sys.stdin:
        command = json.loads(line)
        try:
            result = getattr(replica, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            send(event="error", text=f"{type(error).__name__}: {error}")
        else:
            send(event="result", **(result or {}))
    replica.close()


if __name__ == "__main__":
    # Keep the pipe to ourselves: whatever a library prints goes to standard error.
    CHANNEL = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    parser = argparse.ArgumentParser(description="A replica of the demo; see demo.py.")
    parser.add_argument("--model", required=True)
    serve(Replica(parser.parse_args().model))
