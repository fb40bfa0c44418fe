"""Programs in which the loss, `compute_gradients`, `apply_gradients` or all of them are
in a control-flow context.

A context is a function `context(build, fn, zeros, x)`. It calls `fn(input)` inside the
context, which returns a list of tensors with the shapes of `zeros`. It returns a list
of tensors with these shapes outside of the context.
"""

from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()

LOOP = dict(parallel_iterations=1)


def cond(t, fn, zeros, x):
  return as_list(tf.cond(t.flag, lambda: fn(x), lambda: fn(x * 2.0)))


def cond_of_one_branch(t, fn, zeros, x):
  """Calls `fn` only if the flag is True."""
  return as_list(
    tf.cond(t.flag, lambda: fn(x), lambda: [tf.identity(zero) for zero in zeros])
  )


def case(t, fn, zeros, x):
  return as_list(
    tf.case(
      [(tf.logical_not(t.flag), lambda: fn(x)), (t.x[0] > 1e9, lambda: fn(x * 3.0))],
      default=lambda: fn(x * 2.0),
    )
  )


def switch_case(t, fn, zeros, x):
  return as_list(
    tf.switch_case(
      tf.cast(t.flag, tf.int32),
      [lambda: fn(x), lambda: fn(x * 2.0), lambda: fn(x * 3.0)],
    )
  )


def while_loop(t, fn, zeros, x):
  turns = 1 + tf.cast(t.flag, tf.int32)

  def body(i, *sums):
    return [i + 1] + [
      total + one for total, one in zip(sums, fn(x * tf.cast(i + 1, x.dtype)))
    ]

  return tf.while_loop(
    lambda i, *sums: i < turns, body, [tf.constant(0)] + zeros, **LOOP
  )[1:]


def map_fn(t, fn, zeros, x):
  mapped = tf.map_fn(
    fn, tf.stack([x, x * 2.0]), dtype=[zero.dtype for zero in zeros], **LOOP
  )
  return [tf.reduce_sum(one, 0) for one in mapped]


def scan(t, fn, zeros, x):
  scanned = tf.scan(
    lambda sums, one: [total + new for total, new in zip(sums, fn(one))],
    tf.stack([x, x * 2.0]),
    initializer=zeros,
    **LOOP,
  )
  return [one[-1] for one in scanned]


def dynamic_rnn(t, fn, zeros, x):

  class Cell:  # tf.nn.rnn_cell.RNNCell needs an old Keras
    state_size, output_size = (
      3,
      tuple(zero.shape if zero.shape.ndims else tf.TensorShape([1]) for zero in zeros),
    )

    def zero_state(self, batch_size, dtype):
      return tf.zeros([batch_size, 3], dtype)

    def __call__(self, inputs, state, scope=None):
      made = fn(inputs[0])
      return tuple(
        tf.reshape(one, [1] + (zero.shape.as_list() or [1]))
        for one, zero in zip(made, zeros)
      ), state

  outputs, _ = tf.nn.dynamic_rnn(
    Cell(), tf.stack([x, x * 2.0])[None], dtype=tf.float32, **LOOP
  )
  return [
    tf.reshape(tf.reduce_sum(one, [0, 1]), zero.shape)
    for one, zero in zip(outputs, zeros)
  ]


def nest_contexts(outer, inner):
  """Returns the context `inner` inside the context `outer`."""
  return lambda t, fn, zeros, x: outer(
    t, lambda own: inner(t, fn, zeros, own), zeros, x
  )


def as_list(values):
  return list(values) if isinstance(values, (list, tuple)) else [values]


CONTEXTS = {
  one.__name__: one
  for one in (
    cond,
    cond_of_one_branch,
    case,
    switch_case,
    while_loop,
    map_fn,
    scan,
    dynamic_rnn,
  )
}
NESTED = {
  "cond_in_cond": nest_contexts(cond, cond),
  "cond_in_while": nest_contexts(while_loop, cond),
  "while_in_cond": nest_contexts(cond, while_loop),
  "while_in_while": nest_contexts(while_loop, while_loop),
  "cond_in_map": nest_contexts(map_fn, cond),
  "map_in_cond": nest_contexts(cond, map_fn),
  "case_in_scan": nest_contexts(scan, case),
  "switch_in_case_in_cond": nest_contexts(cond, nest_contexts(case, switch_case)),
}


