"""Tests of GradientRangesHook in sessions, and of its files."""

import collections
import json
import os
import shutil

import numpy as np
import pytest

import mp_compat
from mp_compat.monitoring import range_history
from tests import testing
from tests.programs.table import VERSION
from tests.testing import FINITE
from tests.testing import OVERFLOW
from tests.testing import Optimizer
from tests.testing import Training
from tests.testing import sgd
from tests.testing import tf


def train(
  directory, xs, every_n_steps=1, with_global_step=True, in_branch=None, hook_dir=None
):
  """Trains on the gradients `xs` in a MonitoredTrainingSession with a hook."""
  directory = str(directory)
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [2])
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    global_step = tf.train.get_or_create_global_step() if with_global_step else None
    opt = Optimizer(sgd(), mp_compat.DynamicLossScale(8.0, 3))
    taken = tf.placeholder_with_default(True, [])

    def minimize():
      return opt.minimize(tf.reduce_sum(w * x), global_step)

    train_op = minimize() if in_branch is None else tf.cond(taken, minimize, tf.no_op)
    hook = mp_compat.GradientRangesHook(
      opt, every_n_steps, hook_dir or os.path.join(directory, "ranges")
    )
    saved = directory if with_global_step else None
    with tf.train.MonitoredTrainingSession(
      checkpoint_dir=saved, hooks=[hook], log_step_count_steps=None
    ) as sess:
      for index, value in enumerate(xs):
        sess.run(w)  # does not execute the train op
        sess.run(train_op, {x: value, taken: in_branch is None or in_branch[index]})
  return hook


def make_training():
  """Returns a Training with its optimizer and its train op."""
  training, opt = Training(), Optimizer(sgd(), 8.0)
  return training, opt, opt.minimize(training.loss, training.global_step)


def records(directory):
  return [
    json.loads(line)
    for line in (directory / "ranges" / "gradient_ranges.jsonl")
    .read_text()
    .splitlines()
  ]


@pytest.fixture(name="lines")
def _lines(monkeypatch):
  """Returns a list of the infos that are logged."""
  lines = []
  monkeypatch.setattr(tf.logging, "info", lambda text, *args: lines.append(text % args))
  return lines


@pytest.mark.parametrize("with_global_step", [True, False])
def test_hook_records_every_nth_step(tmp_path, with_global_step):
  xs = [FINITE * 2.0**n for n in range(7)]
  train(tmp_path, xs, every_n_steps=3, with_global_step=with_global_step)
  assert len(records(tmp_path)) == 3
  for index, (record, n) in enumerate(zip(records(tmp_path), (0, 3, 6))):
    assert record["step"] == n + 1
    tensor = record["tensors"]["w:0"]
    # The scale doubles after three finite steps.
    values = np.abs(FINITE * 2.0**n * 8.0 * 2.0**index)
    assert (
      tensor["selected"]
      and tensor["scale"] == 8.0 * 2.0**index
      and tensor["largest"] == values.max()
    )
    exponents = np.floor(np.log2(values)).astype(int)
    assert tensor["exponents"] == {
      str(exponent): list(exponents).count(exponent) for exponent in set(exponents)
    }


def advice_on_small_loss(scale, lines):
  """Returns what is logged of a loss times 1e-9, and the gradients."""
  del lines[:]
  with tf.Graph().as_default():
    x = tf.placeholder(tf.float32, [1, 2])
    w = tf.get_variable("w", [2, 1], initializer=tf.ones_initializer())
    opt = Optimizer(sgd(), scale)
    product = tf.matmul(tf.cast(x, tf.float16), tf.cast(w, tf.float16))
    gradients = opt.compute_gradients(
      1e-9 * tf.reduce_sum(tf.cast(product, tf.float32))
    )
    train_op = opt.apply_gradients(gradients)
    with tf.train.MonitoredTrainingSession(
      hooks=[mp_compat.GradientRangesHook(opt)]
    ) as sess:
      _, values = sess.run([train_op, gradients[0][0]], {x: [[1.0, 2.0]]})
  (line,) = [line for line in lines if "Gradient ranges" in line]
  return line, values


