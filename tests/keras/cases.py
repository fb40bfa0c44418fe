"""The families of Keras optimizers in the installed TensorFlow, and a recorded training
run for each optimizer.
"""

import importlib
import re

import numpy as np
import pytest
import tensorflow

from mp_compat import keras as mp_keras
from tests import testing
from tests.testing import tf

VERSION = tuple(int(part) for part in tensorflow.__version__.split(".")[:2])


class Family:
  """One kind of Keras optimizers (`optimizers.SGD`, ...).

  `native` is Keras's own loss scale wrapper for them; `counts_skipped` is whether its
  skipped steps increment `iterations`. `classes` are those of the optimizers, by name.
  """

  def __init__(self, name, keras, optimizers):
    self.name, self.keras, self.optimizers = name, keras, optimizers
    others = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap")
    found = sorted(vars(optimizers).items())
    self.classes = {
      name: cls for name, cls in found if isinstance(cls, type) and name not in others
    }
    self.counts_skipped = name != "keras3" and VERSION >= (2, 3)
    module = keras.optimizers if name == "keras3" else keras.mixed_precision
    self.native = (
      getattr(module, "LossScaleOptimizer", None)
      or module.experimental.LossScaleOptimizer
    )

  def __repr__(self):
    return self.name

  def native_dynamic(self, optimizer, initial_scale, growth_steps):
    """Returns the optimizer in Keras's own wrapper with a dynamic loss scale."""
    if VERSION < (2, 4):
      return self.native(
        optimizer, testing.native.DynamicLossScale(initial_scale, growth_steps)
      )
    return self.native(
      optimizer, initial_scale=initial_scale, dynamic_growth_steps=growth_steps
    )


def _find_families():
  keras = tensorflow.keras
  if VERSION < (2, 11):
    return [Family("v2", keras, keras.optimizers)]
  if VERSION < (2, 16):
    return [
      Family("v2", keras, keras.optimizers.legacy),
      Family("newer", keras, keras.optimizers),
    ]
  keras_2 = importlib.import_module("tf_keras")
  return [
    Family("v2", keras_2, keras_2.optimizers.legacy),
    Family("newer", keras_2, keras_2.optimizers),
    Family("keras3", keras, keras.optimizers),
  ]


FAMILIES = _find_families()
KERAS_2 = [family for family in FAMILIES if family.name != "keras3"]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=repr)
newest_family = pytest.mark.parametrize(  # by default
  "family",
  [
    pytest.param(family, marks=[pytest.mark.matrix] * (family is not FAMILIES[-1]))
    for family in FAMILIES
  ],
  ids=repr,
)
each_family_of_keras_2 = pytest.mark.parametrize("family", KERAS_2, ids=repr)
needs_keras_3 = pytest.mark.skipif(
  VERSION < (2, 16), reason="TensorFlow uses Keras 3 from 2.16 on"
)
(V2,) = [family for family in FAMILIES if family.name == "v2"]


def wrap(optimizer, initial_scale=8.0):
  """Returns the optimizer in our wrapper, whose loss scale doubles after two steps."""
  return mp_keras.LossScaleOptimizer(
    optimizer, initial_scale=initial_scale, dynamic_growth_steps=2
  )


OPTIMIZERS = {
  "SGD": lambda optimizers: optimizers.SGD(0.1, momentum=0.9),
  "Adam": lambda optimizers: optimizers.Adam(0.1),
  "Adagrad": lambda optimizers: optimizers.Adagrad(0.1),
}


def make_averaging_sgd(optimizers):
  """Returns an SGD with a moving average of each variable, which starts with the
  variable in iteration 0.
  """
  if optimizers is not V2.optimizers:
    return optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

  class AveragingSGD(optimizers.SGD):
    """Applies dense gradients only."""

    def _create_slots(self, var_list):
      super()._create_slots(var_list)
      for variable in var_list:
        self.add_slot(variable, "average")

    def _resource_apply_dense(self, grad, var, *args, **kwargs):
      applied, average = (
        super()._resource_apply_dense(grad, var, *args, **kwargs),
        self.get_slot(var, "average"),
      )
      with tf.control_dependencies([] if applied is None else [applied]):
        is_first = tf.equal(self.iterations, 0)
        return average.assign(
          tf.where_v2(
            is_first, var.read_value(), 0.5 * average + 0.5 * var.read_value()
          )
        )

  return AveragingSGD(0.1)


def to_numpy(value):
  """Returns the value of a variable, a tensor or a number as an array."""
  return np.array(value.numpy() if hasattr(value, "numpy") else value)


def scale_of(optimizer):
  """Returns the current loss scale of Keras's own wrapper or of ours, a float32
  scalar.
  """
  scale = (
    optimizer.loss_scale
    if hasattr(optimizer, "loss_scale")
    else optimizer.dynamic_scale
  )
  return scale() if callable(scale) else scale


class Run:
  """Trains the variables w [3] and table [4, 3] in eager mode or in a function.

  If `sparse`, rows of the table are looked up, so that its gradient is sparse.
  """

  def __init__(self, optimizer, as_function=False, sparse=True):
    self.w = tensorflow.Variable([1.0, -2.0, 3.0], name="w")
    self.table = tensorflow.Variable(np.ones([4, 3], np.float32), name="table")
    self.optimizer, self._sparse = optimizer, sparse
    self.step = tensorflow.function(self._step) if as_function else self._step

  def loss(self, x):
    rows = tf.gather(self.table, [1, 3, 1]) if self._sparse else self.table[1:]
    return tf.reduce_sum(x * self.w * self.w) + tf.reduce_sum(rows * x)

  def _step(self, x):
    opt = self.optimizer
    # of Keras 3, whose `apply_gradients` unscales
    scale_loss = getattr(opt, "scale_loss", lambda loss: loss)
    with tf.GradientTape() as tape:
      loss = getattr(opt, "get_scaled_loss", scale_loss)(self.loss(x))
    grads = tape.gradient(loss, [self.w, self.table])
    if hasattr(opt, "get_unscaled_gradients"):
      grads = opt.get_unscaled_gradients(grads)
    opt.apply_gradients(zip(grads, [self.w, self.table]))

  def state(self):
    """Returns everything that a step can change, as {name: array}."""
    inner = getattr(
      self.optimizer,
      "inner_optimizer",
      getattr(self.optimizer, "_optimizer", self.optimizer),
    )
    variables = inner.variables() if callable(inner.variables) else inner.variables
    # Most names begin with the optimizer's name, in the native classes below another.
    # Slots that are restored before the first step do not.
    prefix = re.compile(
      r"^((cond|loss_scale_optimizer)\w*/)?((adam|adagrad|sgd)\w*/)?", re.IGNORECASE
    )
    named = {
      prefix.sub("", getattr(variable, "path", variable.name)): to_numpy(variable)
      for variable in variables
    }
    assert len(named) == len(variables)
    return dict(named, w=to_numpy(self.w), table=to_numpy(self.table))


def train(optimizer, xs, **run):
  """Trains on the inputs `xs`; returns the state after every step."""
  run = Run(optimizer, **run)
  history = []
  for x in xs:
    run.step(tf.constant(x))
    history.append(run.state())
  return history
