"""Programs that differ in the inner optimizer or in its learning rate."""

from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()

INNER = {
  "gradient_descent": lambda: tf.train.GradientDescentOptimizer(0.1),
  "adam": lambda: tf.train.AdamOptimizer(0.1),
  "adam_with_locks": lambda: tf.train.AdamOptimizer(0.1, use_locking=True),
  "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
  "adadelta": lambda: tf.train.AdadeltaOptimizer(1.0),
  "ftrl": lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
  "ftrl_with_shrinkage": lambda: tf.train.FtrlOptimizer(0.1, l2_shrinkage_regularization_strength=0.1),
  "nesterov": lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
  "rms_prop": lambda: tf.train.RMSPropOptimizer(0.01),
  "rms_prop_centered": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.5, centered=True),
  "proximal_gradient_descent": lambda: tf.train.ProximalGradientDescentOptimizer(0.1, l1_regularization_strength=0.01),
  "proximal_adagrad": lambda: tf.train.ProximalAdagradOptimizer(0.1, l1_regularization_strength=0.01),
}
for name, make_inner in INNER.items():
  TABLE.add(
    "trained_by_{}".format(name),
    lambda t, make_inner=make_inner: t.wrap(make_inner()).minimize(t.loss(), t.global_step),
    slow=name not in ("adam", "ftrl"),
  )


@TABLE.program(slow=True)
def trained_by_adagrad_da(t):
  inner = tf.train.AdagradDAOptimizer(0.1, t.global_step)
  return t.wrap(inner).minimize(t.loss(), t.global_step)


# --- learning rates ---------------------------------------------------------------------------------------------------

RATES = {
  "a_placeholder": lambda t: t.input(tf.float32, [], lambda x, flag: 0.1 if flag else 0.2),
  "a_variable": lambda t: tf.Variable(0.1, trainable=False, use_resource=t.resource),
  "a_schedule": lambda t: tf.train.exponential_decay(0.1, t.global_step, 2, 0.5),
  "a_schedule_with_cases": lambda t: tf.train.piecewise_constant(t.global_step, [1, 2], [0.1, 0.2, 0.3]),
  "a_callable": lambda t: lambda: 0.1,
  "a_function_of_the_input": lambda t: tf.minimum(tf.abs(t.x[0]), 0.1),
}
for name, make_rate in RATES.items():
  TABLE.add(
    "learning_rate_is_{}".format(name),
    lambda t, make_rate=make_rate: t.wrap(tf.train.AdamOptimizer(make_rate(t))).minimize(t.loss(), t.global_step),
    slow=name != "a_schedule",
  )


# --- custom optimizers ------------------------------------------------------------------------------------------------


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


class Counting(Descent):
  """Counts steps in a variable that `_create_slots` makes and `_finish` increments."""

  def _create_slots(self, var_list):
    self._create_non_slot_variable(0.0, "steps", min(var_list, key=lambda v: v.name))
    for variable in var_list:
      self._zeros_slot(variable, "seen", self._name)

  def _prepare(self):
    self._rate = tf.convert_to_tensor(0.25)

  def _steps(self):
    return self._get_non_slot_variable("steps", graph=tf.get_default_graph())

  def _resource_apply_dense(self, grad, handle):
    seen = self.get_slot(handle, "seen").assign_add(tf.abs(grad))
    with tf.control_dependencies([seen]):
      return handle.assign_sub(self._rate * grad)

  def _apply_dense(self, grad, var):
    seen = tf.assign_add(self.get_slot(var, "seen"), tf.abs(grad))
    with tf.control_dependencies([seen]):
      return tf.assign_sub(var, self._rate * grad)

  def _finish(self, update_ops, name_scope):
    with tf.control_dependencies(update_ops):
      with tf.init_scope():
        graph = tf.get_default_graph()
      steps = self._get_non_slot_variable("steps", graph=graph)
      return tf.group(*(update_ops + [steps.assign_add(1.0, read_value=False)]), name=name_scope)


class ReturnsAList(Descent):
  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return [v.assign_sub(0.1 * tf.convert_to_tensor(g)) for g, v in grads_and_vars]


class ReturnsAValue(Descent):
  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    with tf.control_dependencies([super().apply_gradients(grads_and_vars, global_step, name)]):
      return tf.constant(3)


class HalvesComputedGradients(Descent):
  def compute_gradients(self, *args, **kwargs):
    return [
      (None if g is None else tf.convert_to_tensor(g) * 0.5, v) for g, v in super().compute_gradients(*args, **kwargs)
    ]


class ComputesATuple(Descent):
  def compute_gradients(self, *args, **kwargs):
    return tuple(super().compute_gradients(*args, **kwargs))


class ClipsAppliedGradients(Descent):
  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads, variables = zip(*grads_and_vars)
    return super().apply_gradients(zip(tf.clip_by_global_norm(grads, 0.5)[0], variables), *args, **kwargs)


