"""Programs as in training scripts: clipping, towers, accumulation, averages, scopes,
global steps, datasets.
"""

import numpy as np

from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()

# --- between computing and applying
# -----------------------------------------------------------------------------------


def change_gradients(t, change):
  optimizer = t.wrap()
  grads, variables = zip(*optimizer.compute_gradients(t.loss(sparse=False)))
  return optimizer.apply_gradients(
    zip(change(t, list(grads)), variables), t.global_step
  )


def clip_conditionally(t, grads):
  norm = tf.global_norm(grads)
  return [
    tf.cond(norm > 1.0, lambda g=g: g / norm, lambda g=g: tf.identity(g)) for g in grads
  ]


def assign_to_variables(t, grads):
  stored = [
    tf.Variable(
      tf.zeros(g.shape), name="stored", trainable=False, use_resource=t.resource
    )
    for g in grads
  ]
  return [v.assign(g) for v, g in zip(stored, grads)]


def add_noise(t, grads):

  def make_noise(shape):
    return lambda x, flag: np.random.RandomState(int(flag)).normal(size=shape)

  return [
    g + t.input(tf.float32, g.shape, make_noise(g.shape.as_list())) for g in grads
  ]


def each(function):
  """Returns a function that changes every gradient."""
  return lambda t, grads: [function(g) for g in grads]


HIDING_OVERFLOW = {
  "clipped_by_value": each(lambda g: tf.clip_by_value(g, -0.5, 0.5)),
  "clipped_by_norm": each(lambda g: tf.clip_by_norm(g, 0.5)),
  "clipped_by_average_norm": each(lambda g: tf.clip_by_average_norm(g, 0.5)),
  "masked": each(lambda g: tf.where(tf.is_finite(g), g, tf.zeros_like(g))),
  "normalized": each(lambda g: g / (tf.norm(g) + 1e-3)),
  "conditionally_clipped": clip_conditionally,
  "quantized": each(lambda g: tf.quantization.fake_quant_with_min_max_args(g, -1, 1)),
  "tanh": each(tf.tanh),
  "in_a_py_func": each(
    lambda g: tf.py_func(lambda g: np.clip(g, -1, 1), [g], tf.float32)
  ),
}
KEEPING_OVERFLOW = {
  "clipped_by_global_norm": lambda t, grads: tf.clip_by_global_norm(grads, 0.5)[0],
  "clipped_to_a_placeholder": lambda t, grads: tf.clip_by_global_norm(
    grads, t.input(tf.float32, [], lambda x, flag: 1.0)
  )[0],
  "regularized": lambda t, grads: [g + 0.01 * v for g, v in zip(grads, t.variables)],
  "multiplied": each(lambda g: g * 0.3),
  "cast_and_back": each(lambda g: tf.cast(tf.cast(g, tf.float64), tf.float32)),
  "with_noise": add_noise,
}
SLOW = "clipped_by_norm clipped_by_average_norm normalized quantized tanh regularized multiplied cast_and_back".split()
for changes, hidden in [(HIDING_OVERFLOW, True), (KEEPING_OVERFLOW, False)]:
  for name, change in changes.items():
    TABLE.add(
      "gradients_" + name, change_gradients, change, hidden=hidden, slow=name in SLOW
    )
TABLE.add(
  "gradients_assigned_to_variables",
  change_gradients,
  assign_to_variables,
  hidden=True,
  outside="stored.*",
)


@TABLE.program()
def averaged_over_towers(t):
  optimizer = t.wrap()
  # only the first one overflows
  second = t.input(tf.float32, [3], lambda x, flag: np.where(np.isfinite(x), 2 * x, 1))
  towers = []
  for number, x in enumerate([t.x, second]):
    with tf.device("/cpu:{}".format(number)), tf.name_scope("tower_{}".format(number)):
      with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        towers.append(optimizer.compute_gradients(t.loss(x, sparse=False)))
  averaged = [
    (
      tf.reduce_mean(tf.concat([tf.expand_dims(g, 0) for g, _ in pairs], 0), 0),
      pairs[0][1],
    )
    for pairs in zip(*towers)
  ]
  return optimizer.apply_gradients(averaged, t.global_step)


@TABLE.program(outside="accum.*")
def accumulated_in_variables(t):
  optimizer = t.wrap()
  accum = [
    tf.Variable(
      tf.zeros_like(v.initial_value),
      trainable=False,
      name="accum",
      use_resource=t.resource,
    )
    for v in t.variables
  ]
  zero_op = [v.assign(tf.zeros_like(v)) for v in accum]
  pairs = optimizer.compute_gradients(t.loss(sparse=False), t.variables)
  accum_op = [accum[i].assign_add(g) for i, (g, _) in enumerate(pairs)]
  train_op = optimizer.apply_gradients(
    [(accum[i], v) for i, (_, v) in enumerate(pairs)], t.global_step
  )

  def step(sess, feed):
    sess.run(zero_op)
    sess.run(accum_op, feed)
    sess.run(accum_op, {t.x: np.ones(3, np.float32)})
    sess.run(train_op)

  return step


