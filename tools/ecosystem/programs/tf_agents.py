# SPDX-License-Identifier: Apache-2.0
"""TF-Agents: a DqnAgent with a compat.v1 AdamOptimizer, a replay buffer, and TF-Agents'
Checkpointer.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow as tf
  from tf_agents.agents.dqn import dqn_agent
  from tf_agents.networks import q_network
  from tf_agents.replay_buffers import tf_uniform_replay_buffer
  from tf_agents.specs import tensor_spec
  from tf_agents.trajectories import time_step
  from tf_agents.utils import common

  class Agent(dqn_agent.DqnAgent):
    """Calls `minimize`: `DqnAgent` itself computes gradients with a tape, and refuses
    infinite losses.
    """

    def _train(self, experience, weights):
      losses = []

      def loss():
        losses.append(
          self._loss(
            experience,
            self._td_errors_loss_fn,
            self._gamma,
            training=True,
            weights=weights,
          )
        )
        return losses[0].loss

      self._optimizer.minimize(
        loss, self.train_step_counter, self._q_network.trainable_weights
      )
      self._update_target()
      return losses[0]

  tf.random.set_seed(1)
  observations, actions = (
    tf.TensorSpec([4]),
    tensor_spec.BoundedTensorSpec([], tf.int32, 0, 2),
  )
  opt, steps = (
    tools.wrap(tf.compat.v1.train.AdamOptimizer(0.01)),
    tf.Variable(0, dtype=tf.int64),
  )
  network = q_network.QNetwork(observations, actions, fc_layer_params=[16])
  agent = Agent(
    time_step.time_step_spec(observations),
    actions,
    network,
    opt,
    target_update_period=5,
    td_errors_loss_fn=common.element_wise_huber_loss,
    train_step_counter=steps,
  )
  agent.initialize()
  buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(
    agent.collect_data_spec, 16, max_length=8
  )
  random = np.random.RandomState(1)
  for _ in range(8):
    buffer.add_batch(
      tf.nest.map_structure(
        lambda spec: tf.constant(random.randint(0, 3, [16, *spec.shape]), spec.dtype),
        agent.collect_data_spec,
      )
    )
  checkpointer = common.Checkpointer(directory, max_to_keep=1, agent=agent, step=steps)
  checkpointer.initialize_or_restore()
  experience, train_agent = buffer.gather_all(), common.function(agent.train)
  for step in range(comparison.STEPS):
    train_agent(
      tf.nest.map_structure(
        lambda x, step=step: x[:, step % 7 : step % 7 + 2], experience
      )
    )
  checkpointer.save(steps)
  return comparison.read_eager(
    agent._q_network.variables + agent._target_q_network.variables + [steps], opt
  )
