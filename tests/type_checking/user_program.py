"""A typed program that uses every public name; test_types.py runs type checkers on it.
It is not imported.
"""

import collections
from typing import Any, Dict, List, Optional, Tuple, Type

import tensorflow.compat.v1 as tf

import mp_compat
from mp_compat.contrib import mixed_precision as contrib


class PrintingHook(mp_compat.StepHook):
  """Prints the loss scale after each attempted step."""

  def after_step(
    self, run_context: tf.train.SessionRunContext, step: mp_compat.AttemptedStep
  ) -> None:
    if step.is_skipped and step.scale < 1.0:
      run_context.request_stop()
    print(step.number, step.scale)


class HalvingLossScale(mp_compat.LossScale):
  """Halves the scale after every step that is not finite."""

  def __init__(self, initial_loss_scale: float) -> None:
    self._initial_loss_scale = initial_loss_scale
    self._scale = self._add_weight("current_loss_scale", initial_loss_scale, tf.float32)

  def __call__(self) -> tf.Tensor:
    return tf.convert_to_tensor(self._scale)

  def update(self, grads: Any) -> Tuple[tf.Operation, tf.Tensor]:
    finite = tf.reduce_all(
      [tf.reduce_all(tf.is_finite(grad)) for grad in tf.nest.flatten(grads)]
    )
    return self._scale.assign(
      tf.where_v2(finite, self._scale, self._scale / 2.0), read_value=False
    ), finite

  def get_config(self) -> Dict[str, Any]:
    return {"initial_loss_scale": self._initial_loss_scale}


def make_loss_scale(name: str) -> mp_compat.LossScale:
  if name == "fixed":
    return mp_compat.FixedLossScale(128)
  if name == "slow":
    config: Dict[str, Any] = mp_compat.DynamicLossScale(
      2**10, increment_period=500, backoff=4.0
    ).get_config()
    slow: mp_compat.DynamicLossScale = mp_compat.DynamicLossScale.from_config(config)
    return slow
  if name == "halving":
    halving: HalvingLossScale = HalvingLossScale.from_config(
      {"initial_loss_scale": 1024.0}
    )
    return halving
  return mp_compat.get_loss_scale("dynamic")


def make_model() -> Tuple[tf.Tensor, List[tf.Variable]]:
  with tf.variable_scope(
    "model", custom_getter=mp_compat.float32_variable_storage_getter
  ):
    weights = tf.get_variable("weights", [3], tf.float16)
  return tf.reduce_sum(
    tf.square(tf.cast(weights, tf.float32) - 1.0)
  ), tf.trainable_variables()


def train(steps: int) -> int:
  """Trains with clipping, summaries and a hook; returns the number of skipped steps."""
  loss, variables = make_model()
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.AdamOptimizer(),
    make_loss_scale("slow"),
    finite_reducer=mp_compat.horovod.all_ranks_finite,
  )
  scale: mp_compat.LossScale = opt.loss_scale
  tf.summary.scalar("scale", scale())
  grads, _ = zip(*opt.compute_gradients(loss, variables))
  for grad, variable in zip(mp_compat.finite_or_zero(grads), variables):
    tf.summary.histogram(variable.op.name, grad)
  clipped, norm = mp_compat.clip_by_global_norm(grads, 1.0)
  tf.summary.scalar("norm", norm)
  train_op = opt.apply_gradients(
    zip(clipped, variables), tf.train.get_or_create_global_step()
  )
  in_float16: List[mp_compat.Float16Op] = mp_compat.float16_ops(loss)
  in_float32: List[mp_compat.Float32Op] = mp_compat.float32_ops(loss)
  print([op.type for op in in_float16])
  print([(op.name, op.sources) for op in in_float32])
  report: collections.OrderedDict[str, mp_compat.GradientReport] = (
    mp_compat.nonfinite_gradients(opt)
  )
  ranges: collections.OrderedDict[str, mp_compat.GradientRange] = (
    mp_compat.gradient_ranges(opt, [tf.float16])
  )
  tf.summary.scalar(
    "headroom", tf.reduce_min([values.headroom for values in ranges.values()])
  )
  tf.summary.merge(mp_compat.loss_scale_summaries(opt))
  hook = mp_compat.LossScaleHook(opt, every_n_steps=10, on_stall="raise")
  scaffold = tf.train.Scaffold(saver=mp_compat.checkpoints.Saver())
  hooks = [
    hook,
    mp_compat.StopAtAttemptHook(opt, steps),
    mp_compat.LossScaleHook(opt, every_n_secs=60.0),
    PrintingHook(opt),
  ]
  hooks.append(
    mp_compat.GradientRangesHook(
      opt, every_n_steps=100, output_dir="ranges", dtypes=["float16"]
    )
  )
  try:
    with tf.train.MonitoredTrainingSession(scaffold=scaffold, hooks=hooks) as sess:
      while not sess.should_stop():
        _, gradients = sess.run([train_op, report])
        print(
          [
            name
            for name, gradient in gradients.items()
            if gradient.nans or gradient.infs
          ]
        )
  except mp_compat.LossScaleStalledError as error:
    print(error)
  return hook.skipped


