"""Programs whose inner optimizer builds functions, tables, variables and shared tensors
in `apply_gradients`.
"""

import functools

import tensorflow

from tests.programs import table as programs
from tests.programs.test_functions import NEEDS_COMPILED
from tests.testing import tf

TABLE = programs.Table()
FAILS_IN_BRANCH = "what is built in its branch cannot be used outside of it"
COMPILE = {
  "jit_compile" if programs.VERSION >= (2, 5) else "experimental_compile": True
}


def compiled(function):
  return tensorflow.function(function, **COMPILE)


class Descent(tf.train.GradientDescentOptimizer):
  """Is gradient descent that passes gradients through `change(pairs)` first; `after()`
  is run with each step.
  """

  def __init__(self, change=list, rate=0.25, after=None):
    super().__init__(rate)
    self._change, self._after = change, after

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    pairs = self._change(
      [(tf.convert_to_tensor(grad), variable) for grad, variable in grads_and_vars]
    )
    applied = super().apply_gradients(pairs, *args, **kwargs)
    return tf.group(applied, self._after()) if self._after else applied


def minimize(t, *args, **kwargs):
  return t.wrap(Descent(*args, **kwargs)).minimize(t.loss(), t.global_step)


def minimize_both(t, make_inner):
  """Trains each variable with an optimizer of its own, `make_inner()`."""
  return [
    t.wrap(make_inner()).minimize(t.loss(), var_list=[variable])
    for variable in t.variables
  ]


@TABLE.program(variants=programs.RESOURCE, needs=NEEDS_COMPILED, exact=True)
def gradient_of_a_compiled_function(t):
  """Adds the gradient of a penalty, which a compiled function computes."""

  def with_penalty(pairs):
    return [
      (grad + tf.gradients(compiled(tf.square)(variable), variable)[0], variable)
      for grad, variable in pairs
    ]

  return minimize(t, with_penalty)


@TABLE.program(
  variants=programs.RESOURCE,
  needs=NEEDS_COMPILED,
  exact=True,
  tensorflow_fails=FAILS_IN_BRANCH,
)
def two_optimizers_share_a_compiled_learning_rate(t):
  step = tf.cast(t.global_step, tf.float32)
  rate = functools.lru_cache(maxsize=None)(
    lambda: compiled(lambda number: 0.25 / (1.0 + number))(step)
  )
  return minimize_both(t, lambda: Descent(rate=rate))


@TABLE.program(
  variants=programs.RESOURCE, needs=NEEDS_COMPILED, tensorflow_fails=FAILS_IN_BRANCH
)
def two_optimizers_share_a_function_that_reads(t):
  read = compiled(
    lambda: 0.25 / (1.0 + tf.cast(t.global_step.read_value(), tf.float32))
  )
  rate = functools.lru_cache(maxsize=None)(lambda: read())
  return minimize_both(t, lambda: Descent(rate=rate))


@TABLE.program(tensorflow_fails=FAILS_IN_BRANCH)
def two_optimizers_wait_for_one_op(t):
  shared = functools.lru_cache(maxsize=None)(lambda: tf.identity(t.global_step))

  def after_shared(pairs):
    with tf.control_dependencies([shared()]):
      return [(tf.identity(grad), variable) for grad, variable in pairs]

  return minimize_both(t, lambda: Descent(after_shared))


@TABLE.program(tensorflow_fails=FAILS_IN_BRANCH)
def lookup_table(t):
  """Makes a lookup table. Its initializer runs without inputs for the model."""

  def look_up(pairs):
    keys, values = tf.constant([0, 1], tf.int64), tf.constant([1.0, 0.5])
    initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
    rate = tf.lookup.StaticHashTable(initializer, 0.25).lookup(
      tf.minimum(tf.cast(t.global_step, tf.int64), 2)
    )
    return [(grad * rate, variable) for grad, variable in pairs]

  t.initialize = lambda sess: sess.run(
    [tf.global_variables_initializer(), tf.tables_initializer()]
  )
  return minimize(t, look_up)


@TABLE.program(tensorflow_fails=FAILS_IN_BRANCH)
def fetched_learning_rate(t):
  rates = []

  def decay(pairs):
    rates.append(0.5 / (1.0 + tf.cast(t.global_step, tf.float32)))
    return [(grad * rates[0], variable) for grad, variable in pairs]

  return [minimize(t, decay)] + rates


@TABLE.program()
def names_of_what_is_built_later(t):
  train_op = minimize(t)
  with tf.name_scope("GradientDescent"), tf.name_scope("group_deps"):
    t.variable("later", 0.0)
    tf.Variable(0.0, name="variable", use_resource=t.resource)
    tf.Variable(
      0.0, name=tf.constant(0.0, name="cond").op.name, use_resource=t.resource
    )
  return train_op


class MakesVariables(Descent):
  """Makes a variable in the name scope of its step, and the moving average of a tensor
  there.
  """

  def _prepare(self):
    super()._prepare()
    with tf.init_scope():
      self._rate = tf.Variable(1.0, name="rate", trainable=False)

  def _finish(self, update_ops, name_scope):
    average = tf.train.ExponentialMovingAverage(0.5)
    averaged = average.apply([tf.add(tf.cast(self._rate, tf.float32), 1.0, name="sum")])
    return super()._finish(update_ops + [averaged], name_scope)