def test_zeros_need_larger_scale(lines):
  """If every gradient vanishes, the advice finds the scale at which none does."""
  line, values = advice_on_small_loss(2.0**3, lines)
  assert "Record with a loss scale above 2**3. At 2**3, all gradients are zeros" in line
  assert not values.any()
  line, values = advice_on_small_loss(2.0**20, lines)
  assert "Use a fixed loss scale of 2**" in line
  np.testing.assert_allclose(values, [[1e-9], [2e-9]], rtol=0.01)


@pytest.mark.usefixtures("graph")
def test_hook_observes_plain_session(tmp_path):
  training, opt, train_op = make_training()
  hook = mp_compat.GradientRangesHook(opt, 2, str(tmp_path / "ranges"))
  with testing.session() as sess, pytest.raises(
    RuntimeError, match=r"GradientRangesHook.begin\(\) was not called. Call it after"
  ):
    hook.run(sess, train_op)
  hook.begin()
  with testing.initialized_session() as sess:
    for n in range(5):
      x = FINITE * 2.0**n
      _, fetched = hook.run(sess, [train_op, {"x": training.x}], {training.x: x})
      np.testing.assert_array_equal(fetched["x"], x)
      hook.run(sess, training.w)  # does not execute the train op
    hook.end(sess)
  assert [record["step"] for record in records(tmp_path)] == [1, 3, 5]
  assert [record["tensors"]["w:0"]["largest"] for record in records(tmp_path)] == [
    8 * FINITE.max() * factor for factor in (1, 4, 16)
  ]


def test_hook_counts_steps_of_executed_branches(tmp_path):
  taken = [False, False, True, True, False, False, True, True]
  xs = [FINITE * 2.0**n for n in range(len(taken))]
  with testing.control_flow(1):
    train(tmp_path, xs, every_n_steps=3, in_branch=taken)
  # The first and the fourth step; three finite steps have doubled the scale.
  assert [record["tensors"]["w:0"]["largest"] for record in records(tmp_path)] == [
    8 * xs[2].max(),
    16 * xs[7].max(),
  ]


@pytest.mark.parametrize(
  "every_n_steps, steps", [(15, [1, 11, 26]), (4, [1, 5, 9, 13, 17, 21, 25, 29])]
)
def test_overflow_is_soon_followed_by_record(tmp_path, every_n_steps, steps):
  train(tmp_path, [OVERFLOW] + [FINITE] * 29, every_n_steps, with_global_step=False)
  assert [record["step"] for record in records(tmp_path)] == steps
  assert [record["tensors"]["w:0"]["nonfinite"] for record in records(tmp_path)][
    :2
  ] == [1, 0]


@pytest.mark.each_choice
@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("inputs", ["placeholder", "dataset"])
@pytest.mark.parametrize("check_computed", [True, False])
def test_feeding_gradients_computes_nothing_else(
  tmp_path, warnings, inputs, check_computed
):
  x = tf.placeholder(tf.float32, [2])
  if inputs == "dataset":
    batches = tf.data.Dataset.range(100).map(
      lambda index: tf.fill([2], tf.cast(index, tf.float32))
    )
    x = tf.data.make_one_shot_iterator(batches).get_next()
  w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
  opt = Optimizer(sgd(), 8.0, check_computed_gradients=check_computed)
  ((grad, _),) = opt.compute_gradients(tf.reduce_sum(w * x))
  train_op = opt.apply_gradients([(grad, w)])
  hook = mp_compat.GradientRangesHook(opt, 2, str(tmp_path / "ranges"))
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    for index in range(4):
      (value,) = sess.run([grad], {x: [index] * 2} if inputs == "placeholder" else None)
      sess.run({"step": train_op}, {grad.name if index % 2 else grad: value})
      if index == 2 and inputs == "placeholder":
        sess.run(train_op, {x: [0.0, 0.0]})  # feeds no gradient
    np.testing.assert_array_equal(sess.run(w), [-6.0, -6.0])
  if check_computed:
    assert (
      len(
        [
          text
          for text in warnings
          if "runs that feed a gradient cannot be recorded" in text
        ]
      )
      == 1
    )
    assert len(hook._history.steps) == (inputs == "placeholder")
  else:
    assert not [text for text in warnings if "GradientRangesHook" in text]
    assert [record["tensors"]["w:0"]["scale"] for record in records(tmp_path)][:2] == [
      None,
      None,
    ]


