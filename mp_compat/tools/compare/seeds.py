# SPDX-License-Identifier: Apache-2.0
"""Makes the seeds of TensorFlow's ops repeatable."""

import itertools
from typing import Optional, Tuple

from mp_compat._tensorflow import seeds
from mp_compat.graph import graphs
from mp_compat.graph import records


def make_repeatable() -> None:
  """Gives each op without a seed the number of its call in the graph, not that of its
  op, and always a graph seed.

      op_seed given    get_seed(op_seed)
      none             get_seed(0), get_seed(1), ... in each graph, and in eager mode

  So a program has the same seeds whichever further ops are built between its own.
  Generators with a state from the system's entropy get such a seed, too.
  """
  eager_numbers = itertools.count()

  def get_repeatable_seed(
    op_seed: Optional[int],
  ) -> Tuple[Optional[int], Optional[int]]:
    graph = graphs.init_scope_graph()
    numbers = eager_numbers
    if graph is not None:
      numbers = records.record_in(graph, "op_seeds", itertools.count)
    if op_seed is None:
      op_seed = next(numbers)
    return seeds.get_seed(op_seed)

  def next_seed() -> Optional[int]:
    _, op_seed = get_repeatable_seed(None)
    return op_seed

  seeds.replace_get_seed(get_repeatable_seed)
  seeds.replace_seed_of_generators(next_seed)
