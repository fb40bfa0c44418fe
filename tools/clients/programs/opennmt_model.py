# SPDX-License-Identifier: Apache-2.0
"""A model for OpenNMT-tf, as its users write them: `onmt-main --model`. Some of its
batches overflow.
"""

import opennmt
import opennmt.training
import tensorflow as tf

# the last word of the vocabulary; its batches have a loss that is finite, but not if it
# is scaled
ABSURD = 12

print(
  "Loss scaling by {}".format(
    opennmt.training._LossScaleOptimizer.__bases__[0].__module__
  )
)


class TinyTransformer(opennmt.models.Transformer):
  """One layer of 16 units."""

  def __init__(self):
    super().__init__(
      opennmt.inputters.WordEmbedder(embedding_size=16),
      opennmt.inputters.WordEmbedder(embedding_size=16),
      num_layers=1,
      num_units=16,
      num_heads=2,
      ffn_inner_dim=32,
    )

  def compute_loss(self, outputs, labels, training=True):
    loss, *normalizers = super().compute_loss(outputs, labels, training=training)
    absurd = tf.reduce_any(tf.equal(labels["ids"], ABSURD))
    return (loss * tf.where(absurd, 1e35, 1.0), *normalizers)


model = TinyTransformer