class ReadsCollections(Descent):
  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    decayed = [v for v in tf.trainable_variables() if "w" in v.name]
    with tf.control_dependencies([super().apply_gradients(grads_and_vars, *args, **kwargs)]):
      return tf.group(*[v.assign_sub(0.01 * v) for v in decayed])


class Averaging(Descent):
  """Keeps a moving average of the variables that it trains."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars = list(grads_and_vars)
    average = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([super().apply_gradients(grads_and_vars, *args, **kwargs)]):
      return average.apply([v for _, v in grads_and_vars])


class WithOtherAttributes(Descent):
  """Has attributes with the names in which wrappers keep their inner optimizer."""

  def __init__(self):
    super().__init__()
    self._opt, self._optimizer = "sgd", 3


class Wrapper(tf.train.Optimizer):
  """Wraps another optimizer, which it keeps in the attribute `_inner`."""

  def __init__(self, inner):
    super().__init__(False, "Wrapper")
    self._inner = inner

  def compute_gradients(self, *args, **kwargs):
    return self._inner.compute_gradients(*args, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return self._inner.apply_gradients(grads_and_vars, global_step, name)


class ClipsOutside(Wrapper):
  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    grads, variables = zip(*grads_and_vars)
    return super().apply_gradients(zip(tf.clip_by_global_norm(grads, 0.5)[0], variables), global_step, name)


class ClipsByValueOutside(Wrapper):
  def compute_gradients(self, *args, **kwargs):
    return [(tf.clip_by_value(g, -0.5, 0.5), v) for g, v in super().compute_gradients(*args, **kwargs)]


class AddsNoiseOutside(Wrapper):
  def compute_gradients(self, *args, **kwargs):
    return [(g + 0.25, v) for g, v in super().compute_gradients(*args, **kwargs)]


class AveragesOutside(Wrapper):
  """Keeps moving averages, which are updated in skipped steps, too."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    grads_and_vars = list(grads_and_vars)
    with tf.control_dependencies([super().apply_gradients(grads_and_vars, global_step, name)]):
      return tf.train.ExponentialMovingAverage(0.5).apply([v for _, v in grads_and_vars])


class WithoutInit(Descent):
  def __init__(self):
    self._use_locking, self._name = False, "WithoutInit"
    self._slots, self._non_slot_dict, self._deferred_slot_restorations = {}, {}, {}


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


class MakesVariablesInApply(Descent):
  """Makes its variables with `tf.get_variable`, as published LAMB and LARS implementations do."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    updates = []
    for grad, variable in grads_and_vars:
      m = tf.get_variable(
        variable.op.name + "/lamb_m",
        shape=variable.shape.as_list(),
        trainable=False,
        initializer=tf.zeros_initializer(),
        use_resource=True,
      )
      next_m = 0.9 * m + 0.1 * tf.convert_to_tensor(grad)
      updates += [m.assign(next_m), variable.assign_sub(0.1 * next_m)]
    with tf.control_dependencies(updates):
      return tf.assign_add(global_step, 1)


class HasOtherOrder(Descent):
  """Has an argument of its own before `global_step`, which `minimize` passes by keyword."""

  def apply_gradients(self, grads_and_vars, rate=0.1, global_step=None, name=None):
    updates = [v.assign_sub(rate * tf.convert_to_tensor(g)) for g, v in grads_and_vars]
    return tf.group(*updates + [tf.assign_add(global_step, 1)], name=name)


class TakesKeywordsOnly(Descent):
  def apply_gradients(self, grads_and_vars, *, name=None, global_step=None):
    return super().apply_gradients(grads_and_vars, global_step, name)


class TakesAnyKeywords(Descent):
  def apply_gradients(self, grads_and_vars, factor=1.0, **kwargs):
    return super().apply_gradients([(factor * tf.convert_to_tensor(g), v) for g, v in grads_and_vars], **kwargs)


class HasOwnDefaults(Descent):
  """`minimize` replaces its defaults by TensorFlow's, because it passes every argument."""

  def compute_gradients(self, loss, var_list=None, grad_loss=2.0, **kwargs):
    return super().compute_gradients(loss, var_list, grad_loss=grad_loss, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step="none", name="own"):
    rate = 0.1 if name is None else 10.0
    scaled = [(rate * tf.convert_to_tensor(g), v) for g, v in grads_and_vars]
    return super().apply_gradients(scaled, None if global_step == "none" else global_step)


class RequiresVariables(Descent):
  """As tensorflow-privacy's: `var_list` has no default."""

  def compute_gradients(self, loss, var_list, gate_gradients=1, aggregation_method=None, grad_loss=None, **kwargs):
    assert "colocate_gradients_with_ops" in kwargs
    return super().compute_gradients(loss, var_list, gate_gradients, aggregation_method, grad_loss=grad_loss)


class HasOtherNames(Descent):
  def apply_gradients(self, pairs, step=None):
    return super().apply_gradients(pairs, step)

  def compute_gradients(self, loss, variables=None):
    return super().compute_gradients(loss, variables)


