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
  seeds.make_repeatable()
  for seed in (None, 7, None, 7):
    tf.random.uniform([], seed=seed)
  ops = [op for op in graph.get_operations() if op.type == "RandomUniform"]
  assert [op.get_attr("seed2") for op in ops] == [0, 7, 1, 7]
