"""Programs that differ in the inner optimizer or in its learning rate."""

from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()

INNER = {
  "gradient_descent": lambda t: tf.train.GradientDescentOptimizer(0.1),
  "adam": lambda t: tf.train.AdamOptimizer(0.1),
  "adam_with_locks": lambda t: tf.train.AdamOptimizer(0.1, use_locking=True),
  "adagrad": lambda t: tf.train.AdagradOptimizer(0.1),
  "adagrad_da": lambda t: tf.train.AdagradDAOptimizer(0.1, t.global_step),
  "adadelta": lambda t: tf.train.AdadeltaOptimizer(1.0),
  "ftrl": lambda t: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
  "ftrl_with_shrinkage": lambda t: tf.train.FtrlOptimizer(
    0.1, l2_shrinkage_regularization_strength=0.1
  ),
  "nesterov": lambda t: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
  "rms_prop": lambda t: tf.train.RMSPropOptimizer(0.01),
  "rms_prop_centered": lambda t: tf.train.RMSPropOptimizer(
    0.01, momentum=0.5, centered=True
  ),
  "proximal_gradient_descent": lambda t: tf.train.ProximalGradientDescentOptimizer(
    0.1, l1_regularization_strength=0.01
  ),
  "proximal_adagrad": lambda t: tf.train.ProximalAdagradOptimizer(
    0.1, l1_regularization_strength=0.01
  ),
}
RATES = {
  "a_placeholder": lambda t: t.input(
    tf.float32, [], lambda x, flag: 0.1 if flag else 0.2
  ),
  "a_variable": lambda t: tf.Variable(0.1, trainable=False, use_resource=t.resource),
  "a_schedule": lambda t: tf.train.exponential_decay(0.1, t.global_step, 2, 0.5),
  "a_schedule_with_cases": lambda t: tf.train.piecewise_constant(
    t.global_step, [1, 2], [0.1, 0.2, 0.3]
  ),
  "a_callable": lambda t: lambda: 0.1,
  "a_function_of_the_input": lambda t: tf.minimum(tf.abs(t.x[0]), 0.1),
}


def train_with(t, make_inner):
  return t.wrap(make_inner(t)).minimize(t.loss(), t.global_step)


def train_at_rate(t, make_rate):
  return t.wrap(tf.train.AdamOptimizer(make_rate(t))).minimize(t.loss(), t.global_step)


for name, make_inner in INNER.items():
  TABLE.add(
    "trained_by_" + name, train_with, make_inner, slow=name not in ("adam", "ftrl")
  )
for name, make_rate in RATES.items():
  TABLE.add(
    "learning_rate_is_" + name, train_at_rate, make_rate, slow=name != "a_schedule"
  )


# --- custom optimizers
# ------------------------------------------------------------------------------------------------

BY_POSITION = "it passes global_step by position"
OTHER_NAMES = "variables of the inner optimizer get the names of its conditional"


def custom_optimizer(t, cls):
  return t.wrap(cls()).minimize(t.loss(sparse=False), t.global_step)


def outer_wrapper(t, cls):
  return cls(t.wrap()).minimize(t.loss(sparse=False), t.global_step)


def trains(build, **options):
  """Returns a decorator that adds the program `build(t, cls)` for a class."""

  def decorate(cls):
    TABLE.add("{}_{}".format(build.__name__, cls.__name__), build, cls, **options)
    return cls

  return decorate


class Descent(tf.train.Optimizer):
  """Gradient descent; the custom optimizers below override its methods."""

  def __init__(self):
    super().__init__(False, "Descent")

  def _apply_dense(self, grad, var):
    return tf.assign_sub(var, 0.1 * grad)

  def _resource_apply_dense(self, grad, handle):
    return handle.assign_sub(0.1 * grad)

  def _apply_sparse(self, grad, var):
    return tf.scatter_sub(var, grad.indices, 0.1 * grad.values)

  def _resource_apply_sparse(self, grad, handle, indices):
    return handle.scatter_sub(tf.IndexedSlices(0.1 * grad, indices))


@trains(custom_optimizer)
class ReturnsAList(Descent):
  """Has attributes with the names in which wrappers keep their inner optimizer."""

  def __init__(self):
    super().__init__()
    self._opt, self._optimizer = "sgd", 3

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return [v.assign_sub(0.1 * tf.convert_to_tensor(g)) for g, v in grads_and_vars]


@trains(custom_optimizer, slow=True)
class ReturnsAValue(Descent):
  """Also computes a tuple of pairs."""

  def compute_gradients(self, *args, **kwargs):
    return tuple((g * 0.5, v) for g, v in super().compute_gradients(*args, **kwargs))

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    with tf.control_dependencies(
      [super().apply_gradients(grads_and_vars, global_step, name)]
    ):
      return tf.constant(3)


@trains(custom_optimizer)
class ReadsCollections(Descent):
  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    decayed = [v for v in tf.trainable_variables() if "w" in v.name]
    with tf.control_dependencies(
      [super().apply_gradients(grads_and_vars, *args, **kwargs)]
    ):
      return tf.group(*[v.assign_sub(0.01 * v) for v in decayed])