class SortsPairs(Descent):
  """Relies on getting a list."""

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    grads_and_vars.sort(key=lambda pair: pair[1].name, reverse=True)
    return super().apply_gradients(grads_and_vars + [], *args, **kwargs)


class CountsAndAveragesNorms(Descent):
  """Makes variables in a scope of its own, and others that are named after tensors, as YellowFin does."""

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    grads_and_vars = list(grads_and_vars)
    norms = [tf.reduce_sum(tf.square(tf.convert_to_tensor(grad))) for grad, _ in grads_and_vars[:1]]
    average = tf.train.ExponentialMovingAverage(0.5)
    with tf.variable_scope("state"), tf.name_scope("inner"):
      count = tf.Variable(0.0, trainable=False, name="count", use_resource=True)
    with tf.control_dependencies([average.apply(norms), count.assign_add(1.0)]):
      return super().apply_gradients(grads_and_vars, global_step, name)


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


CUSTOM = [
  Counting,
  ReturnsAList,
  ReturnsAValue,
  HalvesComputedGradients,
  ComputesATuple,
  ClipsAppliedGradients,
  ReadsCollections,
  Averaging,
  WithOtherAttributes,
  WithoutInit,
  NeverInitialized,
  MakesVariablesInApply,
  HasOtherOrder,
  TakesKeywordsOnly,
  TakesAnyKeywords,
  HasOwnDefaults,
  RequiresVariables,
  SortsPairs,
  CountsAndAveragesNorms,
  MakesVariablesInPrepare,
]
BY_POSITION = "it passes global_step by position"
OTHER_NAMES = "variables of the inner optimizer get the names of its conditional"
TENSORFLOW_FAILS = {
  NeverInitialized: "it reads attributes that the constructor of the base class sets",
  HasOtherOrder: BY_POSITION,
  TakesKeywordsOnly: BY_POSITION,
  TakesAnyKeywords: BY_POSITION,
  HasOwnDefaults: "it passes a name",
  SortsPairs: "it passes a tuple",
  CountsAndAveragesNorms: OTHER_NAMES,
  MakesVariablesInPrepare: OTHER_NAMES,
}
for custom in CUSTOM:
  TABLE.add(
    "custom_optimizer_{}".format(custom.__name__),
    lambda t, custom=custom: t.wrap(custom()).minimize(t.loss(sparse=False), t.global_step),
    # A moving average cannot be initialized from a reference variable under control flow v2.
    variants=programs.NO_V2_REFERENCE if custom is Averaging else programs.ALL,
    fresh=custom is Averaging,
    tensorflow_fails=TENSORFLOW_FAILS.get(custom),
    slow=custom
    not in (
      HasOwnDefaults,
      RequiresVariables,
      Counting,
      ReturnsAList,
      ReadsCollections,
      WithoutInit,
      TakesAnyKeywords,
      SortsPairs,
    ),
  )
for outer in (ClipsOutside, ClipsByValueOutside, AddsNoiseOutside, AveragesOutside):
  TABLE.add(
    "outer_wrapper_{}".format(outer.__name__),
    lambda t, outer=outer: outer(t.wrap()).minimize(t.loss(sparse=False), t.global_step),
    variants=programs.NO_V2_REFERENCE if outer is AveragesOutside else programs.ALL,
    fresh=outer is AveragesOutside,
    hidden=outer is ClipsByValueOutside,
    outside=".*ExponentialMovingAverage.*" if outer is AveragesOutside else "$^",
  )
TABLE.add(
  "custom_optimizer_Wrapper",
  lambda t: t.wrap(Wrapper(tf.train.AdamOptimizer(0.1))).minimize(t.loss(), t.global_step),
  slow=True,
)


@TABLE.program(tensorflow_fails="it passes var_list by keyword")
def custom_optimizer_HasOtherNames(t):
  optimizer = t.wrap(HasOtherNames())
  return optimizer.apply_gradients(optimizer.compute_gradients(t.loss(sparse=False), t.variables), t.global_step)


@TABLE.program(tensorflow_fails=OTHER_NAMES)
def names_of_variables_that_two_optimizers_make(t):
  with tf.name_scope("state"):  # the model has a scope of this name, too
    tf.identity(t.x)
  w, table = t.variables
  loss = t.loss(sparse=False)
  train_ops = []
  for make in (CountsAndAveragesNorms, MakesVariablesInPrepare, MakesVariablesInPrepare):
    train_ops.append(t.wrap(make()).minimize(loss, var_list=[w]))
    train_ops.append(t.wrap(make()).minimize(loss, var_list=[table], name="train"))
  for scope in ("cond", "Sum", "mul", "truediv", "stack", "group_deps"):  # scopes that ops of this package could use
    with tf.name_scope(scope):
      tf.Variable(1.0, name="later", trainable=False, use_resource=True)
  return tf.group(*train_ops[:2])


test_program_trains_with_the_same_numbers = TABLE.make_test()