def test_hook_that_records_nothing_warns(tmp_path, warnings):
  expected = "GradientRangesHook recorded nothing: no Session run executed the train op"
  train(tmp_path, [FINITE])
  assert not [text for text in warnings if text.startswith(expected)]
  train(tmp_path, [])
  assert len([text for text in warnings if text.startswith(expected)]) == 1


def test_run_continues_damaged_file(tmp_path):
  train(tmp_path, [FINITE] * 3)
  path = tmp_path / "ranges" / "gradient_ranges.jsonl"
  first, second, third = path.read_bytes().splitlines(True)
  second = json.dumps(dict(json.loads(second), run="1", step="2")).encode() + b"\n"
  path.write_bytes(first.replace(b"w:0", b"w\xff0") + second + third[:30] + b"\xff")
  hook = train(tmp_path, [FINITE])
  assert hook._history.steps == [1, 2, 4] and {"w\ufffd0", "w:0"} < set(
    hook._history.tensors
  )
  assert range_history.read(range_history.read_text(str(path))).steps == [1, 2, 4]


def test_file_without_records_is_kept(tmp_path, warnings):
  (tmp_path / "ranges").mkdir()
  path = tmp_path / "ranges" / "gradient_ranges.jsonl"
  path.write_text("not a record\n")
  assert train(tmp_path, [FINITE])._history.steps == [1]
  assert any(
    "none of the 1 lines is a record of GradientRangesHook; they are ignored" in text
    for text in warnings
  )
  assert path.read_text().startswith("not a record\n{")


def test_another_program_replaces_records(tmp_path):
  for index in range(2):
    (tmp_path / str(index)).mkdir()
    hook = train(
      str(tmp_path / str(index)), [FINITE] * 2, hook_dir=str(tmp_path / "ranges")
    )
  assert hook._history.steps == [1, 2] and len(records(tmp_path)) == 4


def summaries(directory):
  """Yields the values of all summaries in the event files of a directory."""
  for path in directory.glob("*tfevents*"):
    for event in tf.train.summary_iterator(str(path)):
      yield from event.summary.value


def test_event_files_contain_histograms(tmp_path):
  train(tmp_path, [FINITE, 4.0 * FINITE])
  histograms = [
    value.histo
    for value in summaries(tmp_path / "ranges")
    if value.tag == "gradient_ranges/w:0"
  ]
  assert len(histograms) == 2
  for histogram, record in zip(histograms, records(tmp_path)):
    exponents = record["tensors"]["w:0"]["exponents"]
    bars = {
      round(limit - 0.5): count
      for limit, count in zip(histogram.bucket_limit, histogram.bucket)
      if count
    }
    assert {str(exponent): count for exponent, count in bars.items()} == exponents
    values = np.repeat(
      [float(exponent) for exponent in exponents], list(exponents.values())
    )
    assert (histogram.num, histogram.sum) == (
      len(values),
      values.sum(),
    ) and histogram.sum_squares == (values**2).sum()
    assert (histogram.min, histogram.max) == (values.min() - 0.5, values.max() + 0.5)


@pytest.mark.usefixtures("graph")
def test_writers_do_not_collide(tmp_path):
  directory = str(tmp_path)
  training, opt, train_op = make_training()
  tf.summary.scalar("loss", training.loss)
  hooks = [
    mp_compat.LossScaleHook(opt, every_n_steps=1, output_dir=directory),
    mp_compat.GradientRangesHook(opt, 1, directory),
  ]
  with tf.train.MonitoredTrainingSession(
    checkpoint_dir=directory,
    save_summaries_steps=1,
    log_step_count_steps=None,
    hooks=hooks,
  ) as sess:
    for _ in range(5):
      sess.run(train_op, {training.x: FINITE})
  tags = collections.Counter(value.tag for value in summaries(tmp_path))
  assert (tags["loss"], tags["loss_scale_hook/scale"], tags["gradient_ranges/w:0"]) == (
    5,
    6,
    5,
  )
  assert [step for step, _ in testing.events(directory)["loss_scale_hook/scale"]] == [
    0,
    1,
    2,
    3,
    4,
    5,
  ]


def test_advice_is_logged_when_it_changes(lines, tmp_path):
  train(tmp_path, [FINITE] * 3 + [FINITE * 2.0**-30] * 3)
  first, second = [
    line
    for line in lines
    if line.startswith("Gradient ranges of GradientDescent at step")
  ]
  assert (
    " at step 1: No loss scaling is needed." in first
    and " at step 4: Use a fixed loss scale of 2**" in second
  )


