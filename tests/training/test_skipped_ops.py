"""Tests of what a skipped step does not run, and of what another step may not read."""

import functools

import numpy as np
import pytest
import tensorflow

import mp_compat
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph", "control_flow")


def counter(name="counter"):
  return tf.Variable(0.0, trainable=False, name=name, use_resource=True)


class Counting(tf.train.GradientDescentOptimizer):
  """Runs what `build` builds in its step, which may depend on gradients."""

  def __init__(self, build):
    super().__init__(1.0)
    self._build = build

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars = list(grads_and_vars)
    applied = super().apply_gradients(grads_and_vars, *args, **kwargs)
    return tf.group(applied, self._build(grads_and_vars[0][0]))


def values_after(build, variable, feeds=None):
  """Returns the variable and the weights after a skipped and after an applied step."""
  training = testing.Training()
  opt = Optimizer(Counting(build), "dynamic")
  train_op = opt.minimize(training.loss, training.global_step)
  values = []
  with testing.initialized_session() as sess:
    for x in (OVERFLOW, FINITE):
      sess.run(train_op, dict({training.x: x}, **(feeds or {})))
      values.append(sess.run([variable, training.w]))
  return values


class TestCallsThatReadGradients:
  """Functions run some of their ops although an input is not computed."""

  def check(self, build_with):
    count = counter()
    skipped, applied = values_after(lambda grad: build_with(count, grad), count)
    assert skipped[0] == 0.0 and applied[0] > 0.0
    np.testing.assert_array_equal(applied[1], -FINITE)

  @pytest.mark.parametrize("taken", [True, False])
  @pytest.mark.parametrize("change", [lambda g: g, lambda g: 2.0 * g])
  def test_branch_changes_no_state(self, taken, change):
    flag = tf.placeholder_with_default(taken, [])

    def build(count, grad):
      changed = change(grad)
      amount = tf.cond(flag, lambda: tf.reduce_max(changed), lambda: 1.0)
      return count.assign_add(amount)

    self.check(build)

  def test_function_changes_no_state(self):
    def build(count, grad):
      @tensorflow.function
      def add(values):
        count.assign_add(1.0)
        return tf.reduce_max(values)

      return add(2.0 * grad)

    self.check(build)

  def test_loop_changes_no_state(self):
    def build(count, grad):
      flag = tf.placeholder_with_default(False, [])

      def body(i, total):
        added = tf.cond(flag, lambda: tf.reduce_max(grad), lambda: 1.0)
        return i + 1, total + added

      total = tf.while_loop(lambda i, total: i < 3, body, [0, 0.0])[1]
      return count.assign_add(total)

    self.check(build)


def make_dataset(count):
  def add(value):
    with tf.control_dependencies([count.assign_add(1.0)]):
      return tf.identity(value)

  return tensorflow.data.Dataset.range(3).map(add)


def reduced(dataset):
  return dataset.reduce(tf.constant(0, tf.int64), lambda total, value: total + value)


def single_element(dataset):
  return tensorflow.data.experimental.get_single_element(dataset.batch(3))


def iterated(dataset):
  iterator = tf.data.make_initializable_iterator(dataset)
  with tf.control_dependencies([iterator.initializer]):
    return iterator.get_next()


def element_at(dataset):
  if not hasattr(tensorflow.data.experimental, "at"):
    pytest.skip("no random access to datasets before TensorFlow 2.7")
  return tensorflow.data.experimental.at(dataset, 0)


def print_values(tensor):
  """Returns an op that reads a tensor, so that graph optimizers keep it."""
  return tf.print(tensor, output_stream="file:///dev/null")


@pytest.mark.parametrize("run", [reduced, single_element, iterated, element_at])
def test_dataset_of_skipped_step_changes_no_state(run):
  count = counter()
  dataset = make_dataset(count)  # built before the step
  skipped, applied = values_after(lambda grad: print_values(run(dataset)), count)
  assert skipped[0] == 0.0 and applied[0] >= 1.0


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("run", [reduced, single_element, element_at])
def test_dataset_in_function_changes_no_state(run, is_captured):
  count = counter()
  dataset = make_dataset(count)

  def build(grad):
    del grad
    read = tensorflow.function(
      lambda: run(dataset if is_captured else make_dataset(count))
    )
    return print_values(read())

  skipped, applied = values_after(build, count)
  assert skipped[0] == 0.0 and applied[0] >= 1.0


