"""Tests of programs that have optimizers with and without loss scaling: each way of
restoring gives every variable its value, or raises an error.
"""

import collections
import contextlib
import json
import random
import re
import shutil

import numpy as np
import pytest

import mp_compat
from mp_compat import checkpoints
from tests import testing
from tests.checkpoints import programs
from tests.checkpoints.programs import Optimizer
from tests.checkpoints.programs import Program
from tests.testing import tf

HAS_CONTRIB = tf.__version__ < "2"

# Such as a generator with loss scaling, and a discriminator without.
SCALED_FIRST = Program((Optimizer(steps=2), Optimizer(scaling="none", steps=4)))
SCALED_LAST = Program((Optimizer(scaling="none", steps=4), Optimizer(steps=2)))
WITH_FIXED = Program(
  (
    Optimizer(scaling="fixed", steps=3),
    Optimizer(steps=2),
    Optimizer(scaling="none", steps=5),
  )
)

CONTINUES, ERROR = "continues", "error"
POWERS = ("beta1_power", "beta2_power")

# By the reader and the way: what happens with the `.meta` file of the checkpoint, and
# without.
FROM_TENSORFLOW = [
  ("mp_compat", programs.saver, CONTINUES, CONTINUES),
  ("mp_compat", programs.name_map, CONTINUES, CONTINUES),
  ("mp_compat", programs.name_map_saver, CONTINUES, CONTINUES),
  ("mp_compat", programs.assignment_map, CONTINUES, CONTINUES),
  ("mp_compat", programs.converted_to("mp_compat"), CONTINUES, ERROR),
  ("mp_compat", programs.converted_like, CONTINUES, ERROR),
  ("tensorflow", programs.saver, CONTINUES, CONTINUES),
  ("tensorflow", programs.converted_to("tensorflow"), ERROR, ERROR),
  ("plain", programs.saver, CONTINUES, ERROR),
  ("plain", programs.converted_to("plain"), CONTINUES, ERROR),
  ("installed", programs.installed_saver, CONTINUES, CONTINUES),
  ("installed", programs.installed_init, CONTINUES, CONTINUES),
  ("installed", programs.installed_reader, CONTINUES, CONTINUES),
  ("installed", programs.installed_shared_names, CONTINUES, CONTINUES),
]
FROM_MP_COMPAT = [
  ("tensorflow", programs.saver, CONTINUES, CONTINUES),
  ("tensorflow", programs.name_map, CONTINUES, CONTINUES),
  ("tensorflow", programs.converted_like, CONTINUES, CONTINUES),
  ("tensorflow", programs.converted_like_without_meta, ERROR, ERROR),
  ("tensorflow", programs.converted_to("tensorflow"), ERROR, ERROR),
]
# After `mp_compat migrate`; docs/checkpoints.md says so.
AFTER_MIGRATE = [
  ("mp_compat", programs.installed_saver, ERROR, ERROR),
  ("mp_compat", programs.installed_init, ERROR, ERROR),
  ("mp_compat", programs.installed_reader, ERROR, ERROR),
]
KEEP_TRAINING = ("mp_compat", "tensorflow", "installed")


def installed_if(is_installed):
  return mp_compat.install() if is_installed else contextlib.nullcontext()


def write(program, writer, path, meta=True):
  with installed_if(writer == "installed"):
    return programs.write(program, writer, path, meta)


def check(program, reader, way, path, saved, after, warnings=()):
  """Restores in a way, and compares the values then and after further steps; does not
  compare those that a warning named.
  """
  with installed_if(reader == "installed"):
    restored, trained, names = programs.restore(program, reader, way, path)
  named = set(re.split("[ ,]+", " ".join(warnings)))
  unnamed = {key: value for key, value in saved.items() if names.get(key) not in named}
  programs.assert_same(restored, unnamed)
  if after is not None:
    programs.assert_same(trained, after)


def check_outcome(program, writer, reader, way, outcome, path, meta):
  saved, after = write(program, writer, path, meta)
  if outcome == CONTINUES:
    is_same_training = {writer, reader} <= set(KEEP_TRAINING)
    check(program, reader, way, path, saved, after if is_same_training else None)
    return
  with pytest.raises((ValueError, tf.errors.OpError)) as raised:
    check(program, reader, way, path, saved, None)
  assert "beta" in str(raised.value)


