"""Programs in which functions of tf.contrib and TF-Slim build the train op, and
clip.
"""

import tensorflow

import mp_compat
from tests.programs import table as programs
from tests.testing import tf

try:
  import tf_slim as slim
except ImportError:
  slim = None
contrib = tensorflow.contrib if programs.VERSION < (2, 0) else None

TABLE = programs.Table()
CLIP = 0.5


def clip(grads_and_vars):
  grads, variables = zip(*grads_and_vars)
  return list(zip(mp_compat.clip_by_global_norm(grads, CLIP)[0], variables))


def optimize_loss(t):
  return contrib.layers.optimize_loss(
    t.loss(), t.global_step, None, t.wrap(), clip_gradients=CLIP
  )


def optimize_loss_with_factory(t):
  return contrib.layers.optimize_loss(
    t.loss(),
    t.global_step,
    0.1,
    lambda rate: t.wrap(tf.train.MomentumOptimizer(rate, 0.9)),
    gradient_multipliers={t.variables[0]: 2.0},
  )


def contrib_create_train_op(t):
  clip_norms = contrib.training.clip_gradient_norms_fn(CLIP)
  return contrib.training.create_train_op(
    t.loss(),
    t.wrap(),
    t.global_step,
    transform_grads_fn=clip_norms,
    check_numerics=False,
  )


def slim_learning_create_train_op(t):
  return slim.learning.create_train_op(
    t.loss(), t.wrap(), t.global_step, clip_gradient_norm=CLIP, check_numerics=False
  )


def slim_training_create_train_op(t):
  return slim.training.create_train_op(
    t.loss(), t.wrap(), t.global_step, transform_grads_fn=clip, check_numerics=False
  )


for build, hidden, needs in [
  (optimize_loss, False, {"TensorFlow 2 has no tf.contrib": contrib}),
  (optimize_loss_with_factory, False, {"TensorFlow 2 has no tf.contrib": contrib}),
  (contrib_create_train_op, True, {"TensorFlow 2 has no tf.contrib": contrib}),
  (
    slim_learning_create_train_op,
    True,
    {
      "no tf_slim whose clipping has ops.IndexedSlices": slim
      and hasattr(slim.learning.ops, "IndexedSlices")
    },
  ),
  (slim_training_create_train_op, False, {"no tf_slim": slim}),
]:
  TABLE.add(build.__name__, build, needs=needs, hidden=hidden)


test_program_trains_with_the_same_numbers = TABLE.make_test()
