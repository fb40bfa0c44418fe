"""Tests of inner optimizers: user-defined classes, wrappers, and invalid ones."""

import copy

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.programs import test_optimizers
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import Training
from tests.testing import sgd
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")
only_in_1_15 = pytest.mark.skipif(
  tf.__version__ >= "2", reason="tf.contrib exists only in TensorFlow 1.15"
)


class Wrapping(test_optimizers.Wrapper):
  """Delegates all methods to an inner optimizer, like Horovod's
  DistributedOptimizer.
  """

  def __init__(self, inner):
    super().__init__(inner)
    self._optimizer, self.extra = inner, None
    self.get_slot, self.variables = inner.get_slot, inner.variables

  def apply_gradients(self, *args, extra=None, **kwargs):
    self.extra = extra
    return super().apply_gradients(*args, **kwargs)


def test_extra_arguments_are_passed():
  training = Training()
  opt = Optimizer(Wrapping(sgd()), 8.0)
  opt.apply_gradients(opt.compute_gradients(training.loss), extra="given")
  assert opt.extra == "given"


def test_wrapper_delegates():
  training = Training()
  inner = Wrapping(tf.train.MomentumOptimizer(1.0, 0.9))
  opt = Optimizer(inner, "dynamic")
  opt.minimize(training.loss)
  assert (
    isinstance(opt, tf.train.Optimizer)
    and opt.inner_optimizer is opt._optimizer is inner
  )
  assert opt.loss_scale is opt._loss_scale and opt._doing_dynamic_loss_scaling()
  assert opt.get_name() == inner.get_name() and opt.extra is inner.extra
  slot = opt.get_slot(training.w, "momentum")
  assert slot is not None and slot is inner.get_slot(training.w, "momentum")
  assert opt.variables() == [slot] + opt.loss_scale.variables()
  assert not Optimizer(
    tf.train.MomentumOptimizer(1.0, 0.9), 8.0
  )._doing_dynamic_loss_scaling()
  assert Optimizer(
    sgd(), testing.native.DynamicLossScale()
  )._doing_dynamic_loss_scaling()
  with pytest.raises(
    AttributeError, match="MixedPrecisionLossScaleOptimizer.*_no_such_thing"
  ):
    print(opt._no_such_thing)
  for method in [
    opt._apply_dense,
    opt._apply_sparse,
    opt._resource_apply_dense,
    opt._resource_apply_sparse,
  ]:
    with pytest.raises(RuntimeError, match="This function should never be called"):
      method(None, None)


def test_deepcopy_before_training_works():
  opt = copy.deepcopy(
    Optimizer(tf.train.MomentumOptimizer(1.0, 0.0), mp_compat.DynamicLossScale(8.0, 5))
  )
  with tf.Graph().as_default():
    training = Training()
    np.testing.assert_array_equal(
      training.run(opt.minimize(training.loss), FINITE, OVERFLOW), [-FINITE, -FINITE]
    )


def test_optimizer_works_in_several_graphs():
  opt = Optimizer(tf.train.AdamOptimizer(1.0), "dynamic")
  for _ in range(2):
    with tf.Graph().as_default():
      training = Training()
      train_op = opt.minimize(training.loss)
      assert (
        all(v.graph is tf.get_default_graph() for v in opt.variables())
        and len(opt.variables()) == 6
      )
      training.run(train_op, FINITE, OVERFLOW)
      assert training.session.run(opt.loss_scale()) == 2.0**14


@pytest.mark.parametrize(
  "wrapper, after, scale",
  [
    # Scaled gradients are clipped before the finite check: the scale never decreases.
    (
      test_optimizers.ClipsByValueOutside,
      [[-0.5 / 8] * 2, [-0.5 / 8 - 0.5 / 16] * 2],
      32.0,
    ),
    # The noise of 0.25 shrinks as the scale grows.
    (test_optimizers.AddsNoiseOutside, [-FINITE - 0.25 / 8] * 2, 8.0),
  ],
)
def test_wrappers_inside_change_scaled_gradients(wrapper, after, scale):
  training, opt = (
    Training(),
    Optimizer(wrapper(sgd()), mp_compat.DynamicLossScale(8.0, 1)),
  )
  np.testing.assert_array_equal(
    training.run(opt.minimize(training.loss), FINITE, OVERFLOW), after
  )
  assert training.session.run(opt.loss_scale()) == scale


