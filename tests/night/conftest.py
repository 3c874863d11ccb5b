# SPDX-License-Identifier: Apache-2.0
"""The soak asks /proc who is stopped."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]
