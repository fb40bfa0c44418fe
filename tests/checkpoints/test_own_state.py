"""Tests that loss scales with further variables, as docs/how_to.md defines, are saved,
restored and converted.
"""

import ast
import json
import os

import numpy as np
import pytest

import mp_compat
from mp_compat import __main__ as command_line
from mp_compat import checkpoints
from mp_compat import keras as mp_keras
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")

with open(os.path.join(testing.ROOT, "docs", "how_to.md"), encoding="utf-8") as _file:
  (_code,) = [
    block for block in _file.read().split("```") if "class HysteresisLossScale" in block
  ]
_tree = ast.parse(_code.partition("\n")[2])
_tree.body = [node for node in _tree.body if isinstance(node, ast.ClassDef)]
_namespace = {"mp_compat": mp_compat, "tf": tf, "__name__": __name__}
exec(compile(_tree, "docs/how_to.md", "exec"), _namespace)
Hysteresis, Linear = _namespace["HysteresisLossScale"], _namespace["LinearLossScale"]

FINITE = [bool(number) for number in np.random.RandomState(1).rand(40) < 0.6]
STATE = ("current_loss_scale", "good_steps", "hysteresis")


def expected_states(finite, scale=1024.0, period=2, hysteresis=2):
  """Returns the scale, the growth tracker and the hysteresis tracker of Megatron-LM's
  DynamicGradScaler per step.
  """
  growth_tracker, hysteresis_tracker, states = 0, hysteresis, []
  for is_finite in finite:
    if not is_finite:
      growth_tracker = 0
      hysteresis_tracker -= 1
      if hysteresis_tracker <= 0:
        scale = max(scale * 0.5, 1.0)
    else:
      growth_tracker += 1
      if growth_tracker == period:
        growth_tracker, hysteresis_tracker = 0, hysteresis
        scale *= 2.0
    states.append((scale, growth_tracker, max(hysteresis_tracker, 0)))
  return states


class Training:
  """A program that trains one variable with Adam."""

  def __init__(self, make_loss_scale):
    self.x = tf.placeholder(tf.float32, [2])
    self.w = tf.get_variable("w", initializer=np.float32([1.0, 2.0]), use_resource=True)
    self.loss_scale, opt = make_loss_scale(), tf.train.AdamOptimizer(0.1)
    if self.loss_scale is not None:
      opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, self.loss_scale)
    self.train_op = opt.minimize(tf.reduce_sum(self.x * tf.square(self.w)))

  def run(self, sess, finite):
    """Trains; returns the values of the loss scale's variables after each step."""
    states = []
    for is_finite in finite:
      sess.run(self.train_op, {self.x: [0.5 if is_finite else np.inf, 1.0]})
      states.append(
        tuple(
          sess.run(
            [tf.convert_to_tensor(variable) for variable in self.loss_scale.variables()]
          )
        )
      )
    return states


def make_hysteresis():
  return Hysteresis(1024.0, 2)


def save(path, make_loss_scale=make_hysteresis, finite=FINITE[:20]):
  """Trains in a new graph and saves a checkpoint; returns the values of all
  variables.
  """
  with tf.Graph().as_default():
    training = Training(make_loss_scale)
    with testing.initialized_session() as sess:
      training.run(sess, finite)
      tf.train.Saver().save(sess, path)
      return testing.values(sess)


@pytest.mark.parametrize("saver", [tf.train.Saver, checkpoints.Saver])
def test_savers_continue_own_state(saver, tmp_path):
  path, expected = str(tmp_path / "model"), expected_states(FINITE)
  save(path)
  training = Training(make_hysteresis)
  with testing.session() as sess:
    saver().restore(sess, path)
    assert training.run(sess, FINITE[20:]) == expected[20:]


