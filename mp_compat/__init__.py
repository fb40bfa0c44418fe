# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for float16 training in TensorFlow's graph mode (`tf.compat.v1`), from
TensorFlow 1.15 to 2.21.

Each module, and TensorFlow with it, is imported on first use of a public name.
`mp_compat migrate` needs no TensorFlow.
"""

import importlib
import sys
from typing import Any, List

__version__ = "0.1.0"

if sys.version_info < (3, 7):  # noqa: UP036 (pip refuses to install it, but a folder on PYTHONPATH is found)
  raise ImportError(
    "mp_compat needs Python 3.7 or later, but this is Python {}.{}.".format(
      *sys.version_info[:2]
    )
  )

# The public names by the module that defines them; __init__.pyi lists the same for type
# checkers.
_PUBLIC = {
  "mp_compat": ["checkpoints", "contrib", "horovod", "keras"],
  "mp_compat.core.gradients": ["clip_by_global_norm", "finite_or_zero"],
  "mp_compat.core.loss_scale": [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "get_loss_scale",
  ],
  "mp_compat.core.variable_scope": ["float32_variable_storage_getter"],
  "mp_compat.graph_rewrite": [
    "disable_mixed_precision_graph_rewrite",
    "enable_mixed_precision_graph_rewrite",
    "mixed_precision_graph_rewrite",
    "register_loss_scale_wrapper",
  ],
  "mp_compat.migration.installation": ["install"],
  "mp_compat.monitoring.float16_ops": ["Float16Op", "float16_ops"],
  "mp_compat.monitoring.float32_ops": ["Float32Op", "float32_ops"],
  "mp_compat.monitoring.gradient_ranges": ["GradientRange", "gradient_ranges"],
  "mp_compat.monitoring.hooks": [
    "LossScaleHook",
    "LossScaleStalledError",
    "StopAtAttemptHook",
  ],
  "mp_compat.monitoring.ranges_hook": ["GradientRangesHook"],
  "mp_compat.monitoring.reports": [
    "GradientReport",
    "loss_scale_summaries",
    "nonfinite_gradients",
  ],
  "mp_compat.monitoring.step_hook": ["AttemptedStep", "StepHook"],
  "mp_compat.training.gradient_accumulation": ["GradientAccumulator"],
  "mp_compat.training.optimizer": ["MixedPrecisionLossScaleOptimizer"],
  "mp_compat.training.shared_loss_scale": ["apply_gradients_together"],
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
  if name not in _MODULE_OF:
    raise AttributeError("module 'mp_compat' has no attribute {!r}".format(name))
  module = _MODULE_OF[name]
  if module == __name__:
    return importlib.import_module("{}.{}".format(module, name))
  value = getattr(importlib.import_module(module), name)
  globals()[name] = value
  return value


def __dir__() -> List[str]:
  return sorted(set(globals()) | set(__all__))
