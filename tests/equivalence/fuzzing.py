"""Generates random training graphs for test_fuzzing.py.

`check(Case(...))` trains a case with our class and with TensorFlow's, and asserts that
all variables are bitwise equal after every step. A `Case` holds plain values, so its
repr is valid Python.
"""

import contextlib
import itertools
from typing import Any, NamedTuple, Optional, Tuple

from hypothesis import strategies as st
import numpy as np

import mp_compat
from mp_compat.core import gradients
from tests import testing
from tests.testing import native
from tests.testing import tf

STEPS = 40
STRATEGIES = {
  "OneDevice": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
  "Mirrored": lambda: tf.distribute.MirroredStrategy(testing.TWO_CPUS),
  "ParameterServer": lambda: tf.distribute.experimental.ParameterServerStrategy(),
}
CLIPS = {
  "clip_by_norm": lambda grads: [
    None if grad is None else tf.clip_by_norm(grad, 0.5) for grad in grads
  ],
  "clip_by_global_norm": lambda grads: tf.clip_by_global_norm(grads, 0.5)[0],
  "finite clip_by_global_norm": lambda grads: mp_compat.clip_by_global_norm(grads, 0.5)[
    0
  ],
  "scale": lambda grads: [
    None if grad is None else gradients.map_values(lambda g: g * 0.3, grad)
    for grad in grads
  ],
}


# The control-flow construct in which the gradients are computed. They are applied
# outside.
CONTEXTS = {
  "cond": lambda compute, flag: tf.cond(
    flag, compute, lambda: [g * 2.0 for g in compute()]
  ),
  "while_loop": lambda compute, flag: tf.while_loop(
    lambda i, *grads: i < 2,
    lambda i, *grads: [i + 1] + compute(),
    [0] + [tf.zeros_like(g) for g in compute()],
  )[1:],
  "cond in cond": lambda compute, flag: tf.cond(
    flag, lambda: tf.cond(flag, compute, compute), lambda: [g * 0.5 for g in compute()]
  ),
}

# Functions that replace a computed gradient before apply_gradients.
KINDS = {
  "tensor": lambda grad, variable: grad,
  "assigned": lambda grad, variable: tf.identity(
    tf.Variable(
      tf.zeros(variable.shape),
      trainable=False,
      use_resource=True,
      collections=[tf.GraphKeys.LOCAL_VARIABLES],
    ).assign(tf.convert_to_tensor(grad))
  ),
  "array": lambda grad, variable: np.full(variable.shape.as_list(), 0.125, np.float32),
  "list": lambda grad, variable: np.full(variable.shape.as_list(), -0.25).tolist(),
  "dropped": lambda grad, variable: None,
}


class Variable(NamedTuple):
  """A variable and its term of the loss, which has an input `x` of the same shape
  (`TERMS`).
  """

  shape: Tuple[int, ...]
  term: str
  resource: bool
  kind: str = "tensor"  # kind of its gradient (`KINDS`)


class Case(NamedTuple):
  """A training graph and the steps at which gradients overflow."""

  variables: Tuple[Variable, ...]
  optimizer: str
  # fixed: value; dynamic: initial value, period, multiplier
  loss_scale: Tuple[float, ...]
  gate_gradients: int
  aggregation_method: Optional[int]
  colocate: bool
  grad_loss: Optional[float]
  global_step: Optional[str]  # "resource", "reference" or None
  # function between compute_gradients and apply_gradients (`CLIPS`)
  between: Optional[str]
  strategy: Optional[str]
  context: Optional[str]  # where the gradients are computed (`CONTEXTS`)
  fed: bool  # whether gradients are fetched in one run and fed in a second one
  reverse: bool  # whether gradients and variables are passed in reverse order
  control_flow: int
  rewriting: bool  # whether constant folding and arithmetic optimization are enabled
  seed: int  # seed of inputs and initial values
  overflows: Tuple[Tuple[int, int, float], ...]  # step, variable, value


# No variable is in more than two terms: the order in which AddN adds three tensors
# depends on free buffers.
TERMS = {
  "square": lambda w, x, previous: tf.square(w) * x,
  "sine": lambda w, x, previous: tf.sin(w) * x,
  "product": lambda w, x, previous: w * x * 0.7 * x,
  "half": lambda w, x, previous: tf.cast(
    tf.cast(w, tf.float16) * tf.cast(x, tf.float16), tf.float32
  ),
  "previous": lambda w, x, previous: w * x * tf.reduce_mean(previous),
  "rows": lambda w, x, previous: (
    tf.square(tf.gather(w, [0, int(w.shape[0]) - 1, 0])) * x[:1]
  ),
  "unused": lambda w, x, previous: tf.zeros([]),
}


