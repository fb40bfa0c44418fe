# SPDX-License-Identifier: Apache-2.0
"""Grappler's option `auto_mixed_precision`: the rewrite of graphs to float16."""

from typing import Any

from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf

# Read before mp_compat.install() replaces these names.
_enable_graph_rewrite = native.find("enable_mixed_precision_graph_rewrite")
_disable_graph_rewrite = native.find("disable_mixed_precision_graph_rewrite")

_Native: Any = (native.LOSS_SCALES + (object,))[0]


# The options of `RewriterConfig`, of which not every TensorFlow has all.
_REWRITES = (
  "auto_mixed_precision",
  "auto_mixed_precision_cpu",
  "auto_mixed_precision_mkl",
  "auto_mixed_precision_onednn_bfloat16",
)


class _NoLossScale(_Native):
  """A loss scale without variables, for the unused optimizer in `enable`."""

  __call__ = update = get_config = None


def is_enabled() -> bool:
  """Returns whether new Sessions and functions are rewritten to float16."""
  options = tf.config.optimizer.get_experimental_options()
  return bool(options.get("auto_mixed_precision"))


def is_enabled_in(session: tf.Session) -> bool:
  """Returns whether a session rewrites graphs to float16 or bfloat16, on a GPU or a
  CPU; False for an object around a session that has no configuration.
  """
  config = getattr(session, "_config", None) or tf.ConfigProto()
  rewrites = config.graph_options.rewrite_options
  on = (rewrites.ON, rewrites.AGGRESSIVE)
  return any(getattr(rewrites, name, None) in on for name in _REWRITES)


def enable() -> None:
  """Enables the rewrite of new Sessions and functions to float16.

  TensorFlow's function is called, and not only the option set: it also logs a warning
  about existing Sessions, and rejects Keras policies. The optimizer that it wraps is
  not used.

  Raises:
    ValueError: If a mixed precision policy of Keras is set.
  """
  _enable_graph_rewrite(tf.train.GradientDescentOptimizer(0.0), _NoLossScale())


def disable() -> None:
  """Disables the rewrite of new Sessions and functions."""
  _disable_graph_rewrite()
