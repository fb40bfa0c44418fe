# SPDX-License-Identifier: Apache-2.0
"""Trains one network three times: in float32, in float16 without loss scaling, and in
float16 with mp_compat.

The task is dense, as in segmentation. The input is a noisy 8x8 digit of scikit-learn's
data. The output is ten masks of 64x64 pixels; mask c marks the ink if the digit is a c.
The loss is the mean over batch, pixels and classes, 2621440 numbers. Therefore no
gradient of a logit exceeds 2**-21, those of the background begin at 2**-26, and the
smallest float16 number is 2**-24. As in RetinaNet (arXiv:1708.02002), the last layers
begin with small weights and a bias for rare ink, so the gradients of earlier layers are
even smaller.

    python examples/train_digits.py --out runs/digits

writes `digits.png`, `digits.json`, `ranges.png` (the gradients of the first run with
mp_compat, see docs/gradient_ranges.md) and, under `logs/`, checkpoints and summaries
for TensorBoard.

Measures, for every run, every few steps, on test digits:

  test accuracy   share of the ink pixels of the test digits at which the mask of the
  right class has the largest of the
                  ten logits, computed in the run's own precision. Chance is 10%.
  ms a step       median time of a training step.
  vanished        share of the gradient values that are zero as the run computes them,
  in its precision and at its loss
                  scale. Counts values of the loss's gradient with respect to a layer's output that are not zero in
                  float32, with the same float32 variables and the same batch. Without the name of a layer, it is the
                  mean over the layers, whatever their sizes. A layer whose gradient is all zero in float32, because its
                  ReLUs are dead, has no such share (null in JSON). In float32 the share is zero by definition.

The comments "mp_compat, line 1" to "line 3" mark the lines that mp_compat needs. The
float16 run without loss scaling has the first two: its variables are float32, too.
"""

import collections
import json
import os
import time

# Both are read once, while TensorFlow is imported. On a CPU with AVX512-FP16, oneDNN
# computes the gradient of a float16 convolution with respect to its weights by a
# reference implementation, which takes twenty times as long.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from absl import flags
import common_flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
import matplotlib.figure
import numpy as np
import processor
from sklearn.datasets import load_digits
import tensorflow.compat.v1 as tf
from tqdm import tqdm

import mp_compat  # mp_compat, line 1
from mp_compat.tools import ranges_chart

FLAGS = flags.FLAGS
FLAGS.set_default("steps", 160)
flags.declare_key_flag("steps")
flags.DEFINE_string(
  "out", os.path.join("runs", "digits"), "Directory for pictures, numbers and logs."
)
flags.DEFINE_integer("seeds", 3, "Trainings of each kind.", lower_bound=1)
flags.DEFINE_bool("quick", False, "A smoke test: one seed, 20 steps.")
flags.DEFINE_bool(
  "check", False, "Fail if a float16 step takes more than 15 float32 steps."
)

CLASSES = 10
SIZE = 8
MASK_SIZE = 64
BACKGROUND = -1  # tf.one_hot maps it to a row of zeros.
TEST_DIGITS = 397
NOISE = 0.1
BATCH = 64
LEARNING_RATE = 0.004
HEAD_STDDEV = 0.01
INK = 0.04  # The share of ones in the masks; its log-odds initialize the output bias.
INITIAL_LOSS_SCALE = 2.0**32  # Far too high, to show the backoff.
INCREMENT_PERIOD = 50
SLOWEST = 15  # for --check: a float16 step over a float32 step

Run = collections.namedtuple("Run", "name dtype loss_scaling color")
RUNS = (
  Run("float32", tf.float32, False, "tab:blue"),
  Run("float16", tf.float16, False, "tab:red"),
  Run("float16 + mp_compat", tf.float16, True, "tab:green"),
)

# `spread` is the block size of the tf.depth_to_space after the convolution.
Layer = collections.namedtuple("Layer", "name kernel stride filters spread")
LAYERS = (
  Layer("encode1", 3, 1, 16, 1),
  Layer("encode2", 3, 2, 32, 1),
  Layer("encode3", 3, 2, 48, 1),
  Layer("encode4", 3, 2, 64, 1),
  Layer("code", 1, 1, 64, 1),
  Layer("decode", 1, 1, 256, 4),
  Layer("head", 3, 1, 32, 1),
  Layer("masks", 1, 1, CLASSES * 16 * 16, 16),
)


