# SPDX-License-Identifier: Apache-2.0
"""AdaNet: two candidates an iteration and their mixture weights; the second process
begins the second iteration.
"""

import comparison
import numpy as np


def train(tools, directory):
  import adanet
  import tensorflow.compat.v1 as tf

  random = np.random.RandomState(1)
  inputs, labels = (
    random.normal(size=[64, 4]).astype(np.float32),
    random.normal(size=[64, 1]).astype(np.float32),
  )

  class Builder(adanet.subnetwork.Builder):
    def __init__(self, layers):
      self._layers = layers

    @property
    def name(self):
      return "layers{}".format(self._layers)

    def build_subnetwork(
      self,
      features,
      labels,
      logits_dimension,
      training,
      iteration_step,
      summary,
      previous_ensemble=None,
    ):
      hidden, init = features["x"], tf.glorot_uniform_initializer(self._layers)
      for _ in range(self._layers):
        hidden = tf.layers.dense(hidden, 8, tf.nn.relu, kernel_initializer=init)
      logits = tf.layers.dense(hidden, logits_dimension, kernel_initializer=init)
      return adanet.Subnetwork(hidden, logits, float(self._layers), {})

    def build_subnetwork_train_op(
      self,
      subnetwork,
      loss,
      var_list,
      labels,
      iteration_step,
      summary,
      previous_ensemble,
    ):
      return tools.wrap(tf.train.MomentumOptimizer(0.01, 0.9)).minimize(
        loss, var_list=var_list
      )

  ensembler = adanet.ensemble.ComplexityRegularizedEnsembler(
    optimizer=lambda: tools.wrap(tf.train.GradientDescentOptimizer(0.01)),
    adanet_lambda=0.001,
    mixture_weight_type=adanet.ensemble.MixtureWeightType.SCALAR,
  )
  generator = adanet.subnetwork.SimpleGenerator([Builder(1), Builder(2)])
  estimator = adanet.Estimator(
    tf.estimator.RegressionHead(),
    generator,
    3 * comparison.STEPS // 2,
    ensemblers=[ensembler],
    model_dir=directory,
    config=tf.estimator.RunConfig(tf_random_seed=1),
  )
  estimator.train(comparison.batches({"x": inputs}, labels), steps=comparison.STEPS)
