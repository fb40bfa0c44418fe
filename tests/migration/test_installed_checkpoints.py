"""Tests that TensorFlow's Saver, after mp_compat.install(), restores all checkpoints,
and that programs with TensorFlow's class continue from converted ones.
"""

import contextlib
import re

import numpy as np
import pytest

import mp_compat
from mp_compat import checkpoints
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import Optimizer
from tests.testing import tf

# names in TensorFlow's class depend on it
pytestmark = pytest.mark.usefixtures("control_flow")
FEEDS = list(testing.feeds(9, overflow_at={1, 4, 6}))


def make_adam():
  return tf.train.AdamOptimizer(0.1)


def add_conditional():
  """Adds a conditional to the graph, as a program may have."""
  return tf.cond(
    tf.placeholder_with_default(True, []),
    lambda: tf.constant(1.0),
    lambda: tf.constant(2.0),
  )


class WithVariables(tf.train.GradientDescentOptimizer):
  """Creates variables when it applies gradients, with names in the current name scope
  and without.
  """

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    with tf.name_scope("schedule"):
      rate = tf.Variable(lambda: 1.0, name="rate", trainable=False, use_resource=True)
    applied = tf.Variable(
      lambda: 0.0, name="applied", trainable=False, use_resource=True
    )
    total = tf.get_variable(
      "total", initializer=lambda: 0.0, trainable=False, use_resource=True
    )
    norm = tf.norm(grads_and_vars[0][0], name="norm")
    average = tf.train.ExponentialMovingAverage(0.5).apply([norm])
    updates = [
      rate.assign_add(0.5),
      applied.assign_add(1.0),
      total.assign_add(2.0),
      average,
    ]
    return tf.group(
      super().apply_gradients(grads_and_vars, global_step, name), *updates
    )


class OfKeras(tf.train.Optimizer):
  """Lets a Keras optimizer apply the gradients."""

  def __init__(self):
    super().__init__(use_locking=False, name="OfKeras")
    self._adam = keras_cases.V2.optimizers.Adam(0.1)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    with tf.control_dependencies([self._adam.apply_gradients(grads_and_vars)]):
      return global_step.assign_add(1, name=name)


def make_loss_scale():
  return tf.train.experimental.DynamicLossScale(increment_period=2)


def scaled(opt=None, loss_scale=None):
  """Wraps an optimizer, Adam by default, with the class of TensorFlow's name, which
  install() replaces.
  """
  wrapper = tf.train.experimental.MixedPrecisionLossScaleOptimizer
  return wrapper(opt or make_adam(), loss_scale or make_loss_scale())


class Program:
  """A program that uses TensorFlow's names. Each method adds one kind of train ops."""

  def __init__(self, kind):
    self.x = tf.placeholder(tf.float32, [3])
    self.w, self.b = [
      tf.get_variable(name, initializer=np.array(value, np.float32), use_resource=True)
      for name, value in [("w", [1.0, -2.0, 3.0]), ("b", [0.5, 0.25, 0.125])]
    ]
    self.losses = [
      tf.reduce_sum(self.x * tf.square(self.w)),
      tf.reduce_sum(tf.sin(self.b) * self.x),
    ]
    with tf.variable_scope("", use_resource=True):
      self.global_step = tf.train.get_or_create_global_step()
    self.train_op = tf.group(*getattr(self, kind)())

  def train_w(self, opt):
    return opt.minimize(self.losses[0], self.global_step, [self.w])

  def train_b(self, opt):
    return opt.minimize(self.losses[1], var_list=[self.b])

  def one(self):
    yield self.train_w(scaled())

  def conditionals_before(self):
    add_conditional()
    tf.cond(
      tf.placeholder_with_default(True, []),
      add_conditional,
      add_conditional,
      name="named",
    )
    add_conditional()
    yield self.train_w(scaled())
    add_conditional()

  def conditionals_between(self):
    opt = scaled()
    grads_and_vars = opt.compute_gradients(self.losses[0], [self.w])
    grads_and_vars = [
      (grad * add_conditional(), variable) for grad, variable in grads_and_vars
    ]
    yield opt.apply_gradients(grads_and_vars, self.global_step)

  def name_scope(self):
    add_conditional()
    with tf.name_scope("head"):
      add_conditional()
      yield self.train_w(scaled())

  def two_optimizers(self):
    yield self.train_w(scaled())
    add_conditional()
    yield self.train_b(scaled())

  def fixed_then_dynamic(self):
    yield self.train_w(scaled(loss_scale=8.0))
    add_conditional()
    yield self.train_b(scaled())

  def momentum_then_adam(self):
    yield self.train_w(scaled(tf.train.MomentumOptimizer(0.1, 0.9)))
    yield self.train_b(scaled())

  def variables(self):
    add_conditional()
    with tf.name_scope("head"):
      yield self.train_w(scaled(WithVariables(0.1)))

  def variables_in_root(self):
    yield self.train_w(scaled(WithVariables(0.1)))

  def keras_in_scope(self):
    with tf.variable_scope("training"):
      yield self.train_w(scaled(OfKeras()))

  def one_for_both(self):
    opt = scaled()
    with tf.control_dependencies([self.train_w(opt)]):
      shared = self.train_b(opt)
    with tf.control_dependencies([shared]):
      yield scaled().minimize(self.losses[0], var_list=[self.w])

  def rewritten(self):
    opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(
      make_adam(), make_loss_scale()
    )
    tf.train.experimental.disable_mixed_precision_graph_rewrite()
    yield self.train_w(opt)

  def mirrored(self):
    strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
    add_conditional()
    with strategy.scope():
      v = tf.get_variable("v", initializer=np.float32(1.0))
      opt = scaled()

    def step():
      add_conditional()
      return opt.minimize(tf.square(v) * self.x[0], var_list=[v])

    run = getattr(strategy, "run", None) or strategy.experimental_run_v2
    yield tf.group(strategy.experimental_local_results(run(step)))

  def run(self, sess, feeds):
    for x in feeds:
      sess.run(self.train_op, {self.x: x})


