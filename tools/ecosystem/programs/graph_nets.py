# SPDX-License-Identifier: Apache-2.0
"""Graph Nets: two rounds of a GraphNetwork of Sonnet's MLPs, on random graphs;
checkpoints by MonitoredSession.
"""

import comparison
import numpy as np


def train(tools, directory):
  import graph_nets
  import sonnet as snt
  import tensorflow.compat.v1 as tf

  random = np.random.RandomState(1)
  graphs = graph_nets.utils_tf.data_dicts_to_graphs_tuple(
    [
      {
        "nodes": random.normal(size=[nodes, 4]).astype(np.float32),
        "edges": random.normal(size=[2 * nodes, 4]).astype(np.float32),
        "globals": random.normal(size=[4]).astype(np.float32),
        "senders": random.randint(0, nodes, [2 * nodes]),
        "receivers": random.randint(0, nodes, [2 * nodes]),
      }
      for nodes in (3, 5, 4, 6)
    ]
  )
  targets = tf.constant(random.normal(size=[4, 4]), tf.float32)
  tf.set_random_seed(1)
  network = graph_nets.modules.GraphNetwork(*[lambda: snt.nets.MLP([8, 4])] * 3)
  loss = tf.losses.mean_squared_error(targets, network(network(graphs)).globals)
  train_op = tools.wrap(tf.train.AdamOptimizer(0.01)).minimize(
    loss, tf.train.get_or_create_global_step()
  )
  comparison.run_monitored(train_op, directory)