def test_printing_to_file_waits(tmp_path):
  path = tmp_path / "printed"

  def build(grad):
    del grad
    return tf.print("a step", output_stream="file://{}".format(path))

  values_after(build, counter())
  assert path.read_text() == "a step\n"


def test_ops_behind_a_trigger_wait():
  count = counter()

  def build(grad):
    with tf.control_dependencies([grad]):
      trigger = tf.raw_ops.ControlTrigger()
    with tf.control_dependencies([trigger]):
      return count.assign_add(1.0)

  skipped, applied = values_after(build, count)
  assert skipped[0] == 0.0 and applied[0] == 1.0


def only_of_the_gradient(grad):
  """Returns 1.0 from the size of a gradient, which Grappler makes a constant."""
  return 0.5 * tf.cast(tf.raw_ops.Size(input=grad), tf.float32)


@pytest.mark.parametrize("level", ["ON", "AGGRESSIVE"])
def test_data_that_graph_optimizers_fold_waits(level):
  count, config = counter(), testing.config()
  rewrites = config.graph_options.rewrite_options
  rewrites.constant_folding = rewrites.dependency_optimization = getattr(
    type(rewrites), level
  )
  rewrites.min_graph_nodes = -1

  def build(grad):
    changed = 2.0 * grad
    with tf.control_dependencies([changed]):
      trigger = tf.raw_ops.ControlTrigger()
    with tf.control_dependencies([trigger]):
      amount = only_of_the_gradient(changed)
    return count.assign_add(amount)

  training = testing.Training()
  train_op = Optimizer(Counting(build), "dynamic").minimize(training.loss)
  with tf.Session(config=config) as sess:
    sess.run(tf.global_variables_initializer())
    for x, expected in ((FINITE, 1.0), (OVERFLOW, 1.0), (FINITE, 2.0)):
      sess.run(train_op, {training.x: x})
      assert sess.run(count) == expected