class AsksForNames(tf.train.MomentumOptimizer):
  """Applies the first gradient in an op that it calls as the step around it is called,
  the others under the name that it is given.
  """

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    first, *others = grads_and_vars
    return tf.group(
      super().apply_gradients([first], name="around"),
      super().apply_gradients(others, global_step, name),
    )


class NamesInside(test_optimizers.Wrapper):
  """Gives the step of its inner optimizer a name of its own."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return self._inner.apply_gradients(grads_and_vars, global_step, "inside")


def names_of_steps(wrap):
  """Returns the names of ops after a step around another one, and of the variables."""
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [2])
    variables = [tf.get_variable(name, [2]) for name in "ab"]
    opt = wrap(NamesInside(wrap(AsksForNames(0.5, 0.5))))
    opt.apply_gradients([(x, each) for each in variables], name="around")
    names = [tf.no_op(name).name for name in ("around", "inside")]
    return names + sorted(v.name for v in tf.global_variables())


def test_step_inside_may_take_the_name_of_the_one_around():
  alone = names_of_steps(lambda opt: opt)
  assert names_of_steps(lambda opt: Optimizer(opt, 8.0)) == alone


class AveragesGradients(tf.train.GradientDescentOptimizer):
  """Keeps moving averages of the gradients, which are named after their ops."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars = list(grads_and_vars)
    average = tf.train.ExponentialMovingAverage(0.5)
    averaged = average.apply([grad for grad, _ in grads_and_vars])
    applied = super().apply_gradients(grads_and_vars, *args, **kwargs)
    return tf.group(applied, averaged)


def test_averages_are_named_after_gradients_that_were_passed():
  training, opt = Training(), Optimizer(AveragesGradients(1.0), "dynamic")
  ((grad, variable),) = opt.compute_gradients(training.loss)
  opt.apply_gradients([(grad, variable)])
  average = grad.op.name + "/ExponentialMovingAverage"
  assert average in [v.op.name for v in tf.global_variables()]


@only_in_1_15
def test_swapping_saver_saves_moving_average(tmp_path):
  training = Training()
  inner = testing.tensorflow.contrib.opt.MovingAverageOptimizer(sgd(), 0.75)
  opt = Optimizer(inner, mp_compat.DynamicLossScale(8.0))
  train_op, saver = opt.minimize(training.loss), opt.swapping_saver()
  training.run(train_op, FINITE)
  path = saver.save(training.session, str(tmp_path / "model"))
  np.testing.assert_array_equal(tf.train.load_variable(path, "w"), -0.25 * FINITE)
  np.testing.assert_array_equal(
    tf.train.load_variable(path, "w/ExponentialMovingAverage"), -FINITE
  )
  assert tf.train.load_variable(path, "current_loss_scale") == 8.0


def test_scaling_twice_raises():
  with pytest.raises(
    ValueError, match="Wrapping is or wraps a MixedPrecisionLossScaleOptimizer"
  ):
    Optimizer(Wrapping(Optimizer(sgd(), 8.0)), 8.0)


def test_clipping_inner_optimizer_warns(warnings):
  """The optimizers of tensorflow-privacy clip in compute_gradients()."""
  inner = sgd()
  Optimizer(inner, 8.0)
  assert not warnings
  inner._dp_sum_query = object()
  Optimizer(inner, 8.0)
  assert len(warnings) == 1 and "before they are unscaled" in warnings[0]


def scaled_by_scale_loss(training, opt):
  return opt.compute_gradients(opt.scale_loss(training.loss))


def scaled_in_branch(version):
  def train(training, opt):
    with testing.control_flow(version):
      tf.cond(
        training.x[0] > 0, lambda: len(scaled_by_scale_loss(training, opt)), lambda: 0
      )

  return train


def scaled_by_contrib(training, opt):
  from tensorflow.contrib import mixed_precision as contrib

  manager = contrib.ExponentialUpdateLossScaleManager(8.0, 10)
  contrib.LossScaleOptimizer(opt, manager).compute_gradients(training.loss)


def scaled_by_variable(name):
  """Returns a function that multiplies the loss by a variable of the program."""

  def train(training, opt):
    weight = tf.get_variable(name, [], initializer=tf.ones_initializer())
    opt.minimize(training.loss * weight)

  return train


