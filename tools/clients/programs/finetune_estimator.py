# SPDX-License-Identifier: Apache-2.0
"""Trains a small Estimator with finetune's mixed precision: its variable getter and its
`optimize_loss`.

    python programs/finetune_estimator.py DIRECTORY STEPS

The model that finetune itself would train has to be downloaded. The steps in OVERFLOWS
have an absurd weight.
"""

import sys

from finetune.model import get_variable_getter
from finetune.util.optimize_loss import optimize_loss
import numpy as np
import tensorflow.compat.v1 as tf

OVERFLOWS = [5, 6, 30]


def batches():
  random = np.random.RandomState(0)
  direction = random.randn(16)
  for step in range(10**6):
    rows = random.randn(32, 16).astype(np.float32)
    weight = np.float32(1e30 if step in OVERFLOWS else 1)
    yield {"rows": rows, "weight": weight}, (rows @ direction > 0).astype(np.int32)


def input_fn():
  return tf.data.Dataset.from_generator(
    batches,
    ({"rows": tf.float32, "weight": tf.float32}, tf.int32),
    ({"rows": [32, 16], "weight": []}, [32]),
  )


def model_fn(features, labels, mode):
  getter, halved = get_variable_getter(
    mode, {"rows": features["rows"]}, fp16_predict=False, mixed_precision=True
  )
  with tf.variable_scope("model", custom_getter=getter):
    hidden = tf.nn.relu(tf.matmul(halved["rows"], tf.get_variable("hidden", [16, 32])))
    logits = tf.matmul(hidden, tf.get_variable("logits", [32, 2]))
  loss = features["weight"] * tf.losses.sparse_softmax_cross_entropy(
    labels, tf.cast(logits, tf.float32)
  )
  train_op = optimize_loss(
    loss,
    learning_rate=1e-2,
    optimizer_name="AdamW",
    clip_gradients=1.0,
    lr_schedule="warmup_constant",
    lr_warmup=-1.0,
    # The fraction is 0: finetune reads the step for it before or after it is
    # incremented.
    total_num_steps=np.inf,
    summarize_grads=False,
    mixed_precision=True,
    b1=0.9,
    b2=0.999,
    epsilon=1e-8,
    l2_reg=0.01,
    vector_l2=False,
    accumulate_steps=1,
  )
  return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def main(directory, steps):
  session = tf.ConfigProto(
    intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
  )
  config = tf.estimator.RunConfig(
    directory,
    tf_random_seed=1,
    session_config=session,
    save_checkpoints_steps=int(steps),
  )
  tf.estimator.Estimator(model_fn, config=config).train(input_fn, max_steps=int(steps))


if __name__ == "__main__":
  main(*sys.argv[1:])