def test_gradient_of_a_gather_in_the_step_is_skipped():
  """TensorFlow's gradient of a Switch reads its other output, which a skipped step
  computes.
  """
  w = tf.get_variable("w", initializer=tf.ones([2]), use_resource=True)
  x, rows = tf.placeholder(tf.float32, [2]), tf.placeholder(tf.int32, [None])
  total = tf.Variable(tf.zeros([2]), trainable=False, use_resource=True)

  class Hessian(tf.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
      ((grad, variable),) = grads_and_vars = list(grads_and_vars)
      second = tf.convert_to_tensor(tf.gradients(grad.values, [variable])[0])
      with tf.control_dependencies([total.assign_add(second)]):
        return super().apply_gradients(grads_and_vars, *args, **kwargs)

  loss = tf.reduce_sum(tf.gather(w, rows) ** 3 * x)
  train_op = Optimizer(Hessian(0.0), 8.0).minimize(loss, var_list=[w])
  with testing.initialized_session() as sess:
    for value, expected in (([1, 2], [6, 12]), ([np.inf, 1], [6, 12])):
      sess.run(train_op, {x: value, rows: [0, 1]})
      assert sess.run(total).tolist() == expected


def wait_and_add(count, awaited, amount=lambda: 1.0):
  with tf.control_dependencies([awaited]):
    return tf.assign_add(count, amount())


def wait_in_branch(count, grad):
  return tf.cond(
    tf.placeholder_with_default(True, []),
    lambda: tf.identity(wait_and_add(count, grad)),
    lambda: 0.0,
  )


def wait_in_loop(count, grad):
  def body(i):
    with tf.control_dependencies([wait_and_add(count, grad)]):
      return tf.identity(i) + 1

  return tf.while_loop(lambda i: i < 1, body, [0])


def wait_for_trigger(count, grad):
  del grad
  with tf.control_dependencies([tf.assign_add(counter("other"), 1.0)]):
    trigger = tf.raw_ops.ControlTrigger()
  return wait_and_add(count, trigger)


def wait_for_switch(count, grad):
  with tf.control_dependencies([grad]):
    flag = tf.placeholder_with_default(True, [])
    switched = tf.raw_ops.Switch(data=tf.constant(1.0), pred=flag)
  return wait_and_add(count, switched.output_true.op)


def amount_of_branch():
  return tf.cond(tf.placeholder_with_default(True, []), lambda: 1.0, lambda: 2.0)


def amount_of_loop():
  return tf.while_loop(lambda i: i < 1.0, lambda i: i + 1.0, [0.0])


def amount_of_python():
  return tf.py_func(lambda: np.float32(1.0), [], tf.float32)


WAITS = {
  "for a tensor": wait_and_add,
  "for a group": lambda count, grad: wait_and_add(count, tf.group(grad)),
  "for a tuple": lambda count, grad: tf.assign_add(
    count, tf.tuple([tf.constant(1.0), grad])[0]
  ),
  "for rows": lambda count, grad: wait_and_add(
    count, tf.IndexedSlices(grad, tf.constant([0, 1])).op
  ),
  "for a trigger": wait_for_trigger,
  "for a switch": wait_for_switch,
  "constant": lambda count, grad: wait_and_add(count, grad, lambda: tf.constant(1.0)),
  "conditional": lambda count, grad: wait_and_add(count, grad, amount_of_branch),
  "loop": lambda count, grad: wait_and_add(count, grad, amount_of_loop),
  "Python": lambda count, grad: wait_and_add(count, grad, amount_of_python),
  "in a branch": wait_in_branch,
  "in a loop": wait_in_loop,
}


@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
@pytest.mark.parametrize("wait", WAITS)
def test_what_waits_without_reading_is_skipped(wait, use_resource, control_flow):
  if control_flow == 2 and not use_resource and wait.startswith("in a "):
    pytest.skip("functions cannot take reference variables")
  count = tf.Variable(0.0, trainable=False, use_resource=use_resource)
  skipped, applied = values_after(functools.partial(WAITS[wait], count), count)
  assert skipped[0] == 0.0 and applied[0] == 1.0
  np.testing.assert_array_equal(applied[1], -FINITE)


def test_printing_after_a_gradient_waits(tmp_path):
  path = tmp_path / "printed"

  def build(grad):
    with tf.control_dependencies([grad]):
      return tf.print("a step", output_stream="file://{}".format(path))

  values_after(build, counter())
  assert path.read_text() == "a step\n"


class Logging(tf.train.GradientDescentOptimizer):
  """Keeps a norm of its gradients, which its step does not need."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars = list(grads_and_vars)
    self.gradients = [grad for grad, _ in grads_and_vars]
    with tf.control_dependencies(self.gradients):
      self.constant = tf.constant(3.0)
    self.norm = tf.while_loop(
      lambda i, norm: i < 1,
      lambda i, norm: (i + 1, tf.norm(self.gradients[0])),
      [0, 0.0],
    )[1]
    return super().apply_gradients(grads_and_vars, *args, **kwargs)


def test_tensors_outside_of_the_step_are_fetched():
  training = testing.Training()
  inner = Logging(1.0)
  train_op = Optimizer(inner, "dynamic").minimize(training.loss)
  with testing.initialized_session() as sess:
    fetched = [
      sess.run([inner.norm, inner.constant, train_op], {training.x: x})[:2]
      for x in (OVERFLOW, FINITE)
    ]
  np.testing.assert_allclose(fetched, [[np.inf, 3.0], [np.sqrt(5.0), 3.0]], rtol=1e-6)


def test_gradient_of_two_variables_stays_one_tensor():
  first, second = [tf.Variable([0.0, 0.0], name=name) for name in "ab"]
  grad = tf.placeholder(tf.float32, [2])
  inner = Logging(1.0)
  Optimizer(inner, "dynamic").apply_gradients([(grad, first), (grad, second)])
  assert inner.gradients[0] is inner.gradients[1]


class Curved(tf.train.GradientDescentOptimizer):
  """Differentiates the gradients that it gets."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    pairs = []
    for grad, variable in grads_and_vars:
      (curvature,) = tf.gradients(tf.reduce_sum(grad), [variable])
      pairs.append((grad / (1.0 + curvature), variable))
    return super().apply_gradients(pairs, *args, **kwargs)


@pytest.mark.parametrize(
  "wrap",
  [lambda opt: opt, lambda opt: Optimizer(opt, 8.0)],
  ids=["unwrapped", "wrapped"],
)
@pytest.mark.parametrize("place", ["graph", "branch", "loop"])
def test_gradients_are_differentiated_in_the_step(place, wrap, control_flow):
  if control_flow == 2 and place != "graph":
    pytest.skip("a branch and a body that are functions have no gate")
  w = tf.get_variable("w", initializer=[1.0, 2.0], use_resource=True)

  def counted(i=0):
    loss = tf.reduce_sum(tf.square(w.read_value()))
    with tf.control_dependencies([wrap(Curved(0.75)).minimize(loss)]):
      return tf.identity(i) + 1

  if place == "graph":
    train_op = counted()
  elif place == "branch":
    train_op = tf.cond(tf.placeholder_with_default(True, []), counted, lambda: 0)
  else:
    train_op = tf.while_loop(lambda i: i < 1, counted, [0])
  with testing.initialized_session() as sess:
    sess.run(train_op)
    np.testing.assert_allclose(sess.run(w), [0.5, 1.0], rtol=1e-6)


class Sloped(tf.train.GradientDescentOptimizer):
  """Differentiates the loss in its step, so that a loop of the loss records what it
  computes once more.
  """

  def __init__(self, loss, x):
    super().__init__(1.0)
    self._loss, self._x = loss, x

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    (slope,) = tf.gradients(self._loss, [self._x])
    tf.summary.scalar("slope", tf.norm(slope))
    pairs = [(grad + slope, variable) for grad, variable in grads_and_vars]
    return super().apply_gradients(pairs, *args, **kwargs)


def test_loop_that_the_step_differentiates_runs():
  x = tf.placeholder(tf.float32, [2])
  w = tf.get_variable("w", initializer=[1.0, 1.0])
  _, y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * y), [0, w * x])
  loss = tf.reduce_sum(y)
  train_op = Optimizer(Sloped(loss, x), 8.0, skip_nonfinite=True).minimize(loss)
  summary = tf.summary.merge_all()
  with testing.initialized_session() as sess:
    assert sess.run([train_op, loss], {x: [np.inf, 2.0]})[1] == np.inf
    sess.run([train_op, summary], {x: [np.inf, 2.0]})
    np.testing.assert_array_equal(sess.run(w), [1.0, 1.0])
    assert sess.run([train_op, loss], {x: [1.0, 2.0]})[1] == 17.0
    # y = (w x)**4: 4 w**3 x**4, and 4 w**4 x**3
    np.testing.assert_array_equal(sess.run(w), [-7.0, 1.0 - 64.0 - 32.0])


