# SPDX-License-Identifier: Apache-2.0
"""The optimizer wrapper and what uses its steps. Private: use the names in
`mp_compat`.
"""
