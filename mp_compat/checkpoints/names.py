# SPDX-License-Identifier: Apache-2.0
"""Matches the variables of a graph with the names in a checkpoint."""

from typing import Dict, Mapping

from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import tf
from mp_compat.core import dialects


def tensorflow_names(graph: tf.Graph) -> Dict[str, str]:
  """Returns the record in `graph` of the names that TensorFlow's class would give to variables, by their names here."""
  return graphs.record_in(graph, "tensorflow_names")


def match(wanted: dialects.Shapes, found: dialects.Shapes, recorded: Mapping[str, str]) -> Dict[str, str]:
  """Returns the names that a checkpoint of any naming scheme has for the variables of a graph.

  A checkpoint with all names, apart from those of a loss scale, was written by this package or without loss scaling. In
  others `beta1_power` may belong to an optimizer without loss scaling: the names in `recorded` have precedence.

  Args:
    wanted: The shapes of all variables by name, in the order in which they were created.
    found: The shapes in the checkpoint by name.
    recorded: The names that TensorFlow's class would give to variables in `wanted`, by their names there.

  Returns:
    Names in `found` by names in `wanted`, without the names that have no match.
  """
  exact, state = {}, dialects.state(wanted)
  if not all(name in found or name in state for name in wanted):
    exact = {name: recorded[name] for name in wanted if recorded.get(name) in found}
  return dialects.match(wanted, found, exact)
