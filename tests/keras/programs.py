"""Generates small Keras programs for test_programs.py.

`check(Program(...), folder)` trains a program in the wrapper and asserts that it ends
as in Keras's own wrapper, where that works, and as without loss scaling and without the
steps that overflow. A `Program` holds plain values, so its repr is valid Python.
"""

import os
from typing import NamedTuple, Tuple

from hypothesis import strategies as st
import numpy as np
import tensorflow

from mp_compat import keras as mp_keras
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

STEPS, SAVED_AFTER = 6, 3
MAY_OVERFLOW = (0, 1, 3, 4)  # so that steps are applied before and after saving
SCALE, GROWTH = 2.0**15, 3


class Program(NamedTuple):
  """A training program of `STEPS` steps."""

  family: str
  optimizer: str = "SGD"
  way: str = "minimize"  # of training, in `WAYS`
  clip: str = ""  # an argument of the inner optimizer
  averages: bool = False  # of the variables, by the inner optimizer
  accumulates: bool = False  # gradients of two steps, by the inner optimizer
  sparse: bool = False  # whether a gradient is sparse
  overflows: Tuple[int, ...] = ()  # steps
  saved: str = ""  # "checkpoint" or "model": saved and loaded after `SAVED_AFTER` steps


OPTIMIZERS = {
  "SGD": {"momentum": 0.5},
  "Adam": {},
  "Adagrad": {},
  "RMSprop": {"centered": True},
}


def make_optimizer(program, family):
  arguments = dict(OPTIMIZERS[program.optimizer])
  if program.clip:
    arguments[program.clip] = 0.5
  if program.averages:
    arguments.update(use_ema=True, ema_momentum=0.5)
  if program.accumulates:
    arguments.update(gradient_accumulation_steps=2)
  return getattr(family.optimizers, program.optimizer)(0.1, **arguments)


def variables_of(optimizer):
  """Returns the inner optimizer's variables."""
  inner = getattr(optimizer, "inner_optimizer", getattr(optimizer, "_optimizer", None))
  inner = optimizer if inner is None else inner
  return list(inner.variables() if callable(inner.variables) else inner.variables)


def values_of(optimizer):
  """Returns the values of the inner optimizer's variables."""
  return [
    keras_cases.to_numpy(variable).tolist() for variable in variables_of(optimizer)
  ]


class Loop:
  """Trains two variables with a custom loop."""

  def __init__(self, program, family, make):
    self._way, optimizer = program.way, make()
    self.run = keras_cases.Run(
      optimizer, as_function=program.way == "function", sparse=program.sparse
    )
    if family.name == "keras3":
      optimizer.build([self.run.w, self.run.table])
    self._compute = tensorflow.function(self._compute_gradients)
    self._apply = tensorflow.function(self._apply_gradients)

  def _compute_gradients(self, x):
    opt, variables = self.run.optimizer, [self.run.w, self.run.table]
    scale = getattr(opt, "scale_loss", getattr(opt, "get_scaled_loss", lambda x: x))
    with tf.GradientTape() as tape:
      loss = scale(self.run.loss(x))
    grads = tape.gradient(loss, variables)
    if not hasattr(opt, "scale_loss") and hasattr(opt, "get_unscaled_gradients"):
      grads = opt.get_unscaled_gradients(grads)
    return grads

  def _apply_gradients(self, grads):
    self.run.optimizer.apply_gradients(zip(grads, [self.run.w, self.run.table]))

  def train(self, xs):
    for x in map(tf.constant, xs):
      if self._way == "minimize" and hasattr(self.run.optimizer, "minimize"):
        variables = [self.run.w, self.run.table]
        self.run.optimizer.minimize(lambda x=x: self.run.loss(x), variables)
      elif self._way == "two functions":
        self._apply(self._compute(x))
      else:
        self.run.step(x)

  def checkpoint(self):
    return tensorflow.train.Checkpoint(
      optimizer=self.run.optimizer, w=self.run.w, table=self.run.table
    )

  def state(self):
    weights = [variable.numpy().tolist() for variable in (self.run.w, self.run.table)]
    return weights + values_of(self.run.optimizer)


class Fit:
  """Trains a model with `fit`."""

  def __init__(self, program, family, make):
    keras, options, optimizer = family.keras, {}, make()
    layers = [keras.layers.Dense(2, input_shape=(3,), kernel_initializer="ones")]
    self.model = keras.Sequential(layers)
    if family.name == "keras3":
      options.update(jit_compile=False)
      optimizer.build(self.model.trainable_variables)
    if program.way == "eager fit":
      options.update(run_eagerly=True)
    self.options = options
    self.model.compile(optimizer, "mse", **options)

  def train(self, xs):
    x, y = np.stack(xs), np.ones([len(xs), 2], np.float32)
    self.model.fit(x, y, batch_size=1, shuffle=False, verbose=0)

  def checkpoint(self):
    return tensorflow.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)

  def state(self):
    weights = [weight.tolist() for weight in self.model.get_weights()]
    return weights + values_of(self.model.optimizer)