def list_rows(table, every_commit):
  """Returns the rows of a table for each; those that are not in `every_commit`, by the
  reader, the way and whether there is a `.meta` file, are run every night.
  """
  rows = []
  for reader, way, with_meta, without in table:
    for meta, outcome in [(True, with_meta), (False, without)]:
      row = reader, way.__name__, meta
      name = "{}-{}-{}".format(reader, way.__name__, "meta" if meta else "bare")
      marks = [] if row in every_commit else [pytest.mark.matrix]
      rows.append(pytest.param(reader, way, meta, outcome, marks=marks, id=name))
  return rows


EVERY_COMMIT = [
  ("mp_compat", "saver", False),
  ("mp_compat", "name_map", False),
  ("mp_compat", "converted_to_mp_compat", True),
  ("mp_compat", "converted_to_mp_compat", False),
  ("plain", "saver", True),
  ("installed", "installed_reader", False),
  ("mp_compat", "installed_reader", False),
]


@pytest.mark.parametrize(
  "reader, way, meta, outcome",
  list_rows(FROM_TENSORFLOW + AFTER_MIGRATE, EVERY_COMMIT),
)
def test_scaled_and_unscaled_adam_keep_powers(reader, way, meta, outcome, tmp_path):
  path = str(tmp_path / "model")
  check_outcome(SCALED_FIRST, "tensorflow", reader, way, outcome, path, meta)


@pytest.mark.parametrize("program", [SCALED_LAST, WITH_FIXED], ids=["last", "fixed"])
@pytest.mark.parametrize("reader, way, meta, outcome", list_rows(FROM_TENSORFLOW, []))
def test_other_orders_keep_powers(program, reader, way, meta, outcome, tmp_path):
  path = str(tmp_path / "model")
  check_outcome(program, "tensorflow", reader, way, outcome, path, meta)


@pytest.mark.parametrize(
  "reader, way, meta, outcome",
  list_rows(
    FROM_MP_COMPAT,
    [("tensorflow", "saver", False), ("tensorflow", "converted_to_tensorflow", False)],
  ),
)
def test_way_back_keeps_powers(reader, way, meta, outcome, tmp_path):
  path = str(tmp_path / "model")
  check_outcome(SCALED_FIRST, "mp_compat", reader, way, outcome, path, meta)


@pytest.mark.parametrize(
  "way", [programs.saver, programs.name_map, programs.converted_like_without_meta]
)
def test_completed_map_of_error_restores(way, tmp_path):
  path, out = str(tmp_path / "model"), str(tmp_path / "out")
  saved, _ = write(SCALED_FIRST, "tensorflow", path, meta=False)
  with pytest.raises((ValueError, tf.errors.OpError)) as raised:
    check(SCALED_FIRST, "plain", way, path, saved, None)
  message = str(raised.value)
  names = json.loads(message[message.index("{") :])
  choices = {"cond_1/beta1_power", "beta1_power", "nothing"}
  assert set(names["beta1_power"].split(" or ")) == choices
  assert sorted(names) == sorted([*POWERS, *[name + "_1" for name in POWERS]])
  for name in POWERS:
    names.update({name: "cond_1/" + name, name + "_1": name})
  checkpoints.convert(path, out, "mp_compat", name_map=names)
  check(SCALED_FIRST, "plain", programs.saver, out, saved, None)


@pytest.mark.parametrize("option", ["to", "like"])
@pytest.mark.parametrize("dropped", ["0", "1"])
def test_completed_map_restores_without_dropped_optimizer(dropped, option, tmp_path):
  path, out, like = [str(tmp_path / name) for name in ("model", "out", "like")]
  labelled = [Optimizer(steps=2, label="0"), Optimizer(steps=4, label="1")]
  saved, _ = write(Program(tuple(labelled)), "mp_compat", path)
  smaller = Program(tuple(one for one in labelled if one.label != dropped))
  with pytest.raises(tf.errors.InvalidArgumentError, match="as nothing, nothing_1"):
    check(smaller, "mp_compat", programs.saver, path, saved, None)
  endings = {"0": "", "1": "_1"}
  names = {}
  for name in (*POWERS, "current_loss_scale", "good_steps"):
    names[name] = name + {"0": "_1", "1": ""}[dropped]
    names["nothing_{}".format(len(names))] = name + endings[dropped]
  write(smaller, "mp_compat", like)
  options = {"to": {"to": "mp_compat"}, "like": {"like": like}}[option]
  checkpoints.convert(path, out, name_map=names, **options)
  check(smaller, "mp_compat", programs.saver, out, saved, None)


