"""Compares random training graphs with TensorFlow's class after every step. `--examples
N` sets their number.
"""

import hypothesis
import pytest

from tests.equivalence import fuzzing


@pytest.mark.each_choice
@pytest.mark.parametrize("context", sorted(fuzzing.CONTEXTS))
@pytest.mark.parametrize("control_flow", [1, 2])
def test_fixed_scale_is_folded_in_control_flow(context, control_flow):
  """Graph optimizers multiply the constants of the model and the scale in advance."""
  case = fuzzing.Case(
    variables=(fuzzing.Variable((), "product", True),),
    optimizer="Adagrad",
    loss_scale=(1024.0,),
    gate_gradients=0,
    aggregation_method=None,
    colocate=False,
    grad_loss=2.5,
    global_step=None,
    between=None,
    strategy=None,
    context=context,
    fed=False,
    reverse=False,
    control_flow=control_flow,
    rewriting=True,
    seed=0,
    overflows=(),
  )
  fuzzing.check(case)


# Coverage would double the time, and other tests cover the same lines.
@pytest.mark.no_cover
@hypothesis.given(fuzzing.cases())
def test_random_graphs_match_tensorflow(case):
  try:
    fuzzing.check(case)
  except AssertionError:
    hypothesis.note("Program that reproduces the failure:\n\n" + fuzzing.program(case))
    raise
