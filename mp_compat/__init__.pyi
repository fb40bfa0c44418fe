# SPDX-License-Identifier: Apache-2.0
# The public names and the modules that define them, for type checkers and editors.
# __init__.py lists the same names.

from mp_compat import checkpoints as checkpoints
from mp_compat import contrib as contrib
from mp_compat import horovod as horovod
from mp_compat import keras as keras
from mp_compat.core.gradients import clip_by_global_norm as clip_by_global_norm
from mp_compat.core.gradients import finite_or_zero as finite_or_zero
from mp_compat.core.loss_scale import DynamicLossScale as DynamicLossScale
from mp_compat.core.loss_scale import FixedLossScale as FixedLossScale
from mp_compat.core.loss_scale import LossScale as LossScale
from mp_compat.core.loss_scale import get_loss_scale as get_loss_scale
from mp_compat.core.variable_scope import (
  float32_variable_storage_getter as float32_variable_storage_getter,
)
from mp_compat.graph_rewrite import (
  disable_mixed_precision_graph_rewrite as disable_mixed_precision_graph_rewrite,
)
from mp_compat.graph_rewrite import (
  enable_mixed_precision_graph_rewrite as enable_mixed_precision_graph_rewrite,
)
from mp_compat.graph_rewrite import (
  mixed_precision_graph_rewrite as mixed_precision_graph_rewrite,
)
from mp_compat.graph_rewrite import (
  register_loss_scale_wrapper as register_loss_scale_wrapper,
)
from mp_compat.migration.installation import install as install
from mp_compat.monitoring.float16_ops import Float16Op as Float16Op
from mp_compat.monitoring.float16_ops import float16_ops as float16_ops
from mp_compat.monitoring.float32_ops import Float32Op as Float32Op
from mp_compat.monitoring.float32_ops import float32_ops as float32_ops
from mp_compat.monitoring.gradient_ranges import GradientRange as GradientRange
from mp_compat.monitoring.gradient_ranges import gradient_ranges as gradient_ranges
from mp_compat.monitoring.hooks import LossScaleHook as LossScaleHook
from mp_compat.monitoring.hooks import LossScaleStalledError as LossScaleStalledError
from mp_compat.monitoring.hooks import StopAtAttemptHook as StopAtAttemptHook
from mp_compat.monitoring.ranges_hook import GradientRangesHook as GradientRangesHook
from mp_compat.monitoring.reports import GradientReport as GradientReport
from mp_compat.monitoring.reports import loss_scale_summaries as loss_scale_summaries
from mp_compat.monitoring.reports import nonfinite_gradients as nonfinite_gradients
from mp_compat.monitoring.step_hook import AttemptedStep as AttemptedStep
from mp_compat.monitoring.step_hook import StepHook as StepHook
from mp_compat.training.gradient_accumulation import (
  GradientAccumulator as GradientAccumulator,
)
from mp_compat.training.optimizer import (
  MixedPrecisionLossScaleOptimizer as MixedPrecisionLossScaleOptimizer,
)
from mp_compat.training.shared_loss_scale import (
  apply_gradients_together as apply_gradients_together,
)

__version__: str
