# SPDX-License-Identifier: Apache-2.0
"""Find out what a model computes, from its name and its folder.

Engines tell a connector the name of a model, and little else.  The folder behind the
name has the rest: weights, whose fingerprint tells them apart, and the configuration,
from which rope and layers follow.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cyclone_kv.connectors._identity import canonical_json
from cyclone_kv.connectors._weights import folder_fingerprint

__all__ = [
    "config_of_folder",
    "digest",
    "model_folder",
    "rope_of",
    "weights_of",
    "without_noise",
]

# Facts of a model configuration that say where it came from, not what it computes.
_CONFIG_NOISE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")


def digest(facts: object) -> str:
    """Return the SHA-256 of `facts` in their one spelling."""
    return hashlib.sha256(canonical_json(facts).encode("ascii")).hexdigest()


def weights_of(
    name: str, *, revision: str | None = None, download: str | None = None
) -> str:
    """Return the fingerprint of a model's weights.

    ValueError, with the remedy, when they cannot be told apart from others.
    """
    folder = model_folder(name, revision=revision, download=download)
    if folder is None:
        raise ValueError(
            f"the weights of {name!r} are neither a folder nor in the Hugging Face "
            'cache: name them in the options of the connector, "weights": "<digest or '
            'revision that never moves>"'
        )
    try:
        return folder_fingerprint(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f'{error}; name the weights in the options of the connector, "weights": '
            '"<digest or revision that never moves>"'
        ) from error


def model_folder(
    name: str, *, revision: str | None = None, download: str | None = None
) -> Path | None:
    """Return the folder of a model, given by path or by its name on Hugging Face."""
    path = Path(name)
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(
            name, "config.json", cache_dir=download, revision=revision
        )
    except ValueError:  # not the name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def config_of_folder(folder: Path | None) -> dict[str, Any]:
    """Return the configuration in a model's folder, empty when there is none."""
    file = None if folder is None else folder / "config.json"
    return json.loads(file.read_text()) if file is not None and file.is_file() else {}


def rope_of(text: dict[str, Any]) -> dict[str, Any]:
    """Return what a text model's configuration says about positions."""
    return {
        "parameters": text.get("rope_parameters") or text.get("rope_scaling"),
        "theta": text.get("rope_theta"),
        "positions": text.get("max_position_embeddings"),
    }


def without_noise(facts: Any) -> Any:
    """Leave out what may differ between replicas, in nested configurations too."""
    if isinstance(facts, dict):
        return {
            name: without_noise(value)
            for name, value in facts.items()
            if name not in _CONFIG_NOISE
        }
    return facts
