"""One process of a cluster that trains an Estimator by `train_and_evaluate`.

Arguments: a folder, in which a process that trains writes as JSON what its hooks saw,
and the device of the loss scale.
The environment variable TF_CONFIG names the cluster, and this process.
"""

import json
import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat

FINITE, OVERFLOW = [1.0, 2.0], [np.inf, 2.0]
# The first step of the chief and the last one of the worker overflow, so that the two
# processes do not change the loss scale at the same time.
INPUTS = {
  "chief": [OVERFLOW, FINITE, FINITE, FINITE],
  "worker": [FINITE, FINITE, FINITE, FINITE, FINITE, OVERFLOW],
}


def main():
  folder = sys.argv[1]
  job = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
  hooks, devices = {}, []

  def input_fn():
    features = np.array(INPUTS[job], np.float32)
    return tf.data.Dataset.from_tensor_slices(features)

  def model_fn(features, labels, mode):
    del labels
    w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
    opt = tf.train.GradientDescentOptimizer(0.25)
    opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, "dynamic")
    loss = tf.reduce_sum(w * features)
    train_op = opt.minimize(loss, tf.train.get_global_step())
    devices.append(opt.loss_scale.variables()[0].device)
    hooks["training"] = mp_compat.LossScaleHook(opt)
    hooks["chief"] = mp_compat.LossScaleHook(opt, output_dir=folder)
    return tf.estimator.EstimatorSpec(
      mode,
      loss=tf.where_v2(opt.gradients_finite, loss, 0.0),
      train_op=train_op,
      training_hooks=[hooks["training"]],
      training_chief_hooks=[hooks["chief"]],
    )

  tf.disable_v2_behavior()
  config = tf.estimator.RunConfig(experimental_max_worker_delay_secs=0)
  estimator = tf.estimator.Estimator(model_fn, os.path.join(folder, "logs"), config)
  tf.estimator.train_and_evaluate(
    estimator, tf.estimator.TrainSpec(input_fn), tf.estimator.EvalSpec(input_fn)
  )
  seen = {name: [hook.attempted, hook.skipped] for name, hook in hooks.items()}
  with open(os.path.join(folder, job + ".json"), "w") as file:
    json.dump(dict(seen, devices=devices), file)


if __name__ == "__main__":
  main()
