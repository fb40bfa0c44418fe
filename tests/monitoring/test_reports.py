"""Tests of gradient reports, summaries, clipping and warnings."""

import numpy as np
import pytest

import mp_compat
from mp_compat.monitoring import reports
from tests import testing
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import Training
from tests.testing import sgd
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


def linear(dtype=tf.float32):
  """Returns two variables, the placeholders of their gradients, and the loss."""
  variables = [
    tf.get_variable(name, [3], dtype, initializer=tf.zeros_initializer())
    for name in "ab"
  ]
  xs = [tf.placeholder(dtype, [3]) for _ in "ab"]
  return variables, xs, tf.add_n([tf.reduce_sum(v * x) for v, x in zip(variables, xs)])


# --- nonfinite_gradients
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "dtype", [tf.float16, tf.float32, tf.float64], ids=lambda d: d.name
)
def test_report_counts_nonfinite_values(dtype):
  _, xs, loss = linear(dtype)
  tf.get_variable("unused", [3], dtype)  # has no gradient
  opt = Optimizer(sgd(), 4.0)
  train_op = opt.minimize(loss)
  report = mp_compat.nonfinite_gradients(opt)
  with testing.initialized_session() as sess:
    _, got = sess.run(
      [train_op, report],
      dict(zip(xs, [[1.0, np.nan, -3.0], [np.inf, -np.inf, np.nan]])),
    )
  assert list(got.items()) == [
    ("a:0", mp_compat.GradientReport(nans=1, infs=0, largest=3.0)),
    ("b:0", mp_compat.GradientReport(nans=1, infs=2, largest=0.0)),
  ]


@pytest.mark.parametrize("dtype", [tf.complex64, tf.complex128], ids=lambda d: d.name)
def test_report_counts_complex_parts(dtype):
  v = tf.get_variable("v", initializer=tf.zeros([4], dtype), use_resource=True)
  grad = tf.placeholder(dtype, [4])
  opt = Optimizer(testing.ComplexDescent(1.0), 4.0)
  opt.apply_gradients([(grad, v)])
  report = mp_compat.nonfinite_gradients(opt)
  with testing.session() as sess:
    values = [
      complex(1.0, np.nan),
      complex(np.inf, -np.inf),
      complex(0.0, np.inf),
      complex(2.0, -5.0),
    ]
    assert sess.run(report, {grad: values})["v:0"] == mp_compat.GradientReport(
      nans=1, infs=3, largest=5.0
    )


def test_report_includes_clipped_gradients():
  _, xs, loss = linear()
  opt = Optimizer(sgd(), 4.0)
  train_op = opt.apply_gradients(
    [(tf.clip_by_value(g, -1.0, 1.0), v) for g, v in opt.compute_gradients(loss)]
  )
  report = mp_compat.nonfinite_gradients(opt)
  assert list(report) == ["a:0 (computed)", "b:0 (computed)", "a:0", "b:0"]
  with testing.initialized_session() as sess:
    _, got = sess.run(
      [train_op, report], dict(zip(xs, [[1.0, 2.0, 3.0], [np.inf, 0.0, 0.0]]))
    )
  assert [name for name, gradient in got.items() if gradient.infs] == ["b:0 (computed)"]
  assert got["a:0 (computed)"].largest == 3.0


@pytest.mark.each_choice
@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize(
  "is_shared", [False, True], ids=["own_optimizers", "shared_optimizer"]
)
@pytest.mark.parametrize(
  "loss_scale",
  [
    lambda: 8.0,
    pytest.param(testing.native.DynamicLossScale, marks=pytest.mark.matrix),
  ],
  ids=["fixed", "native_dynamic"],
)
def test_every_replica_finds_step(is_shared, loss_scale):
  x = tf.placeholder(tf.float32, [2])
  found, optimizers = [], [Optimizer(sgd(), loss_scale())] * 2 if is_shared else []

  def step():
    index = tf.distribute.get_replica_context().replica_id_in_sync_group
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    opt = optimizers[0] if is_shared else Optimizer(sgd(), loss_scale())
    optimizers.append(opt)
    train_op = opt.minimize(w * x[index])
    loss = tf.where_v2(opt.gradients_finite, x[index], 0.0)
    found.append(
      (loss, mp_compat.nonfinite_gradients(opt), mp_compat.gradient_ranges(opt))
    )
    return train_op

  train_op = testing.call_on_replicas(step)
  mp_compat.loss_scale_summaries(optimizers[-1])
  with testing.initialized_session() as sess:
    _, fetched, text = sess.run(
      [train_op, found, tf.summary.merge_all()], {x: [1.0, np.inf]}
    )
  losses, (report, same_report), (ranges, other_ranges) = zip(*fetched)
  assert (
    losses == (0.0, 0.0)
    and report == same_report
    and list(ranges) == list(other_ranges)
  )
  of_variables = [values for name, values in ranges.items() if name in report]
  assert [gradient.infs for gradient in report.values()] == [
    values.nonfinite for values in of_variables
  ]
  assert (
    sorted(gradient.infs for gradient in report.values()) == [0, 1]
    and values_of(text)["loss_scale/applied"] == 0.0
  )
  assert [len(reports.train_steps(opt)) for opt in optimizers] == [1] * len(optimizers)


