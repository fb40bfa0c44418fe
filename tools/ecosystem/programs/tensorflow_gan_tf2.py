# SPDX-License-Identifier: Apache-2.0
"""TF-GAN: gan_train with two optimizers, a Wasserstein loss with gradient penalty, and
sequential steps.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import tensorflow_gan as tfgan

  tf.disable_v2_behavior()
  random = np.random.RandomState(1)
  real, noise = (
    tf.constant(random.normal(size=[32, size]), tf.float32) for size in (4, 2)
  )

  def dense(inputs, units, name):
    kernel = tf.get_variable(
      name, [inputs.shape[1], units], initializer=tf.glorot_uniform_initializer(seed=1)
    )
    return inputs @ kernel

  def generator(inputs):
    return dense(tf.nn.relu(dense(inputs, 16, "hidden")), 4, "outputs")

  def discriminator(inputs, _):
    return dense(tf.nn.softplus(dense(inputs, 16, "hidden")), 1, "outputs")

  def clip(grads_and_vars):
    grads, variables = zip(*grads_and_vars)
    return list(zip(tf.clip_by_global_norm(grads, 5.0)[0], variables))

  tf.set_random_seed(1)
  model = tfgan.gan_model(generator, discriminator, real, noise)
  loss = tfgan.gan_loss(
    model,
    tfgan.losses.wasserstein_generator_loss,
    tfgan.losses.wasserstein_discriminator_loss,
    gradient_penalty_weight=1.0,
  )
  train_ops = tfgan.gan_train_ops(
    model,
    loss,
    tools.wrap(tf.train.AdamOptimizer(0.01)),
    tools.wrap(tf.train.RMSPropOptimizer(0.01)),
    transform_grads_fn=clip,
  )
  steps = tfgan.get_sequential_train_hooks(tfgan.GANTrainSteps(1, 2))
  done = 0 if tf.train.latest_checkpoint(directory) is None else comparison.STEPS
  tfgan.gan_train(
    train_ops,
    directory,
    steps,
    save_summaries_steps=None,
    hooks=[tf.train.StopAtStepHook(last_step=done + comparison.STEPS)],
  )
