# SPDX-License-Identifier: Apache-2.0
"""Stable Baselines: SAC, whose three optimizers have a loss scale each (a small
environment, tf.train.Saver).
"""

import comparison
import numpy as np


def train(tools, directory):
  import gym
  from stable_baselines import SAC
  import tensorflow as tf

  class Environment(gym.Env):
    """The action shall be the first component of the state, which rotates."""

    observation_space = gym.spaces.Box(-1.0, 1.0, [2], np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, [1], np.float32)

    def reset(self):
      self.steps = 0
      return np.array([1.0, 0.0], np.float32)

    def step(self, action):
      self.steps += 1
      state = np.array([np.cos(self.steps), np.sin(self.steps)], np.float32)
      return state, -float(abs(state[0] - action[0])), self.steps == 10, {}

  adam = tf.train.AdamOptimizer  # The class makes its optimizers.
  tf.train.AdamOptimizer = lambda *args, **kwargs: tools.wrap(adam(*args, **kwargs))
  model = SAC(
    "MlpPolicy",
    Environment(),
    learning_rate=0.01,
    buffer_size=50,
    batch_size=8,
    learning_starts=8,
    seed=1,
    n_cpu_tf_sess=1,
    policy_kwargs={"layers": [16]},
  )
  tf.train.AdamOptimizer = adam
  with model.graph.as_default():
    # Its `save` is without slots.
    saver, latest = (tf.train.Saver(), tf.train.latest_checkpoint(directory))
  if latest:
    saver.restore(model.sess, latest)
  model.learn(8 + comparison.STEPS)
  saver.save(model.sess, directory + "/model", 2 if latest else 1)
