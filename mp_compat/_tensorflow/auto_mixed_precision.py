"""Grappler's option `auto_mixed_precision`: the rewrite of graphs to float16."""

from mp_compat._tensorflow import native
from mp_compat._tensorflow import tf

_enable_graph_rewrite, _disable_graph_rewrite = (  # read before mp_compat.install() replaces these names
    getattr(native.experimental, name, None)
    for name in ("enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite"))


class _NoLossScale(native.LOSS_SCALES[0] if native.LOSS_SCALES else object):
  """A loss scale without variables, for the unused optimizer in `enable`."""

  __call__ = update = get_config = None


def is_enabled() -> bool:
  """Returns whether new Sessions and functions are rewritten to float16."""
  return bool(tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"))


def enable() -> None:
  """Enables the rewrite through TensorFlow: it logs a warning about existing Sessions, and rejects Keras policies."""
  _enable_graph_rewrite(tf.train.GradientDescentOptimizer(0.), _NoLossScale())


def disable() -> None:
  """Disables the rewrite of new Sessions and functions."""
  _disable_graph_rewrite()
