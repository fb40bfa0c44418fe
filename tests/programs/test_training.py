"""Programs as in training scripts: clipping, towers, accumulation, averages, scopes, global steps, datasets."""

import numpy as np

from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()

# --- between computing and applying -----------------------------------------------------------------------------------


def make_program(change):
  """Returns a program that changes the gradients between computing and applying them."""

  def build(t):
    optimizer = t.wrap()
    grads, variables = zip(*optimizer.compute_gradients(t.loss(sparse=False)))
    return optimizer.apply_gradients(zip(change(t, list(grads)), variables), t.global_step)

  return build


def mask_nonfinite(t, grads):
  return [tf.where(tf.is_finite(g), g, tf.zeros_like(g)) for g in grads]


def normalize(t, grads):
  return [g / (tf.norm(g) + 1e-3) for g in grads]


def clip_conditionally(t, grads):
  norm = tf.global_norm(grads)
  return [tf.cond(norm > 1.0, lambda g=g: g / norm, lambda g=g: tf.identity(g)) for g in grads]


CHANGES = {
  "clipped_by_value": (lambda t, grads: [tf.clip_by_value(g, -0.5, 0.5) for g in grads], True),
  "clipped_by_norm": (lambda t, grads: [tf.clip_by_norm(g, 0.5) for g in grads], True),
  "clipped_by_average_norm": (lambda t, grads: [tf.clip_by_average_norm(g, 0.5) for g in grads], True),
  "clipped_by_global_norm": (lambda t, grads: tf.clip_by_global_norm(grads, 0.5)[0], False),
  "clipped_to_a_placeholder": (
    lambda t, grads: tf.clip_by_global_norm(grads, t.input(tf.float32, [], lambda x, flag: 1.0))[0],
    False,
  ),
  "masked": (mask_nonfinite, True),
  "normalized": (normalize, True),
  "conditionally_clipped": (clip_conditionally, True),
  "quantized": (lambda t, grads: [tf.quantization.fake_quant_with_min_max_args(g, -1, 1) for g in grads], True),
  "tanh": (lambda t, grads: [tf.tanh(g) for g in grads], True),
  "regularized": (lambda t, grads: [g + 0.01 * v for g, v in zip(grads, t.variables)], False),
  "multiplied": (lambda t, grads: [g * 0.3 for g in grads], False),
  "cast_and_back": (lambda t, grads: [tf.cast(tf.cast(g, tf.float64), tf.float32) for g in grads], False),
  "assigned_to_variables": (lambda t, grads: assign_to_variables(t, grads), True),
  "in_a_py_func": (lambda t, grads: [clip_in_py_func(g) for g in grads], True),
  "with_noise": (
    lambda t, grads: [g + t.input(tf.float32, g.shape.as_list(), make_noise(g.shape.as_list())) for g in grads],
    False,
  ),
}


RUN_BY_DEFAULT = (
  "clipped_by_value clipped_by_global_norm clipped_to_a_placeholder masked conditionally_clipped assigned_to_variables "
  "in_a_py_func with_noise"
).split()


def make_noise(shape):
  return lambda x, flag: np.random.RandomState(int(flag)).normal(size=shape)


def assign_to_variables(t, grads):
  stored = [tf.Variable(tf.zeros(g.shape), name="stored", trainable=False, use_resource=t.resource) for g in grads]
  return [v.assign(g) for v, g in zip(stored, grads)]


def clip_in_py_func(grad):
  clipped = tf.py_func(lambda g: np.clip(g, -1, 1), [grad], tf.float32)
  clipped.set_shape(grad.shape)
  return clipped


for name, (change, hides_overflow) in CHANGES.items():
  TABLE.add(
    "gradients_{}".format(name),
    make_program(change),
    hidden=hides_overflow,
    slow=name not in RUN_BY_DEFAULT,
    outside="stored.*" if change is CHANGES["assigned_to_variables"][0] else "$^",
  )


@TABLE.program()
def averaged_over_towers(t):
  optimizer = t.wrap()
  second = t.input(tf.float32, [3], lambda x, flag: np.where(np.isfinite(x), 2 * x, 1))  # only the first one overflows
  towers = []
  for number, x in enumerate([t.x, second]):
    with tf.device("/cpu:{}".format(number)), tf.name_scope("tower_{}".format(number)):
      with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        towers.append(optimizer.compute_gradients(t.loss(x, sparse=False)))
  averaged = [
    (tf.reduce_mean(tf.concat([tf.expand_dims(g, 0) for g, _ in pairs], 0), 0), pairs[0][1]) for pairs in zip(*towers)
  ]
  return optimizer.apply_gradients(averaged, t.global_step)


