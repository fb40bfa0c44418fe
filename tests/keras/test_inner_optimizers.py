"""Tests of custom inner optimizers: with other signatures, attributes and children in a
checkpoint.
"""

import numpy as np
import pytest
import tensorflow

from mp_compat import keras as mp_keras
from tests import testing
from tests.keras import cases as keras_cases
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("eager")
V2 = keras_cases.V2


def make_signatures(cls):
  """Returns subclasses of an optimizer, by the arguments that their `apply_gradients`
  takes.
  """

  class Pairs(cls):
    def apply_gradients(self, grads_and_vars):
      return super().apply_gradients(
        [(2.0 * grad, variable) for grad, variable in grads_and_vars]
      )

  class PairsAndName(cls):
    def apply_gradients(self, grads_and_vars, name=None):
      return super().apply_gradients(
        [(2.0 * grad, variable) for grad, variable in grads_and_vars], name=name
      )

  class Anything(cls):
    def apply_gradients(self, grads_and_vars, **kwargs):
      return super().apply_gradients(
        [(2.0 * grad, variable) for grad, variable in grads_and_vars], **kwargs
      )

  return {"pairs": Pairs, "pairs_and_name": PairsAndName, "anything": Anything}


@pytest.mark.each_choice
@keras_cases.each_family
@pytest.mark.parametrize("signature", ["pairs", "pairs_and_name", "anything"])
def test_older_signature_trains_as_alone(family, signature):
  if (family.name, signature) == ("keras3", "pairs_and_name"):
    pytest.skip("Keras 3's apply_gradients takes no name")
  cls = make_signatures(family.optimizers.SGD)[signature]
  xs = list(testing.feeds(4))
  alone = keras_cases.train(cls(0.1, name="SGD"), xs, sparse=False)
  wrapped = keras_cases.train(
    mp_keras.LossScaleOptimizer(cls(0.1, name="SGD")), xs, sparse=False
  )
  testing.assert_same(wrapped, alone)


@keras_cases.each_family_of_keras_2
# of OptimizerV2, `fit` passes a name
@pytest.mark.parametrize(
  "signature",
  ["pairs_and_name", pytest.param("anything", marks=pytest.mark.matrix)],
)
def test_older_signature_fits_as_alone(family, signature):
  cls = make_signatures(family.optimizers.SGD)[signature]
  # read by `fit` of TensorFlow 2.2 and 2.3
  cls._HAS_AGGREGATE_GRAD = signature == "anything"
  weights = []
  for wrap in (lambda opt: opt, mp_keras.LossScaleOptimizer):
    model = family.keras.Sequential(
      [family.keras.layers.Dense(2, input_shape=(3,), kernel_initializer="ones")]
    )
    model.compile(
      loss=family.keras.losses.MeanSquaredError(), optimizer=wrap(cls(0.125))
    )
    model.fit(np.ones([2, 3], np.float32), np.zeros([2, 2], np.float32), verbose=0)
    weights.append(model.get_weights()[0].tolist())
  assert weights[0] == weights[1] != [[1.0] * 2] * 3


def make_base_tracking_sgd(rate):
  """Returns an optimizer around another, which is its child `base_optimizer` in a
  checkpoint.
  """

  class Around(V2.optimizers.SGD):
    def __init__(self, rate):
      super().__init__(rate)
      self.base = V2.optimizers.Adam(rate)
      self._track_trackable(self.base, "base_optimizer")

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
      return self.base.apply_gradients(grads_and_vars, *args, **kwargs)

  return Around(rate)


def test_inner_base_optimizer_is_saved(tmp_path):

  def make():
    return keras_cases.Run(
      mp_keras.LossScaleOptimizer(make_base_tracking_sgd(0.1), initial_scale=8.0),
      sparse=False,
    )

  def checkpoint(run):
    return tensorflow.train.Checkpoint(
      optimizer=run.optimizer, w=run.w, table=run.table
    )

  def train(run, xs):
    for x in xs:
      run.step(tf.constant(x))
    return dict(
      run.state(), **{v.name: v.numpy() for v in run.optimizer.base.variables()}
    )

  xs = list(testing.feeds(6))
  before = make()
  train(before, xs[:3])
  path = checkpoint(before).save(str(tmp_path / "model"))
  after = make()
  train(after, xs[5:])
  checkpoint(after).restore(path).assert_existing_objects_matched()
  testing.assert_same([train(after, xs[3:])], [train(before, xs[3:])])


def test_missing_hyperparameters_raise():

  class Rateless(V2.optimizers.Optimizer):
    """Has no learning rate, as the MultiOptimizer of TensorFlow Addons."""

    def get_config(self):
      return super().get_config()

  opt = mp_keras.LossScaleOptimizer(Rateless("rateless"))
  for name in ("learning_rate", "lr"):
    with pytest.raises(
      AttributeError, match="has no attribute '{}'; inner optimizer: ".format(name)
    ):
      getattr(opt, name)


def test_private_hyperparameters_are_forwarded():
  opt = mp_keras.LossScaleOptimizer(V2.optimizers.SGD(0.5, decay=1.0, momentum=0.25))
  w = tensorflow.Variable([1.0])
  opt.minimize(lambda: w * w, [w])
  assert (
    opt._decayed_lr(tf.float32).numpy()
    == opt._get_hyper("momentum", tf.float32).numpy()
    == 0.25
  )
  opt._set_hyper("momentum", 0.5)
  assert opt.inner_optimizer.momentum.numpy() == 0.5


@keras_cases.each_family_of_keras_2
def test_slots_have_same_names_as_alone(family):
  names = []
  for wrap in (lambda opt: opt, mp_keras.LossScaleOptimizer):
    run = keras_cases.Run(wrap(family.optimizers.Adam(0.1)), sparse=False)
    run.step(tf.constant([1.0, 2.0, 3.0]))
    variables = getattr(run.optimizer, "inner_optimizer", run.optimizer).variables
    names.append(
      sorted(
        variable.name
        for variable in (variables() if callable(variables) else variables)
      )
    )
  assert names[0] == names[1]


@keras_cases.each_family
def test_two_wrappers_share_optimizer(family):
  inner, w = family.optimizers.SGD(0.125), tensorflow.Variable([1.0])

  def train(scale):
    mp_keras.LossScaleOptimizer(inner, scale).minimize(lambda: 4.0 * w, [w])

  train(2.0)
  # as TensorFlow's class, which has the inner children
  if family.name != "keras3" and keras_cases.VERSION >= (2, 3):
    with pytest.raises(ValueError, match="already wrapped"):
      train(8.0)
    return
  train(8.0)
  assert w.numpy() == 0.0 and int(keras_cases.to_numpy(inner.iterations)) == 2
