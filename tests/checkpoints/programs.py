"""Programs with several optimizers, with and without loss scaling, and ways to restore
their checkpoints.
"""

import random
from typing import NamedTuple, Tuple

import numpy as np

import mp_compat
from mp_compat import checkpoints
from tests import testing
from tests.testing import tf

INCREMENT_PERIOD = 2


class Optimizer(NamedTuple):
  """An optimizer of a program, which trains a variable of its own.

  Attributes:
    kind: One of `KINDS`.
    scaling: "dynamic", "fixed" or "none".
    scope: The name scope in which the gradients are applied.
    conditionals: How many conditionals the program adds before in the same scope.
    steps: How many steps it trains, so that powers differ.
    model: The variable scope of its variable.
    label: Its name, which it has also in programs with more or fewer optimizers; by
      default its number.
  """

  kind: str = "adam"
  scaling: str = "dynamic"
  scope: str = ""
  conditionals: int = 0
  steps: int = 1
  model: str = ""
  label: str = ""


class Program(NamedTuple):
  """A program.

  Attributes:
    optimizers: Its optimizers, in the order of creation.
    control_flow: The version of control flow.
    shares_scopes: Whether optimizers in one name scope enter the same; otherwise the
      second one is in `head_1`.
  """

  optimizers: Tuple[Optimizer, ...]
  control_flow: int = 1
  shares_scopes: bool = True


class Exchange(NamedTuple):
  """A program that writes a checkpoint, and one that restores it.

  Attributes:
    writer: The program that writes.
    reader: The program that restores: the same, or with one more or fewer optimizer.
    saved: The labels of the optimizers whose variables are saved.
  """

  writer: Program
  reader: Program
  saved: Tuple[str, ...]

  @property
  def features(self):
    """Returns what is drawn of the things that can differ."""
    programs = (self.writer, self.reader)
    optimizers = [one for program in programs for one in program.optimizers]
    found = {"kind " + one.kind for one in optimizers}
    found |= {"scaling " + one.scaling for one in optimizers}
    found |= {"model in " + one.model for one in optimizers if one.model}
    found |= {"applied in " + one.scope for one in optimizers if one.scope}
    found.add("control flow {}".format(self.writer.control_flow))
    added = len(self.reader.optimizers) - len(self.writer.optimizers)
    found.add({0: "same", 1: "added", -1: "dropped"}[added])
    if len(self.saved) < len(self.writer.optimizers):
      found.add("part")
    if {one.kind for one in optimizers} == {"sgd"}:
      found.add("sgd alone")
    return found


def random_exchange(seed):
  """Returns an exchange between programs of one to five optimizers."""
  chance = random.Random(seed)
  program = random_program(chance)
  labels = tuple(one.label for one in program.optimizers)
  change = chance.choice(["same"] * 5 + ["added", "dropped", "part"])
  if change == "same" or len(labels) < 2:
    return Exchange(program, program, labels)
  left_out = chance.choice(labels)
  kept = tuple(label for label in labels if label != left_out)
  if change == "part":
    return Exchange(program, program, kept)
  smaller = program._replace(
    optimizers=tuple(one for one in program.optimizers if one.label in kept)
  )
  if change == "added":
    return Exchange(smaller, program, kept)
  return Exchange(program, smaller, labels)


def random_program(chance):
  """Returns a program of one to five optimizers."""
  scopes = chance.choice([[""], ["", "head"], ["head"], ["a", "b"], ["", "cond"]])
  kinds = chance.choice(
    [["adam"] * 5 + ["adamax", "momentum", "sgd", "own"]] * 7 + [["sgd"]]
  )
  models = chance.choice(
    [[""], [""], ["", "cond", "cond_1"], ["cond", "g/cond", "while"]]
  )
  optimizers = []
  for index in range(chance.randint(1, 5)):
    optimizers.append(
      Optimizer(
        chance.choice(kinds),
        chance.choice(["dynamic", "dynamic", "none", "none", "fixed"]),
        chance.choice(scopes),
        chance.choice([0, 0, 0, 1, 2]),
        chance.choice([index + 1, chance.randint(0, 3)]),
        chance.choice(models),
        str(index),
      )
    )
  return Program(
    tuple(optimizers), chance.choice([1, 1, 1, 2]), chance.choice([True, True, False])
  )


class AdamWithOnePower(tf.train.AdamOptimizer):
  """Has `beta1_power` only, as AdaMax."""

  def _create_slots(self, var_list):
    first = min(var_list, key=lambda variable: variable.name)
    self._create_non_slot_variable(self._beta1, "beta1_power", first)
    for variable in var_list:
      self._zeros_slot(variable, "m", self._name)

  def _power(self):
    with tf.init_scope():
      return self._get_non_slot_variable("beta1_power", graph=tf.get_default_graph())

  def _resource_apply_dense(self, grad, var):
    power = self._power()
    m = self.get_slot(var, "m")
    updated = m.assign(m * power + grad * (1 - power))
    return var.assign_sub(updated * 0.1)

  def _finish(self, update_ops, name_scope):
    power = self._power()
    with tf.control_dependencies(update_ops):
      update = power.assign(power * self._beta1)
    return tf.group(*update_ops, update, name=name_scope)