class Summarizing(tf.train.GradientDescentOptimizer):
  """Collects a summary that `build` builds in its step."""

  def __init__(self, build):
    super().__init__(1.0)
    self._build = build

  def apply_gradients(self, *args, **kwargs):
    self._build()
    return super().apply_gradients(*args, **kwargs)


def summarize():
  return tf.summary.scalar("in_step", 1.0)


def in_loop(build):
  """Calls a function of no arguments in a loop that runs once."""

  def body(i):
    with tf.control_dependencies([build()]):
      return tf.identity(i) + 1

  return tf.while_loop(lambda i: i < 1, body, [0])


def in_branch(build):
  return tf.cond(tf.placeholder_with_default(True, []), build, tf.no_op)


@pytest.mark.parametrize(
  "around_step, around_summary",
  [(in_branch, None), (in_loop, None), (None, in_loop)],
  ids=["step in a branch", "step in a loop", "summary in a loop"],
)
def test_summaries_that_no_run_can_fetch_are_not_collected(
  around_step, around_summary, control_flow
):
  if control_flow == 2:
    pytest.skip("the collections of a body that is a function are its own")
  training = testing.Training()
  tf.summary.scalar("outside", tf.reduce_sum(training.x))

  def build_summary():
    if around_summary is not None:
      return around_summary(summarize)
    return summarize()

  def step():
    loss = tf.reduce_sum(training.w.read_value() * training.x)
    return Optimizer(Summarizing(build_summary), "dynamic").minimize(loss)

  train_op = step() if around_step is None else around_step(step)
  summaries = tf.summary.merge_all()
  with testing.initialized_session() as sess:
    _, serialized = sess.run([train_op, summaries], {training.x: FINITE})
    np.testing.assert_array_equal(sess.run(training.w), -FINITE)
  collected = tf.Summary.FromString(serialized).value
  assert [value.tag for value in collected] == ["outside"]


