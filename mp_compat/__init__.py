"""Loss scaling for TensorFlow's graph mode: `tf.compat.v1` optimizers in float16, from TensorFlow 1.15 to 2.21."""

from mp_compat import checkpoints
from mp_compat import keras
from mp_compat.accumulation import GradientAccumulator
from mp_compat.diagnosis import GradientReport
from mp_compat.diagnosis import nonfinite_gradients
from mp_compat.gradients import clip_by_global_norm
from mp_compat.gradients import finite_or_zero
from mp_compat.graph_rewrite import disable_mixed_precision_graph_rewrite
from mp_compat.graph_rewrite import enable_mixed_precision_graph_rewrite
from mp_compat.graph_rewrite import mixed_precision_graph_rewrite
from mp_compat.graph_rewrite import register_loss_scale_wrapper
from mp_compat.hooks import LossScaleHook
from mp_compat.hooks import LossScaleStalledError
from mp_compat.hooks import StopAtAttemptHook
from mp_compat.install import install
from mp_compat.loss_scale import DynamicLossScale
from mp_compat.loss_scale import FixedLossScale
from mp_compat.loss_scale import LossScale
from mp_compat.loss_scale import get_loss_scale
from mp_compat.optimizer import MixedPrecisionLossScaleOptimizer
from mp_compat.together import apply_gradients_together
from mp_compat.variable_scope import float32_variable_storage_getter

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "GradientAccumulator",
    "GradientReport",
    "LossScale",
    "LossScaleHook",
    "LossScaleStalledError",
    "MixedPrecisionLossScaleOptimizer",
    "StopAtAttemptHook",
    "apply_gradients_together",
    "checkpoints",
    "clip_by_global_norm",
    "disable_mixed_precision_graph_rewrite",
    "enable_mixed_precision_graph_rewrite",
    "finite_or_zero",
    "float32_variable_storage_getter",
    "get_loss_scale",
    "install",
    "keras",
    "mixed_precision_graph_rewrite",
    "nonfinite_gradients",
    "register_loss_scale_wrapper",
]
