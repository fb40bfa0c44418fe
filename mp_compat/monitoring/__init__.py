# SPDX-License-Identifier: Apache-2.0
"""Monitors runs: reports on gradients, hooks, summaries, a chart. Private: use the
names in `mp_compat`.
"""
