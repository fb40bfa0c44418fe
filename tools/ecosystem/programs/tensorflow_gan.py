# SPDX-License-Identifier: Apache-2.0
"""TF-GAN: a GANEstimator, whose two optimizers have a loss scale each, trained in turns
by its hooks.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import tensorflow_gan as tfgan

  random = np.random.RandomState(1)
  noise, images = (
    random.normal(size=[64, size]).astype(np.float32) for size in (4, 64)
  )

  def generator_fn(noise):
    hidden = tf.reshape(tf.layers.dense(noise, 4 * 4 * 4, tf.nn.relu), [-1, 4, 4, 4])
    return tf.layers.conv2d_transpose(hidden, 1, 3, strides=2, padding="same")

  def discriminator_fn(images, unused_conditioning):
    hidden = tf.layers.conv2d(images, 4, 3, strides=2, activation=tf.nn.leaky_relu)
    return tf.layers.dense(tf.layers.flatten(hidden), 1)

  estimator = tfgan.estimator.GANEstimator(
    directory,
    generator_fn,
    discriminator_fn,
    tfgan.losses.modified_generator_loss,
    tfgan.losses.modified_discriminator_loss,
    config=tf.estimator.RunConfig(tf_random_seed=1),
    generator_optimizer=lambda: tools.wrap(tf.train.AdamOptimizer(0.001, 0.5)),
    discriminator_optimizer=lambda: tools.wrap(tf.train.RMSPropOptimizer(0.001)),
  )
  estimator.train(
    comparison.batches(noise, images.reshape([64, 8, 8, 1])), steps=comparison.STEPS
  )