def test_first_record_not_finite_is_logged(lines, tmp_path):
  """Also where the range of the scales stays the same."""
  train(tmp_path, [FINITE * 2.0**14, FINITE, FINITE * np.nan, FINITE * np.nan])
  assert all("Use a dynamic loss scale" in line for line in lines[-2:])
  assert ["Not finite: 1 of 3" in line for line in lines[-2:]] == [False, True]


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("scale", [0.0, np.inf])
def test_unusable_loss_scale_gives_no_advice(scale, lines, tmp_path):
  """The first record, of a skipped step, tells nothing of the values."""

  class FedLossScale(mp_compat.LossScale):
    """A loss scale that a run can feed."""

    fed = tf.placeholder_with_default(8.0, [])

    def __call__(self):
      return self.fed

    def update(self, grads):
      del grads
      return tf.no_op(), tf.constant(True)

    def get_config(self):
      return {}

  training, loss_scale = Training(), FedLossScale()
  opt = Optimizer(sgd(), loss_scale)
  train_op = opt.minimize(training.loss, training.global_step)
  hook = mp_compat.GradientRangesHook(opt, 1, str(tmp_path))
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    sess.run(train_op, {training.x: FINITE, loss_scale.fed: scale})
    assert not [line for line in lines if "Gradient ranges" in line]
    sess.run(train_op, {training.x: FINITE})
  (line,) = [line for line in lines if "Gradient ranges" in line]
  assert " at step 1: No loss scaling is needed." in line


@pytest.mark.usefixtures("graph")
def test_float32_program_gets_advice(tmp_path):
  """Its gradients are far below float16's range."""
  tf.set_random_seed(0)
  x = tf.placeholder(tf.float32, [4, 8])
  hidden = tf.nn.relu(tf.matmul(x, tf.get_variable("one", [8, 8])))
  loss = 1e-8 * tf.reduce_mean(
    tf.square(tf.matmul(hidden, tf.get_variable("two", [8, 8])) - 1.0)
  )
  opt = Optimizer(sgd(), 1.0)
  train_op = opt.minimize(loss)
  hook = mp_compat.GradientRangesHook(opt, 1, str(tmp_path))
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    sess.run(train_op, {x: np.random.RandomState(0).normal(size=[4, 8])})
  advice = range_history.advise(hook._history)
  assert advice.kind == "fixed" and hook._history.is_complete
  lost = [
    tensor.bounds.low
    for name, tensor in hook._history.tensors.items()
    if "ReluGrad" in name
  ]
  assert lost and 0 < max(lost) <= advice.low


@pytest.mark.parametrize(
  "dtype", [tf.float32, tf.float16], ids=lambda dtype: dtype.name
)
def test_advice_ignores_gradients_of_zero(dtype):
  """A bias before batch normalization, also of an auxiliary loss with a small weight,
  changes nothing.
  """
  advice = []
  for has_bias in (False, True):
    with tf.Graph().as_default():
      x = tf.placeholder(tf.float32, [64, 8])
      with tf.variable_scope(
        "", custom_getter=mp_compat.float32_variable_storage_getter
      ):
        initializer = tf.variance_scaling_initializer(seed=1)

        def layer(value, name, has_bias=has_bias, initializer=initializer):
          product = tf.matmul(value, tf.get_variable(name, [8, 8], dtype, initializer))
          if not has_bias:
            return product
          zeros = tf.zeros_initializer()
          bias = tf.get_variable(name + "_bias", [8], dtype, zeros)
          return tf.nn.bias_add(product, bias)

        def loss(hidden):
          mean, variance = tf.nn.moments(tf.cast(hidden, tf.float32), [0])
          return tf.reduce_mean(
            tf.square(
              tf.nn.relu((tf.cast(hidden, tf.float32) - mean) * tf.rsqrt(variance))
              - 1.0
            )
          )

        hidden = layer(tf.cast(x, dtype), "one")
        total = 8.0 * loss(hidden) + 2.0 * loss(layer(tf.tanh(hidden), "auxiliary"))
      opt = Optimizer(sgd(), 2.0**7)
      train_op = opt.minimize(total)
      hook = mp_compat.GradientRangesHook(opt, 1)
      with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
        sess.run(train_op, {x: np.random.RandomState(0).normal(size=[64, 8])})
      advice.append(range_history.advise(hook._history)[:3])
  assert advice[0][0] == "none" and advice[1] == advice[0]


