"""Programs in which the loss, `compute_gradients`, `apply_gradients` or all of them are
in a function, or compiled.
"""

import tensorflow

from tests.programs import table as programs
from tests.programs import test_control_flow as control_flow
from tests.programs.table import VERSION
from tests.testing import tf

TABLE = programs.Table()


def function(t, fn, zeros, x):
  return control_flow.as_list(tensorflow.function(fn)(x))


def wrap_function(t, fn, zeros, x):
  return control_flow.as_list(
    tf.wrap_function(fn, [tf.TensorSpec(x.shape, x.dtype)])(x)
  )


def function_in_function(t, fn, zeros, x):
  return function(t, lambda own: function(t, fn, zeros, own), zeros, x)


NEEDS_COMPILED = {"tf.function with experimental_compile": VERSION != (2, 0)}


def compiled(t, fn, zeros, x):
  option = "jit_compile" if VERSION >= (2, 5) else "experimental_compile"
  return control_flow.as_list(tensorflow.function(fn, **{option: True})(x))


def xla(t, fn, zeros, x):
  return control_flow.as_list(tf.xla.experimental.compile(fn, [x]))


def jit_scope(t, fn, zeros, x):
  with tf.xla.experimental.jit_scope():
    return control_flow.as_list(fn(x))


FUNCTIONS = {
  "function": (function, {}),
  "wrap_function": (wrap_function, {}),
  "function_in_function": (function_in_function, {}),
  "cond_in_function": (control_flow.nest_contexts(function, control_flow.cond), {}),
  "function_in_cond": (control_flow.nest_contexts(control_flow.cond, function), {}),
  "while_in_function": (
    control_flow.nest_contexts(function, control_flow.while_loop),
    {},
  ),
  "function_in_while": (
    control_flow.nest_contexts(control_flow.while_loop, function),
    {},
  ),
}
COMPILED = {
  "compiled_function": (compiled, NEEDS_COMPILED),
  "xla": (xla, {}),
  "jit_scope": (jit_scope, {}),
  "cond_in_xla": (control_flow.nest_contexts(xla, control_flow.cond), {}),
  "cond_in_compiled_function": (
    control_flow.nest_contexts(compiled, control_flow.cond),
    NEEDS_COMPILED,
  ),
  "compiled_function_in_cond": (
    control_flow.nest_contexts(control_flow.cond, compiled),
    NEEDS_COMPILED,
  ),
}
RUN_BY_DEFAULT = set(
  [
    ("both", where)
    for where in (
      "function",
      "wrap_function",
      "compiled_function",
      "cond_in_xla",
      "cond_in_function",
    )
  ]
  + [("compute", where) for where in ("function", "xla")]
  + [("apply", where) for where in ("function", "xla")]
  + [("loss", "function")]
)
for where, (context, needs) in list(FUNCTIONS.items()) + list(COMPILED.items()):
  for part, build in control_flow.PARTS.items():
    if part == "loss" and where in ("xla", "cond_in_xla", "cond_in_compiled_function"):
      continue  # Gradients of compiled functions cannot be computed outside of them.
    # A compiled function in a branch of control flow v1 stops the whole step in its
    # backward pass, also unwrapped. On TensorFlow 2.2, a compiled step of the unwrapped
    # optimizer is executed in the branch that is not taken, too.
    fails_in_v1 = where == "compiled_function_in_cond" and (
      part == "loss" or VERSION == (2, 2)
    )
    fails = None
    if part == "apply" and where in ("xla", "cond_in_xla"):
      fails = programs.fails_up_to(
        (2, 10), "it converts IndexedSlices to dense tensors, which XLA cannot compile"
      )
    TABLE.add(
      "{}_in_{}".format(part, where),
      build,
      context,
      needs=needs,
      variants=(programs.V2,) if fails_in_v1 else programs.RESOURCE,
      exact=where in COMPILED,
      slow=(part, where) not in RUN_BY_DEFAULT,
      tensorflow_fails=fails,
    )

for first, second in [
  (function, control_flow.cond),
  (control_flow.cond, function),
  (function, function),
  (xla, function),
  (function, xla),
  (control_flow.map_fn, xla),
]:
  TABLE.add(
    "compute_in_{}_apply_in_another_{}".format(first.__name__, second.__name__),
    control_flow.compute_and_apply_in,
    first,
    second,
    variants=programs.RESOURCE,
    exact=xla in (first, second),
    slow=True,
  )


