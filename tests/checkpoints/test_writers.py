"""Tests that checkpoints of every writer and version restore, and that training
continues with the same numbers.
"""

import numpy as np
import pytest

from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import golden_cases
from tests.checkpoints import goldens
from tests.checkpoints.golden_cases import Case
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("graph")


@pytest.mark.parametrize("version, case", goldens.BY_NAME)
def test_all_checkpoints_restore_and_continue(version, case):
  saved = goldens.load_expected_renamed(version, case, "saved")
  saved = {
    name: value for name, value in saved.items() if not name.endswith("bad_steps")
  }
  if case.writer == "plain":
    saved.update(current_loss_scale=np.float32(2.0**15), good_steps=np.int64(0))
  elif case.writer == "contrib":
    counts = [name for name in saved if name.endswith("good_steps")]
    saved.update((name, saved[name].astype(np.int64)) for name in counts)
  restored, after = goldens.restore_and_continue(
    "mp_compat", case, goldens.golden_path(version, case)
  )
  goldens.assert_equal(restored, saved)
  if case.writer in ("tensorflow", "mp_compat"):
    goldens.assert_equal(after, goldens.load_expected_renamed(version, case, "after"))


@pytest.mark.parametrize("version, case", goldens.SESSIONS)
def test_plain_training_restores_checkpoints(version, case):
  saved = goldens.load_expected_renamed(version, case, "saved")
  goldens.assert_equal(
    goldens.restore("plain", case, goldens.golden_path(version, case)),
    {
      name: value
      for name, value in saved.items()
      if not name.endswith(("loss_scale", "_steps"))
    },
  )


@pytest.mark.each_choice
@pytest.mark.parametrize("scope, control_flow", [("", 1), ("head", 2)])
@pytest.mark.parametrize("optimizer", sorted(golden_cases.OPTIMIZERS))
def test_tensorflow_class_continues_our_training(
  optimizer, scope, control_flow, tmp_path
):
  case = Case("mp_compat", optimizer, 1, scope)
  path, converted = str(tmp_path / case.name), str(tmp_path / "converted")
  saved, after = golden_cases.make(case, str(tmp_path))
  to = {1: "tensorflow", 2: "tensorflow_v2"}[control_flow]
  written = checkpoints.convert(path, converted, to)
  has_conditional = optimizer == "adam" and control_flow == 1
  assert written.naming_scheme == ("tensorflow" if has_conditional else "mp_compat")
  for saver, source in [(checkpoints.Saver, path), (tf.train.Saver, converted)]:
    histories = goldens.restore_and_continue(
      "tensorflow", case, source, saver, control_flow
    )
    for values, expected in zip(histories, [saved, after]):
      goldens.assert_equal(goldens.rename_to_ours(values, case), expected)


@pytest.mark.each_choice
@pytest.mark.parametrize(
  "version, case",
  [param for param in goldens.GOLDENS if param.values[1].kind == "objects"],
)
@pytest.mark.parametrize("writer", ["mp_compat", "tensorflow"])
def test_object_based_goldens_continue(version, case, writer):
  training = golden_cases.GoldenTraining(case._replace(writer=writer))
  status = training.checkpoint().restore(goldens.golden_path(version, case))
  with testing.initialized_session() as sess:
    status.assert_consumed().assert_existing_objects_matched().run_restore_ops(sess)
    values = training.run(sess, goldens.FEEDS_AFTER)
  expected = goldens.load_expected_renamed(version, case, "after")
  del values["save_counter"], expected["save_counter"]
  goldens.assert_equal(goldens.rename_to_ours(values, case), expected)


def test_restore_finds_other_name_scope():
  case = Case("contrib", "momentum", 1, "head")
  values = goldens.restore(
    "mp_compat", case._replace(scope=""), goldens.golden_path("1.15", case)
  )
  saved = goldens.load_expected("1.15", case, "saved")
  assert values["current_loss_scale"] == saved["head/loss_scale"] != 2.0**15
  assert (
    values["good_steps"] == saved["head/good_steps"]
    and values["good_steps"].dtype == np.int64
  )


def test_monitored_session_continues_training(tmp_path):
  case = Case("tensorflow", "adam")
  goldens.copy_golden(case, str(tmp_path / "model.ckpt-4"))
  tf.train.update_checkpoint_state(str(tmp_path), "model.ckpt-4")
  training = golden_cases.GoldenTraining(case._replace(writer="mp_compat"))
  step = goldens.load_expected("1.15", case, "saved")["global_step"]
  for expected_step in (step, step + 1):  # from TensorFlow's checkpoint, then from ours
    with tf.train.MonitoredTrainingSession(
      checkpoint_dir=str(tmp_path),
      scaffold=tf.train.Scaffold(saver=checkpoints.Saver()),
      save_checkpoint_steps=1,
      save_summaries_steps=None,
      save_summaries_secs=None,
      log_step_count_steps=None,
    ) as sess:
      assert sess.run(training.global_step) == expected_step
      sess.run(training.train_op, {training.x: golden_cases.FEEDS[0]})
  assert checkpoints.inspect(str(tmp_path)).naming_scheme == "mp_compat"