@st.composite
def cases(draw):
  """Draws cases that TensorFlow's class supports: float32, no overflow at a fixed
  scale, no hidden overflow.
  """
  shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
  dense, sparse = sorted(set(TERMS) - {"rows"}), sorted(TERMS)
  strategy = draw(st.sampled_from([None, None] + sorted(STRATEGIES)))
  resource = st.just(True) if strategy else st.booleans()
  variables = tuple(
    Variable(
      shape,
      draw(st.sampled_from(sparse if shape else dense)),
      draw(resource),
      draw(st.sampled_from(["tensor"] * 6 + sorted(KINDS)))
      if not strategy
      else "tensor",
    )
    for shape in draw(
      st.lists(shapes, min_size=1, max_size=draw(st.sampled_from([3, 20])))
    )
  )
  if all(
    variable.term == "unused" or variable.kind == "dropped" for variable in variables
  ):
    variables += (Variable((2,), "square", True),)
  initial, multiplier = (
    st.sampled_from([1.0, 8.0, 2.0**15, 1000.0, 2.0**100]),
    st.sampled_from([2.0, 3.0, 1.5, 16.0]),
  )
  fixed, dynamic = (
    st.sampled_from([(1.0,), (1024.0,), (3.0,)]),
    st.tuples(initial, st.integers(1, 12), multiplier),
  )
  loss_scale = draw(st.one_of(fixed, dynamic))
  if len(loss_scale) == 1:
    # With a fixed scale, TensorFlow's class may update a variable before another
    # variable's gradient, or a norm of all gradients, reads it. Gates do not prevent
    # it.
    variables = tuple(
      v._replace(
        term="square" if v.term == "previous" else v.term,
        kind="tensor" if v.kind in ("array", "list") else v.kind,
      )
      for v in variables
    )
  overflow = st.tuples(
    st.integers(0, STEPS - 1),
    st.sampled_from(
      [i for i, variable in enumerate(variables) if variable.term != "unused"]
    ),
    st.sampled_from([np.inf, -np.inf, np.nan]).map(float),
  )
  between = draw(st.sampled_from([None] + sorted(CLIPS)))
  optimizers = set(testing.OPTIMIZERS)
  if strategy == "Mirrored" and tf.VERSION.startswith("1."):
    # cannot create its slots there, with or without loss scaling
    optimizers.remove("Ftrl")
  context = None if strategy else draw(st.sampled_from([None] * 3 + sorted(CONTEXTS)))
  control_flow = draw(st.sampled_from([1, 2]))
  aggregation_methods = [None, 0, 1, 2]
  is_early = tf.VERSION.startswith(("1.", "2.0."))
  if context == "while_loop" and control_flow == 2 and is_early:
    # AccumulateNV2 has no kernel there, with or without loss scaling
    aggregation_methods.remove(2)
  return Case(
    variables=variables,
    optimizer=draw(st.sampled_from(sorted(optimizers))),
    loss_scale=loss_scale,
    gate_gradients=draw(st.integers(0, 2)),
    aggregation_method=draw(st.sampled_from(aggregation_methods)),
    colocate=draw(st.booleans()),
    grad_loss=draw(st.sampled_from([None, None, 2.5])),
    global_step=draw(
      st.sampled_from([None, "resource"] + ["reference"] * (not strategy))
    ),
    between=between,
    strategy=strategy,
    context=context,
    fed=not strategy and draw(st.sampled_from([False, False, True])),
    reverse=draw(st.booleans()),
    control_flow=control_flow,
    # Graph optimization may factor out or fold constants differently in the two graphs.
    rewriting=between != "scale"
    and not {3.0, 1.5, 1000.0}.intersection(loss_scale)
    and draw(st.booleans()),
    seed=draw(st.integers(0, 999)),
    overflows=tuple(draw(st.lists(overflow, max_size=8)))
    if len(loss_scale) > 1
    else (),
  )


def check(case: Case) -> None:
  """Raises AssertionError if our class and TensorFlow's give different variables."""
  # TensorFlow's class cannot update reference variables under control flow v2.
  references = case.global_step == "reference" or not all(
    variable.resource for variable in case.variables
  )
  theirs = train(case, native, 1 if references else case.control_flow)

  # above 2**126, `1 / scale` is 0 with TensorFlow's class
  def scale_has_reciprocal(values):
    return all(
      value <= 2.0**126
      for name, value in values.items()
      if name.startswith("current_loss_scale")
    )

  comparable = list(itertools.takewhile(scale_has_reciprocal, theirs))
  testing.assert_same(
    train(case, mp_compat, case.control_flow)[: len(comparable)], comparable
  )


def program(case: Case) -> str:
  """Returns a program that checks a case. It imports this package's `tests`."""
  return "from tests.equivalence.fuzzing import *\nnan, inf = float('nan'), float('inf')\ncheck({!r})\n".format(
    case
  )


class Built(NamedTuple):
  """A case in the current graph."""

  train_op: Any
  inputs: Any  # a placeholder [replicas, ...] for each variable
  flag: Any
  computed: Any  # the tensors that compute_gradients returned
  variables: Any  # all variables on all devices, by name
  replicas: int