def test_shared_names_that_may_be_several_raise(tmp_path):
  path = str(tmp_path / "model")
  write(Program((Optimizer(steps=2),)), "tensorflow", path, meta=False)
  with mp_compat.install(), tf.Graph().as_default(), testing.session() as sess:
    programs.Training(SCALED_FIRST, "installed")
    names = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    shared = [each for each in tf.global_variables() if each.op.name in names]
    with pytest.raises(tf.errors.InvalidArgumentError, match="var_list"):
      tf.train.Saver(shared).restore(sess, path)


@pytest.mark.parametrize("optimizers", [[0], [1]], ids=["scaled", "unscaled"])
def test_part_of_variables_is_restored(optimizers, tmp_path):
  path = str(tmp_path / "model")
  saved, _ = write(SCALED_FIRST, "tensorflow", path, meta=False)
  with tf.Graph().as_default(), testing.initialized_session() as sess:
    training = programs.Training(SCALED_FIRST, "mp_compat")
    sess.run(tf.global_variables_initializer())
    names = ["{}:power{}".format(index, n) for index in optimizers for n in (0, 1)]
    checkpoints.Saver([training.state[name] for name in names]).restore(sess, path)
    values = training.values(sess)
  programs.assert_same({name: values[name] for name in names}, saved)


@pytest.mark.each_choice
@pytest.mark.parametrize("reader", ["mp_compat", "plain"])
@pytest.mark.parametrize("meta", [True, False])
def test_powers_of_the_only_saved_optimizer_are_not_those_of_another(
  meta, reader, tmp_path
):
  path = str(tmp_path / "model")
  saved, _ = programs.write(SCALED_FIRST, "tensorflow", path, meta, saved=["1"])
  if meta:
    initial = programs.initial_values(SCALED_FIRST, reader)
    expected = {name: saved[name] for name in saved if name.startswith("1:")}
    check(SCALED_FIRST, reader, programs.name_map, path, {**initial, **expected}, None)
  elif reader == "mp_compat":
    with pytest.raises(ValueError, match="--name-map FILE"):
      programs.restore(SCALED_FIRST, reader, programs.name_map, path)


@pytest.mark.parametrize(
  "api, before", [("mp_compat", True), ("mp_compat", False), ("plain", True)]
)
def test_own_scalar_named_as_power_is_kept(before, api, tmp_path):
  def build(writer):
    def add_own():
      return tf.get_variable("beta1_power", initializer=7.0, use_resource=True)

    one = Program((Optimizer(steps=2),))
    if before:
      own = add_own()
      training = programs.Training(one, writer)
    else:
      training = programs.Training(one, writer)
      own = add_own()
    training.state["own"] = own
    return training

  path = str(tmp_path / "model")
  with testing.control_flow(1), tf.Graph().as_default():
    training = build("tensorflow")
    with testing.initialized_session() as sess:
      training.train(sess)
      saved = training.values(sess)
      tf.train.Saver().save(sess, path, write_meta_graph=False)
  with tf.Graph().as_default(), testing.session() as sess:
    training = build(api)
    saver = checkpoints.Saver()
    if api == "plain":
      with pytest.raises(tf.errors.InvalidArgumentError, match="beta1_power"):
        saver.restore(sess, path)
    else:
      saver.restore(sess, path)
      programs.assert_same(training.values(sess), saved)


def train_monitored(program, writer, folder, scaffold):
  with testing.control_flow(1), tf.Graph().as_default():
    training = programs.Training(program, writer)
    count = tf.assign_add(training.global_step, 1)
    with tf.train.MonitoredTrainingSession(
      checkpoint_dir=folder, scaffold=scaffold(), log_step_count_steps=None
    ) as sess:
      training.train(sess)
      sess.run(count)
      return training.values(sess)


