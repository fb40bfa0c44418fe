# SPDX-License-Identifier: Apache-2.0
"""Moves programs that use TensorFlow's loss scaling to this package. Private: use
`mp_compat` and the command line.
"""
