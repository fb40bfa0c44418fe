"""Programs that differ in the loss scale: custom classes, and the methods and
attributes that they override.
"""

from tests import testing
from tests.programs import table as programs
from tests.testing import tf

TABLE = programs.Table()


def train_with_scale(t, make):
  return t.wrap(tf.train.AdamOptimizer(0.1), make).minimize(t.loss(), t.global_step)


def sets_attributes(api):

  class Scale(api.DynamicLossScale):
    def __init__(self):
      super().__init__(2**10, 3)
      (
        self.min_loss_scale,
        self.max_loss_scale,
        self.overflow_tolerance,
        self.backoff,
      ) = 4, "high", 0.05, None
      self._rule, self._variables, self._state, self.rule, self.scale, self.settings = (
        range(6)
      )
      self._finite = self.finite = self._name = self.name = self._graph = None

  return Scale()


def sets_private_attributes(api):
  """Sets the private attributes that TensorFlow's class reads in every update."""

  class Scale(api.DynamicLossScale):
    def __init__(self):
      super().__init__(2**10, 30)
      self._increment_period, self._multiplier = 2, 8.0

  return Scale()


def overrides(
  change_update=lambda update_op, should_apply: (update_op, should_apply),
  change_scale=tf.identity,
):
  """Returns a function of an API that makes a dynamic loss scale, whose methods change
  what they return.
  """

  def make(api):

    class Scale(api.DynamicLossScale):
      def __call__(self):
        return change_scale(super().__call__())

      def update(self, grads):
        return change_update(*super().update(grads))

    return Scale(2**10, 3)

  return make


def uses_cross_replica_context(api):

  class Scale(api.DynamicLossScale):
    def update(self, grads):
      assert tf.distribute.in_cross_replica_context()
      return super().update(grads)

  return Scale(2**10, 3)


def user_defined(api):

  class Scale(api.LossScale):
    def __init__(self):
      super().__init__()
      self._scale = self._add_weight("current_loss_scale", 64.0, tf.float32)

    def __call__(self):
      return self._scale.read_value()

    def update(self, grads):
      finite = tf.reduce_all(
        [
          tf.reduce_all(tf.is_finite(getattr(g, "values", g)))
          for g in grads
          if g is not None
        ]
      )
      return self._scale.assign(
        tf.where(finite, self._scale * 2.0, self._scale / 2.0)
      ), finite

    def get_config(self):
      return {}

  return Scale()


SCALES = {
  "that_sets_attributes": (sets_attributes, {}),
  "that_sets_private_attributes": (sets_private_attributes, {}),
  "that_overrides_update": (
    overrides(
      lambda update_op, apply: (
        tf.group(tf.identity(update_op)),
        tf.logical_and(apply, tf.constant(True)),
      )
    ),
    {},
  ),
  "that_overrides_call": (
    overrides(change_scale=lambda scale: tf.minimum(scale, 64.0)),
    {"slow": True},
  ),
  "whose_update_uses_cross_replica_context": (uses_cross_replica_context, {}),
  "whose_update_always_applies": (
    overrides(lambda update_op, apply: (update_op, True)),
    {"hidden": True},
  ),
  "whose_update_returns_none": (
    overrides(lambda update_op, apply: (None, apply)),
    {
      "overflow": (),
      "tensorflow_fails": "it passes the op, which is None, to tf.group",
    },
  ),
  "defined_by_the_user": (
    user_defined,
    {"tensorflow_fails": "it applies gradients although update() returns False"},
  ),
  "with_growth_interval_of_one": (
    lambda api: api.DynamicLossScale(2.0, 1),
    {"slow": True},
  ),
  "given_by_name": (lambda api: "dynamic", {"slow": True}),
  "of_tensorflow": (lambda api: testing.native.DynamicLossScale(2**10, 3), {}),
}
for name, (make_scale, options) in SCALES.items():
  TABLE.add("loss_scale_" + name, train_with_scale, make_scale, fixed=False, **options)


@TABLE.program(fixed=False)
def a_loss_scale_updated_by_the_program(t):
  """Applies gradients with the inner optimizer if `update` returns True."""
  inner = tf.train.MomentumOptimizer(0.1, 0.9)
  if t.api is None:
    return inner.minimize(t.loss(), t.global_step)
  loss_scale = t.api.DynamicLossScale(2**10, 3)
  scale = loss_scale()
  grads = [
    tf.convert_to_tensor(g) / scale for g in tf.gradients(t.loss() * scale, t.variables)
  ]
  grads = [
    tf.IndexedSlices(tf.gather(g, [1, 4]), tf.constant([1, 4]), tf.constant([6, 2]))
    if number
    else g
    for number, g in enumerate(grads)
  ]
  update_op, should_apply = loss_scale.update(grads)
  with testing.control_flow(t.control_flow if t.resource else 1):
    applied = tf.cond(
      should_apply,
      lambda: inner.apply_gradients(zip(grads, t.variables), t.global_step),
      tf.no_op,
    )
  return [tf.identity(update_op), applied]


test_program_trains_with_the_same_numbers = TABLE.make_test()