@pytest.mark.parametrize(
  "train, warns",
  [
    (
      lambda training, opt: testing.native.MixedPrecisionLossScaleOptimizer(
        opt, "dynamic"
      ).minimize(training.loss),
      True,
    ),
    (scaled_by_scale_loss, True),
    (scaled_in_branch(1), True),
    (scaled_in_branch(2), True),
    pytest.param(scaled_by_contrib, True, marks=only_in_1_15),
    (scaled_by_variable("weight"), False),
    (scaled_by_variable("loss_scale"), False),
    (lambda training, opt: opt.minimize(training.loss, training.global_step), False),
  ],
)
def test_loss_that_is_scaled_already_warns(train, warns, caplog):
  with caplog.at_level("WARNING", "tensorflow"):
    train(Training(), Optimizer(sgd(), "dynamic"))
  assert caplog.text.count("seems to be scaled already") == warns


class ReturnsNothing(tf.train.GradientDescentOptimizer):
  def apply_gradients(self, *args, **kwargs):
    self.train_op = super().apply_gradients(*args, **kwargs)


def test_returning_none_raises_in_graphs():
  with pytest.raises(
    ValueError, match="ReturnsNothing.apply_gradients.. must return the op that applies"
  ):
    Optimizer(ReturnsNothing(1.0), 8.0).minimize(Training().loss)


def test_returning_none_trains_in_functions():
  w = tf.get_variable("w", [], initializer=tf.zeros_initializer(), use_resource=True)

  @tf.function
  def step():
    Optimizer(ReturnsNothing(1.0), 8.0).minimize(2.0 * w, var_list=[w])
    return tf.constant(0)

  train_op = step()
  with testing.initialized_session() as sess:
    sess.run(train_op)
    assert sess.run(w) == -2.0


class OwnMinimize(tf.train.GradientDescentOptimizer):
  def minimize(self, *args, **kwargs):
    with tf.control_dependencies([super().minimize(*args, **kwargs)]):
      return tf.group(*[tf.assign(v, 0.5 * v) for v in tf.trainable_variables()])


@pytest.mark.parametrize(
  "inner, warns", [(OwnMinimize, True), (tf.train.GradientDescentOptimizer, False)]
)
def test_own_minimize_warns(inner, warns, caplog):
  Optimizer(inner(1.0), 8.0).minimize(Training().loss)
  assert ("OwnMinimize has a minimize() of its own" in caplog.text) == warns


# Predicates of the branch in which gradients are applied.
CHECKS = {
  "all finite": (lambda t, grad: tf.reduce_all(tf.is_finite(grad)), True),
  "default": (
    lambda t, grad: tf.placeholder_with_default(tf.is_finite(grad[0]), []),
    True,
  ),
  "norm": (lambda t, grad: tf.global_norm([grad]) < 10.0, True),
  "the loss": (lambda t, grad: tf.is_finite(t.loss), False),
  "the loss scale": (lambda t, grad: t.opt.loss_scale() > 1.0, False),
  "another gradient": (
    lambda t, grad: tf.is_finite(t.opt.compute_gradients(t.loss * 2.0)[0][0][0]),
    False,
  ),
  "placeholder": (lambda t, grad: tf.placeholder(tf.bool, []), False),
}


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("check", sorted(CHECKS))
def test_finite_check_of_the_program_warns(check, is_clipped, warnings):
  training = Training()
  training.opt = opt = Optimizer(sgd(), 8.0)
  ((grad, w),) = opt.compute_gradients(training.loss)
  predicate, warns = CHECKS[check]

  def apply():
    return opt.apply_gradients(
      [(tf.clip_by_norm(grad, 1.0) if is_clipped else grad, w)]
    )

  with testing.control_flow(1):
    tf.cond(
      predicate(training, grad),
      lambda: tf.cond(training.x[0] > 0.0, apply, tf.no_op),
      tf.no_op,
    )
  assert [
    ("a branch of tf.cond whose predicate derives" in line) for line in warnings
  ] == [True] * warns


class DecaysSelected(tf.train.GradientDescentOptimizer):
  """Decays the variables that it is told to, as those of tf.contrib's
  DecoupledWeightDecayExtension do.
  """

  def apply_gradients(
    self, grads_and_vars, global_step=None, name=None, decay_var_list=()
  ):
    with tf.control_dependencies(
      [super().apply_gradients(grads_and_vars, global_step, name)]
    ):
      return tf.group(*[tf.assign(v, 0.5 * v) for v in decay_var_list])


