"""Tests of `mp_compat.contrib.mixed_precision`, with comparisons with tf.contrib in
TensorFlow 1.15.
"""

import numpy as np
import pytest

import mp_compat
from mp_compat.contrib import mixed_precision
from tests import testing
from tests.checkpoints import golden_cases
from tests.checkpoints import goldens
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import tf

try:
  from tensorflow.contrib import mixed_precision as native
  from tensorflow.contrib import opt as contrib_opt
except ImportError:
  native = None
needs_contrib = pytest.mark.skipif(
  native is None, reason="tf.contrib is in TensorFlow 1.15 only"
)


@pytest.fixture(autouse=True)
def _graph():
  # contrib's class fails with control flow v2
  with testing.control_flow(1), tf.Graph().as_default():
    yield


MODEL = [
  "model/w:0",
  "model/b:0",
  "model/table:0",
  "model/w/Momentum:0",
  "model/b/Momentum:0",
  "model/table/Momentum:0",
  "global_step:0",
]


def make_manager(api):
  return api.ExponentialUpdateLossScaleManager(64.0, 2, 1, 2.0, 0.5)


def get_used_variables():
  """Returns the variables with gradients, that of `table` sparse; contrib's
  `apply_gradients` fails with None.
  """
  return [v for v in tf.trainable_variables() if v.op.name != "model/unused"]


def momentum():
  return tf.train.MomentumOptimizer(0.1, 0.9)


def clip_rows():
  """Returns an optimizer that clips the rows of `table`."""
  tables = [v for v in tf.trainable_variables() if v.op.name == "model/table"]
  return contrib_opt.VariableClippingOptimizer(
    tf.train.GradientDescentOptimizer(0.1), {table: [1] for table in tables}, 0.2
  )


# All optimizers of `tf.train`, but SyncReplicasOptimizer, which needs servers, and of
# `tf.contrib.opt`, but AVERAGING and those with which contrib's class fails.
OPTIMIZERS = {
  **testing.OPTIMIZERS,
  "Adadelta": lambda: tf.train.AdadeltaOptimizer(0.1),
  "AdagradDA": lambda: tf.train.AdagradDAOptimizer(
    0.1, tf.train.get_global_step(), l2_regularization_strength=0.01
  ),
  "CenteredRMSProp": lambda: tf.train.RMSPropOptimizer(0.01, centered=True),
  "Nesterov": lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
  "ProximalAdagrad": lambda: tf.train.ProximalAdagradOptimizer(
    0.1, l1_regularization_strength=0.01
  ),
  "ProximalGradientDescent": lambda: tf.train.ProximalGradientDescentOptimizer(
    0.1, l1_regularization_strength=0.01
  ),
  "AdaMax": lambda: contrib_opt.AdaMaxOptimizer(0.1),
  "AdamGS": lambda: contrib_opt.AdamGSOptimizer(
    tf.train.get_or_create_global_step(), 0.1
  ),
  "AdamW": lambda: contrib_opt.AdamWOptimizer(0.01, 0.1),
  "AddSign": lambda: contrib_opt.AddSignOptimizer(0.1),
  "DecayedAdagrad": lambda: contrib_opt.extend_with_decoupled_weight_decay(
    tf.train.AdagradOptimizer
  )(0.01, learning_rate=0.1),
  "LARS": lambda: contrib_opt.LARSOptimizer(0.1, weight_decay=0.01),
  "LazyAdam": lambda: contrib_opt.LazyAdamOptimizer(0.1),
  "LazyAdamGS": lambda: contrib_opt.LazyAdamGSOptimizer(
    tf.train.get_or_create_global_step(), 0.1
  ),
  "MomentumW": lambda: contrib_opt.MomentumWOptimizer(0.01, 0.1, 0.9),
  "MovingAverage": lambda: contrib_opt.MovingAverageOptimizer(momentum()),
  "Nadam": lambda: contrib_opt.NadamOptimizer(0.1),
  "PowerSign": lambda: contrib_opt.PowerSignOptimizer(0.1),
  "RegAdagrad": lambda: contrib_opt.RegAdagradOptimizer(0.1),
  "Shampoo": lambda: contrib_opt.ShampooOptimizer(
    tf.train.get_or_create_global_step(), learning_rate=0.1
  ),
  "VariableClipping": clip_rows,
}
# Those that average the variables of workers, here of one, every second step. They
# train local variables, which a getter makes.
AVERAGING = {
  "AGN": lambda getter: contrib_opt.AGNOptimizer(momentum(), 1, getter, 2),
  "ElasticAverage": lambda getter: contrib_opt.ElasticAverageOptimizer(
    momentum(), 1, getter, 2
  ),
  "ModelAverage": lambda getter: contrib_opt.ModelAverageOptimizer(
    momentum(), 1, True, getter, 2
  ),
}
# Those with which contrib's class fails: it has another output in a step that is
# skipped, or passes an argument that no `OptimizerV2` takes.
FAILING = {
  "DropStaleGradient": lambda: contrib_opt.DropStaleGradientOptimizer(momentum(), 3),
  "GGT": lambda: contrib_opt.GGTOptimizer(0.1),
}
# The others are compared every night. Adam has counters, RMSProp moves rows without
# gradients.
COMPARED_FIRST = ("Adam", "Momentum", "RMSProp")


