# SPDX-License-Identifier: Apache-2.0
"""The numerics of loss scaling: the update rule, the finite check, the conditional.
Private.
"""
