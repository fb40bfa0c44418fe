"""Tests the seeds that `compare` gives to ops."""

from mp_compat._tensorflow import seeds as tensorflow_seeds
from mp_compat.tools.compare import seeds
from tests.testing import tf


def test_only_ops_without_seed_get_the_next_one(graph, monkeypatch):
  generator = tensorflow_seeds.stateful_random_ops.Generator
  method = "from_non_deterministic_state"
  monkeypatch.setattr(generator, method, getattr(generator, method))
  monkeypatch.setattr(
    tensorflow_seeds.random_seed, "get_seed", tensorflow_seeds.get_seed
  )
  framework_ops = tensorflow_seeds.ops.Graph
  create = framework_ops._create_op_internal
  monkeypatch.setattr(framework_ops, "_create_op_internal", create)
  seeds.make_repeatable()
  for seed in (None, 7, None, 7):
    tf.random.uniform([], seed=seed)
  ops = [op for op in graph.get_operations() if op.type == "RandomUniform"]
  assert [op.get_attr("seed2") for op in ops] == [0, 7, 1, 7]
  # These ask for no seed.
  tf.image.sample_distorted_bounding_box([8, 8, 3], [[[0.0, 0.0, 1.0, 1.0]]])
  tf.raw_ops.RandomStandardNormal(shape=[2], dtype=tf.float32)
  boxes, normal = [
    op for op in graph.get_operations() if op not in ops and "seed2" in op.node_def.attr
  ]
  assert [op.get_attr("seed2") for op in (boxes, normal)] == [2, 3]
  assert boxes.get_attr("seed") == ops[0].get_attr("seed") != 0
  # A pooling that is random fails with a seed.
  tf.nn.fractional_max_pool(tf.zeros([1, 4, 4, 1]), [1.0, 1.5, 1.5, 1.0])
  (pool,) = [op for op in graph.get_operations() if op.type == "FractionalMaxPool"]
  assert pool.get_attr("seed") == pool.get_attr("seed2") == 0