# --- loss_scale_summaries
# ------------------------------------------------------------------------------------------


def values_of(text):
  return {value.tag: value.simple_value for value in tf.Summary.FromString(text).value}


def test_summaries_show_their_own_step():
  training = Training()
  opt = Optimizer(sgd(), mp_compat.DynamicLossScale(16.0, 2))
  train_op = opt.minimize(training.loss, training.global_step)
  assert mp_compat.loss_scale_summaries(opt) == tf.get_collection(
    tf.GraphKeys.SUMMARIES
  )
  merged = tf.summary.merge_all()
  with testing.initialized_session() as sess:
    for x, scale, applied in [
      (FINITE, 16, 1),
      (FINITE, 16, 1),
      (OVERFLOW, 32, 0),
      (OVERFLOW, 16, 0),
      (FINITE, 8, 1),
    ]:
      _, text = sess.run([train_op, merged], {training.x: x})
      assert values_of(text) == {
        "loss_scale/scale": scale,
        "loss_scale/applied": applied,
      }
    assert values_of(sess.run(merged, {training.x: FINITE})) == {
      "loss_scale/scale": 8.0,
      "loss_scale/applied": 1.0,
    }
    assert sess.run(training.global_step) == 3  # summaries alone do not train


def test_skipped_branch_is_zero():
  training = Training()
  opt = Optimizer(sgd(), 8.0)
  executed = tf.placeholder(tf.bool, [])
  with testing.control_flow(1):
    tf.cond(executed, lambda: opt.minimize(training.loss), tf.no_op)
    mp_compat.loss_scale_summaries(opt)
  merged = tf.summary.merge_all()
  with testing.initialized_session() as sess:
    for value, applied in [(True, 1.0), (False, 0.0)]:
      text = sess.run(merged, {training.x: FINITE, executed: value})
      assert values_of(text) == {"loss_scale/applied": applied}


