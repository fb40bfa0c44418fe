# SPDX-License-Identifier: Apache-2.0
"""What the optimizers of Keras 2 do in this TensorFlow version, and what its own
wrapper does.
"""

from mp_compat._tensorflow import VERSION

# `_create_all_weights` makes the slots and the hyperparameters
CREATES_ALL_WEIGHTS = VERSION >= (2, 2)
# `clipnorm` or `clipvalue`; before, the attribute is missing
MISSING_LIMIT_IS_NONE = VERSION >= (2, 2)
# the wrapper has the inner optimizer's children in a `tf.train.Checkpoint`
DELEGATES_TO_INNER = VERSION >= (2, 3)
COUNTS_SKIPPED_STEPS = VERSION >= (2, 3)  # in `iterations`
# in `apply_gradients`; before, when gradients are computed
CLIPS_WHEN_APPLYING = VERSION >= (2, 4)
# sums gradients over replicas before it clips and applies them
AGGREGATES_FIRST = VERSION >= (2, 4)
# `loss_scale` of its experimental wrapper; gone in 2.9
EXPERIMENTAL_SCALE_IS_TENSOR = (2, 4) <= VERSION < (2, 9)
# configurations have `inner_optimizer`, not `loss_scale`
HAS_LATER_FORM = VERSION >= (2, 4)
# `apply_gradients` of the newer wrapper calls its own `build`, not the inner one's
BUILDS_WHEN_APPLYING = VERSION >= (2, 14)