def train_in_windows(batches: List[Any]) -> None:
  """Accumulates gradients over micro-batches."""
  loss, _ = make_model()
  opt = mp_compat.MixedPrecisionLossScaleOptimizer(
    tf.train.GradientDescentOptimizer(0.1), "dynamic"
  )
  window = mp_compat.GradientAccumulator(opt, skip="micro_batch")
  add_op = window.add(opt.compute_gradients(loss))
  train_op = window.apply_gradients(window.mean())
  with tf.Session() as sess:
    sess.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for _ in batches:
      sess.run(add_op)
    sess.run(train_op)


def train_together(d_loss: tf.Tensor, g_loss: tf.Tensor) -> Optional[tf.Operation]:
  """Trains two optimizers with one loss scale."""
  scale = mp_compat.DynamicLossScale()
  d_opt, g_opt = (
    mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), scale)
    for _ in range(2)
  )
  return mp_compat.apply_gradients_together(
    [
      (d_opt, d_opt.compute_gradients(d_loss)),
      (g_opt, g_opt.compute_gradients(g_loss)),
    ],
    skip="each",
  )


def train_as_contrib(loss: tf.Tensor) -> tf.Operation:
  manager = contrib.ExponentialUpdateLossScaleManager(2.0**15, incr_every_n_steps=1000)
  return mp_compat.contrib.mixed_precision.LossScaleOptimizer(
    tf.train.AdamOptimizer(), manager
  ).minimize(loss)


def train_keras(model: Any, x: Any, y: Any) -> float:
  """Trains a Keras model; returns the last loss scale."""
  opt = mp_compat.keras.LossScaleOptimizer(
    tf.keras.optimizers.SGD(0.1), initial_scale=2.0**12
  )
  model.compile(opt, "mse")
  model.fit(x, y)
  same: mp_compat.keras.LossScaleOptimizer = (
    mp_compat.keras.LossScaleOptimizer.from_config(opt.get_config())
  )
  if same.dynamic and same.dynamic_growth_steps is not None:
    print(same.dynamic_growth_steps + 1, opt.loss_scale * 2.0)
  classes: Dict[str, Type[mp_compat.keras.LossScaleOptimizer]] = (
    mp_compat.keras.CUSTOM_OBJECTS
  )
  print(sorted(classes))
  earlier = mp_compat.keras.experimental.LossScaleOptimizer(
    tf.keras.optimizers.SGD(0.1), "dynamic"
  )
  earlier.apply_gradients([])
  scale: mp_compat.LossScale = earlier.loss_scale
  print(scale() * 2.0)
  return float(opt.loss_scale)


def train_with_rewrite(loss: tf.Tensor) -> None:
  """Trains with TensorFlow's graph rewrite."""
  mp_compat.register_loss_scale_wrapper(
    tf.train.Optimizer, mp_compat.MixedPrecisionLossScaleOptimizer
  )
  opt = mp_compat.enable_mixed_precision_graph_rewrite(tf.train.AdamOptimizer(), 1024.0)
  opt.minimize(loss)
  mp_compat.disable_mixed_precision_graph_rewrite()
  with mp_compat.mixed_precision_graph_rewrite(tf.train.AdamOptimizer()) as other:
    other.minimize(loss)


def convert(path: str) -> str:
  """Converts a checkpoint for a program without mp_compat; returns the naming scheme
  that it had.
  """
  with mp_compat.install() as installed:
    print(installed.patched)
  tf.train.init_from_checkpoint(path, mp_compat.checkpoints.name_map(path))
  mp_compat.checkpoints.convert(path, path + "-plain", to="plain")
  return mp_compat.checkpoints.inspect(path).naming_scheme


if __name__ == "__main__":
  print(mp_compat.__version__, train(100))