# --- clipping
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.5, 5.0, 100.0])
def test_finite_clipping_matches_tensorflow(clip_norm):
  random = np.random.RandomState(0)
  a, b = tf.placeholder(tf.float32, [7]), tf.placeholder(tf.float32, [2, 3])
  slices = tf.IndexedSlices(b, tf.constant([4, 1]), tf.constant([6, 3]))
  ours, our_norm = mp_compat.clip_by_global_norm(iter([a, None, slices]), clip_norm)
  theirs, their_norm = tf.clip_by_global_norm([a, None, slices], clip_norm)
  assert ours[1] is None and isinstance(ours[2], tf.IndexedSlices)
  with testing.session() as sess:
    for scale in [1e-3, 1.0, 1e10]:
      feed = {a: random.normal(size=7) * scale, b: random.normal(size=[2, 3]) * scale}
      got, expected = sess.run(
        [
          [ours[0], ours[2].values, our_norm],
          [theirs[0], theirs[2].values, their_norm],
        ],
        feed,
      )
      for one, other in zip(got, expected):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
  "dtype, value",
  [
    (tf.float16, 300.0),
    (tf.bfloat16, 2.0**40),
    (tf.float32, 1e25),
    (tf.float64, 1e200),
  ],
  ids=str,
)
def test_norm_survives_overflowing_squares(dtype, value):
  x = tf.placeholder(dtype, [4])
  (clipped,), norm = mp_compat.clip_by_global_norm([x], 1.0)
  assert clipped.dtype == dtype
  nothing, zero = mp_compat.clip_by_global_norm([None, None], 1.0)
  with testing.session() as sess:
    got, got_norm, got_zero = sess.run([clipped, norm, zero], {x: np.full([4], value)})
  assert nothing == [None, None] and got_zero == 0.0
  np.testing.assert_allclose(got_norm, 2.0 * value, rtol=1e-2)
  np.testing.assert_allclose(got.astype(np.float64), [0.5] * 4, rtol=1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_clipping_nonfinite_skips_step(bad):
  (a, b), xs, loss = linear()
  opt = Optimizer(sgd(), 4.0)
  grads, variables = zip(*opt.compute_gradients(loss))
  clipped, _ = mp_compat.clip_by_global_norm(grads, 1.0)
  train_op = opt.apply_gradients(zip(clipped, variables))
  with testing.initialized_session() as sess:
    feed = dict(zip(xs, [[1.0, 2.0, 3.0], [bad, 0.0, 0.0]]))
    assert not np.isfinite(np.concatenate(sess.run(clipped, feed))).any()
    sess.run(train_op, feed)
    np.testing.assert_array_equal(sess.run([a, b]), np.zeros([2, 3]))


def test_finite_or_zero_allows_histograms():
  x = tf.placeholder(tf.float32, [3])
  slices = tf.IndexedSlices(x, tf.constant([0, 1, 2]))
  masked = mp_compat.finite_or_zero([x, None, slices])
  assert masked[1] is None
  with testing.session() as sess:
    for got in sess.run([masked[0], masked[2].values], {x: [np.nan, 2.0, np.inf]}):
      np.testing.assert_array_equal(got, [0.0, 2.0, 0.0])
    sess.run(tf.summary.histogram("masked", masked[0]), {x: [np.nan, 2.0, np.inf]})
    with pytest.raises(tf.errors.InvalidArgumentError, match="Nan"):
      sess.run(tf.summary.histogram("raw", x), {x: [np.nan, 2.0, np.inf]})


# --- warnings about unscaled gradients
# -----------------------------------------------------------------------------


def test_unscaled_gradients_warn_once_per_graph(warnings):
  opt = Optimizer(sgd(), 4.0)
  for count in range(2):
    with tf.Graph().as_default():
      opt.minimize(linear()[2])
    assert len(warnings) == count
    with tf.Graph().as_default():
      variables, _, loss = linear()
      for _ in range(2):
        opt.apply_gradients(zip(tf.gradients(loss, variables), variables))
    assert len(warnings) == count + 1
  assert (
    "never to have been scaled" in warnings[0]
    and "opt.unscale_gradients(tf.gradients(opt.scale_loss(loss)" in warnings[0]
  )


class _Rebuilt(mp_compat.LossScale):
  """A loss scale that reads no variable and builds other ops in each call."""

  def __call__(self):
    return tf.constant(2.0) ** tf.constant(3.0)

  def update(self, grads):
    return tf.no_op(), True

  def get_config(self):
    return {}


@pytest.mark.parametrize(
  "make_scale",
  [
    lambda: 4.0,
    lambda: "dynamic",
    lambda: testing.native.FixedLossScale(4.0),
    lambda: testing.native.DynamicLossScale(4.0),
    _Rebuilt,
  ],
  ids=["fixed", "dynamic", "native_fixed", "native_dynamic", "custom"],
)
def test_gradients_scaled_by_the_program_do_not_warn(warnings, make_scale):
  variables, _, loss = linear()
  opt = Optimizer(sgd(), make_scale())
  grads = tf.gradients(loss * opt.loss_scale(), variables)
  opt.apply_gradients(
    [(grad / opt.loss_scale(), variable) for grad, variable in zip(grads, variables)]
  )
  assert not warnings


def in_branch(make):
  """Returns the tensor that `make` returns, made in a branch."""
  return tf.cond(tf.placeholder(tf.bool, []), make, lambda: tf.zeros([3]))


def in_loop(make):
  """Returns the sum of two tensors that `make` returns, made in a loop."""
  return tf.while_loop(
    lambda i, _: i < 2, lambda i, total: (i + 1, total + make()), (0, tf.zeros([3]))
  )[1]


def in_function(make):
  """Returns the tensor that `make` returns, made in a function."""
  return tf.function(make)()


def square(variable):
  return tf.reduce_sum(variable * variable)


def scaled_by_the_program(opt, variable):
  loss = square(variable) * opt.loss_scale()
  return tf.gradients(loss, variable)[0] / opt.loss_scale()


def apply(opt, grad, variable):
  """Applies a gradient; returns zeros [3]."""
  with tf.control_dependencies([opt.apply_gradients([(grad, variable)])]):
    return tf.zeros([3])


@pytest.mark.each_choice
@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("loss_scale", [4.0, "dynamic"])
@pytest.mark.parametrize("place", [in_branch, in_loop, in_function])
def test_gradients_scaled_in_control_flow_do_not_warn(place, loss_scale, warnings):
  variable = tf.get_variable("v", [3], use_resource=True)
  opt = Optimizer(sgd(), loss_scale)
  apply(opt, place(lambda: scaled_by_the_program(opt, variable)), variable)
  assert not warnings


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("loss_scale", [4.0, "dynamic"])
@pytest.mark.parametrize("place", [in_branch, in_loop])
def test_gradients_that_are_applied_in_control_flow_do_not_warn(
  place, loss_scale, warnings
):
  variable = tf.get_variable("v", [3], use_resource=True)
  opt = Optimizer(sgd(), loss_scale)
  grad = scaled_by_the_program(opt, variable)
  place(lambda: apply(opt, grad, variable))
  assert not warnings


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("loss_scale", [4.0, "dynamic"])
def test_scale_of_another_optimizer_does_not_hide_a_warning(loss_scale, warnings):
  variable, other = [tf.get_variable(name, [3], use_resource=True) for name in "vu"]
  grad = in_branch(lambda: Optimizer(sgd(), 8.0).compute_gradients(square(other))[1][0])
  opt = Optimizer(sgd(), loss_scale)
  opt.apply_gradients([(tf.gradients(square(variable - grad), variable)[0], variable)])
  (warning,) = warnings
  assert "seem never to have been scaled" in warning


@pytest.mark.parametrize("is_native", [False, True], ids=["ours", "native"])
def test_gradients_of_scaled_loss_warn(warnings, is_native):
  variables, _, loss = linear()
  loss_scale = testing.native.FixedLossScale(4.0) if is_native else 4.0
  opt = Optimizer(sgd(), loss_scale)
  opt.apply_gradients(zip(tf.gradients(opt.scale_loss(loss), variables), variables))
  (warning,) = warnings
  assert "but unscale_gradients() was not called: unless the program" in warning


def test_optimizers_of_replicas_warn_once(warnings):

  def step():
    variable = tf.get_variable("v", [], initializer=tf.zeros_initializer())
    opt = Optimizer(sgd(), 4.0)
    return opt.apply_gradients([(tf.placeholder_with_default(1.0, []), variable)])

  testing.call_on_replicas(step)
  assert len(warnings) == 1 and "never to have been scaled" in warnings[0]


def test_scaling_by_hand_avoids_warning(warnings):
  variables, xs, loss = linear(tf.float16)
  opt = Optimizer(sgd(), 2.0**10)
  grads = opt.unscale_gradients(tf.gradients(opt.scale_loss(loss), variables))
  assert [g.dtype for g in grads] == [tf.float16] * 2
  train_op = opt.apply_gradients(
    [(tf.clip_by_value(g, -4.0, 4.0), v) for g, v in zip(grads, variables)]
  )
  with testing.initialized_session() as sess:
    for last in [3.0, np.inf]:  # the second step overflows, and clipping hides it
      sess.run(train_op, dict(zip(xs, [[1.0, 2.0, 3.0], [1.0, 2.0, last]])))
      np.testing.assert_array_equal(sess.run(variables), [[-1.0, -2.0, -3.0]] * 2)
  assert not warnings


def test_accumulators_log_no_warning(warnings):
  variables, _, loss = linear()
  opt = Optimizer(sgd(), 4.0)
  opt.minimize(loss)
  totals = [tf.Variable(tf.zeros([3]), trainable=False) for _ in variables]
  opt.apply_gradients(zip([tf.convert_to_tensor(total) for total in totals], variables))
  assert not warnings


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize(
  "observe", [mp_compat.nonfinite_gradients, mp_compat.loss_scale_summaries]
)
def test_observing_steps_of_loops_raises(observe):
  opt = Optimizer(sgd(), 4.0)

  def body(i):
    with tf.control_dependencies([opt.minimize(linear()[2])]):
      return i + 1

  with tf.variable_scope("loop"):
    tf.while_loop(lambda i: i < 2, body, [0])
  with pytest.raises(
    RuntimeError,
    match="inside a loop or a function, so its gradients cannot be read from outside",
  ):
    observe(opt)
