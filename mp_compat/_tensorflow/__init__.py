# SPDX-License-Identifier: Apache-2.0
"""Differences between TensorFlow versions, and private names of TensorFlow. Private.

All modules import `tf` from this package: `tensorflow.compat.v1`, whose public names
are the same from TensorFlow 1.15 to 2.21. What needs other names is in this package and
in `graph`. `VERSION` is (2, 21), for example, and `VERSION_TEXT` "2.21.0".
"""

from typing import TYPE_CHECKING

try:
  import tensorflow
except ImportError as error:
  raise ImportError(
    "mp_compat needs TensorFlow 1.15 or later, and importing tensorflow failed: {}. "
    "Install it under the name that fits your machine, for example `pip install "
    "tensorflow` or `pip install tensorflow-cpu`.".format(error)
  ) from error

# missing if `tensorflow` is an empty folder
VERSION_TEXT = getattr(tensorflow, "__version__", "0.0")
VERSION = tuple(int(part) for part in VERSION_TEXT.split(".")[:2])
if VERSION < (1, 15):
  raise ImportError(
    "mp_compat needs TensorFlow 1.15 or later, but found {}. Upgrade it, for example "
    "with `pip install 'tensorflow>=1.15'`.".format(VERSION_TEXT)
  )

if TYPE_CHECKING:
  import tensorflow.compat.v1 as tf  # A variable could not be used in annotations.
else:
  tf = tensorflow.compat.v1
