"""Programs that differ in how gradients are computed and in the arguments of
`apply_gradients`.
"""

import numpy as np
import tensorflow

from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()

# --- values that replace the gradient of `w` [3]
# ----------------------------------------------------------------------


def train_with_gradient(t, make):
  w, table = t.variables
  optimizer = t.wrap()
  ((grad, _),) = optimizer.compute_gradients(t.loss(), [table])
  return optimizer.apply_gradients([(make(t), w), (grad, table)], t.global_step)


def output_of_assign_add(t):
  return tf.Variable(
    [0.0, 0.0, 0.0], trainable=False, use_resource=t.resource
  ).assign_add(t.input(tf.float32, [3], lambda x, flag: [1.0, 0.5, 2.0]))


def dequeue_input(t):
  queue = tf.FIFOQueue(10, tf.float32, [[3]])
  with tf.control_dependencies([queue.enqueue(t.x * 2.0)]):
    return queue.dequeue()


VALUES = {
  "a_resource_variable": lambda t: tf.Variable(
    [0.5, 0.25, 2.0], use_resource=True, trainable=False
  ),
  "a_reference_variable": lambda t: tf.Variable(
    [0.5, 0.25, 2.0], use_resource=False, trainable=False
  ),
  "an_array": lambda t: np.array([0.5, 0.25, 2.0], np.float32),
  "a_list_of_float64": lambda t: [np.float64(0.5), 0.25, 2.0],
  "a_tuple": lambda t: (0.5, 0.25, 2.0),
  "a_placeholder": lambda t: t.input(tf.float32, [3], lambda x, flag: x),
  "a_placeholder_of_unknown_shape": lambda t: t.input(
    tf.float32, None, lambda x, flag: x
  ),
  "a_placeholder_of_unknown_size": lambda t: t.input(
    tf.float32, [None], lambda x, flag: x
  ),
  "a_placeholder_with_default": lambda t: tf.placeholder_with_default(
    np.ones(3, np.float32), [3]
  ),
  "a_list_of_tensors": lambda t: tf.unstack(t.x),
  "a_list_of_numbers_and_tensors": lambda t: [1.0, t.x[0], np.float32(0.5)],
  "none": lambda t: None,
  "a_tensor_of_a_queue": dequeue_input,
  "a_py_func": lambda t: tf.py_func(lambda x: x * 2, [t.x], tf.float32),
}
SLOW = (
  "a_tuple",
  "a_placeholder_of_unknown_size",
  "a_placeholder_with_default",
  "a_list_of_tensors",
  "a_py_func",
)
for kind, make in VALUES.items():
  TABLE.add("gradient_is_{}".format(kind), train_with_gradient, make, slow=kind in SLOW)
# The program changes the variable in skipped steps, too.
TABLE.add(
  "gradient_is_the_output_of_assign_add",
  train_with_gradient,
  output_of_assign_add,
  overflow=(),
)


@TABLE.program()
def gradients_are_numbers_and_nested_lists(t):
  values = [2.5, np.float32(2.5), np.array(2.5, "f"), [[1.0, 2.0], [3.0, 4.0]]]
  own = [
    (value, t.variable("own{}".format(i), np.ones_like(value, "f")))
    for i, value in enumerate(values)
  ]
  optimizer = t.wrap()
  return optimizer.apply_gradients(
    own + optimizer.compute_gradients(t.loss()), t.global_step
  )


@TABLE.program()
def one_gradient_for_two_variables(t):
  w, table = t.variables
  second = t.variable("second", np.zeros(3, np.float32))
  optimizer = t.wrap()
  ((grad, _),) = optimizer.compute_gradients(t.loss(), [w])
  return optimizer.apply_gradients([(grad, w), (grad, second)], t.global_step)


@TABLE.program()
def a_generator_of_some_pairs_in_another_order(t):
  second = t.variable("second", np.zeros(3, np.float32))
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss() + tf.reduce_sum(tf.sin(second) * t.x))
  return optimizer.apply_gradients(
    ([grad, v] for grad, v in (pairs[2], pairs[0])), t.global_step
  )


@TABLE.program()
def a_variable_without_elements(t):
  empty = t.variable("empty", np.zeros([0, 3], np.float32))
  return t.wrap().minimize(t.loss() + tf.reduce_sum(empty * t.x), t.global_step)