class Digits:
  """scikit-learn's 8x8 digits and their masks."""

  def __init__(self):
    digits = load_digits()
    self.images = digits.images.astype(np.float32) / 16
    # A matrix [64, 8] for linear interpolation along one axis, from the pixels of a
    # digit to those of the mask.
    centers = (np.arange(MASK_SIZE) + 0.5) * SIZE / MASK_SIZE - 0.5
    interpolation = np.stack(
      [np.interp(centers, np.arange(SIZE), row) for row in np.eye(SIZE)], axis=1
    )
    ink = np.matmul(np.matmul(interpolation, self.images), interpolation.T) > 0.4
    self.masks = np.where(ink, digits.target[:, None, None], BACKGROUND).astype(
      np.int32
    )
    order = np.random.RandomState(0).permutation(len(self.images))
    self.test, self.train = order[:TEST_DIGITS], order[TEST_DIGITS:]

  def examples(self, indices, rng):
    """Returns the digits at `indices` as (noisy images [n, 8, 8, 1], int32 masks [n,
    64, 64]).
    """
    noise = NOISE * rng.randn(len(indices), SIZE, SIZE)
    return (2 * self.images[indices] - 0.6 + noise)[..., None], self.masks[indices]


def convolution(x, layer, op_seed):
  """Returns the output of one layer of LAYERS, before its nonlinearity, in the dtype of
  `x`.
  """
  with tf.variable_scope(layer.name):
    stddev = HEAD_STDDEV if layer.name in ("head", "masks") else None
    # The op-level seed gives all runs of one seed identical initial weights.
    initializer = (
      tf.truncated_normal_initializer(stddev=stddev, seed=op_seed)
      if stddev
      else tf.variance_scaling_initializer(2.0, seed=op_seed)
    )
    bias = np.log(INK / (1 - INK)) if layer.name == "masks" else 0.0
    weights = tf.get_variable(
      "weights",
      [layer.kernel, layer.kernel, x.shape.as_list()[-1], layer.filters],
      x.dtype,
      initializer=initializer,
    )
    biases = tf.get_variable(
      "biases", [layer.filters], x.dtype, initializer=tf.constant_initializer(bias)
    )
    return tf.nn.bias_add(
      tf.nn.conv2d(x, weights, [1, layer.stride, layer.stride, 1], "SAME"), biases
    )


def network(images, dtype, layers=LAYERS):
  """Returns float32 logits [n, 64, 64, 10], and the outputs of the layers in
  `dtype`.
  """
  outputs = []
  x = tf.cast(images, dtype)
  # mp_compat, line 2
  with tf.variable_scope(
    "network",
    reuse=tf.AUTO_REUSE,
    custom_getter=mp_compat.float32_variable_storage_getter,
  ):
    for op_seed, layer in enumerate(layers):
      x = convolution(x, layer, op_seed)
      x = x if layer.name == "masks" else tf.nn.relu(x)
      outputs.append(x)
      x = x if layer.spread == 1 else tf.depth_to_space(x, layer.spread)
  return tf.cast(x, tf.float32), outputs


def mean_loss(logits, masks):
  """Returns the mean cross entropy over batch, pixels and classes. The mean is why the
  gradients are small.
  """
  return tf.reduce_mean(
    tf.nn.sigmoid_cross_entropy_with_logits(
      labels=tf.one_hot(masks, CLASSES), logits=logits
    )
  )


def ink_accuracy(logits, masks):
  """Returns the share of ink pixels whose class has the largest logit."""
  ink = tf.cast(tf.not_equal(masks, BACKGROUND), tf.float32)
  right = tf.cast(
    tf.equal(tf.argmax(logits, -1, output_type=tf.int32), masks), tf.float32
  )
  return tf.reduce_sum(ink * right) / tf.reduce_sum(ink)