def make_zeros(variables):
  return [tf.zeros(variable.shape) for variable in variables]


def run_after(op):
  """Returns a list with one scalar tensor, whose evaluation runs the op."""
  with tf.control_dependencies([op]):
    return [tf.constant(0.0) + 0.0]


def to_dense(grads):
  return [tf.convert_to_tensor(grad) for grad in grads]


def compute_in(t, context, optimizer):
  """Returns the gradients that `compute_gradients` returns inside the context."""

  def compute(x):
    return to_dense(
      grad for grad, _ in optimizer.compute_gradients(t.loss(x), t.variables)
    )

  return context(t, compute, make_zeros(t.variables), t.x)


def apply_in(t, context, optimizer, grads_and_vars):
  """Returns tensors that run `apply_gradients` inside the context."""

  def apply(x):
    return run_after(optimizer.apply_gradients(grads_and_vars, t.global_step))

  return context(t, apply, [tf.zeros([])], t.x)


def loss_inside(t, context):
  (loss,) = context(t, lambda x: [t.loss(x)], [tf.zeros([])], t.x)
  return t.wrap().minimize(loss, t.global_step)


def compute_inside(t, context):
  optimizer = t.wrap()
  grads = compute_in(t, context, optimizer)
  return optimizer.apply_gradients(zip(grads, t.variables), t.global_step)


def apply_inside(t, context):
  optimizer = t.wrap()
  return apply_in(t, context, optimizer, optimizer.compute_gradients(t.loss()))


def both_inside(t, context):
  optimizer = t.wrap()

  def minimize(x):
    return run_after(optimizer.minimize(t.loss(x), t.global_step, t.variables))

  return context(t, minimize, [tf.zeros([])], t.x)


def gradients_inside(t, context):
  """Calls `tf.gradients` inside the context; ours also scales the loss and unscales
  there.
  """
  optimizer = t.wrap()

  def compute(x):
    grads = tf.gradients(scale_loss(optimizer, t.loss(x)), t.variables)
    return to_dense(unscale_gradients(optimizer, grads))

  grads = context(t, compute, make_zeros(t.variables), t.x)
  return optimizer.apply_gradients(zip(grads, t.variables), t.global_step)


def scale_loss(optimizer, loss):
  return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def unscale_gradients(optimizer, grads):
  return (
    optimizer.unscale_gradients(grads)
    if hasattr(optimizer, "unscale_gradients")
    else grads
  )


PARTS = {
  "loss": loss_inside,
  "compute": compute_inside,
  "apply": apply_inside,
  "both": both_inside,
  "gradients": gradients_inside,
}
RUN_BY_DEFAULT = set(
  [
    ("compute", where)
    for where in ("cond", "while_loop", "map_fn", "dynamic_rnn", "case_in_scan")
  ]
  + [("both", where) for where in ("cond", "switch_case", "while_loop", "map_in_cond")]
  + [
    ("loss", "map_fn"),
    ("apply", "cond"),
    ("apply", "scan"),
    ("gradients", "while_loop"),
  ]
)
BRANCHES_IN_OTHERS = (
  "case",
  "cond_in_cond",
  "cond_in_while",
  "cond_in_map",
  "case_in_scan",
  "switch_in_case_in_cond",
)


def get_options(part, where):
  """Returns the options of a row: variants, and reasons why the inner optimizer alone
  fails.

  Branches of `tf.switch_case` are functions under both versions of control flow.
  """
  if part in ("apply", "both"):
    return {
      "variants": programs.RESOURCE if "switch" in where else programs.NO_V2_REFERENCE
    }
  if part == "loss" and where in ("cond_in_while", "cond_in_map", "case_in_scan"):
    # UnsortedSegmentSum fails in the backward pass
    return {"variants": (programs.V2, programs.V2_REFERENCE)}
  # tf.gradients in a branch of control flow v1 that is inside another branch returns
  # zeros.
  if part == "gradients" and where in BRANCHES_IN_OTHERS:
    return {"variants": (programs.V2, programs.V2_REFERENCE)}
  if part == "compute" and where in BRANCHES_IN_OTHERS:
    return {
      "unwrapped_fails": lambda variant: (
        "tf.gradients returns zeros" if variant.control_flow == 1 else None
      )
    }
  return {}