@pytest.mark.parametrize("in_branch", [None, [True, True, True, False] * 2])
def test_overflow_between_records_bounds_scale(tmp_path, lines, in_branch):
  """The first record is finite, and the scale falls afterwards."""
  xs = [FINITE] + [OVERFLOW] * 3 + [FINITE] * 3
  with testing.control_flow(1):
    hook = train(tmp_path, xs, every_n_steps=100, in_branch=in_branch)
  overflows = [entry for entry in records(tmp_path) if not entry["tensors"]]
  # The scales of the skipped steps; the fourth is not executed in a branch.
  expected = [8.0, 4.0] if in_branch else [8.0, 4.0, 2.0]
  assert [entry["overflow_scale"] for entry in overflows] == expected
  advice = range_history.advise(hook._history)
  assert advice.high == np.log2(expected[-1]) - 1 and advice.kind == "dynamic"
  assert "Between the records, step 1, which overflowed at 2**" in lines[-1]
  # A run that resumes knows it.
  again = train(tmp_path, [FINITE], every_n_steps=100)
  assert range_history.advise(again._history).high == advice.high


def test_overflow_in_record_adds_no_line(tmp_path):
  train(tmp_path, [OVERFLOW] + [FINITE] * 3, every_n_steps=100)
  assert all(entry["tensors"] for entry in records(tmp_path))


@pytest.mark.usefixtures("graph")
def test_fixed_scale_without_check_is_recorded(tmp_path):
  training = Training()
  opt = Optimizer(sgd(), 8.0, skip_nonfinite=False)
  train_op = opt.minimize(training.loss, training.global_step)
  hook = mp_compat.GradientRangesHook(opt, 100, str(tmp_path))
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    for x in [FINITE, OVERFLOW, FINITE]:
      sess.run(train_op, {training.x: x})
  assert hook._history.steps == [1] and hook._history.below_skipped is None


@pytest.mark.usefixtures("graph")
def test_windows_are_recorded_without_scale(tmp_path):
  """The micro-batches of a window may have had several scales."""
  training, opt = Training(), Optimizer(sgd(), 8.0)
  window = mp_compat.GradientAccumulator(opt)
  add_op = window.add(opt.compute_gradients(training.loss))
  train_op = window.apply_gradients(window.mean(), training.global_step)
  hook = mp_compat.GradientRangesHook(opt, 2, str(tmp_path / "ranges"))
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    for x in [FINITE, OVERFLOW, FINITE]:
      sess.run(add_op, {training.x: x})
      sess.run(train_op)
  tensors = [record["tensors"]["w:0"] for record in records(tmp_path)]
  assert [tensor["scale"] for tensor in tensors] == [None, None]
  assert [tensor["largest"] for tensor in tensors] == [FINITE.max()] * 2
  assert hook._overflow_scale is None


FAILURES = {
  "deleted": lambda path: shutil.rmtree(path),
  "replaced by a file": lambda path: (shutil.rmtree(path), open(path, "w").close()),
  "full disk": lambda path: (
    os.remove(path + FILE),
    os.symlink("/dev/full", path + FILE),
  ),
}
FILE = "/gradient_ranges.jsonl"


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize("failure", sorted(FAILURES))
def test_run_goes_on_without_its_files(failure, tmp_path, warnings):
  directory = str(tmp_path / "ranges")
  training, opt, train_op = make_training()
  hook = mp_compat.GradientRangesHook(opt, 1, directory)
  with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
    for index in range(5):
      if index == 2:
        FAILURES[failure](directory)
      sess.run(train_op, {training.x: FINITE})
    np.testing.assert_array_equal(sess.run(training.w), -5 * FINITE)
  assert (
    len(
      [
        text
        for text in warnings
        if "GradientRangesHook cannot write to {}".format(directory) in text
      ]
    )
    == 1
  )
  assert len(hook._history.steps) == 5


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize(
  "hook", [mp_compat.LossScaleHook, mp_compat.GradientRangesHook]
)
def test_run_begins_without_its_directory(hook, tmp_path, warnings):
  (tmp_path / "file").write_text("")
  directory = str(tmp_path / "file" / "logs")
  training, opt, train_op = make_training()
  with tf.train.MonitoredTrainingSession(
    hooks=[hook(opt, 1, output_dir=directory)]
  ) as sess:
    for _ in range(3):
      sess.run(train_op, {training.x: FINITE})
    np.testing.assert_array_equal(sess.run(training.w), -3 * FINITE)
  expected = "{} cannot write to {}, records are missing".format(
    hook.__name__, directory
  )
  assert len([text for text in warnings if text.startswith(expected)]) == 1


