"""Tests the checksums of values."""

import itertools

import numpy as np

from mp_compat.tools.compare import recorder


def test_digests_differ_if_bits_do():
  nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
  values = [
    np.float32([0.0, 1.0]),
    np.float32([-0.0, 1.0]),
    np.float32([1.0, 0.0]),
    np.float32([[0.0, 1.0]]),
    np.int32([0, 0x3F800000]),  # the bits of the first
    np.float64([0.0, 1.0]),
    nan[:1],
    nan[1:],
    np.array([b"a", b"bc"], object),
    np.array([b"ab", b"c"], object),
  ]
  for one, two in itertools.combinations_with_replacement(values, 2):
    is_same = recorder._digest(one) == recorder._digest(np.copy(two))
    assert is_same == (one is two), (one, two)