KINDS = [
  name
  for name in vars(Program)
  if not name.startswith("_") and name not in ("train_w", "train_b", "run")
]


def train(kind, path, feeds, restore=None, make_saver=tf.train.Saver):
  """Builds a program in a new graph, restores or initializes it, trains and saves."""
  with tf.Graph().as_default():
    program = Program(kind)
    saver = make_saver()
    with testing.session() as sess:
      if restore:
        saver.restore(sess, restore)
      else:
        sess.run(tf.global_variables_initializer())
      program.run(sess, feeds)
      saver.save(sess, path)


def read_names(path):
  """Returns the names of the variables in a checkpoint."""
  return set(tf.train.load_checkpoint(path).get_variable_to_shape_map())


def read_values(path, like):
  """Returns {name: bytes} from a checkpoint, for the names in the checkpoint `like`."""
  reader = tf.train.load_checkpoint(path)
  return {name: reader.get_tensor(name).tobytes() for name in read_names(like)}


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param(kind, marks=[pytest.mark.matrix] * (kind != "mirrored"))
    for kind in KINDS
  ],
)
def test_install_exchanges_checkpoints(kind, control_flow, tmp_path):
  feeds = FEEDS
  if kind == "fixed_then_dynamic":  # TensorFlow's class would apply the overflow
    feeds = list(testing.feeds(9))

  def train_three_times(name, install):
    """Trains with TensorFlow's class, again after a call of `install`, and again with
    TensorFlow's class, from a converted checkpoint.
    """
    first, second, third = [str(tmp_path / (name + number)) for number in "123"]
    train(kind, first, feeds[:3])
    with install():
      train(kind, second, feeds[3:6], restore=first)
    checkpoints.convert(second, second + "-back", like=first)
    train(kind, third, feeds[6:], restore=second + "-back")
    return second + "-back", third

  lost = {"keras_in_scope": "training/Adam/", "variables": "head/schedule/rate"}
  if kind in lost and control_flow == 2:
    # TensorFlow's class drops the scopes of variables that are not only the optimizer's.
    with pytest.raises(tf.errors.NotFoundError, match=lost[kind] + ".*--name-map FILE"):
      train_three_times("ours", mp_compat.install)
    return
  ours, alone = (
    train_three_times("ours", mp_compat.install),
    train_three_times("alone", contextlib.nullcontext),
  )
  assert [read_values(*paths) for paths in zip(ours, alone)] == [
    read_values(path, path) for path in alone
  ]


def get_variables_by_name():
  return {variable.op.name: variable for variable in tf.global_variables()}


def test_saver_writes_one_name(tmp_path):
  path, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
  train("conditionals_before", theirs, FEEDS[:2])
  with mp_compat.install():
    train("conditionals_before", path, FEEDS[:2])
  names = {re.sub(r"^cond(_\d+)?/", "", name) for name in read_names(theirs)}
  assert read_names(path) == names and "beta1_power" in names


def train_with_average(path, restore=None):
  """Trains a program that averages an unnamed tensor of the step; returns the name of
  the average and its value.
  """
  with tf.Graph().as_default(), testing.session() as sess:
    program = Program("one")
    average = tf.train.ExponentialMovingAverage(0.5)
    product = tf.multiply(program.w, 2.0)
    train_op = tf.group(program.train_op, average.apply([product]))
    variable = average.average(product)
    if restore:
      tf.train.Saver().restore(sess, restore)
    else:
      sess.run(tf.global_variables_initializer())
      sess.run(train_op, {program.x: FEEDS[0]})
      tf.train.Saver().save(sess, path)
    return variable.op.name, sess.run(variable)


