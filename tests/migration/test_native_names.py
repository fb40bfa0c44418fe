"""Tests that ops and variables which a program builds after a step have the names that
they have with TensorFlow's own class, under `install()`.
"""

import pytest

import mp_compat
from mp_compat._tensorflow import native
from mp_compat.migration import native_names
from tests import testing
from tests.testing import tf

pytestmark = pytest.mark.skipif(
  not native.LOSS_SCALE_OPTIMIZERS, reason="this TensorFlow has no class of its own"
)

# The name scopes of this package, in lower case, as graphs compare names.
OWN = {
  "apply_or_skip",
  "check_finite",
  "scale_loss",
  "unscale_gradients",
  "update_loss_scale",
}


class Custom(tf.train.GradientDescentOptimizer):
  """An optimizer that computes at the root, and makes variables."""

  def __init__(self):
    super().__init__(0.1)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    rate = tf.Variable(0.1, name="rate", trainable=False)
    with tf.name_scope("decay"):
      factor = tf.Variable(0.5, name="factor", trainable=False)
    updates = []
    for grad, variable in grads_and_vars:
      step = tf.multiply(rate * factor, grad)
      momentum = tf.get_variable(
        variable.op.name + "/m", variable.shape, initializer=tf.zeros_initializer()
      )
      updates.append(variable.assign(variable - step - momentum * 2.0))
    return tf.group(*updates, name=name)


def make_loss(dtype=tf.float32):
  x = tf.placeholder(dtype, [2])
  w = tf.get_variable("w", [2], dtype)
  return tf.reduce_sum(x * tf.square(w)), w


def wrap(opt, scale="dynamic"):
  return tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, scale)


def once(opt=None, scale="dynamic"):
  loss, _ = make_loss()
  opt = opt or tf.train.AdamOptimizer()
  wrap(opt, scale).minimize(loss)
  return loss


def sparse():
  table = tf.get_variable("table", [4, 2])
  loss, w = make_loss()
  loss += tf.reduce_sum(tf.gather(table, tf.placeholder(tf.int32, [1])))
  unused = tf.get_variable("unused", [2])
  wrap(tf.train.AdamOptimizer()).minimize(loss, var_list=[w, table, unused])
  return loss


def clipped():
  loss, w = make_loss()
  opt = wrap(tf.train.MomentumOptimizer(0.1, 0.9))
  pairs = opt.compute_gradients(loss, [w])
  pairs = ((tf.clip_by_value(grad, -1.0, 1.0), variable) for grad, variable in pairs)
  opt.apply_gradients(pairs, tf.train.get_or_create_global_step(), name="train")
  return loss


def in_scopes():
  loss, w = make_loss()
  with tf.name_scope("head"):
    wrap(tf.train.AdamOptimizer()).minimize(loss, var_list=[w])
    tf.train.ExponentialMovingAverage(0.9).apply([loss * 0.5])
  with tf.variable_scope("tail"):
    wrap(tf.train.AdamOptimizer(name="Other")).minimize(loss, var_list=[w])
  return loss


def twice():
  loss, w = make_loss()
  for opt in (tf.train.AdagradOptimizer(0.1), tf.train.RMSPropOptimizer(0.1)):
    wrap(opt).minimize(loss, var_list=[w])
    doubled, halved = loss * 2.0, loss / 2.0
    loss = tf.cond(loss > 0.0, lambda each=doubled: each, lambda each=halved: each)
  return loss


def callable_loss():
  x = tf.placeholder(tf.float32, [2])
  w = tf.get_variable("w", [2])

  def loss():
    return tf.reduce_sum(x * tf.square(w))

  wrap(tf.train.AdamOptimizer()).minimize(loss, var_list=[w])
  return loss()


def fixed():
  return once(scale=128.0)


def custom():
  return once(Custom())


def own_scale():
  class Half(tf.train.experimental.DynamicLossScale):
    """A loss scale of the program."""

    def update(self, grads):
      update_op = tf.group(self._current_loss_scale.assign(tf.constant(8.0) * 2.0))
      return update_op, tf.reduce_all(tf.is_finite(grads[0]))

  return once(scale=Half())


def rewritten():
  loss, _ = make_loss()
  opt = tf.train.AdamOptimizer()
  opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)
  opt.minimize(loss)
  tf.train.experimental.disable_mixed_precision_graph_rewrite()
  return loss


def contrib(fixed=False):
  module = testing.tensorflow.contrib.mixed_precision
  manager = module.FixedLossScaleManager(8.0)
  if not fixed:
    manager = module.ExponentialUpdateLossScaleManager(8.0, 2)
  loss, _ = make_loss()
  module.LossScaleOptimizer(tf.train.AdamOptimizer(), manager).minimize(loss)
  return loss


