"""Tests that the sum over replicas has the bits that it has without loss scaling, which
depend on the order in which graph optimizers sort its terms.
"""

import json

import pytest

from tests import testing

ROWS = [pytest.param(3, "sparse", ["Adam"])]
for count in (2, 3, 8, 11):
  for optimizer in sorted(testing.OPTIMIZERS):
    row = pytest.param(
      count, "dense,sparse,clipped", [optimizer], marks=pytest.mark.matrix
    )
    ROWS.append(row)


@pytest.mark.parametrize("replicas, kinds, optimizers", ROWS)
def test_replicas_add_up_as_without_loss_scaling(replicas, kinds, optimizers):
  if "Ftrl" in optimizers and testing.tf.VERSION.startswith("1."):
    pytest.skip("TensorFlow 1.15 creates no slots of Ftrl for mirrored variables")
  command = ["-m", "tests.programs.replica_sums", replicas, kinds, *optimizers]
  done = testing.run_python(*command, cwd=testing.ROOT)
  different = json.loads(done.stdout.splitlines()[-1])
  if replicas > 10:
    # There, TensorFlow's class adds in another order than the optimizer alone.
    different = [row for row in different if row[-1] != "tensorflow"]
  assert different == []
