# SPDX-License-Identifier: Apache-2.0
"""Runs a program several times, with and without this package, and compares all
variables after each step.
"""