for where, context in list(CONTEXTS.items()) + list(NESTED.items()):
  for part, build in PARTS.items():
    TABLE.add(
      "{}_in_{}".format(part, where),
      build,
      context,
      slow=(part, where) not in RUN_BY_DEFAULT,
      **get_options(part, where),
    )


def compute_and_apply_in(t, first, second):
  """Computes gradients in one context and applies them in another."""
  optimizer = t.wrap()
  grads = compute_in(t, first, optimizer)
  return apply_in(t, second, optimizer, list(zip(grads, t.variables)))


for one, other in [
  (cond, cond),
  (cond, while_loop),
  (while_loop, cond),
  (map_fn, switch_case),
  (scan, case),
]:
  TABLE.add(
    "compute_in_{}_apply_in_another_{}".format(one.__name__, other.__name__),
    compute_and_apply_in,
    one,
    other,
    slow=one is not cond,
    variants=programs.RESOURCE if other is switch_case else programs.NO_V2_REFERENCE,
  )


@TABLE.program(variants=programs.NO_V2_REFERENCE)
def compute_outside_of_the_branch_that_clips_and_applies(t):
  optimizer = t.wrap()
  grads_and_vars = optimizer.compute_gradients(t.loss())

  def clip_and_apply():
    return optimizer.apply_gradients(
      [(tf.clip_by_norm(g, 0.5), v) for g, v in grads_and_vars], t.global_step
    )

  return tf.cond(
    t.flag,
    clip_and_apply,
    lambda: optimizer.apply_gradients(grads_and_vars, t.global_step),
  )


@TABLE.program()
def sparse_gradients_computed_in_a_branch(t):
  optimizer = t.wrap()
  _, table = t.variables

  def compute(factor):
    ((grad, _),) = optimizer.compute_gradients(
      tf.reduce_sum(
        tf.square(tf.gather(table, [1, 4, 1])) * tf.expand_dims(t.x * factor, 1)
      ),
      [table],
    )
    return tf.IndexedSlices(
      grad.values, tf.cast(grad.indices, tf.int32), grad.dense_shape
    )

  grad = tf.cond(t.flag, lambda: compute(1.0), lambda: compute(2.0))
  return optimizer.apply_gradients([(grad, table)], t.global_step)


@TABLE.program()
def per_example_gradients_are_clipped_and_averaged(t):
  optimizer = t.wrap()

  def compute_for_example(x):
    grads = [g for g, _ in optimizer.compute_gradients(t.loss(x), t.variables)]
    return to_dense(tf.clip_by_global_norm(grads, 1.0)[0])

  grads = tf.map_fn(
    compute_for_example, tf.stack([t.x, t.x * 2.0, t.x * 0.5]), dtype=[tf.float32] * 2
  )
  return optimizer.apply_gradients(
    [(tf.reduce_mean(g, 0), v) for g, v in zip(grads, t.variables)], t.global_step
  )


@TABLE.program(variants=programs.NO_V2_REFERENCE)
def one_of_two_train_ops_runs(t):
  first, second = t.wrap(), t.wrap(tf.train.MomentumOptimizer(0.1, 0.9))
  w, table = t.variables
  return tf.cond(
    t.flag,
    lambda: tf.group(first.minimize(t.loss(), t.global_step, [w])),
    lambda: tf.group(second.minimize(t.loss(), t.global_step, [table])),
  )


@TABLE.program()
def loss_scaled_in_branches_unscaled_outside(t):
  optimizer = t.wrap()
  loss = tf.cond(
    t.flag,
    lambda: scale_loss(optimizer, t.loss()),
    lambda: scale_loss(optimizer, t.loss() * 2.0),
  )
  grads = unscale_gradients(optimizer, to_dense(tf.gradients(loss, t.variables)))
  return optimizer.apply_gradients(zip(grads, t.variables), t.global_step)


@TABLE.program(variants=programs.NO_V2_REFERENCE)
def loss_scaled_outside_unscaled_in_a_branch(t):
  optimizer = t.wrap()
  grads = to_dense(tf.gradients(scale_loss(optimizer, t.loss()), t.variables))

  def step(clip):
    own = unscale_gradients(optimizer, grads)
    return optimizer.apply_gradients(
      zip(tf.clip_by_global_norm(own, clip)[0], t.variables), t.global_step
    )

  return tf.cond(t.flag, lambda: step(0.5), lambda: step(5.0))


test_program_trains_with_the_same_numbers = TABLE.make_test()