@pytest.mark.usefixtures("graph")
def test_summaries_and_hook_have_separate_tags(tmp_path):
  """They count steps differently, so that one tag would show two lines."""
  directory = str(tmp_path)
  training, opt, train_op = make_training()
  mp_compat.loss_scale_summaries(opt)
  hook = mp_compat.LossScaleHook(opt, every_n_steps=1, output_dir=directory)
  with tf.train.MonitoredTrainingSession(
    checkpoint_dir=directory, save_summaries_steps=1, hooks=[hook]
  ) as sess:
    for x in [FINITE, OVERFLOW, FINITE]:
      sess.run(train_op, {training.x: x})
  events = testing.events(directory)
  assert [step for step, _ in events["loss_scale_hook/scale"]] == [0, 1, 2, 3]
  assert len(events["loss_scale/scale"]) == 3


PROGRAM = """
import os
import resource
import numpy as np
import tensorflow.compat.v1 as tf
import mp_compat
tf.disable_v2_behavior()
x = tf.placeholder(tf.float32, [2])
w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
scale = mp_compat.DynamicLossScale(8.0, 50)
opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.GradientDescentOptimizer(1.0), scale)
train_op = opt.minimize(tf.reduce_sum(w * x), tf.train.get_or_create_global_step())
"""
FULL_DISK = """
os.symlink("/dev/null", "gradient_ranges.jsonl")
hooks = [mp_compat.LossScaleHook(opt, 1, output_dir="."), mp_compat.GradientRangesHook(opt, 1, ".")]
with tf.train.MonitoredSession(hooks=hooks) as sess:
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
  for _ in range(50):
    sess.run(train_op, {x: [1.0, 1.0]})
  print(sess.run(w))
"""


@pytest.mark.skipif(
  VERSION == (2, 1),
  reason="flush of TensorFlow 2.1's event writer waits forever after a failure",
)
@pytest.mark.matrix
def test_run_goes_on_without_event_files(tmp_path):
  assert (
    testing.run_python("-c", PROGRAM + FULL_DISK, cwd=str(tmp_path)).stdout
    == "[-50. -50.]\n"
  )


@pytest.mark.usefixtures("graph")
def test_hook_writes_nothing_by_default(lines, monkeypatch, tmp_path):
  training, opt, train_op = make_training()
  monkeypatch.chdir(tmp_path)
  with tf.train.MonitoredTrainingSession(
    hooks=[mp_compat.GradientRangesHook(opt)]
  ) as sess:
    sess.run(train_op, {training.x: FINITE})
  assert not os.listdir(str(tmp_path)) and any(
    "Gradient ranges of GradientDescent at step" in line for line in lines
  )


@pytest.mark.parametrize("every_n_steps", [0, -1, 2.0, True, None])
def test_wrong_every_n_steps_raises(every_n_steps):
  with pytest.raises(
    ValueError,
    match="every_n_steps must be an int of at least 1, but got " + repr(every_n_steps),
  ):
    mp_compat.GradientRangesHook(Optimizer(sgd(), 8.0), every_n_steps)


SOAK = """
def resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1])
random = np.random.RandomState(0)
with tf.train.MonitoredSession(hooks=[mp_compat.GradientRangesHook(opt, 10, ".")]) as sess:
  for step in range(20000):
    sess.run(train_op, {x: random.normal(size=2) * 2.0 ** (step % 20) if step % 100 else [np.inf] * 2})
    if step == 5000:
      before = resident()
print(resident() / before)
"""


@pytest.mark.slow
def test_twenty_thousand_steps(tmp_path):
  done = testing.run_python("-W", "ignore", "-c", PROGRAM + SOAK, cwd=str(tmp_path))
  steps = range_history.read((tmp_path / "gradient_ranges.jsonl").read_text()).steps
  assert len(steps) == 2000 and steps == sorted(set(steps))
  assert float(done.stdout) < 1.1  # the growth of the resident memory