def build(case: Case, api: Any, control_flow: int) -> Built:
  """Builds a case in the current graph."""
  with testing.control_flow(control_flow):
    strategy = STRATEGIES[case.strategy]() if case.strategy else None
    replicas = strategy.num_replicas_in_sync if strategy else 1
    inputs = [
      tf.placeholder(tf.float32, (replicas,) + variable.shape)
      for variable in case.variables
    ]
    flag = tf.placeholder(tf.bool, [])
    computed = []

    def step():
      replica = tf.distribute.get_replica_context().replica_id_in_sync_group
      xs = [each[replica] for each in inputs]
      optimizer = api.MixedPrecisionLossScaleOptimizer(
        testing.OPTIMIZERS[case.optimizer](),
        case.loss_scale[0]
        if len(case.loss_scale) == 1
        else api.DynamicLossScale(*case.loss_scale),
      )
      variables = variables_of(case)

      def compute():
        pairs = optimizer.compute_gradients(
          loss_of(case, variables, xs),
          variables,
          gate_gradients=case.gate_gradients,
          aggregation_method=case.aggregation_method,
          colocate_gradients_with_ops=case.colocate,
          grad_loss=None if case.grad_loss is None else tf.constant(case.grad_loss),
        )
        return [grad for grad, _ in pairs]

      def compute_dense():
        dense = []
        for grad, variable in zip(compute(), variables):
          dense.append(
            tf.zeros_like(variable) if grad is None else tf.convert_to_tensor(grad)
          )
          # required by loops; TensorFlow 1.15 loses the shape of rows
          dense[-1].set_shape(variable.shape)
        return dense

      # tf.cond returns a list of one tensor as a tensor.
      grads = (
        tf.nest.flatten(CONTEXTS[case.context](compute_dense, flag))
        if case.context
        else compute()
      )
      computed.extend(grad for grad in grads if isinstance(grad, tf.Tensor))
      if case.between:
        grads = CLIPS[case.between](grads)
      pairs = [
        (None if grad is None else KINDS[each.kind](grad, variable), variable)
        for each, grad, variable in zip(case.variables, grads, variables)
      ]
      return optimizer.apply_gradients(
        reversed(pairs) if case.reverse else pairs, global_step
      )

    with strategy.scope() if strategy else contextlib.nullcontext():
      global_step = None
      if case.global_step:
        with tf.variable_scope("", use_resource=case.global_step == "resource"):
          global_step = tf.train.get_or_create_global_step()
      train_op = (
        strategy.group(strategy.extended.call_for_each_replica(step))
        if strategy
        else step()
      )
    copies_of = (
      strategy.experimental_local_results if strategy else lambda variable: [variable]
    )
    copies = [copy for v in tf.global_variables() for copy in copies_of(v)]
    variables = {"{} on {}".format(testing.plain_name(v), v.device): v for v in copies}
    return Built(train_op, inputs, flag, computed, variables, replicas)


def train(case: Case, api: Any, control_flow: int) -> Any:
  """Trains a case. Returns the values of all variables on all devices after every
  step.
  """
  with tf.Graph().as_default():
    built = build(case, api, control_flow)
    config = testing.config()
    if not case.rewriting:
      rewrites = config.graph_options.rewrite_options
      rewrites.constant_folding = rewrites.arithmetic_optimization = (
        2  # RewriterConfig.OFF
      )
    with tf.Session(config=config) as sess:
      sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
      history = []
      for number, values in enumerate(feeds(case, built.replicas)):
        feed = dict(zip(built.inputs, values))
        feed[built.flag] = number % 3 > 0
        if case.fed:
          feed.update(zip(built.computed, sess.run(built.computed, feed)))
        sess.run(built.train_op, feed)
        history.append(sess.run(built.variables))
  return history


def variables_of(case):
  """Creates the variables of a case."""
  random = np.random.RandomState(case.seed)
  return [
    tf.get_variable(
      "w{}".format(number),
      initializer=np.float32(random.uniform(-2, 2, shape)),
      use_resource=resource,
    )
    for number, (shape, _, resource, _) in enumerate(case.variables)
  ]


def loss_of(case, variables, xs):
  """Returns the loss of one replica, the sum of a term for each variable."""
  return tf.add_n(
    [
      tf.reduce_sum(TERMS[variable.term](w, x, previous))
      for variable, w, x, previous in zip(
        case.variables, variables, xs, variables[:1] + variables
      )
    ]
  )


def feeds(case, replicas):
  """Yields the inputs of every step, an array [replicas, ...] for each variable."""
  random = np.random.RandomState(case.seed + 1)
  for step in range(STEPS):
    xs = [
      np.float32(random.normal(size=(replicas,) + variable.shape))
      for variable in case.variables
    ]
    for index, value in [
      (index, value) for at, index, value in case.overflows if at == step
    ]:
      replica = (step + index) % replicas
      # The term "rows" uses the first element.
      xs[index][(replica,) + (0,) * len(case.variables[index].shape)] = value
    yield xs
