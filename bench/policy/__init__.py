# SPDX-License-Identifier: Apache-2.0
"""Eviction policies, replayed: models in C, the real engine beside them."""
