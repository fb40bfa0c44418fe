"""Trains a Keras model in graph mode."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
wrapper = tf.keras.mixed_precision.experimental.LossScaleOptimizer
if "migrated" in sys.argv:
  from mp_compat.keras.experimental import LossScaleOptimizer as wrapper
model = tf.keras.Sequential(
  [tf.keras.layers.Dense(3, input_shape=(4,)), tf.keras.layers.Dropout(0.5)]
)
model.compile(wrapper(tf.keras.optimizers.Adam(), "dynamic"), "mse", metrics=["mae"])
data = np.random.normal(size=[32, 4]), np.zeros([32, 3])
model.fit(*data, epochs=2, batch_size=8, validation_data=data, verbose=0)
