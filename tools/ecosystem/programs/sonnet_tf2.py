# SPDX-License-Identifier: Apache-2.0
"""Sonnet 2: an autoencoder with vector quantization, and a compat.v1 optimizer in a
tf.function.
"""

import comparison
import numpy as np


def train(tools, directory):
  import sonnet as snt
  import tensorflow as tf

  inputs = tf.constant(np.random.RandomState(1).normal(size=[32, 8]), tf.float32)
  tf.random.set_seed(1)
  encoder, decoder = (
    snt.nets.MLP([16, 4], w_init=snt.initializers.TruncatedNormal(0.3, seed=1)),
    snt.Linear(8),
  )
  quantizer = snt.nets.VectorQuantizerEMA(
    embedding_dim=4, num_embeddings=8, commitment_cost=0.25, decay=0.9
  )
  opt = tools.wrap(tf.compat.v1.train.MomentumOptimizer(0.01, 0.9))

  def loss():
    quantized = quantizer(encoder(inputs), is_training=True)
    return (
      tf.reduce_mean((decoder(quantized["quantize"]) - inputs) ** 2) + quantized["loss"]
    )

  loss()  # creates the variables
  variables = encoder.trainable_variables + decoder.trainable_variables

  @tf.function
  def train_step():
    opt.minimize(loss, var_list=variables)

  with comparison.checkpoint(
    directory, encoder=encoder, decoder=decoder, quantizer=quantizer, opt=opt
  ):
    for _ in range(comparison.STEPS):
      train_step()
  return comparison.read_eager(
    encoder.variables + decoder.variables + quantizer.variables, opt
  )
