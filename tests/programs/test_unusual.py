"""Unusual programs: names, variable creators, custom optimizers, dtypes."""

import functools

import numpy as np

from tests.programs import table as programs
from tests.programs.test_optimizers import Descent
from tests.testing import tf

TABLE = programs.Table()


@TABLE.program(exact=True)
def one_variable_in_two_pairs(t):
  w, _ = t.variables
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(
    t.loss(), gate_gradients=tf.train.Optimizer.GATE_GRAPH
  )
  with tf.control_dependencies([pairs[0][0]]):
    return optimizer.apply_gradients(pairs + [(tf.identity(t.x), w)], t.global_step)


@TABLE.program()
def the_loss_is_a_variable(t):
  scalar = t.variable("scalar", 3.0)
  optimizer = t.wrap()
  return optimizer.apply_gradients(
    optimizer.compute_gradients(scalar, [scalar])
    + optimizer.compute_gradients(t.loss(), t.variables),
    t.global_step,
  )


@TABLE.program(variants=programs.RESOURCE, slow=True)
def the_loss_is_a_function(t):
  return t.wrap().minimize(t.loss, t.global_step)


@TABLE.program()
def the_second_train_op_found_by_name(t):
  w, table = t.variables
  t.wrap().minimize(t.loss(), t.global_step, [w])
  t.wrap().minimize(t.loss(), t.global_step, [table])
  return t.graph.get_operation_by_name("Momentum_1")


# the first iteration applies zeros, which are finite
@TABLE.program(variants=programs.NO_V2_REFERENCE, overflow=())
def gradients_delayed_by_one_loop_iteration(t):
  w, _ = t.variables
  optimizer = t.wrap()

  def body(i, previous):
    ((grad, _),) = optimizer.compute_gradients(tf.reduce_sum(w * w * t.x), [w])
    with tf.control_dependencies([grad]):
      with tf.control_dependencies(
        [optimizer.apply_gradients([(previous, w)], t.global_step)]
      ):
        return i + 1, tf.identity(grad)

  return tf.while_loop(
    lambda i, _: i < 3, body, [0, tf.zeros([3])], parallel_iterations=1
  )


@TABLE.program()
def variables_made_by_a_variable_creator(t):

  def creator(next_creator, **kwargs):
    if "loss_scale" in str(kwargs.get("name")) or "good_steps" in str(
      kwargs.get("name")
    ):
      return next_creator(**kwargs)
    return next_creator(
      **dict(kwargs, name=(kwargs.get("name") or "unnamed") + "_created")
    )

  with tf.variable_creator_scope(creator):
    return t.wrap(tf.train.AdamOptimizer(0.1)).minimize(t.loss(), t.global_step)


@TABLE.program(tensorflow_fails="it has no slots", slow=True)
def slots_reset_by_the_program(t):
  optimizer = t.wrap()
  train_op = optimizer.minimize(t.loss(), t.global_step)
  reset = [
    tf.assign(optimizer.get_slot(v, name), tf.zeros(v.shape))
    for v in t.variables
    for name in optimizer.get_slot_names()
  ]

  def step(sess, feed):
    sess.run(train_op, feed)
    if feed[t.flag] and np.isfinite(feed[t.x]).all():
      sess.run(reset)

  return step


@TABLE.program(
  overflow=(),
  tensorflow_fails=programs.fails_up_to((1, 15), "variables() lacks the loss scale's"),
)
def optimizer_variables_initialized_again(t):
  optimizer = t.wrap(tf.train.AdamOptimizer(0.1))
  train_op = optimizer.minimize(t.loss(), t.global_step)
  again = tf.variables_initializer(optimizer.variables())

  def step(sess, feed):
    sess.run(train_op, feed)
    if feed[t.flag]:
      sess.run(again)

  return step


# --- custom optimizers
# ------------------------------------------------------------------------------------------------