def test_rate_may_depend_on_the_other_decision():
  training = testing.Training()
  first = Optimizer(tf.train.GradientDescentOptimizer(1.0), "dynamic")
  train_first = first.minimize(training.loss)
  rate = tf.where(first.step_applied, 1.0, 0.5)
  other = tf.get_variable("other", [2], initializer=tf.zeros_initializer())
  second = Optimizer(tf.train.GradientDescentOptimizer(rate), "dynamic")
  train_second = second.minimize(tf.reduce_sum(other))
  with testing.initialized_session() as sess:
    for x in (OVERFLOW, FINITE):
      sess.run([train_first, train_second], {training.x: x})
    np.testing.assert_array_equal(sess.run(other), [-1.5, -1.5])


class Scheduled(tf.train.GradientDescentOptimizer):
  """Computes its learning rate from a counter that its step increments."""

  def __init__(self, count):
    super().__init__(1.0)
    self._count = count

  def apply_gradients(self, *args, **kwargs):
    self.rate = self._learning_rate = self._count.assign_add(1.0) * 0.5
    return super().apply_gradients(*args, **kwargs)


def test_feeding_a_tensor_of_the_step_applies_no_overflow():
  training = testing.Training()
  inner = Scheduled(counter())
  train_op = Optimizer(inner, "dynamic").minimize(training.loss)
  with testing.initialized_session() as sess:
    sess.run(train_op, {training.x: OVERFLOW, inner.rate: 0.5})
    np.testing.assert_array_equal(sess.run(training.w), [0.0, 0.0])
    sess.run(train_op, {training.x: FINITE, inner.rate: 0.5})
    np.testing.assert_array_equal(sess.run(training.w), -0.5 * FINITE)


@pytest.mark.parametrize("derive", [lambda grad: grad, lambda grad: 2.0 * grad])
def test_feeding_what_derives_from_a_gradient_changes_no_state(derive):
  count, fed = counter(), []

  def build(grad):
    fed.append(derive(grad))
    return count.assign_add(tf.reduce_max(fed[0]))

  training = testing.Training()
  train_op = Optimizer(Counting(build), "dynamic").minimize(training.loss)
  with testing.initialized_session() as sess:
    for x, expected in ((OVERFLOW, 0.0), (FINITE, 5.0)):
      sess.run(train_op, {training.x: x, fed[0]: [5.0] * len(FINITE)})
      assert sess.run(count) == expected
      assert np.all(sess.run(training.w) == 0.0) == (x is OVERFLOW)


class Counter(tf.train.GradientDescentOptimizer):
  """Increments a counter and keeps what derives from its new value."""

  def __init__(self, count, derive):
    super().__init__(1.0)
    self._count, self._derive = count, derive

  def apply_gradients(self, *args, **kwargs):
    applied = super().apply_gradients(*args, **kwargs)
    counted = self._count.assign_add(1.0)
    self.counted = self._derive(counted)
    return tf.group(applied, counted)