PROGRAMS = {
  "adam": once,
  "sparse": sparse,
  "clipped": clipped,
  "callable_loss": callable_loss,
  "in_scopes": in_scopes,
  "twice": twice,
  "fixed": fixed,
  "custom": custom,
  "own_scale": own_scale,
  "rewritten": rewritten,
}
if hasattr(testing.tensorflow, "contrib"):
  PROGRAMS.update(contrib=contrib, contrib_fixed=lambda: contrib(fixed=True))
SOME = (
  "callable_loss",
  "clipped",
  "contrib",
  "sparse",
  "twice",
)  # these run by default


def build(program, is_resource):
  """Returns, for each name scope and name, the name that a next op would get, and the
  names of variables that are built after the program.
  """
  with tf.Graph().as_default() as graph, tf.variable_scope(
    "", use_resource=is_resource
  ):
    loss = program()
    made = len(tf.global_variables())
    tf.train.ExponentialMovingAverage(0.9).apply([loss * 0.5, loss / 2.0, loss + 1.0])
    variables = [variable.name for variable in tf.global_variables()[made:]]
    last_parts = [op.name.rpartition("/")[2] for op in graph.get_operations()]
    asked = {part.rstrip("_0123456789") for part in last_parts}
    following = {}
    for scope in ("", "head/", "tail/"):
      with tf.name_scope(scope or None):
        for name in asked | {"truediv", "All", "stack", "group_deps"}:
          following[scope, name] = graph.unique_name(name, mark_as_used=False)
  return following, variables


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize(
  "is_resource",
  [True, pytest.param(False, marks=pytest.mark.matrix)],
  ids=["resource", "reference"],
)
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.matrix] * (name not in SOME))
    for name in sorted(PROGRAMS)
  ],
)
def test_later_ops_have_native_names(name, is_resource):
  if tf.control_flow_v2_enabled() and not is_resource:
    pytest.skip("TensorFlow's class has no reference variables in control flow v2")
  if name == "callable_loss" and not is_resource:
    pytest.skip("TensorFlow's tape watches resource variables only")
  program = PROGRAMS[name]
  expected_names, native_variables = build(program, is_resource)
  with mp_compat.install():
    names, variables = build(program, is_resource)
  assert variables == native_variables
  differing = {}
  for key in expected_names.keys() & names.keys():
    if names[key] != expected_names[key] and key[1].lower() not in OWN:
      differing[key] = expected_names[key], names[key]
  # Variables that TensorFlow's class makes in its conditional have another name.
  exempt = {"beta1_power", "beta2_power", "rate", "factor"}
  if name.startswith("contrib"):  # It reads its scale otherwise, and names no train op.
    exempt |= {"Adam", "Const", "Identity", "NoOp", "ReadVariableOp"}
  assert {asked for _, asked in differing} <= exempt, differing


def averages_in_callable_loss():
  """Returns the names of moving averages of tensors that a callable loss makes, which
  are the names of these tensors.
  """
  averages = []
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [2])
    w = tf.get_variable("w", [2], use_resource=True)

    def loss():
      average = tf.train.ExponentialMovingAverage(0.9)
      doubled = x * 2.0
      average.apply([doubled])
      averages.append(average.average(doubled).name)
      return tf.reduce_sum(doubled * w)

    wrap(tf.train.GradientDescentOptimizer(0.1)).minimize(loss, var_list=[w])
  return averages


@pytest.mark.usefixtures("control_flow")
def test_callable_loss_takes_names_first():
  native_averages = averages_in_callable_loss()
  with mp_compat.install():
    assert averages_in_callable_loss() == native_averages


def test_steps_that_native_class_cannot_build_stay_possible():
  """TensorFlow's class raises a TypeError for float16 variables."""
  with mp_compat.install(), tf.Graph().as_default():
    loss, _ = make_loss(tf.float16)
    wrap(tf.train.GradientDescentOptimizer(0.1)).minimize(loss)


def test_names_are_free_without_install():
  """Without `install()`, no name is taken for an op that is not built."""
  with tf.Graph().as_default() as graph:
    loss, w = make_loss()
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), 8.0)
    opt.minimize(loss, var_list=[w])
    assert graph.unique_name("truediv") == "truediv"


@pytest.mark.parametrize("scale", [8.0, "dynamic"])
def test_names_of_the_inner_optimizer_are_left_to_it(scale):
  """What stands for it in the graph that is dropped has a name of its own."""
  with mp_compat.install(), tf.Graph().as_default() as graph:
    loss, w = make_loss()
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), scale)
    opt.minimize(loss, var_list=[w])
    assert graph.unique_name(native_names._STEP) == native_names._STEP
