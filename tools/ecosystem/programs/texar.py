# SPDX-License-Identifier: Apache-2.0
"""Texar: an RNN decoder with teacher forcing; get_train_op clips gradients and lets the
learning rate decay.
"""

import comparison
import numpy as np


def train(tools, directory):
  import tensorflow.compat.v1 as tf
  import texar.tf as tx

  words = np.random.RandomState(1).randint(0, 30, [16, 9])
  tf.set_random_seed(1)
  step = tf.train.get_or_create_global_step()
  embedder = tx.modules.WordEmbedder(vocab_size=30, hparams={"dim": 16})
  _, state = tx.modules.UnidirectionalRNNEncoder(
    hparams={"rnn_cell": {"kwargs": {"num_units": 16}}}
  )(embedder(words))
  decoder = tx.modules.BasicRNNDecoder(
    vocab_size=30, hparams={"rnn_cell": {"kwargs": {"num_units": 16}}}
  )
  lengths = np.full([16], 8, np.int32)
  outputs, _, _ = decoder(
    initial_state=state, inputs=embedder(words[:, :-1]), sequence_length=lengths
  )
  loss = tx.losses.sequence_sparse_softmax_cross_entropy(
    words[:, 1:], outputs.logits, lengths
  )
  train_op = tx.core.get_train_op(
    loss,
    optimizer=tools.wrap(tf.train.AdamOptimizer(0.01)),
    global_step=step,
    hparams={
      "gradient_clip": {"type": "clip_by_global_norm", "kwargs": {"clip_norm": 1.0}}
    },
  )
  comparison.run_monitored(train_op, directory)