class CompiledUpdates(tf.train.Optimizer):
  """Updates variables in a compiled function, as Keras's optimizers may."""

  def __init__(self, in_cond):
    super().__init__(use_locking=False, name="CompiledUpdates")
    self._in_cond = in_cond

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    grads, variables = zip(*grads_and_vars)

    def update(*grads):
      for variable, grad in zip(variables, grads):
        variable.assign_sub(0.25 * grad)
      return global_step.assign_add(1)

    def apply():
      return compiled(
        None, lambda grads: update(*grads), None, control_flow.to_dense(grads)
      )[0]

    always = tf.placeholder_with_default(True, [])
    return tf.group(
      tf.cond(always, apply, lambda: tf.zeros([], tf.int64))
      if self._in_cond
      else apply(),
      name=name,
    )


for in_cond in (False, True):
  TABLE.add(
    "updates_in_compiled_function" + "_in_cond" * in_cond,
    lambda t, in_cond: t.wrap(CompiledUpdates(in_cond)).minimize(
      t.loss(), t.global_step
    ),
    in_cond,
    variants=programs.RESOURCE,
    needs=NEEDS_COMPILED,
    exact=True,
    tensorflow_fails=lambda variant: (
      "under control flow v1, it executes compiled functions in skipped steps, too"
      if variant.control_flow == 1 and VERSION not in ((1, 15), (2, 4))
      else None
    ),
  )


def compiled_gradients(t, dtype):
  """Computes and applies gradients of a variable of half precision in a compiled
  function.
  """
  half = t.variable("half", tf.constant([1.0, -2.0, 4.0], dtype))
  optimizer = t.wrap(tf.train.GradientDescentOptimizer(0.25))

  def step(x):
    loss = t.loss(x) + tf.reduce_sum(tf.cast(half, tf.float32) * x)
    return control_flow.run_after(
      optimizer.minimize(loss, t.global_step, [half] + t.variables)
    )

  return (compiled if VERSION >= (2, 1) else xla)(t, step, [tf.zeros([])], t.x)


for dtype in (tf.float16, tf.bfloat16):
  TABLE.add(
    "compiled_gradients_of_{}".format(dtype.name),
    compiled_gradients,
    dtype,
    variants=programs.RESOURCE,
    needs={"bfloat16 in XLA on CPUs": dtype == tf.float16 or VERSION >= (2, 0)},
    tensorflow_fails="it does not accept float16 gradients",
    exact=True,
    slow=True,
  )


@TABLE.program(variants=programs.RESOURCE)
def gradients_with_a_tape_in_a_function(t):
  optimizer = t.wrap()

  @tensorflow.function
  def compute(x):
    with tensorflow.GradientTape() as tape:
      loss = control_flow.scale_loss(optimizer, t.loss(x))
    return control_flow.to_dense(tape.gradient(loss, t.variables))

  grads = control_flow.unscale_gradients(optimizer, compute(t.x))
  return optimizer.apply_gradients(zip(grads, t.variables), t.global_step)


@TABLE.program(variants=programs.RESOURCE)
def gradients_clipped_in_a_function(t):
  optimizer = t.wrap()
  grads, variables = zip(*optimizer.compute_gradients(t.loss()))
  clip = tensorflow.function(lambda *grads: tf.clip_by_global_norm(grads, 1.0)[0])
  return optimizer.apply_gradients(
    zip(clip(*control_flow.to_dense(grads)), variables), t.global_step
  )


@TABLE.program(variants=programs.RESOURCE)
def an_eager_tensor_as_gradient_in_a_function(t):
  optimizer = t.wrap()
  w, table = t.variables
  with tf.init_scope():
    outside = tf.constant([0.5, 0.25, 2.0])

  @tensorflow.function
  def step(x):
    ((grad, _),) = optimizer.compute_gradients(t.loss(x), [table])
    return control_flow.run_after(
      optimizer.apply_gradients([(outside, w), (grad, table)], t.global_step)
    )

  return step(t.x)


@TABLE.program(variants=programs.RESOURCE)
def minimize_in_an_autograph_loop(t):
  optimizer = t.wrap()

  @tensorflow.function(autograph=True)
  def step(x):
    for i in tf.range(3):
      optimizer.minimize(
        t.loss(x * tf.cast(i + 1, tf.float32)), t.global_step, t.variables
      )
    return tf.reduce_sum(x)

  return step(t.x)


test_program_trains_with_the_same_numbers = TABLE.make_test()
