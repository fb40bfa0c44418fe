# SPDX-License-Identifier: Apache-2.0
"""What the parts of `scripts/gpu` share: rows, the device, and an optimizer with loss scaling."""

import numpy as np

import mp_compat

GPU = "/gpu:0"


def make_row(name, milliseconds=None, result="", failed=False, **details):
  return dict(name=name, milliseconds=milliseconds, result=result, failed=failed, details=details)


def median(seconds):
  """Returns the median of times in seconds, in milliseconds."""
  return 1e3 * float(np.median(seconds))


def wrap(opt):
  return mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic")


def is_on(name, device):
  """Returns whether the full name of a device, as in a NodeDef, is that of `device`, such as "/gpu:0"."""
  return name.lower().endswith("device:" + device.strip("/"))
