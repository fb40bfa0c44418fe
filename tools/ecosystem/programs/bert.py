# SPDX-License-Identifier: Apache-2.0
"""BERT: a small BertModel with its AdamWeightDecayOptimizer, warm-up and clipping;
checkpoints by Estimator.
"""

import comparison
import numpy as np


def train(tools, directory):
  from bert import modeling
  from bert import optimization
  import tensorflow.compat.v1 as tf

  random = np.random.RandomState(1)
  words, labels = (
    random.randint(0, 50, [32, 12]).astype(np.int32),
    random.randint(0, 2, [32]),
  )
  config = modeling.BertConfig(
    50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=12,
  )

  def input_fn():
    return (
      tf.data.Dataset.from_tensor_slices((words, labels))
      .batch(8, drop_remainder=True)
      .repeat()
    )

  def model_fn(features, labels, mode):
    model = modeling.BertModel(config, is_training=True, input_ids=features)
    loss = tf.losses.sparse_softmax_cross_entropy(
      labels, tf.layers.dense(model.get_pooled_output(), 2)
    )
    step = tf.train.get_global_step()
    rate = 0.01 * tf.minimum(1.0, tf.cast(step + 1, tf.float32) / 10.0)
    opt = tools.wrap(
      optimization.AdamWeightDecayOptimizer(
        rate, 0.01, exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"]
      )
    )
    grads, variables = zip(*opt.compute_gradients(loss))
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    with tf.control_dependencies([opt.apply_gradients(zip(grads, variables), step)]):
      train_op = step.assign_add(1)  # This optimizer ignores the step.
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

  tf.estimator.Estimator(
    model_fn, directory, tf.estimator.RunConfig(tf_random_seed=1)
  ).train(input_fn, steps=comparison.STEPS)