def test_average_of_unnamed_tensor_restores_with_map(tmp_path):
  path, out = str(tmp_path / "model"), str(tmp_path / "out")
  theirs, saved = train_with_average(path)
  with mp_compat.install():
    ours, _ = train_with_average(str(tmp_path / "ours"))
    assert ours != theirs
    with pytest.raises(tf.errors.NotFoundError, match=ours + r"\. It.*--name-map FILE"):
      train_with_average(None, restore=path)
    checkpoints.convert(path, out, "mp_compat", name_map={ours: theirs})
    _, restored = train_with_average(None, restore=out)
  np.testing.assert_array_equal(restored, saved)


def test_saver_keeps_custom_names(tmp_path):
  path = str(tmp_path / "model")

  def make_saver():
    mine = {
      "mine/" + name: variable for name, variable in get_variables_by_name().items()
    }
    return tf.train.Saver({"beta1_power": mine.pop("mine/w"), **mine})

  with mp_compat.install():
    train("one", path, FEEDS[:2], make_saver=make_saver)
  assert all(name.startswith("mine/") for name in read_names(path) - {"beta1_power"})


@pytest.mark.skipif(
  not hasattr(tf, "estimator"), reason="TensorFlow 2.16 and later have no Estimator"
)
def test_estimators_exchange_checkpoints(control_flow, tmp_path):
  if control_flow == 2 and tf.__version__ < "2":
    pytest.skip(
      "TensorFlow's class fails with the reference variable that Estimator uses as the "
      "global step"
    )

  def model_fn(features, mode):
    w = tf.get_variable("w", initializer=np.ones(3, np.float32), use_resource=True)
    loss = tf.reduce_sum(tf.square(w) * features["x"]) * add_conditional()
    return tf.estimator.EstimatorSpec(
      mode, loss=loss, train_op=scaled().minimize(loss, tf.train.get_global_step())
    )

  def train_steps(directory, feeds, warm_start=None):
    estimator = tf.estimator.Estimator(
      model_fn, str(tmp_path / directory), warm_start_from=warm_start
    )
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices({"x": np.array(feeds)}))
    return estimator.latest_checkpoint()

  feeds = list(testing.feeds(9, overflow_at={4}))
  for directory in ("alone", "mixed"):
    train_steps(directory, feeds[:3])
  alone = train_steps("alone", feeds[3:6])
  with mp_compat.install():
    ours = train_steps("mixed", feeds[3:6])
  back = str(tmp_path / "mixed" / "back.ckpt-6")
  checkpoints.convert(ours, back, like=alone)
  assert read_values(back, alone) == read_values(alone, alone)
  alone, mixed = [train_steps(directory, feeds[6:]) for directory in ("alone", "mixed")]
  assert read_values(mixed, alone) == read_values(alone, alone)
  settings = tf.estimator.WarmStartSettings(alone, [".*power", "w.*"])
  warm = train_steps("warm", feeds[:1], settings)
  with mp_compat.install():
    ours = train_steps("warm_ours", feeds[:1], settings)
  checkpoints.convert(ours, ours + "-back", like=warm)
  assert read_values(ours + "-back", warm) == read_values(warm, warm)


@pytest.mark.parametrize(
  "kind",
  [
    "two_optimizers",
    pytest.param("conditionals_before", marks=pytest.mark.matrix),
    pytest.param("variables", marks=pytest.mark.matrix),
  ],
)
def test_init_and_readers_find_tensorflow_names(kind, control_flow, tmp_path):
  path = str(tmp_path / "model")
  train(kind, path, FEEDS[:3])
  with tf.Graph().as_default():
    Program(kind)
    program_names = set(get_variables_by_name())
  with mp_compat.install(), tf.Graph().as_default(), testing.session() as sess:
    Program(kind)
    if kind == "variables" and control_flow == 2:  # whose scopes are lost
      with pytest.raises(ValueError, match="Tensor head/.* is not found"):
        tf.train.init_from_checkpoint(path, get_variables_by_name())
      return
    tf.train.init_from_checkpoint(path, get_variables_by_name())
    sess.run(tf.global_variables_initializer())
    reader = tf.train.load_checkpoint(path)
    for name, value in sess.run(get_variables_by_name()).items():
      assert (
        reader.has_tensor(name) and reader.get_tensor(name).tobytes() == value.tobytes()
      )
    saved = str(tmp_path / "again")
    tf.train.Saver().save(sess, saved)
  checkpoints.convert(saved, saved + "-back", like=path)
  assert read_names(path) == program_names
  assert read_values(saved + "-back", path) == read_values(path, path)