@TABLE.program(outside="accum.*")
def accumulated_in_variables(t):
  optimizer = t.wrap()
  accum = [
    tf.Variable(tf.zeros_like(v.initial_value), trainable=False, name="accum", use_resource=t.resource)
    for v in t.variables
  ]
  zero_op = [v.assign(tf.zeros_like(v)) for v in accum]
  pairs = optimizer.compute_gradients(t.loss(sparse=False), t.variables)
  accum_op = [accum[i].assign_add(g) for i, (g, _) in enumerate(pairs)]
  train_op = optimizer.apply_gradients([(accum[i], v) for i, (_, v) in enumerate(pairs)], t.global_step)

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
  accum = tf.Variable(tf.zeros([3]), trainable=False, name="accum", use_resource=t.resource)
  ((grad, _),) = optimizer.compute_gradients(t.loss(), [w])
  with tf.control_dependencies([accum.assign_add(grad)]):
    summed = tf.identity(accum.read_value())

  def apply():
    with tf.control_dependencies([optimizer.apply_gradients([(summed, w)], t.global_step)]):
      return tf.group(accum.assign(tf.zeros([3])))

  return tf.cond(t.flag, apply, tf.no_op)


@TABLE.program()
def accumulated_in_conditional_accumulators(t):
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss(sparse=False))
  accumulators = [tf.ConditionalAccumulator(tf.float32, v.shape) for _, v in pairs]
  accumulate = [a.apply_grad(g, 2**40) for a, (g, _) in zip(accumulators, pairs)]
  train_op = optimizer.apply_gradients([(a.take_grad(2), v) for a, (_, v) in zip(accumulators, pairs)], t.global_step)

  def step(sess, feed):
    sess.run(accumulate, feed)
    sess.run(accumulate, {t.x: np.ones(3, np.float32)})
    sess.run(train_op)

  return step


# --- variables --------------------------------------------------------------------------------------------------------


@TABLE.program()
def partitioned_variables(t):
  with tf.variable_scope("", use_resource=t.resource):
    parts = tf.get_variable("parts", initializer=tf.ones([6, 3]), partitioner=tf.fixed_size_partitioner(3))
  rows = tf.nn.embedding_lookup(list(parts), [0, 4, 4])
  return t.wrap().minimize(
    tf.reduce_sum(tf.convert_to_tensor(parts) * t.x) + tf.reduce_sum(rows * rows * t.x), t.global_step
  )


@TABLE.program()
def constrained_variables(t):
  w = t.variable("constrained", np.ones(3, np.float32), constraint=lambda v: tf.clip_by_value(v, 0.9, 1.1))
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
  return t.wrap().minimize(t.loss() + tf.reduce_sum(reference * reference * t.x), t.global_step)


@TABLE.program(slow=True)
def an_initializer_that_depends_on_another_variable(t):
  w, _ = t.variables
  second = tf.Variable(w.initial_value * 2.0, name="second", use_resource=t.resource)
  return t.wrap(tf.train.AdamOptimizer(0.1)).minimize(t.loss() + tf.reduce_sum(second * t.x), t.global_step)


# --- global steps -----------------------------------------------------------------------------------------------------


def explain_reference_failure(variant):
  return "its branches are functions, which do not accept reference variables" if variant.control_flow == 2 else None


def make_program_with_global_step(dtype, resource):

  def build(t):
    step = tf.Variable(np.array(5, dtype), trainable=False, name="own_step", use_resource=resource)
    return t.wrap().minimize(t.loss(), step)

  return build


for dtype in ("int32", "int64", "float32"):
  for resource in (True, False):
    TABLE.add(
      "global_step_of_{}_as_{}".format(dtype, "resource" if resource else "reference"),
      make_program_with_global_step(dtype, resource),
      tensorflow_fails=None if resource else explain_reference_failure,
      slow=(dtype, resource) not in [("int32", True), ("int64", False)],
    )


@TABLE.program(slow=True)
def no_global_step(t):
  return t.wrap().minimize(t.loss())