def test_monitored_session_continues(tmp_path):
  def scaffold():
    return tf.train.Scaffold(saver=checkpoints.Saver())

  alone, mixed = str(tmp_path / "alone"), str(tmp_path / "mixed")
  train_monitored(SCALED_FIRST, "tensorflow", alone, tf.train.Scaffold)
  shutil.copytree(alone, mixed)
  latest = tf.train.latest_checkpoint(alone)
  tf.train.update_checkpoint_state(mixed, latest.replace(alone, mixed))
  expected = train_monitored(SCALED_FIRST, "tensorflow", alone, tf.train.Scaffold)
  values = train_monitored(SCALED_FIRST, "mp_compat", mixed, scaffold)
  programs.assert_same(values, expected)


@pytest.mark.skipif(
  not hasattr(tf, "estimator"), reason="TensorFlow 2.16 and later have no Estimator"
)
def test_estimator_continues(tmp_path):
  def train(folder, writer):
    def model_fn(features, mode):
      global_step = tf.train.get_global_step()
      train_ops = []
      for name, scaling in [("w", "dynamic"), ("v", "none")]:
        weights = tf.get_variable(name, initializer=np.ones(2, np.float32))
        opt = programs.wrap(writer, tf.train.AdamOptimizer(0.1), scaling)
        loss = tf.reduce_sum(tf.square(weights) * features[name][0])
        train_ops.append(opt.minimize(loss, var_list=[weights]))
      train_op = tf.group(*train_ops, tf.assign_add(global_step, 1))
      saver = None if writer == "tensorflow" else checkpoints.Saver()
      scaffold = tf.train.Scaffold(saver=saver)
      loss = tf.reduce_sum(features["v"])
      return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, scaffold=scaffold
      )

    # The loss of `w` overflows in two steps, which its optimizer skips.
    features = {"w": np.array([1, np.inf, np.inf, 1], np.float32), "v": np.ones(4, "f")}
    data = tf.data.Dataset.from_tensor_slices
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path / folder))
    estimator.train(lambda: data(features).batch(1))
    reader = tf.train.load_checkpoint(estimator.latest_checkpoint())
    return {name: reader.get_tensor(name) for name in ("w", "w/Adam", "v", "v/Adam")}

  with testing.control_flow(1):
    train("alone", "tensorflow")
    train("mixed", "tensorflow")
    programs.assert_same(train("mixed", "mp_compat"), train("alone", "tensorflow"))


READERS = {
  "mp_compat": [
    programs.saver,
    programs.name_map,
    programs.name_map_saver,
    programs.assignment_map,
    programs.converted_to("mp_compat"),
    programs.converted_like,
    programs.converted_like_without_meta,
  ],
  "tensorflow": [
    programs.saver,
    programs.name_map,
    programs.converted_to("tensorflow"),
    programs.converted_like,
    programs.converted_like_without_meta,
  ],
  "plain": [
    programs.saver,
    programs.name_map_saver,
    programs.converted_to("plain"),
    programs.converted_like,
  ],
  "installed": [
    programs.installed_saver,
    programs.installed_init,
    programs.installed_reader,
    programs.installed_shared_names,
  ],
}
if HAS_CONTRIB:
  ways = [programs.saver, programs.converted_to("contrib"), programs.converted_like]
  READERS.update({"contrib": ways, "mp_compat.contrib": ways})


def is_compared(name, writer, reader, way):
  """Returns whether a way restores a variable: only a Saver of this package converts the
  counts of `tf.contrib`, int32, and only a conversion.
  """
  has_other_counts = ("contrib" in writer) != ("contrib" in reader)
  converts = way is programs.saver or "converted" in way.__name__
  return ":good" not in name or not has_other_counts or converts