def vanished_fractions(gradients, reference):
  """Returns for each layer the share of nonzero values of `reference` that are 0 in
  `gradients`; NaN for 0 of 0.
  """
  fractions = []
  for gradient, exact in zip(gradients, reference):
    alive = tf.not_equal(exact, 0)
    vanished = tf.logical_and(alive, tf.equal(gradient, 0))
    fractions.append(
      tf.count_nonzero(vanished, dtype=tf.float32)
      / tf.count_nonzero(alive, dtype=tf.float32)
    )
  return tf.stack(fractions)


def minimize(run, loss, steps, learning_rate=LEARNING_RATE):
  """Returns the optimizer of a run and its train op. The learning rate falls to 0 after
  `steps` global steps.
  """
  global_step = tf.train.get_or_create_global_step()
  optimizer = tf.train.AdamOptimizer(
    tf.train.polynomial_decay(learning_rate, global_step, steps, 0.0)
  )
  if run.loss_scaling:
    # mp_compat, line 3; "dynamic" is the usual argument
    optimizer = mp_compat.MixedPrecisionLossScaleOptimizer(
      optimizer, mp_compat.DynamicLossScale(INITIAL_LOSS_SCALE, INCREMENT_PERIOD)
    )
  return optimizer, optimizer.minimize(loss, global_step)


def train(run, seed, steps, every, digits, directory, progress):
  """Trains one network and returns what was measured, as plain Python values."""
  started = time.time()
  with tf.Graph().as_default():
    tf.set_random_seed(seed)
    images = tf.placeholder(tf.float32, [None, SIZE, SIZE, 1])
    masks = tf.placeholder(tf.int32, [None, MASK_SIZE, MASK_SIZE])
    logits, outputs = network(images, run.dtype)
    loss = mean_loss(logits, masks)

    optimizer, train_op = minimize(run, loss, steps)

    # The measurements. The float32 network shares the variables, since their names are
    # the same.
    exact_logits, exact_outputs = network(images, tf.float32)
    scale = optimizer.loss_scale() if run.loss_scaling else 1.0
    vanished = vanished_fractions(
      tf.gradients(loss * scale, outputs),
      tf.gradients(mean_loss(exact_logits, masks), exact_outputs),
    )
    test_images, test_masks = digits.examples(digits.test, np.random.RandomState(0))
    tests = {images: test_images, masks: test_masks}
    probes = {images: test_images[:BATCH], masks: test_masks[:BATCH]}
    accuracy, global_step = ink_accuracy(logits, masks), tf.train.get_global_step()
    hooks = [tf.train.StopAtStepHook(last_step=steps)]
    tf.summary.scalar("loss", loss)
    fetches = [train_op]
    result = {
      "seed": seed,
      "steps": [],
      "test_accuracy": [],
      "vanished": [],
      "step_seconds": [],
    }
    if run.loss_scaling:
      if seed == 0:
        hooks.append(
          mp_compat.GradientRangesHook(
            optimizer, 10, output_dir=os.path.join(directory, "ranges")
          )
        )
      fetches.append(optimizer.gradients_finite)
      result.update(loss_scale=[], overflow=[])

    rng = np.random.RandomState(seed)
    with tf.train.MonitoredTrainingSession(
      checkpoint_dir=directory,
      hooks=hooks,
      save_checkpoint_steps=100,
      save_summaries_steps=20,
      log_step_count_steps=None,
    ) as session:

      def read(tensor, feed=None):  # without the hooks
        return session.run_step_fn(
          lambda step_context: step_context.session.run(tensor, feed)
        )

      def measure(step):
        fractions = read(vanished, probes)
        result["steps"].append(step)
        result["test_accuracy"].append(float(read(accuracy, tests)))
        result["vanished"].append(
          [None if np.isnan(fraction) else float(fraction) for fraction in fractions]
        )
        progress.set_postfix_str(
          "test accuracy {:.1%}".format(result["test_accuracy"][-1])
        )

      step = 0
      measure(step)
      while not session.should_stop():
        if run.loss_scaling:
          result["loss_scale"].append(float(read(scale)))
        batch_images, batch_masks = digits.examples(
          rng.choice(digits.train, BATCH), rng
        )
        before_step = time.perf_counter()
        _, *finite = session.run(fetches, {images: batch_images, masks: batch_masks})
        result["step_seconds"].append(time.perf_counter() - before_step)
        if run.loss_scaling:
          result["overflow"].append(not finite[0])
        before, step = step, int(read(global_step))
        progress.update(step - before)
        # A skipped step does not change it.
        if step > before and (step % every == 0 or step == steps):
          measure(step)

  return dict(result, seconds=time.time() - started)