# --- dependencies and scopes ------------------------------------------------------------------------------------------


@TABLE.program(outside="counter.*", slow=True)
def control_dependencies_around_minimize(t):
  counter = tf.Variable(0, trainable=False, name="counter", use_resource=t.resource)
  with tf.control_dependencies([counter.assign_add(1)]):
    return t.wrap().minimize(t.loss(), t.global_step)


@TABLE.program(outside="after.*")
def control_dependencies_after_minimize(t):
  count = tf.Variable(0.0, trainable=False, name="after", use_resource=t.resource)
  with tf.control_dependencies([t.wrap().minimize(t.loss(), t.global_step)]):
    return count.assign_add(tf.reduce_sum(t.variables[0].read_value()))


def explain_scope_failure(variant):
  return "the beta powers are not in the name scope" if variant.control_flow == 2 else None


@TABLE.program(tensorflow_fails=explain_scope_failure)
def scopes_around_adam(t):
  with tf.name_scope("outer"), tf.variable_scope("scope"), tf.name_scope("within"):
    return t.wrap(tf.train.AdamOptimizer(0.1)).minimize(t.loss(), t.global_step, name="step")


@TABLE.program(tensorflow_fails=explain_scope_failure)
def a_reused_variable_scope(t):
  optimizer = t.wrap(tf.train.AdamOptimizer(0.1))
  for factor in (1.0, 2.0):
    with tf.variable_scope("shared", reuse=tf.AUTO_REUSE, use_resource=t.resource):
      w = tf.get_variable("w", initializer=np.ones(3, np.float32))
      train_op = optimizer.minimize(tf.reduce_sum(w * w * t.x * factor), t.global_step, [w])
  return train_op


@TABLE.program()
def two_optimizers_in_a_reused_variable_scope(t):
  for factor in (1.0, 2.0):
    with tf.variable_scope("shared", reuse=tf.AUTO_REUSE, use_resource=t.resource):
      w = tf.get_variable("w", initializer=np.ones(3, np.float32))
      train_op = t.wrap().minimize(tf.reduce_sum(w * w * t.x * factor), t.global_step, [w])
  return train_op


@TABLE.program(tensorflow_fails=explain_scope_failure)
def scope_names_that_loss_scale_optimizers_use(t):
  with tf.name_scope("apply_if_finite"), tf.name_scope("cond"):
    return t.wrap(tf.train.AdamOptimizer(0.1)).minimize(t.loss(), t.global_step)


@TABLE.program(outside="moving.*")
def batch_normalization_with_update_ops(t):
  moving = tf.Variable(tf.zeros([3]), trainable=False, name="moving", use_resource=t.resource)
  gamma = t.variable("gamma", np.ones(3, np.float32))
  tf.add_to_collection(
    tf.GraphKeys.UPDATE_OPS, moving.assign_sub(0.1 * (moving - tf.where(tf.is_finite(t.x), t.x, tf.zeros_like(t.x))))
  )
  with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    return t.wrap().minimize(t.loss() + tf.reduce_sum(gamma * gamma * t.x), t.global_step)


# A moving average cannot be initialized from a reference variable under control flow v2.
@TABLE.program(variants=programs.NO_V2_REFERENCE, outside=".*ExponentialMovingAverage.*", fresh=True)
def an_exponential_moving_average_after_the_step(t):
  average = tf.train.ExponentialMovingAverage(0.5, num_updates=t.global_step)
  with tf.control_dependencies([t.wrap().minimize(t.loss(), t.global_step)]):
    return average.apply(t.variables)


@TABLE.program(tensorflow_fails="it adds an op of a branch to the collection")
def the_train_op_taken_from_its_collection(t):
  t.wrap().minimize(t.loss(), t.global_step)
  return tf.get_collection(tf.GraphKeys.TRAIN_OP)[-1]


@TABLE.program()
def an_input_from_a_dataset(t):
  dataset = tf.data.Dataset.from_tensors(t.x).map(lambda x: x * 2.0)
  iterator = tf.data.make_initializable_iterator(dataset)
  train_op = t.wrap().minimize(t.loss(iterator.get_next()), t.global_step)

  def step(sess, feed):
    sess.run(iterator.initializer, feed)
    sess.run(train_op)

  return step


test_program_trains_with_the_same_numbers = TABLE.make_test()