class WithCount(tf.train.GradientDescentOptimizer):
  """Counts its steps in a variable that it creates when it applies gradients."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    self._count = tf.Variable(
      lambda: 5.0, name="own_count", trainable=False, use_resource=True
    )
    applied = super().apply_gradients(grads_and_vars, global_step, name)
    return tf.group(applied, self._count.assign_add(1.0))

  def variables(self):
    return [self._count]


KINDS = {
  "adam": lambda: tf.train.AdamOptimizer(0.1),
  "adamax": lambda: AdamWithOnePower(0.1),
  "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
  "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
  "own": lambda: WithCount(0.1),
}


def wrap(writer, inner, scaling):
  """Returns an optimizer with the loss scaling of a writer."""
  if scaling == "none" or writer == "plain":
    return inner
  if writer in ("contrib", "mp_compat.contrib"):
    if writer == "contrib":
      import tensorflow

      api = tensorflow.contrib.mixed_precision
    else:
      api = mp_compat.contrib.mixed_precision
    if scaling == "fixed":
      manager = api.FixedLossScaleManager(8.0)
    else:
      manager = api.ExponentialUpdateLossScaleManager(2.0**15, INCREMENT_PERIOD)
    return api.LossScaleOptimizer(inner, manager)
  api = mp_compat if writer == "mp_compat" else tf.train.experimental
  scale = 8.0
  if scaling == "dynamic":
    scale = api.DynamicLossScale(increment_period=INCREMENT_PERIOD)
  return api.MixedPrecisionLossScaleOptimizer(inner, scale)


class Training:
  """A program in the default graph.

  `state` has its variables under names that do not depend on the writer: by the
  optimizer that has them, and in the order in which it does.
  """

  def __init__(self, program, writer):
    self.program = program
    self.x = tf.placeholder(tf.float32, [2], "x")
    self.global_step = tf.train.get_or_create_global_step()
    self.train_ops = []
    self.state = {"global_step": self.global_step}
    for index, optimizer in enumerate(program.optimizers):
      self._add(optimizer.label or str(index), optimizer, writer)
    tf.get_default_graph().training = self

  def _add(self, index, optimizer, writer):
    with tf.variable_scope(optimizer.model):
      weights = tf.get_variable(
        "w{}".format(index),
        initializer=np.array([1.0, -2.0], np.float32),
        use_resource=True,
      )
    with tf.name_scope(self._scope(optimizer)):
      for _ in range(optimizer.conditionals):
        tf.cond(self.x[0] > 0, lambda: self.x * 1.0, lambda: self.x * 2.0)
    loss = tf.reduce_sum(self.x * tf.square(weights))
    inner = KINDS[optimizer.kind]()
    opt = wrap(writer, inner, optimizer.scaling)
    with tf.name_scope(self._scope(optimizer)):
      train_op = opt.minimize(loss, var_list=[weights])
    self.train_ops.append(train_op)
    self._note(index, "", [weights])
    own = sorted(
      inner.variables(), key=lambda variable: variable.op.name.split("/")[-1]
    )
    slots = [v for v in own if v.shape.rank]
    powers = [v for v in own if not v.shape.rank]
    self._note(index, "slot", slots)
    self._note(index, "power", powers)
    if opt is not inner and optimizer.scaling == "dynamic":
      if writer == "contrib":
        manager = opt._loss_scale_manager
        scale_and_count = [manager._loss_scale, manager._num_good_steps]
      elif writer == "mp_compat.contrib":
        scale_and_count = opt._loss_scale.variables()[:2]
      else:
        scale = opt._loss_scale
        scale_and_count = [scale._current_loss_scale, scale._num_good_steps]
      self._note(index, "scale", scale_and_count[:1])
      self._note(index, "good", scale_and_count[1:])

  def _scope(self, optimizer):
    """Returns the name scope of an optimizer, which others may have entered before."""
    is_shared = self.program.shares_scopes
    return optimizer.scope + "/" * is_shared if optimizer.scope else None

  def _note(self, index, kind, variables):
    for number, variable in enumerate(variables):
      self.state["{}:{}{}".format(index, kind, number)] = variable

  def train(self, sess):
    """Trains: each optimizer as many steps as it has. The second step of those with a
    dynamic loss scale overflows.
    """
    for optimizer, train_op in zip(self.program.optimizers, self.train_ops):
      for step in range(optimizer.steps):
        overflows = step == 1 and optimizer.scaling == "dynamic"
        sess.run(train_op, {self.x: [np.inf if overflows else 1.0, 0.5]})

  def values(self, sess):
    """Returns the values of `state`."""
    return sess.run(self.state)

  def part(self, labels):
    """Returns the variables of the optimizers with some labels, and the global step."""
    labels = (*labels, "global_step")
    return {
      name: variable
      for name, variable in self.state.items()
      if name.split(":")[0] in labels
    }


def initial_values(program, writer):
  """Returns the values of a program before it trains."""
  with testing.control_flow(program.control_flow), tf.Graph().as_default():
    training = Training(program, writer)
    with testing.initialized_session() as sess:
      return training.values(sess)


def write(program, writer, path, meta=True, saved=None):
  """Trains a program in a new graph and saves it, or the variables of the optimizers
  `saved`; returns the values then, and after it has trained as much again.
  """
  with testing.control_flow(program.control_flow), tf.Graph().as_default():
    training = Training(program, writer)
    with testing.initialized_session() as sess:
      training.train(sess)
      var_list = None if saved is None else list(training.part(saved).values())
      saver = tf.train.Saver(var_list)
      saver.save(sess, path, write_meta_graph=meta, write_state=False)
      values = training.values(sess)
      training.train(sess)
      return values, training.values(sess)


# Each way restores the variables of a training in the default graph, and returns the
# session.


def saver(sess, path):
  checkpoints.Saver().restore(sess, path)


def saver_of(labels):
  """Returns the way of a Saver for the variables of some optimizers."""

  def restore(sess, path):
    sess.run(tf.global_variables_initializer())
    part = tf.get_default_graph().training.part(labels)
    checkpoints.Saver(list(part.values())).restore(sess, path)

  restore.__name__ = "saver_of_part"
  return restore


def name_map(sess, path):
  tf.train.init_from_checkpoint(path, checkpoints.name_map(path))
  sess.run(tf.global_variables_initializer())


def name_map_saver(sess, path):
  sess.run(tf.global_variables_initializer())
  tf.train.Saver(checkpoints.name_map(path)).restore(sess, path)


def assignment_map(sess, path):
  wanted = {variable.op.name: variable for variable in tf.global_variables()}
  tf.train.init_from_checkpoint(path, checkpoints.assignment_map(path, wanted))
  sess.run(tf.global_variables_initializer())


def converted_to(scheme):
  """Returns the way of a checkpoint that was converted to a naming scheme."""

  def restore(sess, path):
    out = "{}-{}".format(path, scheme)
    if not tf.gfile.Exists(out + ".index"):
      checkpoints.convert(path, out, scheme)
    tf.train.Saver().restore(sess, out)

  restore.__name__ = "converted_to_" + scheme
  return restore


def converted_like(sess, path):
  """Converts to the names of a checkpoint that the program itself writes."""
  sess.run(tf.global_variables_initializer())
  example = tf.train.Saver().save(sess, path + "-example", write_state=False)
  checkpoints.convert(path, path + "-like", like=example)
  tf.train.Saver().restore(sess, path + "-like")


def converted_like_without_meta(sess, path):
  sess.run(tf.global_variables_initializer())
  example = tf.train.Saver().save(
    sess, path + "-bare", write_state=False, write_meta_graph=False
  )
  checkpoints.convert(path, path + "-like-bare", like=example)
  tf.train.Saver().restore(sess, path + "-like-bare")


def installed_saver(sess, path):
  tf.train.Saver().restore(sess, path)


def installed_init(sess, path):
  named = {variable.op.name: variable for variable in tf.global_variables()}
  tf.train.init_from_checkpoint(path, named)
  sess.run(tf.global_variables_initializer())


def installed_reader(sess, path):
  reader = tf.train.load_checkpoint(path)
  for variable in tf.global_variables():
    variable.load(reader.get_tensor(variable.op.name), session=sess)


def installed_shared_names(sess, path):
  shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
  sess.run(tf.global_variables_initializer())
  shared = [v for v in tf.global_variables() if v.op.name in shapes]
  if len(shared) < len(tf.global_variables()):
    raise ValueError("beta1_power or another variable was not found.")
  tf.train.Saver(shared).restore(sess, path)


def restore(program, reader, way, path):
  """Builds a program in a new graph and restores it; returns the values then, and after
  it has trained, and the names of its variables.
  """
  with testing.control_flow(program.control_flow), tf.Graph().as_default():
    training = Training(program, reader)
    with testing.session() as sess:
      way(sess, path)
      restored = training.values(sess)
      training.train(sess)
      names = {key: variable.op.name for key, variable in training.state.items()}
      return restored, training.values(sess), names


def assert_same(values, expected):
  """Asserts that the variables that both have are equal, bit for bit; counts of other
  dtypes are compared as numbers.
  """
  different = []
  for name in sorted(set(values) & set(expected)):
    value, other = np.asarray(values[name]), np.asarray(expected[name])
    if ":good" in name:
      other = other.astype(value.dtype)
    if value.tobytes() != other.tobytes():
      different.append((name, value, other))
  assert not different