def train(api, manager, steps, optimizer=momentum, use_resource=True):
  """Trains with an API's optimizer around `optimizer()` and the manager that
  `manager(api)` makes; returns all variables after every step.
  """
  return testing.train(
    lambda: api.LossScaleOptimizer(optimizer(), manager(api)),
    feeds(steps),
    use_resource,
    var_list=get_used_variables,
  )


def feeds(steps):
  """Returns the inputs of `testing.model`; `steps` has a character for every step: "x"
  overflows, "." does not.
  """
  return testing.feeds(len(steps), [i for i, step in enumerate(steps) if step == "x"])


def train_averages(api, name, use_resource):
  """As `train`, with one of AVERAGING and local variables."""
  with tf.Graph().as_default():
    x, global_step = tf.placeholder(tf.float32, [3]), tf.train.create_global_step()
    make = AVERAGING[name]
    getter = getattr(contrib_opt, name + "CustomGetter")("/device:CPU:0")
    with tf.variable_scope("", custom_getter=getter):
      loss = testing.model(x, use_resource)
    opt = api.LossScaleOptimizer(
      make(getter), api.ExponentialUpdateLossScaleManager(8.0, 2)
    )
    grads_and_vars = opt.compute_gradients(loss, get_used_variables())
    train_op = opt.apply_gradients(grads_and_vars, global_step)
    variables = {
      testing.plain_name(v): v for v in tf.global_variables() + tf.local_variables()
    }
    with testing.initialized_session() as sess:
      history = [sess.run(variables)]
      for value in feeds("..x.xx..."):
        sess.run(train_op, {x: value})
        history.append(sess.run(variables))
  return history


@needs_contrib
@pytest.mark.parametrize("use_resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize(
  "optimizer",
  [
    pytest.param(name, marks=[pytest.mark.matrix] * (name not in COMPARED_FIRST))
    for name in sorted(OPTIMIZERS)
  ],
)
@pytest.mark.parametrize(
  "manager",
  [
    lambda api: api.FixedLossScaleManager(10.0),
    lambda api: api.ExponentialUpdateLossScaleManager(8.0, 2),
  ],
  ids=["fixed", "exponential"],
)
def test_all_optimizers_train_as_contrib(optimizer, manager, use_resource):
  """Also with sparse gradients, which contrib makes dense."""
  testing.assert_same(
    *[
      train(api, manager, "..x.xx...", OPTIMIZERS[optimizer], use_resource)
      for api in (mixed_precision, native)
    ]
  )


@needs_contrib
@pytest.mark.parametrize(
  "name, use_resource",
  # ModelAverageOptimizer raises an error for other variables.
  [(name, False) for name in AVERAGING] + [("AGN", True), ("ElasticAverage", True)],
)
def test_averaging_optimizers_train_as_contrib(name, use_resource):
  ours, theirs = [
    train_averages(api, name, use_resource) for api in (mixed_precision, native)
  ]
  testing.assert_same(ours, theirs)
  assert ours[-1]["global_step:0"] == 3  # They count averages.


