# SPDX-License-Identifier: Apache-2.0
"""The processor, as programs print it beside their figures."""

import os
import platform


def describe():
  """Returns the processor's name and its number of cores; the architecture if the
  system does not have the name.
  """
  lines = {}
  if os.path.exists("/proc/cpuinfo"):
    with open("/proc/cpuinfo") as cpuinfo:
      lines = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in cpuinfo)
      }
  name = lines.get("model name", platform.machine())
  # oneDNN chooses other float16 kernels for this instruction set.
  float16 = (
    " with AVX512-FP16" if "avx512_fp16" in lines.get("flags", "").split() else ""
  )
  return "{}{}, {} cores".format(name, float16, os.cpu_count())