@pytest.mark.each_choice
@pytest.mark.parametrize("restore", ["saver", "init_from_checkpoint"])
def test_unscaled_adam_restores(restore, tmp_path):
  # TensorFlow's class: cond_1/beta1_power and beta1_power. Here: beta1_power and
  # beta1_power_1.
  def build():
    program = Program("one")
    program.train_op = tf.group(program.train_op, program.train_b(make_adam()))
    return program

  def values(sess):
    named = {
      name: value.tobytes() for name, value in sess.run(get_variables_by_name()).items()
    }
    for power in ("beta1_power", "beta2_power"):
      if "cond_1/" + power in named:
        named[power + "_1"], named[power] = named[power], named.pop("cond_1/" + power)
    return named

  path = str(tmp_path / "model")
  with tf.Graph().as_default(), testing.session() as sess:
    program = build()
    sess.run(tf.global_variables_initializer())
    program.run(sess, FEEDS[:2])  # The second step is skipped by one of the two.
    expected = values(sess)
    assert expected["beta1_power"] != expected["beta1_power_1"]
    tf.train.Saver().save(sess, path)
  with mp_compat.install(), tf.Graph().as_default(), testing.session() as sess:
    build()
    if restore == "saver":
      tf.train.Saver().restore(sess, path)
    else:
      tf.train.init_from_checkpoint(path, get_variables_by_name())
      sess.run(tf.global_variables_initializer())
    assert values(sess) == expected


def test_readers_keep_names(tmp_path):
  path = str(tmp_path / "model")
  train("one", path, FEEDS[:2])
  native = tf.train.NewCheckpointReader(path)
  names = set(native.get_variable_to_shape_map())
  with mp_compat.install():
    reader = tf.train.NewCheckpointReader(path)
    names |= {"beta1_power", "beta2_power"}
    assert set(reader.get_variable_to_shape_map()) == names
    assert set(reader.get_variable_to_dtype_map()) == names
    assert reader.debug_string() == native.debug_string()
    assert reader.has_tensor("beta1_power") and not reader.has_tensor("nothing")
    with pytest.raises(tf.errors.NotFoundError, match="nothing"):
      reader.get_tensor("nothing")


def patched_functions():
  saver = tf.train.Saver
  return (
    saver.restore,
    tf.train.init_from_checkpoint,
    tf.train.NewCheckpointReader,
  )


def test_uninstall_restores_saver_methods(tmp_path):
  functions, apply_gradients = patched_functions(), Optimizer.apply_gradients
  with mp_compat.install():
    assert not set(patched_functions()) & set(functions)
  assert (
    patched_functions() == functions and Optimizer.apply_gradients is apply_gradients
  )
  with tf.Graph().as_default():
    Optimizer(make_adam(), "dynamic").minimize(
      tf.reduce_sum(tf.get_variable("w", [2], use_resource=True))
    )
    with testing.initialized_session() as sess:
      path = tf.train.Saver().save(sess, str(tmp_path / "model"))
  assert not any("cond" in name for name in read_names(path))


def test_unconditional_step_adds_no_names(tmp_path):
  with tf.Graph().as_default(), mp_compat.install():
    w = tf.get_variable("w", initializer=[1.0, 2.0])
    Optimizer(make_adam(), 8.0, skip_nonfinite=False).minimize(tf.reduce_sum(w * w))
    with testing.initialized_session() as sess:
      path = tf.train.Saver().save(sess, str(tmp_path / "model"))
  assert read_names(path) == {"w", "w/Adam", "w/Adam_1", "beta1_power", "beta2_power"}


def test_installed_replicas_and_eager_mode_train():
  with mp_compat.install():
    with tf.Graph().as_default():
      strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)

      def step():
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        return Optimizer(make_adam(), "dynamic").minimize(tf.reduce_sum(w * w))

      with strategy.scope():
        strategy.extended.call_for_each_replica(step)
      assert "beta1_power" in [variable.op.name for variable in tf.global_variables()]
    with testing.eager_mode():
      w = tf.Variable([1.0, 2.0], use_resource=True)
      Optimizer(tf.train.GradientDescentOptimizer(1.0), 8.0).minimize(
        lambda: tf.reduce_sum(w), var_list=[w]
      )
      np.testing.assert_array_equal(w.numpy(), [0.0, 1.0])


def test_empty_saver_restores_nothing():
  with tf.Graph().as_default(), mp_compat.install(), testing.session() as sess:
    tf.train.Saver([], allow_empty=True).restore(sess, "nothing")


def test_name_map_omits_iterator_state(tmp_path):
  with tf.Graph().as_default(), testing.session() as sess:
    w = tf.get_variable("w", [2])
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.range(3))
    saveable = tf.data.experimental.make_saveable_from_iterator(iterator)
    sess.run(tf.global_variables_initializer())
    path = tf.train.Saver([w]).save(sess, str(tmp_path / "model"))
    assert list(mp_compat.checkpoints.name_map(path, [w, saveable])) == ["w"]