@needs_contrib
@pytest.mark.parametrize("name", FAILING)
def test_optimizers_that_fail_in_contrib_train(name):
  with pytest.raises((TypeError, ValueError)):
    train(native, make_manager, ".", FAILING[name])
  history = train(mixed_precision, make_manager, ".", FAILING[name])
  assert history[1]["global_step:0"] == 1


@needs_contrib
def test_all_optimizers_are_compared():
  names = set()
  for module in (tf.train, contrib_opt):
    for name, cls in vars(module).items():
      if isinstance(cls, type) and issubclass(cls, tf.train.Optimizer):
        names.add(name)
  makers = [*OPTIMIZERS.values(), *FAILING.values()]
  made = {type(make()).__name__ for make in makers}
  made.update(name + "Optimizer" for name in AVERAGING)
  assert names - made == {"Optimizer", "SyncReplicasOptimizer"}


@needs_contrib
def test_gradients_of_branches_train_as_contrib():
  """Graph optimizers fold the constants of the model, but not the scale outside."""

  def run(api):
    with tf.Graph().as_default():
      w = tf.get_variable("w", initializer=0.3)
      x, flag = tf.placeholder(tf.float32, [3]), tf.placeholder(tf.bool, [])
      inner = tf.train.GradientDescentOptimizer(0.1)
      opt = api.LossScaleOptimizer(inner, api.FixedLossScaleManager(1024.0))

      def gradient(factor):
        loss = (w * x[0] * 0.7 * x[1] * 1.9 * 0.9 + w * 0.37) * 1.3 * factor
        return opt.compute_gradients(loss, [w])[0][0]

      grad = tf.cond(flag, lambda: gradient(0.9), lambda: gradient(0.7))
      train_op = opt.apply_gradients([(grad, w)])
      values = []
      with testing.initialized_session() as sess:
        for step in range(8):
          feed = np.random.RandomState(step).normal(size=3)
          sess.run(train_op, {x: feed, flag: step % 3 > 0})
          values.append({"w": sess.run(w)})
      return values

  testing.assert_same(run(mixed_precision), run(native))


@pytest.mark.parametrize(
  "arguments, steps, expected",
  [
    # Three finite steps in succession double the scale. Two overflows, not only in
    # succession, multiply it by 0.8. Further arguments change these numbers.
    ((100.0, 3), "......", [100, 100, 200, 200, 200, 400]),
    ((100.0, 3), "x.x.x..x", [100, 100, 80, 80, 80, 80, 80, 64]),
    ((100.0, 2, 1, 10, 0.5), "..x..", [100, 1000, 500, 500, 5000]),
    ((1.5, 9, 1), "xxx", [1.2, 1.0, 1.0]),
    ((2.0**125, 1), "...", [2.0**126] * 3),
  ],
)
def test_loss_scale_follows_update_rule(arguments, steps, expected):
  history = train(
    mixed_precision,
    lambda api: api.ExponentialUpdateLossScaleManager(*arguments),
    steps,
  )
  np.testing.assert_allclose(
    [values["loss_scale:0"] for values in history[1:]], np.float32(expected), rtol=1e-6
  )
  assert history[0]["good_steps:0"].dtype == history[0]["bad_steps:0"].dtype == np.int32


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
@pytest.mark.parametrize("scope", ["", "head"])
def test_contrib_checkpoint_continues(optimizer, scope):
  case = golden_cases.Case("contrib", optimizer, 1, scope)
  _, values = goldens.restore_and_continue(
    "mp_compat.contrib", case, goldens.golden_path("1.15", case)
  )
  expected = goldens.load_expected("1.15", case, "after")
  goldens.assert_equal(
    values, {name.replace("cond/", ""): value for name, value in expected.items()}
  )