@pytest.mark.each_choice
@pytest.mark.parametrize(
  "make, initial",
  [(make_hysteresis, (1024.0, 0, 2)), (Linear, (1024.0,))],
  ids=["Hysteresis", "Linear"],
)
@pytest.mark.parametrize(
  "make_saved", [mp_compat.DynamicLossScale, lambda: None], ids=["dynamic", "plain"]
)
def test_missing_own_state_is_initialized(make, initial, make_saved, tmp_path, caplog):
  path = str(tmp_path / "model")
  saved = save(path, make_saved, [])
  training = Training(make)
  with testing.session() as sess:
    checkpoints.Saver().restore(sess, path)
    state = testing.values(sess)
    for name in ("w:0", "beta1_power:0"):
      np.testing.assert_array_equal(state[name], saved[name])
    in_checkpoint = saved.get("current_loss_scale:0")
    expected = (
      initial
      if in_checkpoint is None or make is Linear
      else (in_checkpoint, *initial[1:])
    )
    assert tuple(sess.run(training.loss_scale.variables())) == expected
  assert (
    "hysteresis" if make is make_hysteresis else "linear_loss_scale"
  ) in caplog.text


def test_missing_own_state_is_left_out_of_maps(tmp_path, caplog):
  path = str(tmp_path / "model")
  saved = save(path, mp_compat.DynamicLossScale, [])
  Training(make_hysteresis)
  wanted = {variable.op.name: variable for variable in tf.global_variables()}
  tf.train.init_from_checkpoint(path, checkpoints.assignment_map(path, wanted))
  assert "lacks hysteresis, or has another dtype" in caplog.text
  with testing.initialized_session() as sess:
    np.testing.assert_equal(testing.values(sess), dict(saved, **{"hysteresis:0": 2}))


def test_conversion_keeps_own_state_and_does_not_add_it(tmp_path):
  paths = {name: str(tmp_path / name) for name in ("own", "ours", "like", "dynamic")}
  saved = save(paths["own"])
  inspected = checkpoints.inspect(paths["own"])
  assert inspected.state == {name: saved[name + ":0"] for name in STATE[:2]}
  same = checkpoints.convert(paths["own"], paths["ours"], "mp_compat")
  assert same.variables == inspected.variables
  assert tf.train.load_variable(same.path, "hysteresis") == saved["hysteresis:0"]
  save(paths["dynamic"], mp_compat.DynamicLossScale, [])
  with pytest.raises(ValueError, match="Not found in .*: hysteresis. .*Saver instead"):
    checkpoints.convert(paths["dynamic"], paths["like"], like=paths["own"])


def test_command_writes_inspection_as_json(tmp_path):
  path, report = str(tmp_path / "own"), str(tmp_path / "report.json")
  saved = save(path)
  assert command_line.main(["checkpoint", "inspect", path, "--json", report]) == 0
  with open(report) as file:
    found = json.load(file)
  assert (found["path"], found["naming_scheme"]) == (path, "mp_compat")
  assert found["state"] == {name: saved[name + ":0"].item() for name in STATE[:2]}
  assert (
    found["variables"]["w/Adam"] == {"dtype": "float32", "shape": [2]}
    and len(found["variables"]) == 8
  )
  missing = str(tmp_path / "no" / "file")
  assert command_line.main(["checkpoint", "inspect", path, "--json", missing]) == 2


@keras_cases.each_family
@pytest.mark.parametrize(
  "as_function", [pytest.param(False, marks=pytest.mark.matrix), True]
)
def test_keras_continues_own_state(family, as_function, tmp_path):
  def make():
    opt = mp_keras.LossScaleOptimizer(family.optimizers.Adam(0.1), make_hysteresis())
    custom_objects = {"HysteresisLossScale": Hysteresis}
    return type(opt).from_config(opt.get_config(), custom_objects=custom_objects)

  def train(run, finite):
    states = []
    for is_finite in finite:
      run.step(tf.constant([0.5 if is_finite else np.inf, 1.0, 1.0]))
      scale = run.optimizer._loss_scale
      states.append(tuple(keras_cases.to_numpy(scale._weight(name)) for name in STATE))
    return states

  with testing.eager_mode():
    first, second = [keras_cases.Run(make(), as_function) for _ in range(2)]
    expected = expected_states(FINITE)
    assert train(first, FINITE[:20]) == expected[:20]
    path = tf.train.Checkpoint(run=first.optimizer, w=first.w, table=first.table).save(
      str(tmp_path / "model")
    )
    train(second, FINITE[:1])
    tf.train.Checkpoint(run=second.optimizer, w=second.w, table=second.table).restore(
      path
    ).assert_consumed()
    assert train(second, FINITE[20:]) == expected[20:]
