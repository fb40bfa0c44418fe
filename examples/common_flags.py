# SPDX-License-Identifier: Apache-2.0
"""The flags that several programs have. Each program sets its own defaults, and lists
them among its key flags.
"""

import sys

from absl import app
from absl import flags

flags.DEFINE_integer("steps", None, "Training steps.", lower_bound=1)
flags.DEFINE_multi_integer(
  "overflow_at", [], "Attempt whose gradients overflow.", lower_bound=0
)


def no_arguments(argv):
  """Raises UsageError if flags left an argument over, as in `--overflow_at 3 8`."""
  if len(argv) > 1:
    raise app.UsageError("Expected only flags; got {}.".format(" ".join(argv[1:])))


def run(main):
  """Parses the flags and calls `main` with the arguments that are left, as `app.run`.

  `--help` lists the flags and ends with status 0, not with absl's 1.
  """
  app.run(main, flags_parser=_parse)


def _parse(argv):
  try:
    return app.parse_flags_with_usage(argv)
  except SystemExit:
    if {"--help", "-h", "--helpfull", "--helpshort"}.isdisjoint(argv):
      raise
    sys.exit(0)
