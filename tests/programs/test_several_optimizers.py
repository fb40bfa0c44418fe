"""Programs with several optimizers or losses."""

from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()


@TABLE.program()
def two_optimizers_on_shared_variables(t):
  loss = t.loss()
  first = t.wrap(tf.train.AdamOptimizer(0.1)).minimize(loss, t.global_step)
  with tf.control_dependencies([first]):
    return t.wrap().minimize(t.loss(t.x * 2.0), t.global_step)


@TABLE.program(slow=True)
def minimize_called_twice(t):
  optimizer = t.wrap()
  first, second = optimizer.minimize(t.loss(), t.global_step), optimizer.minimize(t.loss(t.x * 2.0), t.global_step)
  return lambda sess, feed: sess.run(first if feed[t.flag] else second, feed)


@TABLE.program(fixed=False)
def two_optimizers_with_one_loss_scale(t):
  loss_scales = []

  def shared(api):
    loss_scales.append(loss_scales[0] if loss_scales else api.DynamicLossScale(2**10, 3))
    return loss_scales[0]

  w, table = t.variables
  first = t.wrap(tf.train.AdamOptimizer(0.1), shared).minimize(t.loss(), t.global_step, [w])
  with tf.control_dependencies([first]):
    return t.wrap(None, shared).minimize(t.loss(), None, [table])


class AppliesWithAnother(tf.train.GradientDescentOptimizer):
  """Calls `apply_gradients` of another optimizer, which may scale the loss, too, in its own."""

  def __init__(self, other):
    super().__init__(0.1)
    self.other = other

  def apply_gradients(self, grads_and_vars, *args, **kwargs):
    pairs = [(tf.convert_to_tensor(grad), variable) for grad, variable in grads_and_vars]
    with tf.control_dependencies([self.other.apply_gradients(pairs)]):
      return super().apply_gradients([(2.0 * grad, variable) for grad, variable in pairs], *args, **kwargs)


@TABLE.program()
def a_step_inside_another(t):
  return t.wrap(AppliesWithAnother(t.wrap(tf.train.AdamOptimizer(0.1)))).minimize(t.loss(), t.global_step)


@TABLE.program()
def computed_by_one_optimizer_applied_by_another(t):
  first, second = t.wrap(tf.train.AdamOptimizer(0.1)), t.wrap()
  return second.apply_gradients(first.compute_gradients(t.loss()), t.global_step)


test_program_trains_with_the_same_numbers = TABLE.make_test()