class Session:
  """Trains two variables in a graph with `get_updates`."""

  def __init__(self, program, family, make):
    self._graph = tf.Graph()
    with self._graph.as_default():
      self._x = tf.placeholder(tf.float32, [3])
      variables = [
        tf.Variable([1.0, -2.0, 3.0], use_resource=True),
        tf.Variable(np.ones([4, 3], np.float32), use_resource=True),
      ]
      w, table = variables
      rows = tf.gather(table, [1, 3, 1]) if program.sparse else table[1:]
      loss = tf.reduce_sum(self._x * w * w) + tf.reduce_sum(rows * self._x)
      optimizer = make()
      self._train_ops = optimizer.get_updates(loss, variables)
      self._state = variables + variables_of(optimizer)
      self._session = testing.session()
      self._session.run(tf.global_variables_initializer())

  def train(self, xs):
    for x in xs:
      self._session.run(self._train_ops, {self._x: x})

  def state(self):
    values = [value.tolist() for value in self._session.run(self._state)]
    self._session.close()
    return values


WAYS = {
  "minimize": Loop,
  "eager": Loop,
  "function": Loop,
  "two functions": Loop,
  "fit": Fit,
  "eager fit": Fit,
  "session": Session,
}


def save_and_load(program, family, trainer, make, folder):
  """Returns a new trainer that goes on as `trainer` does."""
  if program.saved == "checkpoint":
    path = trainer.checkpoint().save(os.path.join(folder, "checkpoint"))
    after = make()
    after.checkpoint().restore(path)
    return after
  path = os.path.join(
    folder, "model" + (".keras" if family.name == "keras3" else ".h5")
  )
  trainer.model.save(path)
  # `isinstance` is also True for Keras's own wrapper.
  is_ours = mp_keras.LossScaleOptimizer in type(trainer.model.optimizer).__mro__
  objects = mp_keras.CUSTOM_OBJECTS if is_ours else None
  model = family.keras.models.load_model(path, custom_objects=objects)
  model.compile(model.optimizer, "mse", **trainer.options)
  trainer.model = model
  return trainer


def train(program, family, wrap, xs, folder):
  """Returns the values of the variables of the model and of the inner optimizer."""

  def make():
    return WAYS[program.way](
      program, family, lambda: wrap(make_optimizer(program, family))
    )

  trainer = make()
  trainer.train([x for x in xs[:SAVED_AFTER] if x is not None])
  if program.saved:
    trainer = save_and_load(program, family, trainer, make, folder)
  trainer.train([x for x in xs[SAVED_AFTER:] if x is not None])
  return trainer.state()


def is_trained_by_native(program):
  """Returns whether Keras's own wrapper trains a program, with the same numbers."""
  version = keras_cases.VERSION
  if program.clip and version < (2, 4):  # It refuses.
    return False
  if program.clip == "global_clipnorm":  # docs/keras.md
    return False
  if program.sparse and version < (2, 3):  # It makes gradients dense.
    return False
  if program.saved == "model" and program.family == "newer":
    return False  # It loads the model with a new optimizer: docs/keras.md.
  return not (program.saved and version < (2, 3))  # It cannot be loaded.


def check(program, folder):
  """Asserts that the wrapper trains as its references."""
  (family,) = [each for each in keras_cases.FAMILIES if each.name == program.family]
  xs = list(testing.feeds(STEPS, program.overflows))

  def wrap(optimizer, **arguments):
    return mp_keras.LossScaleOptimizer(
      optimizer, initial_scale=SCALE, dynamic_growth_steps=GROWTH, **arguments
    )

  def wrap_natively(optimizer):
    return family.native_dynamic(optimizer, SCALE, GROWTH)

  if is_trained_by_native(program):
    ours = train(program, family, wrap, xs, folder)
    theirs = train(program, family, wrap_natively, xs, folder)
    assert ours == theirs, "as Keras's own wrapper"
  applied = [None if i in program.overflows else x for i, x in enumerate(xs)]
  alone = train(program, family, lambda opt: opt, applied, folder)
  ours = train(
    program, family, lambda opt: wrap(opt, count_skipped_steps=False), xs, folder
  )
  assert ours == alone, "as the inner optimizer without the steps that overflow"


def is_possible(program):
  """Returns whether Keras can run a program without loss scaling."""
  version, is_v2 = keras_cases.VERSION, program.family == "v2"
  is_fit = program.way in ("fit", "eager fit")
  impossible = [
    program.way == "session" and (not is_v2 or program.saved),
    program.way == "eager fit" and version < (2, 2),
    program.clip == "global_clipnorm" and version < (2, 4),
    program.averages and is_v2,
    program.accumulates and program.family != "keras3",
    program.accumulates and program.sparse,
    program.sparse and (is_fit or program.clip),
    program.saved == "model" and not is_fit,
  ]
  return not any(impossible)


def programs():
  """Returns a strategy for programs that this TensorFlow can run."""
  overflows = st.lists(st.sampled_from(MAY_OVERFLOW), unique=True, max_size=4)
  return st.builds(
    Program,
    st.sampled_from([family.name for family in keras_cases.FAMILIES]),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(WAYS)),
    st.sampled_from(["", "clipnorm", "clipvalue", "global_clipnorm"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    overflows.map(lambda steps: tuple(sorted(steps))),
    st.sampled_from(["", "checkpoint", "model"]),
  ).filter(is_possible)