@TABLE.program(variants=programs.NO_V2_REFERENCE, outside="accum.*", fixed=False)
def accumulated_and_applied_every_second_step(t):
  """Accumulates and applies in one run; a fed condition decides whether to apply."""
  optimizer = t.wrap()
  w, _ = t.variables
  accum = tf.Variable(
    tf.zeros([3]), trainable=False, name="accum", use_resource=t.resource
  )
  ((grad, _),) = optimizer.compute_gradients(t.loss(), [w])
  with tf.control_dependencies([accum.assign_add(grad)]):
    summed = tf.identity(accum.read_value())

  def apply():
    with tf.control_dependencies(
      [optimizer.apply_gradients([(summed, w)], t.global_step)]
    ):
      return tf.group(accum.assign(tf.zeros([3])))

  return tf.cond(t.flag, apply, tf.no_op)


@TABLE.program()
def accumulated_in_conditional_accumulators(t):
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss(sparse=False))
  accumulators = [tf.ConditionalAccumulator(tf.float32, v.shape) for _, v in pairs]
  accumulate = [a.apply_grad(g, 2**40) for a, (g, _) in zip(accumulators, pairs)]
  train_op = optimizer.apply_gradients(
    [(a.take_grad(2), v) for a, (_, v) in zip(accumulators, pairs)], t.global_step
  )

  def step(sess, feed):
    sess.run(accumulate, feed)
    sess.run(accumulate, {t.x: np.ones(3, np.float32)})
    sess.run(train_op)

  return step


# --- variables
# --------------------------------------------------------------------------------------------------------


@TABLE.program()
def partitioned_variables(t):
  with tf.variable_scope("", use_resource=t.resource):
    parts = tf.get_variable(
      "parts", initializer=tf.ones([6, 3]), partitioner=tf.fixed_size_partitioner(3)
    )
  rows = tf.nn.embedding_lookup(list(parts), [0, 4, 4])
  return t.wrap().minimize(
    tf.reduce_sum(tf.convert_to_tensor(parts) * t.x) + tf.reduce_sum(rows * rows * t.x),
    t.global_step,
  )


@TABLE.program()
def constrained_variables(t):
  w = t.variable(
    "constrained",
    np.ones(3, np.float32),
    constraint=lambda v: tf.clip_by_value(v, 0.9, 1.1),
  )
  return t.wrap().minimize(tf.reduce_sum(w * w * t.x), t.global_step)


@TABLE.program(variants=(programs.V1_REFERENCE, programs.V1, programs.V2))
def cached_variables(t):
  with tf.variable_scope("", use_resource=t.resource, caching_device="/cpu:1"):
    w = tf.get_variable("cached", initializer=np.ones(3, np.float32))
  return t.wrap().minimize(tf.reduce_sum(w * w * t.x), t.global_step)


@TABLE.program(variants=(programs.V1,))
def resource_and_reference_variables_together(t):
  with tf.variable_scope("", use_resource=False):
    reference = tf.get_variable("reference", initializer=np.ones(3, np.float32))
  return t.wrap().minimize(
    t.loss() + tf.reduce_sum(reference * reference * t.x), t.global_step
  )


# --- global steps
# -----------------------------------------------------------------------------------------------------


def explain_reference_failure(variant):
  return (
    "its branches are functions, which do not accept reference variables"
    if variant.control_flow == 2
    else None
  )


def train_with_global_step(t, dtype, resource):
  step = tf.Variable(
    np.array(5, dtype), trainable=False, name="own_step", use_resource=resource
  )
  return t.wrap().minimize(t.loss(), step)


for dtype in ("int32", "int64", "float32"):
  for resource in (True, False):
    TABLE.add(
      "global_step_of_{}_as_{}".format(dtype, "resource" if resource else "reference"),
      train_with_global_step,
      dtype,
      resource,
      tensorflow_fails=None if resource else explain_reference_failure,
      slow=(dtype, resource) not in [("int32", True), ("int64", False)],
    )


# --- dependencies and scopes
# ------------------------------------------------------------------------------------------


def explain_scope_failure(variant):
  return (
    "the beta powers are not in the name scope" if variant.control_flow == 2 else None
  )


@TABLE.program(tensorflow_fails=explain_scope_failure)
def scopes_around_adam(t):
  with tf.name_scope("outer"), tf.variable_scope("scope"), tf.name_scope("within"):
    return t.wrap(tf.train.AdamOptimizer(0.1)).minimize(
      t.loss(), t.global_step, name="step"
    )


