# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.policy``: the policy commands alone."""

from __future__ import annotations

import click

from bench.policy.command import policy, trace

main = click.Group(
    commands={"policy": policy, "trace": trace}, help="Replay eviction policies."
)

if __name__ == "__main__":
    main()