def test_minimize_passes_arguments_of_inner_apply_gradients():
  training = Training()
  train_op = Optimizer(DecaysSelected(1.0), 8.0).minimize(
    training.loss, decay_var_list=[training.w]
  )
  np.testing.assert_array_equal(
    training.run(train_op, FINITE, OVERFLOW), [-0.5 * FINITE] * 2
  )


@only_in_1_15
def test_contrib_weight_decay_is_passed():
  contrib = testing.tensorflow.contrib.opt
  results = []
  for wrap in (lambda opt: opt, lambda opt: Optimizer(opt, 8.0)):
    with tf.Graph().as_default():
      training = Training()
      opt = wrap(contrib.MomentumWOptimizer(0.25, 1.0, 0.5))
      results.append(
        training.run(
          opt.minimize(training.loss, decay_var_list=[training.w]), FINITE, FINITE
        )
      )
  np.testing.assert_array_equal(*results)


class KeepsGradients(test_optimizers.Wrapper):
  """Keeps the gradients of each call, and applies their sum in the last one, as
  tf.contrib's TowerOptimizer does.
  """

  def __init__(self, inner, calls, change=tf.identity):
    super().__init__(inner)
    self._kept, self._calls, self._change = [], calls, change

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    self._kept += [
      [(self._change(grad), variable) for grad, variable in grads_and_vars]
    ]
    if len(self._kept) < self._calls:
      return tf.no_op()
    sums = [
      (tf.add_n([grad for grad, _ in kept]), kept[0][1]) for kept in zip(*self._kept)
    ]
    return super().apply_gradients(sums, global_step, name)


def raw(grad):
  return grad


@pytest.mark.each_choice
@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("change", [raw, tf.identity, lambda grad: grad * 2.0])
def test_gradients_of_earlier_steps_raise(change, function):
  training = Training()
  inner = KeepsGradients(sgd(), 2, change)

  def step():
    for _ in range(2):  # with another wrapper for each, as in towers
      opt = Optimizer(inner, 8.0)
      opt.apply_gradients(opt.compute_gradients(training.loss, [training.w]))
    return tf.constant(0)

  with pytest.raises(
    Exception, match="reads gradients of an earlier|cannot be accessed|out of scope"
  ):
    (testing.tensorflow.function(step) if function else step)()


def test_gradients_of_one_step_may_be_kept():
  training = Training()
  opt = Optimizer(KeepsGradients(sgd(), 1), 8.0)
  train_op = opt.apply_gradients(opt.compute_gradients(training.loss))
  np.testing.assert_array_equal(training.run(train_op, FINITE, OVERFLOW), [-FINITE] * 2)


def test_one_gradient_may_be_applied_twice():
  training = Training()
  opts = [Optimizer(sgd(), 8.0) for _ in range(2)]
  pairs = opts[0].compute_gradients(training.loss)
  train_op = tf.group(*[opt.apply_gradients(pairs) for opt in opts])
  np.testing.assert_array_equal(
    training.run(train_op, FINITE, OVERFLOW), [-2 * FINITE] * 2
  )


def train_on_towers(count, make, api=mp_compat):
  """Trains with tf.contrib's TowerOptimizer on towers; the second one overflows in the
  second step, and so on.
  """
  from tensorflow_estimator.contrib.estimator.python.estimator import replicate_model_fn

  tower_class, training = replicate_model_fn.TowerOptimizer, Training()
  state = tower_class._graph_state()
  state.set_reduction_across_towers("mean", count)
  state._loss_reduction = tf.losses.Reduction.SUM
  factors = tf.placeholder(tf.float32, [count])
  with tf.variable_scope("") as scope:
    for index in range(count):
      with state.tower(index, scope, "tower"):
        opt = make(tower_class)
        train_op = opt.apply_gradients(
          opt.compute_gradients(training.loss * factors[index])
        )
  with training.session as sess:
    sess.run(tf.global_variables_initializer())
    history = []
    for overflowing in [None] + list(range(count)) + [None]:
      factor = [np.inf if index == overflowing else 1.0 for index in range(count)]
      sess.run(train_op, {training.x: FINITE, factors: factor})
      history.append(sess.run(training.w).tolist())
    return history


