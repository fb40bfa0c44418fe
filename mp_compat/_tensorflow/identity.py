# SPDX-License-Identifier: Apache-2.0
"""Dicts that compare their keys by identity."""

from typing import Any

from tensorflow.python.util import object_identity

# Does not keep its keys alive.
WeakKeyDictionary: Any = object_identity.ObjectIdentityWeakKeyDictionary
