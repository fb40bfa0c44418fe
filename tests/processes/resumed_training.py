"""Trains deterministically and resumes from checkpoints; test_resume.py runs and kills
it.

    python resumed_training.py DIRECTORY STEPS

The batch is a function of global_step. The model uses float16, so the gradients
overflow repeatedly.
"""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mp_compat


def build():
  """Builds a train op whose steps depend only on the variables. Returns it, the global
  step and the optimizer.
  """
  global_step = tf.train.get_or_create_global_step()
  phase = (
    tf.cast(tf.reshape(global_step, [1, 1]), tf.float32) + tf.range(8.0)[:, tf.newaxis]
  )
  x = tf.concat([tf.sin(phase * k) for k in (0.3, 0.7, 1.1)], axis=1)
  with tf.variable_scope(
    "model", custom_getter=mp_compat.float32_variable_storage_getter
  ):
    w = tf.get_variable(
      "w", [3, 1], tf.float16, initializer=tf.constant_initializer(0.1)
    )
    y = tf.matmul(tf.cast(x, tf.float16), w)
  loss = tf.reduce_mean(
    tf.square(tf.cast(y, tf.float32) - tf.reduce_sum(x, axis=1, keepdims=True))
  )
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.AdamOptimizer(0.05),
    mp_compat.DynamicLossScale(2.0**15, increment_period=5),
  )
  return opt.minimize(loss, global_step), global_step, opt


def main():
  directory, steps = sys.argv[1], int(sys.argv[2])
  tf.disable_eager_execution()
  tf.logging.set_verbosity(tf.logging.ERROR)
  train_op, global_step, opt = build()
  scaffold = tf.train.Scaffold(saver=mp_compat.checkpoints.Saver())
  hooks = [tf.train.StopAtStepHook(last_step=steps)]
  with tf.train.MonitoredTrainingSession(
    checkpoint_dir=directory,
    scaffold=scaffold,
    hooks=hooks,
    save_checkpoint_steps=7,
    save_summaries_steps=None,
    save_summaries_secs=None,
    log_step_count_steps=None,
  ) as sess:
    while not sess.should_stop():
      _, applied, step = sess.run([train_op, opt.gradients_finite, global_step])
      sys.stdout.write("step={} applied={:d}\n".format(step, np.asarray(applied)))
      sys.stdout.flush()


if __name__ == "__main__":
  main()