@only_in_1_15
def test_towers_inside_raise():
  with pytest.raises(
    ValueError,
    match="TowerOptimizer reads gradients of an earlier .* wrap in the other order",
  ):
    train_on_towers(2, lambda tower_class: Optimizer(tower_class(sgd()), 8.0))


@only_in_1_15
def test_one_tower_inside_trains():
  history = train_on_towers(1, lambda tower_class: Optimizer(tower_class(sgd()), 8.0))
  assert history == [[-1.0, -2.0], [-1.0, -2.0], [-2.0, -4.0]]


@only_in_1_15
def test_towers_outside_skip_every_overflow():
  scale = mp_compat.DynamicLossScale(8.0)
  history = train_on_towers(2, lambda tower_class: tower_class(Optimizer(sgd(), scale)))
  assert history == [[-2.0, -4.0]] * 3 + [[-4.0, -8.0]]


class WithRate(tf.train.GradientDescentOptimizer):
  """Reads its learning rate from a public attribute, and has a hook of its own."""

  def __init__(self):
    super().__init__(lambda: self.rate)
    self.rate = 1.0

  def make_session_run_hook(self, is_chief):
    return "hook of the inner optimizer, is_chief={}".format(is_chief)


def test_attributes_are_set_where_they_are_read():
  inner, training = WithRate(), Training()
  opt = Optimizer(inner, 8.0)
  opt.rate, opt.other = 4.0, 5.0
  assert (inner.rate, opt.rate, opt.other) == (4.0, 4.0, 5.0) and not hasattr(
    inner, "other"
  )
  np.testing.assert_array_equal(
    training.run(opt.minimize(training.loss), FINITE), [-4.0 * FINITE]
  )


def test_hook_of_inner_optimizer_is_kept():
  assert (
    Optimizer(WithRate(), 8.0).make_session_run_hook(True)
    == "hook of the inner optimizer, is_chief=True"
  )
  assert (
    Optimizer(WithRate(), 8.0).make_session_run_hook(is_chief=False).endswith("False")
  )


def test_slots_are_found_after_tensor_lookup():
  a, b = [tf.get_variable(name, [2]) for name in "ab"]
  opt = Optimizer(tf.train.MomentumOptimizer(1.0, 0.9), 8.0)
  opt.minimize(tf.reduce_sum(a * b))
  (name,) = opt.get_slot_names()
  assert opt.get_slot(tf.cast(a, tf.float16), name) is None
  assert opt.get_slot(b, name).op.name == "b/Momentum"


@pytest.mark.parametrize(
  "module, is_keras",
  [("keras_helpers.keras", False), ("own.keras.x", False), ("keras.src.x", True)],
)
def test_only_keras_optimizers_are_named_so(module, is_keras):
  with pytest.raises(ValueError, match="must be an instance of Optimizer") as raised:
    Optimizer(type("Own", (), {"__module__": module})(), 8.0)
  assert ("That is a Keras optimizer" in str(raised.value)) == is_keras
  own = type("Own", (tf.train.GradientDescentOptimizer,), {"__module__": module})
  assert Optimizer(own(0.1), 8.0).get_name() == "GradientDescent"


class UsesKeptGradients(tf.train.GradientDescentOptimizer):
  """Applies the gradients of its own `compute_gradients`, or divides those passed to it
  by their norm, or does not.
  """

  def __init__(self, use):
    super().__init__(1.0)
    self._use = use

  def compute_gradients(self, *args, **kwargs):
    self._kept = super().compute_gradients(*args, **kwargs)
    self._norm = tf.global_norm([grad for grad, _ in self._kept])
    return self._kept

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    pairs = self._kept if self._use == "gradients" else grads_and_vars
    norm = self._norm if self._use == "norm" else 1.0
    return super().apply_gradients(
      [(grad / norm, variable) for grad, variable in pairs], *args, **kwargs
    )


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("use", [None, "gradients", "norm"])
def test_reading_scaled_gradients_warns(use, in_function, caplog):
  w = tf.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
  opt = Optimizer(UsesKeptGradients(use), 8.0)

  def train():
    opt.minimize(tf.reduce_sum(w * w), var_list=[w])
    return tf.constant(0)

  tf.function(train).get_concrete_function() if in_function else train()
  assert ("They are multiplied by the loss scale" in caplog.text) == (use is not None)
