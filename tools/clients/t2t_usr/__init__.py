# SPDX-License-Identifier: Apache-2.0
"""A problem and a model for tensor2tensor, as its users register them:
`--t2t_usr_dir`.
"""

from tensor2tensor.data_generators import algorithmic
from tensor2tensor.models import transformer
from tensor2tensor.utils import registry
import tensorflow.compat.v1 as tf


@registry.register_problem
class ReverseInOrder(algorithmic.AlgorithmicReverseBinary40):
  """Reversing binary numbers, which come in the same order in every run; by itself
  tensor2tensor lets threads race.
  """

  train_size = 2000
  dev_size = 100
  num_shards = 1

  def dataset(self, *args, **kwargs):
    return super().dataset(*args, **dict(kwargs, shuffle_files=False))


@registry.register_model
class QuickTransformer(transformer.Transformer):
  """tensor2tensor's transformer without AutoGraph, which takes longer to read its
  source than to train it.
  """

  @tf.autograph.experimental.do_not_convert
  def call(self, inputs, **kwargs):
    return super().call(inputs, **kwargs)
