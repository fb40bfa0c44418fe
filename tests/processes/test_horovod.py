"""Tests of Horovod with ranks started by mpirun: all ranks have bitwise equal variables
after every step.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip(
  "horovod.tensorflow", reason="Horovod is installed only by `scripts/nox -s horovod`"
)

from tests import testing  # noqa: E402
from tests.processes import horovod_ranks  # noqa: E402
from tests.processes import test_clusters  # noqa: E402

# Expected with overflows in steps 3 and 8 and growth after 4 finite steps.
SCALES = [2.0**e for e in [10, 10, 10, 9, 9, 9, 9, 10, 9, 9, 9, 9]]
GLOBAL_STEPS = [1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9, 10]


# Adasum requires the number of ranks to be a power of 2.
two_ranks = pytest.mark.parametrize("recorded", [2], ids=["2_ranks"], indirect=True)


@pytest.fixture(
  name="recorded", scope="module", params=[2, 3], ids=["2_ranks", "3_ranks"]
)
def _recorded(request, tmp_path_factory):
  """Returns for each rank {case/variable: values after every step}."""
  directory = tmp_path_factory.mktemp("ranks")
  command = "mpirun --allow-run-as-root --oversubscribe --timeout 240 -np {}".format(
    request.param
  ).split()
  done = subprocess.run(
    command + [sys.executable, horovod_ranks.__file__, str(directory)],
    env=testing.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout[-5000:]
  return [dict(np.load(str(path))) for path in sorted(directory.iterdir())]


HOOKS = os.path.join(os.path.dirname(horovod_ranks.__file__), "horovod_hooks.py")


def of(case, recorded):
  """Returns for each rank {variable: values after every step} of one case."""
  return [
    {
      key[len(case) + 1 :]: values
      for key, values in rank.items()
      if key.startswith(case + "/")
    }
    for rank in recorded
  ]


def assert_same(ranks, names=None):
  """Asserts that these variables, by default all, are bitwise equal on all ranks."""
  for name in names or ranks[0]:
    for rank in ranks[1:]:
      assert rank[name].tobytes() == ranks[0][name].tobytes(), name


def assert_skipped(rank):
  """Asserts that a rank skipped the two steps that overflow."""
  np.testing.assert_array_equal(rank["current_loss_scale"], SCALES)
  np.testing.assert_array_equal(rank["global_step"], GLOBAL_STEPS)


def momentum(gradient, applied=frozenset(range(horovod_ranks.STEPS)) - {3, 8}):
  """Computes Momentum over the applied steps in NumPy. Returns the values after every
  step.
  """
  value, velocity, after = 0.0, 0.0, []
  for step in range(horovod_ranks.STEPS):
    if step in applied:
      velocity = 0.9 * velocity + gradient
      value = value - 0.5 * velocity
    after.append(value + np.zeros_like(gradient))
  return np.array(after)


def mean_gradients(size):
  """Returns the gradients of `w` and of the table in a finite step, averaged over
  ranks.
  """
  x = np.array([[1.0 + rank, 2.0] for rank in range(size)])
  table = np.zeros([5, 2])
  for rank in range(size):
    table[1] += 2 * x[rank] / size
    table[4 - rank] += x[rank] / size
  return x.mean(axis=0), table


@pytest.mark.parametrize(
  "case",
  [
    case
    for case in horovod_ranks.CASES
    if case.startswith(("outside", "inside")) and "passes" not in case
  ],
)
def test_overflow_on_one_rank_skips_all(case, recorded):
  ranks = of(case, recorded)
  assert_same(ranks)
  assert_skipped(ranks[0])
  for name, gradient in zip(["w", "table"], mean_gradients(len(recorded))):
    expected = momentum(np.clip(gradient, -1.0, 1.0) if "clipped" in case else gradient)
    np.testing.assert_allclose(ranks[0][name], expected, rtol=1e-3)


@pytest.mark.parametrize("case", horovod_ranks.KERAS_CASES)
def test_keras_overflow_skips_all_ranks(case, recorded):
  ranks = of(case, recorded)
  assert_same(ranks)
  # Horovod makes a second optimizer.
  scale = max(name for name in ranks[0] if name.startswith("current_loss_scale"))
  np.testing.assert_array_equal(ranks[0][scale], SCALES)
  (iterations,) = [
    values for name, values in ranks[0].items() if name.endswith("/iter")
  ]
  counted = [step not in (3, 8) for step in range(horovod_ranks.STEPS)]
  # Keras of TensorFlow 1.15 does not count skipped steps.
  assert iterations.tolist() == np.cumsum(counted).tolist()
  np.testing.assert_allclose(
    ranks[0]["w"], momentum(mean_gradients(len(recorded))[0]), rtol=1e-5
  )


@pytest.mark.parametrize("case", ["outside, two passes", "inside, two passes"])
def test_overflow_skips_aggregated_passes(case, recorded):
  ranks = of(case, recorded)
  assert_same(ranks)
  # The passes of steps 2 and 3 are summed, as are those of steps 8 and 9. Both sums
  # overflow and are skipped.
  expected = momentum(2 * mean_gradients(len(recorded))[0], applied=(1, 5, 7, 11))
  np.testing.assert_allclose(ranks[0]["w"], expected, rtol=1e-5)


@two_ranks
def test_overflow_skips_adasum_gradients(recorded):
  ranks = of("adasum of gradients", recorded)
  assert_same(ranks)
  assert_skipped(ranks[0])
  assert np.isfinite(ranks[0]["w"]).all() and len(np.unique(ranks[0]["w"][:, 0])) == 10


@two_ranks
def test_ranks_skip_adasum_updates(recorded):
  assert_skipped_steps_agree(of("adasum of updates", recorded))


def test_ranks_skip_unreduced_gradients(recorded):
  assert_skipped_steps_agree(of("unreduced", recorded))


def assert_skipped_steps_agree(ranks):
  """Asserts that all ranks skip the same steps and have the same loss scale state."""
  assert_same(ranks, ["current_loss_scale", "good_steps", "global_step"])
  assert_skipped(ranks[0])
  # Updates differ per rank: Adasum in Horovod 0.22 does not reduce those of
  # tf.train.Optimizer.
  for rank in ranks:
    assert np.isfinite(rank["w"]).all() and (rank["w"][3] == rank["w"][2]).all()


def test_readme_program_trains_identically(tmp_path):
  pytest.importorskip("sklearn")
  for order in ["outside", "inside"]:
    (tmp_path / order).mkdir()
    _, records = test_clusters.run(
      tmp_path / order, "train_horovod.py", "--order", order
    )
    assert sorted(records) == ["rank-0", "rank-1"]
    test_clusters.assert_equal_records(records)
    np.testing.assert_array_equal(
      records["rank-0"]["current_loss_scale"], test_clusters.SCALES
    )
    np.testing.assert_array_equal(
      records["rank-0"]["global_step"], test_clusters.GLOBAL_STEPS
    )


@pytest.fixture(name="hooked", scope="module")
def _hooked(tmp_path_factory):
  """Returns what two ranks of `horovod_hooks` wrote."""
  directory = tmp_path_factory.mktemp("hooks")
  command = "mpirun --allow-run-as-root --oversubscribe --timeout 240 -np 2".split()
  done = subprocess.run(
    command + [sys.executable, HOOKS, str(directory)],
    env=testing.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout[-5000:]
  paths = [directory / "rank{}.json".format(rank) for rank in range(2)]
  return [json.loads(path.read_text()) for path in paths]


def test_stall_names_rank_whose_gradients_overflow(hooked):
  """Both ranks get NaN from the reduction, but only one computed it."""
  other, own = [rank["stall"].splitlines() for rank in hooked]
  assert "computes the gradient of a root at zero" in own[-1]
  assert "what this process computed is finite" in other[-1]
  assert "receives from other ranks or workers" in other[-1]
  assert "float16" not in other[-1]


def test_stall_names_rank_whose_loss_overflows(hooked):
  """Both ranks add up the losses of all, but only one has an input that is not finite."""
  other, own = [rank["forward stall"].splitlines()[-1] for rank in hooked]
  assert own == "No scale makes the loss finite: correct the input Placeholder."
  assert other.startswith("No scale makes the loss finite: what this process computed")
  assert "HorovodAllreduce" in other and "from other ranks or workers" in other


def test_counters_before_broadcast_are_equal_after_restart(hooked):
  """The broadcast covers the variables that exist when it is built."""
  assert [rank["hook first"] for rank in hooked] == [[3, 6], [3, 6]]
  assert [rank["hook last"] for rank in hooked] == [[3, 6], [3, 3]]
