# SPDX-License-Identifier: Apache-2.0
"""Maps TensorFlow's names for loss scaling, from 1.14 to 2.21, to the names of this
package.

All names are full names, as strings: nothing is imported. `PUBLIC` and `PRIVATE` have
them by module; `install()` sets the public ones, and `OLD_NAMES` has both, as `migrate`
looks them up:

    >>> from mp_compat.migration import old_names
    >>> old_names.OLD_NAMES["tensorflow.train.experimental.DynamicLossScale"]
    'mp_compat.DynamicLossScale'

Source: `tensorflow/tools/api/golden` of the releases; the modules that programs import
by their private paths.
"""

from typing import Dict, Tuple

_FLAT = "mp_compat"
_CONTRIB = "mp_compat.contrib.mixed_precision"
_KERAS = "mp_compat.keras.experimental"


def _names_in(module: str, *names: str) -> Dict[str, str]:
  """Returns the full names by names in a module of this package."""
  return {name: "{}.{}".format(module, name) for name in names}


_LOSS_SCALES = _names_in(_FLAT, "LossScale", "FixedLossScale", "DynamicLossScale")
_OPTIMIZER = _names_in(_FLAT, "MixedPrecisionLossScaleOptimizer")
_REWRITE = _names_in(
  _FLAT, "enable_mixed_precision_graph_rewrite", "disable_mixed_precision_graph_rewrite"
)
_TRAINING = {**_LOSS_SCALES, **_OPTIMIZER, **_REWRITE}
_MANAGERS = _names_in(
  _CONTRIB,
  "LossScaleManager",
  "FixedLossScaleManager",
  "ExponentialUpdateLossScaleManager",
)
_WRAPPER = _names_in(_CONTRIB, "LossScaleOptimizer")
_KERAS_WRAPPER = _names_in(_KERAS, "LossScaleOptimizer")
_REGISTER = _names_in(_FLAT, "register_loss_scale_wrapper")

# The public interface. Module below `tensorflow`: its names, and their names in this
# package.
PUBLIC: Tuple[Tuple[str, Dict[str, str]], ...] = (
  ("train.experimental", _TRAINING),
  ("compat.v1.train.experimental", _TRAINING),
  ("compat.v1.mixed_precision", _TRAINING),
  ("compat.v1.mixed_precision.experimental", _LOSS_SCALES),
  ("compat.v2.train.experimental", _TRAINING),
  ("compat.v2.mixed_precision.experimental", _LOSS_SCALES),
  ("mixed_precision.experimental", _LOSS_SCALES),
  ("keras.mixed_precision.experimental", _KERAS_WRAPPER),
  ("compat.v1.keras.mixed_precision.experimental", _KERAS_WRAPPER),
  ("compat.v2.keras.mixed_precision.experimental", _KERAS_WRAPPER),
  ("contrib.mixed_precision", {**_MANAGERS, **_WRAPPER}),
)

_REWRITE_V1 = {name + "_v1": new for name, new in _REWRITE.items()}

# The private modules that define the interface. Programs import these, too.
PRIVATE: Tuple[Tuple[str, Dict[str, str]], ...] = (
  (
    "python.training.experimental.loss_scale",
    {**_LOSS_SCALES, "get": _FLAT + ".get_loss_scale"},
  ),
  ("python.training.experimental.loss_scale_optimizer", _OPTIMIZER),
  (
    "python.training.experimental.mixed_precision",
    {**_REWRITE, **_REGISTER, **_REWRITE_V1},
  ),
  ("python.keras.mixed_precision.experimental.loss_scale_optimizer", _KERAS_WRAPPER),
  ("contrib.mixed_precision.python.loss_scale_manager", _MANAGERS),
  ("contrib.mixed_precision.python.loss_scale_optimizer", _WRAPPER),
  ("__internal__.mixed_precision", _REGISTER),
)

# This package's full names by TensorFlow's full names.
OLD_NAMES: Dict[str, str] = {}
for _path, _replacements in PUBLIC + PRIVATE:
  for _name, _new in _replacements.items():
    OLD_NAMES["tensorflow.{}.{}".format(_path, _name)] = _new
