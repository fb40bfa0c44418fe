# SPDX-License-Identifier: Apache-2.0
"""TRFL: double Q-learning from stored transitions, with a target network that it
updates periodically.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import trfl

  random = np.random.RandomState(1)
  before, after = (
    tf.constant(random.normal(size=[32, 4]), tf.float32) for _ in range(2)
  )
  actions, rewards = (
    tf.constant(random.randint(0, 3, [32])),
    tf.constant(random.normal(size=[32]), tf.float32),
  )
  tf.set_random_seed(1)

  def make_network(states, scope):
    with tf.variable_scope(scope, reuse=tf.AUTO_REUSE):
      return tf.layers.dense(
        tf.layers.dense(states, 16, tf.nn.relu, name="hidden"), 3, name="values"
      )

  values, target, selector = (
    make_network(*arguments)
    for arguments in ((before, "online"), (after, "target"), (after, "online"))
  )
  loss = tf.reduce_mean(
    trfl.double_qlearning(
      values, actions, rewards, tf.fill([32], 0.9), target, selector
    ).loss
  )
  train_op = tools.wrap(tf.train.RMSPropOptimizer(0.01)).minimize(
    loss, tf.train.get_or_create_global_step()
  )
  with tf.control_dependencies([train_op]):
    train_op = trfl.periodic_target_update(
      tf.trainable_variables("target"),
      tf.trainable_variables("online"),
      update_period=4,
      tau=0.5,
    )
  comparison.run_monitored(train_op, directory)
