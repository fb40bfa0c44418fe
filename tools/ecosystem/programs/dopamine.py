# SPDX-License-Identifier: Apache-2.0
"""Dopamine: a DQNAgent with its replay buffer and target network; saves and restores by
bundle_and_checkpoint.
"""

import os
import pickle
import random

import comparison
import numpy as np


def train(tools, directory):
  from dopamine.agents.dqn import dqn_agent
  import tensorflow.compat.v1 as tf

  random.seed(1)
  np.random.seed(1)

  def network(num_actions, network_type, state):
    # The graph's seed would depend on the operations of the loss scale.
    init = tf.glorot_uniform_initializer(1)
    hidden = tf.layers.dense(
      tf.layers.flatten(state), 16, tf.nn.relu, kernel_initializer=init, name="hidden"
    )
    return network_type(
      tf.layers.dense(hidden, num_actions, kernel_initializer=init, name="values")
    )

  session, path = tf.Session(), os.path.join(directory, "bundle")
  agent = dqn_agent.DQNAgent(
    session,
    2,
    observation_shape=(2,),
    observation_dtype=tf.float32,
    stack_size=1,
    network=network,
    update_period=1,
    min_replay_history=8,
    target_update_period=5,
    epsilon_fn=dqn_agent.identity_epsilon,
    epsilon_train=0.5,
    use_staging=False,
    optimizer=tools.wrap(tf.train.RMSPropOptimizer(0.01, centered=True)),
  )
  session.run(tf.global_variables_initializer())
  restored = os.path.exists(path)
  if restored:
    with open(path, "rb") as file:
      assert agent.unbundle(directory, 1, pickle.load(file))
  action = agent.begin_episode(np.array([1.0, 0.0], np.float32))
  for step in range(comparison.STEPS if restored else 8 + comparison.STEPS):
    state = np.array([np.cos(step), np.sin(step)], np.float32)
    action = agent.step(float(state[action]), state)
  bundle = agent.bundle_and_checkpoint(directory, 2 if restored else 1)
  with open(path, "wb") as file:
    pickle.dump(bundle, file)