@TABLE.program(variants=(programs.V1_REFERENCE, programs.V2_REFERENCE))
def a_variable_of_unknown_shape(t):
  w = tf.Variable(np.ones(3, np.float32), validate_shape=False, use_resource=False)
  assert w.shape.ndims is None
  return t.wrap(tf.train.GradientDescentOptimizer(0.1)).minimize(
    tf.reduce_sum(tf.square(w) * t.x), t.global_step
  )


# --- sparse gradients
# -------------------------------------------------------------------------------------------------


@TABLE.program()
def a_lookup_of_no_rows(t):
  count = t.input(tf.int32, [], lambda x, flag: 2 if flag else 0)
  w, table = t.variables
  rows = tf.gather(table, tf.range(count))
  return t.wrap().minimize(
    tf.reduce_sum(w * w * t.x) + tf.reduce_sum(tf.square(rows)), t.global_step
  )


@TABLE.program()
def indexed_slices_made_by_the_program(t):
  _, table = t.variables
  slices = tf.IndexedSlices(
    tf.stack([t.x[:2], t.x[1:]]), tf.constant([3, 3]), tf.constant([6, 2])
  )
  return t.wrap().apply_gradients([(slices, table)], t.global_step)


@TABLE.program(
  tensorflow_fails=programs.fails_up_to(
    (2, 10), "it converts IndexedSlices to dense tensors"
  )
)
def indexed_slices_without_a_dense_shape(t):
  _, table = t.variables
  optimizer = t.wrap(tf.train.GradientDescentOptimizer(0.1))
  slices = tf.IndexedSlices(tf.stack([t.x[:2], t.x[1:]]), tf.constant([3, 1]))
  return optimizer.apply_gradients([(slices, table)], t.global_step)


# --- dtypes
# -----------------------------------------------------------------------------------------------------------


def train_variables(t, *dtypes):
  terms = []
  for number, dtype in enumerate(dtypes):
    with tf.variable_scope("", use_resource=t.resource):
      w = tf.get_variable(
        "w{}".format(number), [3], dtype, initializer=tf.ones_initializer()
      )
    terms.append(tf.reduce_sum(tf.cast(w * w * tf.cast(t.x, dtype), tf.float32)))
  return t.wrap().minimize(tf.add_n(terms), t.global_step)


MULTIPLIES = "it multiplies by a float32 scalar"
for dtypes in [
  "float16",
  "bfloat16",
  "float64",
  "float16_and_float32",
  "bfloat16_and_float32",
  "float64_and_float32",
  "float16_and_bfloat16_and_float32_and_float64",
]:
  own = dtypes.split("_and_")
  TABLE.add(
    "variables_of_" + dtypes,
    train_variables,
    *own,
    tensorflow_fails=MULTIPLIES,
    slow=len(own) < 4,
  )


@TABLE.program(tensorflow_fails=MULTIPLIES)
def a_float16_loss(t):
  w = t.variable("half", np.ones(3, np.float16))
  return t.wrap().minimize(
    tf.reduce_sum(w * tf.cast(t.x * 0.125, tf.float16)), t.global_step
  )


# --- how gradients are computed
# ---------------------------------------------------------------------------------------


@TABLE.program(hidden=True)
def a_custom_gradient_that_clips(t):

  @tf.custom_gradient
  def clipped(x):
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 1e6)

  return t.wrap().minimize(tf.reduce_sum(clipped(t.variables[0]) * t.x), t.global_step)


@TABLE.program(
  variants=programs.RESOURCE,
  needs={"no tf.recompute_grad": hasattr(tensorflow, "recompute_grad")},
)
def recomputed_gradients(t):
  w, _ = t.variables
  layer = tensorflow.recompute_grad(lambda x: tf.tanh(x * w))
  return t.wrap().minimize(tf.reduce_sum(layer(t.x)), t.global_step, [w])


@TABLE.program()
def a_gradient_penalty(t):
  w, _ = t.variables
  (slope,) = tf.gradients(tf.reduce_sum(tf.tanh(w * t.x)), [t.x])
  return t.wrap().minimize(t.loss() + tf.square(tf.norm(slope) - 1.0), t.global_step)


@TABLE.program()
def gradients_of_returned_gradients(t):
  w, _ = t.variables
  optimizer = t.wrap()
  ((grad, _),) = optimizer.compute_gradients(tf.reduce_sum(w * w * w * t.x), [w])
  return optimizer.minimize(tf.reduce_sum(grad * grad) * 0.001, t.global_step, [w])


test_program_trains_with_the_same_numbers = TABLE.make_test()
