"""Trains below a name scope with an optimizer that counts its steps, in conditionals
that are functions: with TensorFlow's class, the name of the count has lost the scope.
"""

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.enable_control_flow_v2()
tf.enable_resource_variables()


class Counting(tf.train.GradientDescentOptimizer):
  def _create_slots(self, var_list):
    self._count = self._create_non_slot_variable(0.0, "count", var_list[0])

  def _finish(self, update_ops, name_scope):
    return tf.group(*update_ops, self._count.assign_add(1.0))


w = tf.get_variable("w", [2])
opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(Counting(0.1), "dynamic")
with tf.name_scope("training"):
  train_op = opt.minimize(tf.reduce_sum(tf.square(w)))
with tf.Session() as sess:
  sess.run(tf.global_variables_initializer())
  for _ in range(4):
    sess.run(train_op)