class MakesVelocities(Descent):
  """Makes variables in `apply_gradients`, each with a function of the trained
  variable.
  """

  def __init__(self, make):
    super().__init__()
    self._make = make

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    updates = []
    for grad, variable in grads_and_vars:
      velocity = self._make(variable)
      with tf.control_dependencies(
        [velocity.assign(0.9 * velocity + tf.convert_to_tensor(grad))]
      ):
        updates.append(variable.assign_sub(0.1 * velocity.read_value()))
    return tf.group(*updates)


class MakesVariablesFromOuterTensors(Descent):
  """Makes a variable in `apply_gradients` whose initial value is a tensor from
  `compute_gradients`.
  """

  def compute_gradients(self, *args, **kwargs):
    self._start = tf.constant([0.5, 0.25, 0.125]) * 2.0
    return super().compute_gradients(*args, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    rate = tf.Variable(
      self._start / 8.0, trainable=False, name="rate", use_resource=True
    )
    return super().apply_gradients(
      [
        (grad * rate if variable.shape == [3] else grad, variable)
        for grad, variable in grads_and_vars
      ],
      global_step,
    )


class AddsToCollections(Descent):
  """Adds the norm of the gradients and the train op to collections, from which programs
  run them.
  """

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    tf.add_to_collection(
      "norms",
      tf.global_norm([tf.convert_to_tensor(grad) for grad, _ in grads_and_vars]),
    )
    train_op = super().apply_gradients(grads_and_vars, *args, **kwargs)
    tf.add_to_collection("train_ops", train_op)
    return train_op


class Summarizes(Descent):
  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    for grad, variable in grads_and_vars:
      # raises an error for values that are not finite
      tf.summary.histogram(variable.op.name, grad)
    return super().apply_gradients(grads_and_vars, *args, **kwargs)


class DependsOnCollections(Descent):
  """Adds control dependencies on the ops of a collection, to which the program adds."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    with tf.control_dependencies(tf.get_collection("before_steps")):
      return super().apply_gradients(grads_and_vars, *args, **kwargs)


class AcceptsComplexNumbers(Descent):
  def _valid_dtypes(self):
    return super()._valid_dtypes() | {tf.complex64}


class AcceptsIntegers(Descent):
  def _valid_dtypes(self):
    return super()._valid_dtypes() | {tf.int32}

  def _resource_apply_dense(self, grad, handle):
    return handle.assign_sub(grad)

  def _apply_dense(self, grad, var):
    return tf.assign_sub(var, grad)


NOT_TRAINED = dict(trainable=False, use_resource=True)
MAKE_VELOCITY = {
  "MakesVariablesFromTensors": lambda v: tf.Variable(
    tf.zeros_like(v), name="velocity", **NOT_TRAINED
  ),
  "MakesVariablesFromFunctions": lambda v: tf.Variable(
    lambda: tf.zeros(v.shape), name="velocity", **NOT_TRAINED
  ),
  "GetsVariablesFromTensors": lambda v: tf.get_variable(
    v.op.name + "/velocity", initializer=tf.zeros_like(v), **NOT_TRAINED
  ),
  "GetsVariablesFromInitializers": lambda v: tf.get_variable(
    v.op.name + "/velocity",
    v.shape.as_list(),
    initializer=tf.zeros_initializer(),
    **NOT_TRAINED,
  ),
}
MAKES_VARIABLES = {
  name: functools.partial(MakesVelocities, make) for name, make in MAKE_VELOCITY.items()
}
MAKES_VARIABLES["MakesVariablesFromOuterTensors"] = MakesVariablesFromOuterTensors
for name, make_inner in MAKES_VARIABLES.items():
  TABLE.add(
    "custom_optimizer_" + name,
    lambda t, make: t.wrap(make()).minimize(t.loss(sparse=False), t.global_step),
    make_inner,
    tensorflow_fails="the initial values are tensors in a branch"
    if name.endswith("Tensors")
    else None,
  )
for collection in ("norms", "train_ops"):
  TABLE.add(
    "custom_optimizer_AddsToCollections_" + collection,
    lambda t, name: (
      [t.wrap(AddsToCollections()).minimize(t.loss(), t.global_step)]
      + tf.get_collection(name)
    ),
    collection,
    tensorflow_fails="tensors in a branch cannot be fetched",
  )


@TABLE.program(tensorflow_fails="tensors in a branch cannot be fetched")
def custom_optimizer_Summarizes(t):
  train_op = t.wrap(Summarizes()).minimize(t.loss(), t.global_step)
  summaries = tf.summary.merge_all()
  return lambda sess, feed: sess.run([train_op, summaries], feed)


@TABLE.program(outside="before.*")
def custom_optimizer_DependsOnCollections(t):
  before = tf.Variable(0.0, trainable=False, name="before", use_resource=t.resource)
  tf.add_to_collection("before_steps", before.assign_add(1.0))
  train_op = t.wrap(DependsOnCollections()).minimize(t.loss(), t.global_step)
  return [train_op] + tf.get_collection("before_steps")


@TABLE.program(tensorflow_fails="it does not accept complex gradients")
def complex_variables(t):
  w = t.variable("complex", np.array([1 + 2j, 3j, 1.0], np.complex64))
  return t.wrap(AcceptsComplexNumbers()).minimize(
    tf.reduce_sum(tf.square(tf.abs(w)) * t.x), t.global_step
  )


@TABLE.program(tensorflow_fails="it does not accept integer gradients")
def integer_gradients(t):
  w, count = t.variables[0], t.variable("count", np.zeros(3, np.int32))
  optimizer = t.wrap(AcceptsIntegers())
  return optimizer.apply_gradients(
    [(tf.ones([3], tf.int32), count)] + optimizer.compute_gradients(t.loss(), [w])
  )


@TABLE.program()
def the_name_of_the_train_op_ends_with_a_slash(t):
  return t.wrap().minimize(t.loss(), t.global_step, name="train/")


@TABLE.program(needs={"tf.gradients of ragged losses": programs.VERSION >= (2, 10)})
def the_loss_is_ragged(t):
  w, table = t.variables
  loss = tf.RaggedTensor.from_row_lengths(t.x * tf.square(w), [1, 2]) + tf.reduce_sum(
    tf.square(table[1:4])
  )
  return t.wrap().minimize(loss, t.global_step)


@TABLE.program()
def gradients_computed_while_another_graph_is_default(t):
  optimizer, loss, variables = t.wrap(), t.loss(), t.variables
  with tf.Graph().as_default():
    pairs = optimizer.compute_gradients(loss, variables)
  return optimizer.apply_gradients(pairs, t.global_step)


class NamesScopesAndAverages(Descent):
  """Makes variables in scopes that it opens repeatedly, beside ops of their names, and
  moving averages of tensors.
  """

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars, updates = list(grads_and_vars), []
    for _ in range(2):
      with tf.name_scope("schedule"):
        tf.constant(0.0)
      with tf.name_scope("schedule"), tf.name_scope("inner"):
        tf.Variable(0.0, name="rate", trainable=False)
      tf.constant(0.0, name="rate")
      tf.Variable(0.0, name="rate", trainable=False)
      with tf.variable_scope("average", reuse=tf.AUTO_REUSE) as scope:
        norm = tf.add_n(
          [
            tf.reduce_sum(tf.square(tf.convert_to_tensor(grad)))
            for grad, _ in grads_and_vars
          ]
        )
        updates.append(tf.train.ExponentialMovingAverage(0.5).apply([norm]))
      with tf.variable_scope(scope, auxiliary_name_scope=False):
        tf.Variable(0.0, name="rate", trainable=False)
    with tf.control_dependencies(updates):
      return super().apply_gradients(grads_and_vars, *args, **kwargs)


@TABLE.program(tensorflow_fails="names contain those of its conditional")
def names_that_the_inner_optimizer_uses(t):
  for scope in ("schedule", "average", "rate"):
    with tf.name_scope(scope):
      tf.constant(0.0)
  first, second = [
    t.wrap(NamesScopesAndAverages()).minimize(
      t.loss(sparse=False), name=name, var_list=[variable]
    )
    for name, variable in zip([None, "train"], t.variables)
  ]
  with tf.name_scope("schedule"):
    tf.Variable(0.0, name="later", trainable=False)
  return tf.group(first, second)


def routed_loss(t):
  """Returns a loss of which each run computes the part of one variable; the gradient of
  the other one is dead.
  """
  w, table = t.variables
  to_table, to_w = tf.raw_ops.Switch(data=t.x, pred=t.flag)
  part_of_w = tf.reduce_sum(to_w * tf.square(w))
  part_of_table = tf.reduce_sum(tf.expand_dims(to_table, 1) * tf.square(table[1:4]))
  return tf.raw_ops.Merge(inputs=[part_of_w, part_of_table]).output


DEAD = "its check reads the dead gradient"


@TABLE.program(variants=[programs.V1, programs.V1_REFERENCE], tensorflow_fails=DEAD)
def examples_routed_by_switch_and_merge(t):
  return t.wrap().minimize(routed_loss(t))


@TABLE.program(variants=[programs.V1, programs.V1_REFERENCE], tensorflow_fails=DEAD)
def a_gradient_that_is_always_dead(t):
  loss = t.loss()
  never = t.variable("never", [1.0, 2.0, 3.0])
  _, dead = tf.raw_ops.Switch(data=t.x * never, pred=tf.reduce_any(t.x > 1e30))
  optimizer = t.wrap()
  return optimizer.apply_gradients(
    optimizer.compute_gradients(loss, t.variables) + [(dead, never)]
  )


def conditional_on_a_routed_value(t, positive):
  _, routed = tf.raw_ops.Switch(data=t.x, pred=t.flag)
  return tf.cond(positive, lambda: routed * 2.0, lambda: tf.square(routed))


def merge_of_two_routes(t, positive):
  """Returns a value that is dead if neither `t.flag` nor `positive` is True, though its
  inputs share no predicate.
  """
  if_flag = tf.raw_ops.Switch(data=t.x, pred=t.flag)[1]
  first = tf.raw_ops.Switch(data=if_flag, pred=positive)[0]
  return tf.raw_ops.Merge(
    inputs=[first, tf.raw_ops.Switch(data=t.x * 3.0, pred=positive)[1]]
  ).output


def train_with_a_dead_gradient(t, route):
  w, table = t.variables
  optimizer = t.wrap()
  value = route(t, t.x[1] > 5.0)  # in no step
  pairs = optimizer.compute_gradients(tf.reduce_sum(value * tf.square(w)), [w])
  return optimizer.apply_gradients(
    pairs + optimizer.compute_gradients(t.loss(), [table])
  )


for route in (conditional_on_a_routed_value, merge_of_two_routes):
  TABLE.add(
    "gradients_of_a_" + route.__name__,
    train_with_a_dead_gradient,
    route,
    variants=[programs.V1, programs.V1_REFERENCE],
    tensorflow_fails=DEAD,
  )


class UsesCurvature(Descent):
  """Differentiates its own gradients in `apply_gradients`, as AdaHessian and SAM do."""

  def __init__(self, loss, variables):
    super().__init__()
    self._loss, self._variables = loss, variables

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads = [
      tf.convert_to_tensor(grad) for grad in tf.gradients(self._loss, self._variables)
    ]
    products = tf.gradients(
      tf.add_n([tf.reduce_sum(grad * grad) for grad in grads]), self._variables
    )
    pairs = [
      (grad + 0.01 * tf.convert_to_tensor(product), v)
      for (grad, v), product in zip(grads_and_vars, products)
    ]
    return super().apply_gradients(pairs, *args, **kwargs)


@TABLE.program(
  variants=[programs.V1, programs.V1_REFERENCE],
  tensorflow_fails="TensorFlow takes the conditional of the step for that of the loss",
)
def second_derivatives_of_a_conditional_in_apply_gradients(t):
  loss = tf.cond(
    t.flag, lambda: t.loss(sparse=False), lambda: t.loss(2.0 * t.x, sparse=False)
  )
  return t.wrap(UsesCurvature(loss, t.variables)).minimize(loss, t.global_step)


test_program_trains_with_the_same_numbers = TABLE.make_test()