def over_seeds(results, key):
  """Returns the measurements under `key` as a float64 array [seeds, measurements, ...],
  with NaN for None.
  """
  return np.array([result[key] for result in results], dtype=np.float64)


def vanished_over_layers(results):
  """Returns the mean share over layers as an array [seeds, measurements], masked where
  all layers are dead.
  """
  return np.ma.masked_invalid(over_seeds(results, "vanished")).mean(axis=2)


def median_step_seconds(results):
  """Returns the median time of a training step, over all seeds."""
  return np.median(np.concatenate([result["step_seconds"] for result in results]))


def table(results):
  """Returns the results as text, one line for each run."""
  lines = [
    "",
    "{:<21}{:>14}   {:<24}{:>17}{:>16}{:>11}{:>9}{:>11}".format(
      "",
      "test accuracy",
      "each seed",
      "vanished: first",
      "mean over run",
      "overflows",
      "seconds",
      "ms a step",
    ),
  ]
  for name, of_run in results.items():
    accuracy = over_seeds(of_run, "test_accuracy")[:, -1]
    vanished = vanished_over_layers(of_run)
    overflows = [
      str(sum(result["overflow"])) for result in of_run if "overflow" in result
    ]
    lines.append(
      "{:<21}{:>14.1%}   {:<24}{:>17.1%}{:>16.1%}{:>11}{:>9.1f}{:>11.0f}".format(
        name,
        accuracy.mean(),
        " ".join("{:.1%}".format(a) for a in accuracy),
        vanished[:, 0].mean(),
        vanished.mean(),
        "/".join(overflows) or "-",
        sum(result["seconds"] for result in of_run),
        1000 * median_step_seconds(of_run),
      )
    )
  return "\n".join(lines)


def check_speed(results, machine):
  """Raises SystemExit if a float16 step takes more than SLOWEST float32 steps. The
  message names the machine.
  """
  baseline = median_step_seconds(results["float32"])
  for run in RUNS[1:]:
    ratio = median_step_seconds(results[run.name]) / baseline
    if ratio > SLOWEST:
      raise SystemExit(
        "{}: a step takes {:.1f} times as long as in float32; at most {} is expected. "
        "The machine: {}. docs/troubleshooting.md lists why float16 is slow on a "
        "CPU.".format(run.name, ratio, SLOWEST, machine)
      )


def plot_seeds(axes, results, values):
  """Plots for each run a thick line, the mean over seeds, and a thin line for each
  seed.
  """
  for run in RUNS:
    curves = values(results[run.name])
    steps = results[run.name][0]["steps"]
    # It should coincide with the line of float32.
    style = "--" if run.loss_scaling else "-"
    axes.plot(steps, curves.T, color=run.color, linewidth=0.7, alpha=0.4)
    axes.plot(
      steps, curves.mean(axis=0), style, color=run.color, linewidth=2.5, label=run.name
    )
  axes.set_xlabel("global step")
  axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
  axes.set_ylim(-0.03, 1.03)
  axes.legend()


def plot_layers(axes, results):
  """Plots bars: the share of vanished gradient values for each layer, at the first
  step.
  """
  runs = RUNS[1:]
  for i, run in enumerate(runs):
    first = over_seeds(results[run.name], "vanished")[:, 0].mean(axis=0)
    bars = axes.bar(
      np.arange(len(LAYERS)) + 0.4 * (i - 0.5),
      first,
      0.4,
      color=run.color,
      label=run.name,
    )
    for bar, value in zip(bars, first):
      axes.text(
        bar.get_x() + 0.2, value + 0.01, "{:.0%}".format(value), ha="center", fontsize=8
      )
  axes.set_xticks(range(len(LAYERS)))
  axes.set_xticklabels([layer.name for layer in LAYERS])
  axes.set_xlabel("layer, from input to output")
  axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
  axes.set_ylim(0, 1.25)
  axes.legend(loc="upper right", ncol=2)