class Halving(mixed_precision.LossScaleManager):
  """A custom manager that halves the loss scale at every overflow and never increases
  it.
  """

  def __init__(self):
    self.scale = tf.get_variable("my_scale", initializer=64.0, trainable=False)

  def get_loss_scale(self):
    return self.scale

  def update_loss_scale(self, finite_grads):
    return tf.cond(
      finite_grads, tf.no_op, lambda: tf.assign(self.scale, self.scale / 2).op
    )


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize(
  "make, scales",
  [
    (Halving, [64.0, 32.0, 32.0]),
    (lambda: mixed_precision.FixedLossScaleManager(8), [8.0, 8.0, 8.0]),
  ],
)
def test_managers_scale_and_skip(make, scales):
  with tf.variable_scope("", use_resource=True):
    job, manager = testing.Training(), make()
  opt = mixed_precision.LossScaleOptimizer(
    tf.train.GradientDescentOptimizer(1.0), manager
  )
  train_op = opt.minimize(job.loss, job.global_step)
  with testing.initialized_session() as sess:
    for x, scale, step in zip([FINITE, OVERFLOW, FINITE], scales, [1, 1, 2]):
      sess.run(train_op, {job.x: x})
      assert sess.run([opt.loss_scale(), job.global_step]) == [scale, step]
    np.testing.assert_array_equal(sess.run(job.w), -2 * FINITE)
  assert (
    opt._opt is opt.inner_optimizer
    and opt._loss_scale_manager is manager is opt.loss_scale
  )


def make_manager_with_own_variable(api):
  """Makes a manager that replaces the loss scale and the ratios of its base class, as
  the library Fathom does.
  """

  class Manager(api.ExponentialUpdateLossScaleManager):
    def __init__(self):
      super().__init__(8.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1)
      self._loss_scale = tf.get_variable(
        "my_scale", initializer=64.0, trainable=False, use_resource=True
      )
      self._incr_ratio, self._decr_ratio = 4.0, 0.5

  return Manager()


@pytest.mark.usefixtures("control_flow")
def test_manager_subclass_sets_attributes():
  history = train(mixed_precision, make_manager_with_own_variable, "..x.")
  assert [values["my_scale:0"] for values in history[1:]] == [64.0, 256.0, 128.0, 128.0]
  assert {values["loss_scale:0"] for values in history} == {np.float32(8.0)}


@needs_contrib
def test_manager_subclass_trains_as_contrib():
  testing.assert_same(
    *[
      train(api, make_manager_with_own_variable, "..x.xx..")
      for api in (mixed_precision, native)
    ]
  )


def make_manager_that_resets(api):
  """Makes a manager that forgets its counts after every step."""

  class Manager(api.ExponentialUpdateLossScaleManager):
    def update_loss_scale(self, finite_grads):
      with tf.control_dependencies([super().update_loss_scale(finite_grads)]):
        return tf.group(self._reset_stats())

  return Manager(8.0, 3, 2)


def test_manager_subclass_resets_counts():
  ours = train(mixed_precision, make_manager_that_resets, "..x...x...")
  assert {(values["loss_scale:0"], values["bad_steps:0"]) for values in ours} == {
    (8.0, 0)
  }
  if native is not None:
    testing.assert_same(ours, train(native, make_manager_that_resets, "..x...x..."))


def scale_down_again(api):
  """Makes an optimizer that divides the gradients by 4 with the method of contrib's
  class.
  """

  class DividesAgain(api.LossScaleOptimizer):
    def compute_gradients(self, *args, **kwargs):
      return self._down_scale(
        super().compute_gradients(*args, **kwargs), tf.constant(4.0)
      )

  return DividesAgain(
    tf.train.GradientDescentOptimizer(0.1), api.FixedLossScaleManager(8.0)
  )


def test_optimizer_subclass_scales_down():
  histories = [
    testing.train(
      lambda api=api: scale_down_again(api),
      testing.feeds(3),
      var_list=get_used_variables,
    )
    for api in [mixed_precision] + [native] * (native is not None)
  ]
  plain = testing.train(
    lambda: tf.train.GradientDescentOptimizer(0.025),
    testing.feeds(3),
    var_list=get_used_variables,
  )
  testing.assert_same(histories[0], histories[-1])
  np.testing.assert_allclose(
    histories[0][-1]["model/w:0"], plain[-1]["model/w:0"], rtol=1e-6
  )


