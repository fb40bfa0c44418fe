# SPDX-License-Identifier: Apache-2.0
"""Monitors runs: reports on gradients, hooks, summaries, plots. Private: use the names in `mp_compat`."""
