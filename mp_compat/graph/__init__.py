# SPDX-License-Identifier: Apache-2.0
"""What a graph is and how it runs, without loss scaling: contexts, effects, searches,
the gate, records. Private.
"""