def reuse_variable_scope(t, shares_optimizer):
  shared = t.wrap(tf.train.AdamOptimizer(0.1)) if shares_optimizer else None
  for factor in (1.0, 2.0):
    with tf.variable_scope("shared", reuse=tf.AUTO_REUSE, use_resource=t.resource):
      w = tf.get_variable("w", initializer=np.ones(3, np.float32))
      train_op = (shared or t.wrap()).minimize(
        tf.reduce_sum(w * w * t.x * factor), t.global_step, [w]
      )
  return train_op


TABLE.add(
  "a_reused_variable_scope",
  reuse_variable_scope,
  True,
  tensorflow_fails=explain_scope_failure,
)
TABLE.add("two_optimizers_in_a_reused_variable_scope", reuse_variable_scope, False)


@TABLE.program(tensorflow_fails=explain_scope_failure)
def scope_names_that_loss_scale_optimizers_use(t):
  with tf.name_scope("apply_or_skip"), tf.name_scope("cond"):
    return t.wrap(tf.train.AdamOptimizer(0.1)).minimize(t.loss(), t.global_step)


@TABLE.program(outside="moving.*")
def batch_normalization_with_update_ops(t):
  moving = tf.Variable(
    tf.zeros([3]), trainable=False, name="moving", use_resource=t.resource
  )
  gamma = t.variable("gamma", np.ones(3, np.float32))
  tf.add_to_collection(
    tf.GraphKeys.UPDATE_OPS,
    moving.assign_sub(
      0.1 * (moving - tf.where(tf.is_finite(t.x), t.x, tf.zeros_like(t.x)))
    ),
  )
  with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    return t.wrap().minimize(
      t.loss() + tf.reduce_sum(gamma * gamma * t.x), t.global_step
    )


# A moving average cannot be initialized from a reference variable under control flow
# v2.
@TABLE.program(
  variants=programs.NO_V2_REFERENCE, outside=".*ExponentialMovingAverage.*", fresh=True
)
def an_exponential_moving_average_after_the_step(t):
  average = tf.train.ExponentialMovingAverage(0.5, num_updates=t.global_step)
  with tf.control_dependencies([t.wrap().minimize(t.loss(), t.global_step)]):
    return average.apply(t.variables)


@TABLE.program()
def an_input_from_a_dataset(t):
  dataset = tf.data.Dataset.from_tensors(t.x).map(lambda x: x * 2.0)
  iterator = tf.data.make_initializable_iterator(dataset)
  train_op = t.wrap().minimize(t.loss(iterator.get_next()), t.global_step)

  def step(sess, feed):
    sess.run(iterator.initializer, feed)
    sess.run(train_op)

  return step


# --- several optimizers or losses
# -------------------------------------------------------------------------------------


@TABLE.program()
def two_optimizers_on_shared_variables(t):
  loss = t.loss()
  first = t.wrap(tf.train.AdamOptimizer(0.1)).minimize(loss, t.global_step)
  with tf.control_dependencies([first]):
    return t.wrap().minimize(t.loss(t.x * 2.0), t.global_step)


@TABLE.program(fixed=False)
def two_optimizers_with_one_loss_scale(t):
  loss_scales = []

  def shared(api):
    loss_scales.append(
      loss_scales[0] if loss_scales else api.DynamicLossScale(2**10, 3)
    )
    return loss_scales[0]

  w, table = t.variables
  first = t.wrap(tf.train.AdamOptimizer(0.1), shared).minimize(
    t.loss(), t.global_step, [w]
  )
  with tf.control_dependencies([first]):
    return t.wrap(None, shared).minimize(t.loss(), None, [table])


class AppliesWithAnother(tf.train.GradientDescentOptimizer):
  """Calls `apply_gradients` of another optimizer, which may scale the loss, too, in its
  own.
  """

  def __init__(self, other):
    super().__init__(0.1)
    self.other = other

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    pairs = [
      (tf.convert_to_tensor(grad), variable) for grad, variable in grads_and_vars
    ]
    with tf.control_dependencies([self.other.apply_gradients(pairs)]):
      return super().apply_gradients(
        [(2.0 * grad, variable) for grad, variable in pairs], *args, **kwargs
      )


@TABLE.program()
def a_step_inside_another(t):
  return t.wrap(AppliesWithAnother(t.wrap(tf.train.AdamOptimizer(0.1)))).minimize(
    t.loss(), t.global_step
  )


@TABLE.program()
def computed_by_one_optimizer_applied_by_another(t):
  first, second = t.wrap(tf.train.AdamOptimizer(0.1)), t.wrap()
  return second.apply_gradients(first.compute_gradients(t.loss()), t.global_step)


test_program_trains_with_the_same_numbers = TABLE.make_test()