def derived(tensor):
  return tf.exp(-0.5 * tensor) * 2.0


def derived_in_loop(tensor):
  return tf.while_loop(lambda rate: rate > 1.0, lambda rate: 0.5 * rate, [tensor])


def added_in_loop(tensor):
  return testing.loop_twice(lambda rate: rate + tensor, 1.0)


def waiting_in_loop(tensor):
  read = tf.identity(tensor)

  def body(rate):
    with tf.control_dependencies([read]):
      return tf.identity(rate)

  with testing.control_flow(1):  # A function does not wait for what is outside.
    return testing.loop_twice(body, 1.0)


def derived_in_branch(tensor):
  flag = tf.placeholder_with_default(True, [])
  return tf.cond(flag, lambda: 0.5 * tensor, lambda: tf.constant(1.0))


def minimize_two(first_inner, make_rate, build_second):
  training = testing.Training()
  first = Optimizer(first_inner, "dynamic")
  train_first = first.minimize(training.loss)
  second = Optimizer(tf.train.GradientDescentOptimizer(make_rate()), "dynamic")
  return train_first, build_second(second, training)


SECOND_STEPS = {
  "minimize": lambda opt, training: opt.minimize(training.loss),
  "together": lambda opt, training: mp_compat.apply_gradients_together(
    [(opt, opt.compute_gradients(training.loss))]
  ),
}


@pytest.mark.parametrize("second", SECOND_STEPS)
@pytest.mark.parametrize(
  "derive",
  [derived, derived_in_loop, added_in_loop, waiting_in_loop, derived_in_branch],
)
@pytest.mark.parametrize("built_by", ["optimizer", "program"])
def test_rate_that_derives_from_skipped_op_raises(built_by, derive, second):
  inner = Counter(counter(), derive if built_by == "optimizer" else tf.identity)

  def make_rate():
    return inner.counted if built_by == "optimizer" else derive(inner.counted)

  with pytest.raises(ValueError, match="derives from what it built"):
    minimize_two(inner, make_rate, SECOND_STEPS[second])


def rated(rate):
  return tf.train.GradientDescentOptimizer(rate)


def step_without_check(rate, training):
  opt = Optimizer(rated(rate), 8.0, skip_nonfinite=False)
  return opt.minimize(training.loss)


def step_in_function(rate, training):
  def build():
    with tf.control_dependencies([step_without_check(rate, training)]):
      return tf.constant(1.0)

  return tf.function(build)()


def checked_step_in_function(rate, training):
  def build():
    loss = tf.reduce_sum(training.w * training.x)
    with tf.control_dependencies([Optimizer(rated(rate), "dynamic").minimize(loss)]):
      return tf.constant(1.0)

  return tf.function(build)()


def checked_step_in_xla(rate, training):
  def build():
    return Optimizer(rated(rate), "dynamic").minimize(training.loss)

  return tf.xla.experimental.compile(build)


def micro_batch_after(rate, training):
  opt = Optimizer(rated(0.5), "dynamic")
  pairs = opt.compute_gradients(training.loss)
  with tf.control_dependencies([rate]):
    return mp_compat.GradientAccumulator(opt).add(pairs)


def micro_batch_of(rate, training):
  opt = Optimizer(rated(0.5), "dynamic")
  ((grad, variable),) = opt.compute_gradients(training.loss)
  return mp_compat.GradientAccumulator(opt).add([(rate * grad, variable)])


@pytest.mark.parametrize(
  "build",
  [
    step_without_check,
    step_in_function,
    checked_step_in_function,
    checked_step_in_xla,
    micro_batch_after,
    micro_batch_of,
  ],
)
def test_what_has_no_gate_must_not_use_skipped_op(build):
  inner = Counter(counter(), derived)
  training = testing.Training(use_resource=True)
  Optimizer(inner, "dynamic").minimize(training.loss)
  with pytest.raises(ValueError, match="derives from what it built"):
    build(tf.exp(inner.counted), training)


