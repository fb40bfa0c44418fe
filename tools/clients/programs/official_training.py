# SPDX-License-Identifier: Apache-2.0
"""Trains digits with the model garden's mixed precision on two replicas; prints each
loss and, at the end, the weights.

    python programs/official_training.py

Two steps in the middle overflow.
"""

import numpy as np
from official.modeling import performance
from official.staging.training import grad_utils
from sklearn import datasets
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
  cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.random.set_seed(1)
digits = datasets.load_digits()
images, labels = (
  (digits.images / 16).reshape([-1, 64]).astype(np.float32),
  digits.target,
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
  performance.set_mixed_precision_policy(tf.float16)
  model = tf.keras.Sequential(
    [
      tf.keras.layers.Dense(32, "relu", input_shape=[64]),
      tf.keras.layers.Dense(10, dtype="float32"),
    ]
  )
  opt = performance.configure_optimizer(
    tf.keras.optimizers.SGD(0.1, 0.9), use_float16=True
  )
print("class", tf.keras.mixed_precision.experimental.LossScaleOptimizer.__module__)


@tf.function
def train_step(x, y, weight):
  with tf.GradientTape() as tape:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
    loss = weight * tf.reduce_mean(losses) / strategy.num_replicas_in_sync
  grad_utils.minimize_using_explicit_allreduce(
    tape, opt, loss, model.trainable_variables
  )
  return loss


@tf.function
def on_replicas(x, y, weight):
  parts = [
    strategy.experimental_distribute_values_from_function(
      lambda context, part=part: tf.split(part, 2)[context.replica_id_in_sync_group]
    )
    for part in (x, y)
  ]
  return strategy.reduce(
    "SUM", strategy.run(train_step, args=(*parts, weight)), axis=None
  )


for attempt in range(40):
  batch = slice(32 * attempt, 32 * attempt + 32)
  loss = on_replicas(
    tf.constant(images[batch]),
    tf.constant(labels[batch]),
    tf.constant(1e30 if attempt in (15, 16) else 1.0),
  )
  print(
    "loss", loss.numpy().tobytes().hex(), loss.numpy(), "scale", float(opt.loss_scale)
  )
for variable in model.trainable_variables:
  print("variable", variable.name, variable.numpy().tobytes().hex())
