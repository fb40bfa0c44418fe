# SPDX-License-Identifier: Apache-2.0
"""Runs tensor2tensor's optimizer on TensorFlow 2.10, with TensorFlow's loss scaling,
and then with mp_compat's.

    scripts/nox -s client-tensor2tensor_tf2

tensor2tensor is not modified. It was written for TensorFlow 1.15: on TensorFlow 2, its
Keras optimizers (`adam`) work, with the graph rewrite; its float16 activations need
`tf.contrib` and raise an error. In the run with mp_compat, TensorFlow's names refer to
it. This program exits with an error unless two trainings with TensorFlow's class and
one with mp_compat have the same variables after each step, to the bit, over steps that
overflow and are skipped.
"""

import os
import tempfile

import client

with tempfile.TemporaryDirectory() as top:
  skipped = client.compare(
    top, os.path.join(client.PROGRAMS, "tensor2tensor_optimize.py")
  )["skipped"]
client.check(skipped == 2, "{} steps were skipped instead of 2.".format(skipped))
