# SPDX-License-Identifier: Apache-2.0
"""Experiments behind the decisions in ``docs/decisions/``: small, and repeatable."""