@pytest.mark.usefixtures("control_flow")
def test_fixed_manager_returns_one_tensor():
  manager = mixed_precision.FixedLossScaleManager(8.0)
  in_branch = []
  tf.cond(
    tf.placeholder(tf.bool, []),
    lambda: in_branch.append(manager.get_loss_scale()) or 1.0,
    lambda: 2.0,
  )
  scale = manager.get_loss_scale()
  tf.get_default_graph().finalize()
  assert manager.get_loss_scale() is scale
  if not tf.control_flow_v2_enabled():  # otherwise, a branch is a function
    assert in_branch == [scale]
  with testing.session() as sess:
    assert sess.run(scale) == 8.0 and scale.dtype == tf.float32
  with tf.Graph().as_default():
    assert manager.get_loss_scale().graph is tf.get_default_graph()
  with testing.eager_mode():
    assert manager.get_loss_scale().numpy() == 8.0


def make_optimizer_with_replaced_parts(api):
  """Makes an optimizer whose manager and inner optimizer are replaced after
  construction.
  """
  opt = api.LossScaleOptimizer(
    tf.train.GradientDescentOptimizer(0.1), api.FixedLossScaleManager(8.0)
  )
  opt._loss_scale_manager = api.ExponentialUpdateLossScaleManager(64.0, 2)
  opt._opt = tf.train.MomentumOptimizer(0.1, 0.9)
  return opt


def test_parts_can_be_replaced():
  histories = [
    testing.train(
      lambda api=api: make_optimizer_with_replaced_parts(api),
      testing.feeds(4),
      var_list=get_used_variables,
    )
    for api in [mixed_precision] + [native] * (native is not None)
  ]
  assert [values["loss_scale:0"] for values in histories[0]] == [
    64.0,
    64.0,
    128.0,
    128.0,
    256.0,
  ]
  testing.assert_same(histories[0], histories[-1])


def train_with_two_scales(api, experimental, overflows):
  """Trains with contrib's optimizer around the result of `experimental`'s graph
  rewrite.
  """

  def make_optimizer():
    opt = experimental.enable_mixed_precision_graph_rewrite(
      tf.train.MomentumOptimizer(0.1, 0.9)
    )
    return api.LossScaleOptimizer(opt, make_manager(api))

  try:
    return testing.train(
      make_optimizer, testing.feeds(9, overflows), var_list=get_used_variables
    )
  finally:
    experimental.disable_mixed_precision_graph_rewrite()


def select(history, names):
  return [{name: values[name] for name in names} for values in history]


@pytest.mark.usefixtures("control_flow")
def test_contrib_replaces_scale_of_rewrite(caplog):
  with caplog.at_level("WARNING", "tensorflow"):
    both = train_with_two_scales(mixed_precision, mp_compat, [1, 4, 5])
  assert "Only the scale of the loss_scale_manager is used" in caplog.text
  alone = train(mixed_precision, make_manager, ".x..xx...")
  testing.assert_same(
    *[select(history, MODEL + ["loss_scale:0"]) for history in (both, alone)]
  )


@needs_contrib
def test_rewrite_inside_contrib_trains_as_tensorflow():
  ours = train_with_two_scales(mixed_precision, mp_compat, [])
  theirs = train_with_two_scales(native, testing.native, [])
  assert sorted(ours[0]) == sorted(theirs[0])  # the checkpoints have the same entries
  testing.assert_same(*[select(history, MODEL) for history in (ours, theirs)])


def test_unusual_gradients_are_applied():
  """Checks None, iterators, `get_name` and `variables`, with which contrib fails."""
  table = tf.get_variable("table", [4, 2], initializer=tf.zeros_initializer())
  unused, x = tf.get_variable("unused", [1]), tf.placeholder(tf.float32, [2])
  opt = mixed_precision.LossScaleOptimizer(
    tf.train.GradientDescentOptimizer(1.0), make_manager(mixed_precision)
  )
  grads_and_vars = opt.compute_gradients(
    tf.reduce_sum(tf.gather(table, [1, 1]) * x), [table, unused]
  )
  assert grads_and_vars[1][0] is None
  train_op = opt.apply_gradients(iter(grads_and_vars))
  assert opt.get_name() == "GradientDescent"
  assert [v.op.name for v in opt.variables()] == [
    "loss_scale",
    "good_steps",
    "bad_steps",
  ]
  with testing.initialized_session() as sess:
    for value in (FINITE, OVERFLOW):
      sess.run(train_op, {x: value})
    np.testing.assert_array_equal(sess.run(table)[1], -2 * FINITE)


