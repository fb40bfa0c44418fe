"""Names of `tf.contrib`, which TensorFlow 2 has no more."""