@pytest.mark.parametrize(
  "seed",
  [
    pytest.param(seed, marks=[pytest.mark.matrix] if seed else []) for seed in range(60)
  ],
)
def test_random_program_restores_or_raises(seed, tmp_path, warnings):
  exchange = programs.random_exchange(seed)
  chance = random.Random(seed)
  writers = ["tensorflow", "mp_compat", "plain", "installed"]
  if HAS_CONTRIB and exchange.writer.control_flow == 1:
    writers.append("contrib")
  writer = chance.choice(writers)
  (tmp_path / "written").mkdir()
  meta = chance.choice([True, False])
  path = str(tmp_path / "written" / "model")
  with installed_if(writer == "installed"):
    values, _ = programs.write(exchange.writer, writer, path, meta, exchange.saved)
  pairs = [(reader, way) for reader, ways in READERS.items() for way in ways]
  if exchange.writer.control_flow == 2:  # in which contrib's class fails
    pairs = [pair for pair in pairs if pair[0] != "contrib"]
  drawn = chance.sample(pairs, 4)
  if "same" not in exchange.features or "part" in exchange.features:
    drawn.append(("mp_compat", programs.name_map))
    labels = {one.label for one in exchange.reader.optimizers}
    for part in (labels & set(exchange.saved), labels - set(exchange.saved)):
      if part:
        drawn.append(("mp_compat", programs.saver_of(part)))
    drawn.append(("plain", programs.name_map))
    # `convert --to` writes all names, and does not know the reader.
    drawn = [
      (reader, way)
      for reader, way in drawn
      if "converted_to" not in way.__name__ and not is_plain(exchange, writer, reader)
    ]
  for number, (reader, way) in enumerate(drawn):
    folder = shutil.copytree(str(tmp_path / "written"), str(tmp_path / str(number)))
    expected = expect(exchange, writer, reader, way, values)
    warnings.clear()
    try:
      check(exchange.reader, reader, way, folder + "/model", expected, None, warnings)
    except (ValueError, tf.errors.OpError) as error:
      assert not must_restore(exchange, writer, reader, way), (reader, way, error)


def is_plain(exchange, writer, reader):
  """Returns whether neither the checkpoint nor the graph shows loss scaling. Names are
  TensorFlow's then, which do not tell which optimizer was added or dropped.
  """
  in_checkpoint = {one.scaling for one in exchange.writer.optimizers}
  in_graph = {one.scaling for one in exchange.reader.optimizers}
  if "contrib" not in writer:
    in_checkpoint.discard("fixed")
  if reader == "tensorflow":
    in_graph.discard("fixed")
  return (writer == "plain" or in_checkpoint <= {"none"}) and (
    reader == "plain" or in_graph <= {"none"}
  )


def expect(exchange, writer, reader, way, values):
  """Returns the values of a reader: those that were saved, or else initial ones."""
  with installed_if(reader == "installed"):
    expected = programs.initial_values(exchange.reader, reader)
  for name, value in values.items():
    if name in expected and name.split(":")[0] in (*exchange.saved, "global_step"):
      expected[name] = value
  return {
    name: value
    for name, value in expected.items()
    if is_compared(name, writer, reader, way)
  }


def must_restore(exchange, writer, reader, way):
  """Returns whether an error is wrong: what both programs build, and in which order, is
  known.
  """
  is_known = reader in ("mp_compat", "installed") and way in (
    programs.saver,
    programs.installed_saver,
  )
  optimizers = exchange.writer.optimizers
  has_user_scope = any(one.scope == "cond" or one.kind == "own" for one in optimizers)
  return (
    is_known
    and "same" in exchange.features
    and "part" not in exchange.features
    and writer in ("mp_compat", "plain", "tensorflow")
    and not (has_user_scope and writer == "tensorflow")
  )


def test_random_exchanges_have_all_features():
  counts = collections.Counter()
  for seed in range(60):
    counts.update(programs.random_exchange(seed).features)
  expected = ["same", "added", "dropped", "part", "sgd alone"]
  expected += ["control flow 1", "control flow 2"]
  expected += ["kind " + kind for kind in programs.KINDS]
  expected += ["scaling " + scaling for scaling in ("dynamic", "fixed", "none")]
  expected += ["model in " + scope for scope in ("cond", "cond_1", "g/cond", "while")]
  expected += ["applied in " + scope for scope in ("a", "b", "head", "cond")]
  assert set(counts) == set(expected) and min(counts.values()) >= 3, counts


@pytest.mark.usefixtures("control_flow")
def test_scopes_restore_beside_powers_of_unknown_order(tmp_path, caplog):
  path = str(tmp_path / "model")
  write(SCALED_FIRST, "tensorflow", path, meta=False)
  with tf.Graph().as_default():
    programs.Training(SCALED_FIRST, "plain")
    assert checkpoints.assignment_map(path, {"/": "/"}) == {"/": "/"}
  assert "A map of scopes does not initialize beta1_power" in caplog.text