def plot_loss_scale(axes, of_run):
  """Plots the loss scale of each seed over the executed steps, and marks overflows."""
  for i, result in enumerate(of_run):
    scales, overflow = np.array(result["loss_scale"]), np.array(result["overflow"])
    calls = np.arange(len(scales))
    axes.step(
      calls,
      scales,
      where="post",
      color="tab:green",
      alpha=1 - 0.3 * min(i, 2),
      linewidth=1.5,
      linestyle=("-", "--", ":")[i % 3],
      label="seed {}".format(result["seed"]),
    )
    axes.plot(
      calls[overflow],
      scales[overflow],
      "x",
      color="black",
      markersize=6,
      label="overflow: step skipped, scale halved" if i == len(of_run) - 1 else None,
    )
  axes.set_yscale("log", base=2)
  axes.set_xlabel("executed step (with the skipped ones)")
  axes.legend()


def plot(results, path):
  """Writes the four plots to one PNG file."""
  figure = matplotlib.figure.Figure(figsize=(14, 9))
  FigureCanvasAgg(figure)
  (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2)
  plot_seeds(top_left, results, lambda of_run: over_seeds(of_run, "test_accuracy"))
  top_left.set_title("Test accuracy on the ink pixels")
  plot_seeds(top_right, results, vanished_over_layers)
  top_right.set_title("Gradient values that vanish (mean over layers)")
  plot_layers(bottom_left, results)
  bottom_left.set_title("Gradient values that vanish at the first step")
  plot_loss_scale(bottom_right, results[RUNS[-1].name])
  bottom_right.set_title("Dynamic loss scale of float16 + mp_compat")
  for axes in figure.axes:
    axes.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def main(argv):
  common_flags.no_arguments(argv)
  seeds, steps = (1, 20) if FLAGS.quick else (FLAGS.seeds, FLAGS.steps)
  tf.disable_eager_execution()
  tf.logging.set_verbosity(tf.logging.ERROR)
  digits = Digits()
  # A new directory, since training would resume from old checkpoints.
  logs = os.path.join(FLAGS.out, "logs", time.strftime("%Y%m%d-%H%M%S"))
  machine = "{}, TensorFlow {}, TF_ENABLE_ONEDNN_OPTS={}".format(
    processor.describe(), tf.__version__, os.environ["TF_ENABLE_ONEDNN_OPTS"]
  )
  every = max(steps // 8, 5)
  results = collections.OrderedDict((run.name, []) for run in RUNS)
  with tqdm(total=len(RUNS) * seeds * steps, unit="step", ncols=110) as progress:
    for run in RUNS:
      for seed in range(seeds):
        progress.set_description("{}, seed {}".format(run.name, seed))
        directory = os.path.join(
          logs, "{}-seed{}".format(run.name.replace(" + ", "-"), seed)
        )
        results[run.name].append(
          train(run, seed, steps, every, digits, directory, progress)
        )
  with open(os.path.join(FLAGS.out, "digits.json"), "w") as file:
    json.dump(
      {"machine": machine, "layers": [layer.name for layer in LAYERS], "runs": results},
      file,
    )
  plot(results, os.path.join(FLAGS.out, "digits.png"))
  history, advice = ranges_chart.read(os.path.join(logs, "float16-mp_compat-seed0"))
  ranges_chart.save(
    ranges_chart.draw(history, advice), os.path.join(FLAGS.out, "ranges.png")
  )
  print("{}\n{}".format(table(results), machine))
  print(
    "\nCurves: {0}.png, numbers: {0}.json, summaries: {1}".format(
      os.path.join(FLAGS.out, "digits"), logs
    )
  )
  print(
    "Gradients: {}. Advice: {}".format(
      os.path.join(FLAGS.out, "ranges.png"), advice.text
    )
  )
  if FLAGS.check:
    check_speed(results, machine)


if __name__ == "__main__":
  common_flags.run(main)