class Wrapper(tf.train.Optimizer):
  """Wraps another optimizer, which it keeps in the attribute `_inner`."""

  def __init__(self, inner):
    super().__init__(False, "Wrapper")
    self._inner = inner

  def compute_gradients(self, *args, **kwargs):
    return self._inner.compute_gradients(*args, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return self._inner.apply_gradients(grads_and_vars, global_step, name)


@trains(outer_wrapper)
class ClipsOutside(Wrapper):
  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    grads, variables = zip(*grads_and_vars)
    return super().apply_gradients(
      zip(tf.clip_by_global_norm(grads, 0.5)[0], variables), global_step, name
    )


@trains(outer_wrapper, hidden=True)
class ClipsByValueOutside(Wrapper):
  def compute_gradients(self, *args, **kwargs):
    return [
      (tf.clip_by_value(g, -0.5, 0.5), v)
      for g, v in super().compute_gradients(*args, **kwargs)
    ]


@trains(outer_wrapper)
class AddsNoiseOutside(Wrapper):
  def compute_gradients(self, *args, **kwargs):
    return [(g + 0.25, v) for g, v in super().compute_gradients(*args, **kwargs)]


@trains(
  custom_optimizer,
  tensorflow_fails="it reads attributes that the constructor of the base class sets",
  slow=True,
)
class NeverInitialized(tf.train.Optimizer):
  """Does not call the base class's constructor, and sets none of its attributes."""

  def __init__(self):
    pass

  def compute_gradients(self, loss, var_list=None, **kwargs):
    variables = var_list or tf.trainable_variables()
    return list(zip(tf.gradients(loss, variables), variables))

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    updates = [tf.assign_sub(v, 0.1 * grad) for grad, v in grads_and_vars]
    return tf.group(*updates + [tf.assign_add(global_step, 1)])


@trains(custom_optimizer, tensorflow_fails=BY_POSITION, slow=True)
class TakesKeywords(Descent):
  """Has an argument of its own before those that `minimize` passes, which are keywords
  only.
  """

  def apply_gradients(self, grads_and_vars, rate=0.1, *, name=None, global_step=None):
    updates = [v.assign_sub(rate * tf.convert_to_tensor(g)) for g, v in grads_and_vars]
    return tf.group(*updates + [tf.assign_add(global_step, 1)], name=name)


@trains(custom_optimizer, tensorflow_fails=BY_POSITION)
class TakesAnyKeywords(Descent):
  def apply_gradients(self, grads_and_vars, factor=1.0, **kwargs):
    return super().apply_gradients(
      [(factor * tf.convert_to_tensor(g), v) for g, v in grads_and_vars], **kwargs
    )


@trains(custom_optimizer, tensorflow_fails="it passes a name")
class HasOwnDefaults(Descent):
  """`minimize` replaces its defaults by TensorFlow's, because it passes every
  argument.
  """

  def compute_gradients(self, loss, var_list=None, grad_loss=2.0, **kwargs):
    return super().compute_gradients(loss, var_list, grad_loss=grad_loss, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step="none", name="own"):
    rate = 0.1 if name is None else 10.0
    scaled = [(rate * tf.convert_to_tensor(g), v) for g, v in grads_and_vars]
    return super().apply_gradients(
      scaled, None if global_step == "none" else global_step
    )


@trains(custom_optimizer)
class RequiresVariables(Descent):
  """As tensorflow-privacy's: `var_list` has no default."""

  def compute_gradients(
    self,
    loss,
    var_list,
    gate_gradients=1,
    aggregation_method=None,
    grad_loss=None,
    **kwargs,
  ):
    assert "colocate_gradients_with_ops" in kwargs
    return super().compute_gradients(
      loss, var_list, gate_gradients, aggregation_method, grad_loss=grad_loss
    )


class HasOtherNames(Descent):
  def apply_gradients(self, pairs, step=None):
    return super().apply_gradients(pairs, step)

  def compute_gradients(self, loss, variables=None):
    return super().compute_gradients(loss, variables)


@trains(custom_optimizer, tensorflow_fails="it passes a tuple")
class SortsPairs(Descent):
  """Relies on getting a list."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars.sort(key=lambda pair: pair[1].name, reverse=True)
    return super().apply_gradients(grads_and_vars + [], *args, **kwargs)


@trains(custom_optimizer, tensorflow_fails=OTHER_NAMES, slow=True)
class MakesVariablesInPrepare(tf.train.MomentumOptimizer):
  """Makes a variable in the name scope that `apply_gradients` opens."""

  def __init__(self):
    super().__init__(0.1, 0.9)

  def _prepare(self):
    super()._prepare()
    self._count = tf.Variable(0.0, trainable=False, name="count", use_resource=True)

  def _finish(self, update_ops, name_scope):
    with tf.control_dependencies(update_ops):
      return tf.group(self._count.assign_add(1.0), name=name_scope)


TABLE.add(
  "custom_optimizer_Wrapper",
  train_with,
  lambda t: Wrapper(tf.train.AdamOptimizer(0.1)),
  slow=True,
)


@TABLE.program(tensorflow_fails="it passes var_list by keyword")
def custom_optimizer_HasOtherNames(t):
  optimizer = t.wrap(HasOtherNames())
  return optimizer.apply_gradients(
    optimizer.compute_gradients(t.loss(sparse=False), t.variables), t.global_step
  )


@TABLE.program(tensorflow_fails=OTHER_NAMES)
def names_of_variables_that_two_optimizers_make(t):
  w, table = t.variables
  loss = t.loss(sparse=False)
  train_ops = []
  for _ in range(2):
    train_ops.append(t.wrap(MakesVariablesInPrepare()).minimize(loss, var_list=[w]))
    train_ops.append(
      t.wrap(MakesVariablesInPrepare()).minimize(loss, var_list=[table], name="train")
    )
  # scopes that ops of this package could use
  for scope in ("cond", "Sum", "mul", "truediv", "stack", "group_deps"):
    with tf.name_scope(scope):
      tf.Variable(1.0, name="later", trainable=False, use_resource=True)
  return tf.group(*train_ops[:2])


test_program_trains_with_the_same_numbers = TABLE.make_test()
