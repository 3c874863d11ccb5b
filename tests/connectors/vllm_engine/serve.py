# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine on the CPU, driven over a pipe: JSON lines in, JSON lines out.

    python serve.py SETTINGS_JSON     {"model": ..., "tiers": [...], ...}

A request {"ids": [...], "tokens": n} answers with the tokens, their logprobs, how many
tokens were cached, and the time to the first token.  {"reset": true} resets the prefix
cache, and the connector's unless "connector" is false.  The end of the input ends the
engine.  Answers go to the descriptor that was standard output at the start; everything
that vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def make_engine(settings):
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    extra = {}
    if settings.get("tiers") is not None:
        extra["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "CpuPlatformTieringSpec",
                "spec_module_path": "cpu_spec",
                "cpu_bytes_to_use": settings.get("primary_bytes", 256 << 20),
                "secondary_tiers": settings["tiers"],
                "self_describing_kv_events": True,
            },
        )
    if settings.get("lmcache_port"):
        extra["kv_transfer_config"] = KVTransferConfig(
            kv_connector="LMCacheMPConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": settings["lmcache_port"],
                "lmcache.mp.mq_timeout": 60.0,
            },
        )
    if settings.get("events"):
        extra["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=settings["events"],
            replay_endpoint=settings.get("replay"),
            topic="",
        )
    return LLM(
        settings["model"],
        dtype=settings.get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=settings.get("max_model_len", 2048),
        block_size=32,
        max_num_batched_tokens=settings.get("step_tokens", 512),
        max_num_seqs=2,
        disable_log_stats=False,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        num_gpu_blocks_override=settings.get("device_blocks"),
        **extra,
    )


def generate(engine, request):
    from vllm import SamplingParams

    started = time.monotonic()
    params = SamplingParams(
        temperature=0, max_tokens=request["tokens"], logprobs=0, ignore_eos=True
    )
    output = engine.generate(
        {"prompt_token_ids": request["ids"]}, params, use_tqdm=False
    )[0]
    tokens = list(output.outputs[0].token_ids)
    return {
        "tokens": tokens,
        "logprobs": [
            step[token].logprob
            for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)
        ],
        "cached": output.num_cached_tokens,
        "first_token": getattr(output.metrics, "first_token_latency", None),
        "seconds": time.monotonic() - started,
    }


def main():
    engine = make_engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("reset"):
            connector = request.get("connector", True)
            answer = {"reset": engine.reset_prefix_cache(reset_connector=connector)}
        elif request.get("metrics"):
            answer = {
                m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")
            }
        else:
            answer = generate(engine, request)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