def test_sparse_gradients_move_all_rows():
  """As dense ones: Momentum moves a row that had a gradient in an earlier step."""
  x, rows = tf.placeholder(tf.float32, []), tf.placeholder(tf.int32, [None])

  table = tf.get_variable("table", [3], initializer=tf.zeros_initializer())
  loss = tf.reduce_sum(tf.gather(table, rows)) * x
  opt = mixed_precision.LossScaleOptimizer(
    tf.train.MomentumOptimizer(1.0, 0.5), mixed_precision.FixedLossScaleManager(8.0)
  )
  scaled = tf.gradients(opt.scale_loss(loss), [table])
  train_ops = [
    opt.apply_gradients(pairs)
    for pairs in [
      opt.compute_gradients(loss, [table]),
      zip(opt.unscale_gradients(scaled), [table]),
      opt._down_scale(zip(scaled, [table]), tf.constant(8.0)),
    ]
  ]
  with testing.initialized_session() as sess:
    for train_op, moved, expected in [
      (train_ops[0], [0, 0], [-2.0, 0.0, 0.0]),
      (train_ops[0], [2], [-3.0, 0.0, -1.0]),
      (train_ops[1], [1], [-3.5, -1.0, -1.5]),
      (train_ops[2], [1], [-3.75, -2.5, -1.75]),
    ]:
      sess.run(train_op, {x: 1.0, rows: moved})
      np.testing.assert_array_equal(sess.run(table), expected)


def test_sparse_gradients_of_unknown_shape_are_applied():
  table = tf.get_variable("table", [3], initializer=tf.zeros_initializer())

  class Sparse(tf.train.GradientDescentOptimizer):
    """Computes gradients without their shape, with which contrib fails."""

    def compute_gradients(self, loss, *args, **kwargs):
      return [(tf.IndexedSlices(tf.reshape(loss, [1]), [1]), table)]

  opt = mixed_precision.LossScaleOptimizer(
    Sparse(1.0), mixed_precision.FixedLossScaleManager(8.0)
  )
  x = tf.placeholder(tf.float32, [])
  train_op = opt.minimize(x)
  with testing.initialized_session() as sess:
    sess.run(train_op, {x: 2.0})
    np.testing.assert_array_equal(sess.run(table), [0.0, -2.0, 0.0])


@pytest.mark.usefixtures("control_flow")
def test_overflow_on_one_replica_skips_all():
  strategy = tf.distribute.MirroredStrategy(testing.TWO_CPUS)
  x = tf.placeholder(tf.float32, [2, 2])

  def step():
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    manager = mixed_precision.ExponentialUpdateLossScaleManager(8.0, 2, 1)
    opt = mixed_precision.LossScaleOptimizer(
      tf.train.GradientDescentOptimizer(1.0), manager
    )
    return opt.minimize(
      tf.reduce_sum(w * x[tf.distribute.get_replica_context().replica_id_in_sync_group])
    )

  with strategy.scope():
    train_op = strategy.group(strategy.extended.call_for_each_replica(step))
  with testing.initialized_session() as sess:
    for values in ([FINITE, FINITE], [FINITE, OVERFLOW]):
      sess.run(train_op, {x: values})
    for variable, expected in [
      ("w", -2 * FINITE),
      ("loss_scale", 6.4),
      ("bad_steps", 0),
    ]:
      (found,) = [v for v in tf.global_variables() if v.op.name == variable]
      for copy in strategy.experimental_local_results(found):
        np.testing.assert_allclose(sess.run(copy), expected, rtol=1e-6)


def test_from_config_makes_equal_managers():
  for manager in [
    mixed_precision.FixedLossScaleManager(8.0),
    mixed_precision.ExponentialUpdateLossScaleManager(8.0, 3, 1, 4.0, 0.5),
  ]:
    other = type(manager).from_config(manager.get_config())
    assert (
      other is not manager
      and other.get_config() == manager.get_config()
      and len(manager.get_config()) in (1, 5)
    )

  class Minimal(mixed_precision.LossScaleManager):
    """A custom manager with only the methods that contrib requires."""

    def get_loss_scale(self):
      return 4.0

    def update_loss_scale(self, finite_grads):
      return tf.no_op()

  assert Minimal.from_config(Minimal().get_config())().dtype == tf.float32
