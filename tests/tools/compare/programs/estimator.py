"""Trains with an Estimator."""

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def model_fn(features, labels, mode):
  loss = tf.reduce_mean(
    tf.square(tf.layers.flatten(features) @ tf.get_variable("w", [4, 1]) - labels)
  )
  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
    tf.train.AdamOptimizer(0.1), "dynamic"
  )
  return tf.estimator.EstimatorSpec(
    mode, loss=loss, train_op=opt.minimize(loss, tf.train.get_global_step())
  )


def input_fn():
  features = tf.data.Dataset.from_tensor_slices(
    (tf.random.normal([32, 4]), tf.random.normal([32, 1]))
  )
  return features.shuffle(32).repeat().batch(8)


tf.estimator.train_and_evaluate(
  tf.estimator.Estimator(
    model_fn, "folder", tf.estimator.RunConfig(save_checkpoints_steps=4)
  ),
  tf.estimator.TrainSpec(input_fn, 8),
  tf.estimator.EvalSpec(input_fn, 2, throttle_secs=0),
)