def read_after(train_op, count):
  with tf.control_dependencies([train_op]):
    return count.read_value()


class Choosing(tf.train.GradientDescentOptimizer):
  """Calls a function of a constant, or in another run of a gradient."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    pairs = list(grads_and_vars)
    flag = tf.placeholder_with_default(False, [])
    with testing.control_flow(1):
      chosen = tf.cond(flag, lambda: tf.reduce_sum(pairs[0][0]), lambda: 3.0)
    self.doubled = tf.function(lambda value: 2.0 * value)(chosen)
    applied = super().apply_gradients(pairs, *args, **kwargs)
    return tf.group(applied, self.doubled)


def test_function_of_a_branch_that_reads_no_gradient_runs():
  training, inner = testing.Training(), Choosing(1.0)
  train_op = Optimizer(inner, "dynamic").minimize(training.loss)
  with testing.initialized_session() as sess:
    for x in (OVERFLOW, FINITE):
      _, doubled = sess.run([train_op, inner.doubled], {training.x: x})
      assert doubled == 6.0


class Checking(tf.train.GradientDescentOptimizer):
  """Applies what a loop computes, and passes the number of iterations to a function,
  which checks another argument.
  """

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    ((grad, variable),) = grads_and_vars
    count, total = tf.while_loop(
      lambda i, _: i < 2, lambda i, total: (i + 1, total + grad), [0, 0.0 * grad]
    )
    applied = super().apply_gradients([(total, variable)], *args, **kwargs)
    self.is_valid = tf.placeholder(tf.bool, [])

    def check(number, is_valid):
      with tf.control_dependencies([tf.debugging.Assert(is_valid, ["invalid"])]):
        return tf.identity(number)

    checked = tf.function(check)(count, self.is_valid)
    return tf.group(checked, applied)


def test_function_of_what_a_loop_counts_is_skipped():
  training, inner = testing.Training(), Checking(1.0)
  train_op = Optimizer(inner, "dynamic").minimize(training.loss)
  with testing.initialized_session() as sess:
    sess.run(train_op, {training.x: OVERFLOW, inner.is_valid: False})
    assert np.all(sess.run(training.w) == 0.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="invalid"):
      sess.run(train_op, {training.x: FINITE, inner.is_valid: False})


def trigger_after(inner):
  """Returns an op that runs in any case, though it waits for an update of the step."""
  with tf.control_dependencies([inner.counted]):
    return tf.raw_ops.ControlTrigger()


@pytest.mark.parametrize("second", SECOND_STEPS)
@pytest.mark.parametrize("waits_for", ["train op", "trigger"])
def test_rate_may_derive_from_a_step_that_ran(waits_for, second):
  count = counter()
  inner = Counter(count, tf.identity)
  training = testing.Training()
  train_first = Optimizer(inner, "dynamic").minimize(training.loss)
  # Both run in any case.
  first = train_first if waits_for == "train op" else trigger_after(inner)
  rate = derived(read_after(first, count))
  opt = Optimizer(tf.train.GradientDescentOptimizer(rate), "dynamic")
  train_op = SECOND_STEPS[second](opt, training)
  with testing.initialized_session() as sess:
    sess.run([train_first, train_op], {training.x: FINITE})
    expected = (1.0 + 2.0 * np.exp(-0.5)) * -FINITE
    np.testing.assert_allclose(sess.run(training.w), expected, rtol=1e-6)


class Caching(tf.train.GradientDescentOptimizer):
  """Returns the op of its first step from the second, too."""

  applied = None

  def apply_gradients(self, *args, **kwargs):
    if self.applied is None:
      self.applied = super().apply_gradients(*args, **kwargs)
    return self.applied


def test_op_of_an_earlier_step_raises():
  training = testing.Training()
  opt = Optimizer(Caching(1.0), "dynamic")
  opt.minimize(training.loss)
  with pytest.raises(ValueError, match="which an earlier apply_gradients.. built"):
    opt.minimize(training.loss)