for _name in (None, "train", "train/"):
  TABLE.add(
    "variables_in_the_scope_of_the_step_" + str(_name).replace("/", "_with_slash"),
    lambda t, name: t.wrap(MakesVariables()).minimize(
      t.loss(), t.global_step, name=name
    ),
    _name,
    tensorflow_fails="names contain -wrapped",
    slow=_name == "train/",
  )


@TABLE.program(tensorflow_fails="names contain -wrapped")
def variables_in_the_scope_of_the_step_in_a_variable_scope(t):
  with tf.variable_scope("outer", use_resource=t.resource):
    return t.wrap(MakesVariables()).minimize(t.loss(), t.global_step)


@TABLE.program(variants=programs.NO_V2_REFERENCE)
def second_derivatives(t):
  def precondition(pairs):
    w = t.variables[0]
    loss = tf.cond(t.flag, lambda: tf.reduce_sum(w**3), lambda: tf.reduce_sum(w**2))
    (first,) = tf.gradients(loss, w)
    (second,) = tf.gradients(first, w)
    return [
      (grad / (2.0 + tf.abs(second)) if variable is w else grad, variable)
      for grad, variable in pairs
    ]

  return minimize(t, precondition)


@TABLE.program(fixed=False, tensorflow_fails=FAILS_IN_BRANCH)
def update_ops(t):
  """Adds an op to UPDATE_OPS, which the program runs with the train op."""
  total = tf.Variable(0.0, trainable=False, name="total", use_resource=t.resource)

  def add(pairs):
    tf.add_to_collection(
      tf.GraphKeys.UPDATE_OPS, total.assign_add(tf.reduce_sum(pairs[0][0]))
    )
    return pairs

  return tf.group(minimize(t, add), *tf.get_collection(tf.GraphKeys.UPDATE_OPS))


@TABLE.program(
  # Later versions make queues outside of branches.
  tensorflow_fails=FAILS_IN_BRANCH if programs.VERSION < (2, 2) else None
)
def queue(t):
  """Passes gradients through a queue, whose size the program reads between steps."""
  made = []

  def through_queue(pairs):
    made.append(tf.FIFOQueue(1, tf.float32, [3]))
    with tf.control_dependencies([made[0].enqueue(pairs[0][0])]):
      return [(made[0].dequeue(), pairs[0][1])] + pairs[1:]

  train_op = minimize(t, through_queue)
  size = made[0].size()

  def step(session, feed):
    assert session.run(size) == 0
    session.run(train_op, feed)

  return step


@TABLE.program()
def decomposition_that_raises_for_nan(t):
  def precondition(pairs):
    (grad, w), *others = pairs
    outer = tf.matmul(tf.expand_dims(grad, 1), tf.expand_dims(grad, 0))
    return [(tf.linalg.matvec(tf.linalg.cholesky(outer + tf.eye(3)), grad), w)] + others

  return minimize(t, precondition)


@TABLE.program(variants=[programs.V1, programs.V1_REFERENCE, programs.V2])
def gradient_of_an_earlier_loop(t):
  """Adds the gradient of a penalty, which a loop computed before; the program fetches
  the penalty, too.
  """
  w = t.variables[0]
  _, penalty = tf.while_loop(
    lambda i, _: i < 3, lambda i, total: (i + 1, total * w + w), [0, tf.zeros([3])]
  )

  def with_penalty(pairs):
    return [
      (grad + tf.gradients(penalty, w)[0] if v is w else grad, v) for grad, v in pairs
    ]

  return [minimize(t, with_penalty, rate=0.01), penalty]


@TABLE.program(variants=[programs.V1, programs.V1_REFERENCE], outside="count.*")
def op_outside_of_the_loop_around_the_step(t):
  count = tf.Variable(0.0, trainable=False, name="count", use_resource=t.resource)

  def with_count(pairs):
    with tf.control_dependencies(None):
      one = tf.minimum(count.assign_add(1.0), 1.0)
    return [(grad / one, variable) for grad, variable in pairs]

  def body(i):
    with tf.control_dependencies([minimize(t, with_count)]):
      return i + 1

  assert t.variables
  return tf.while_loop(lambda i: i < 1, body, [0])


@TABLE.program(variants=programs.RESOURCE, tensorflow_fails=FAILS_IN_BRANCH)
def initial_values_that_functions_compute(t):
  def with_kept(pairs):
    doubled = [2.0 * variable for _, variable in pairs]
    kept = [
      tf.Variable(lambda value=value: value + 1.0, trainable=False, use_resource=True)
      for value in doubled
    ]
    return [
      (grad + value - one, variable)
      for (grad, variable), value, one in zip(pairs, kept, doubled)
    ]

  t.initialize = lambda sess: [
    sess.run(tf.variables_initializer(variables))
    for variables in (tf.trainable_variables(), tf.global_variables())
  ]
  return minimize(t, with_kept)


test_program_trains_with_same_numbers = TABLE.make_test()
