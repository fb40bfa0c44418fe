# SPDX-License-Identifier: Apache-2.0
"""Tensorpack: a ModelDesc with batch normalization, a gradient processor, its trainer,
ModelSaver and SaverRestore.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import tensorpack
  from tensorpack.tfutils import gradproc
  from tensorpack.tfutils import optimizer

  random = np.random.RandomState(1)
  points = [
    [image, label]
    for image, label in zip(
      random.normal(size=[64, 8, 8, 1]).astype(np.float32),
      random.randint(0, 3, [64]).astype(np.int32),
    )
  ]

  class Model(tensorpack.ModelDesc):
    def inputs(self):
      return [
        tf.TensorSpec([None, 8, 8, 1], tf.float32, "image"),
        tf.TensorSpec([None], tf.int32, "label"),
      ]

    def build_graph(self, image, label):
      hidden = tensorpack.Conv2D("conv", image, 4, 3, activation=tensorpack.BNReLU)
      logits = tensorpack.FullyConnected("fc", hidden, 3)
      return tf.losses.sparse_softmax_cross_entropy(label, logits)

    def optimizer(self):
      rate = tf.get_variable("learning_rate", initializer=0.01, trainable=False)
      return optimizer.apply_grad_processors(
        tools.wrap(tf.train.MomentumOptimizer(rate, 0.9)),
        [gradproc.GlobalNormClip(1.0)],
      )

  tf.set_random_seed(1)
  latest = tf.train.latest_checkpoint(directory)
  data = tensorpack.RepeatedData(
    tensorpack.BatchData(tensorpack.DataFromList(points, shuffle=False), 16), -1
  )
  epoch = 2 if latest else 1
  tensorpack.launch_train_with_config(
    tensorpack.TrainConfig(
      model=Model(),
      data=tensorpack.FeedInput(data),
      callbacks=[tensorpack.ModelSaver(checkpoint_dir=directory)],
      extra_callbacks=[],
      monitors=[],
      steps_per_epoch=comparison.STEPS,
      starting_epoch=epoch,
      max_epoch=epoch,
      session_init=tensorpack.SaverRestore(latest) if latest else None,
    ),
    tensorpack.SimpleTrainer(),
  )
