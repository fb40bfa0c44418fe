"""Tests that what LossScaleStalledError says of a mistake is true: the program with the
remedy trains, and where no dtype helps, it stalls in float32, too.
"""

from typing import Callable, NamedTuple, Union

import numpy as np
import pytest

import mp_compat
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf

NO_REMEDY = "no remedy"


def in_float32(value):
  return tf.cast(value, tf.float32)


def as_it_is(value):
  return value


class Mistake(NamedTuple):
  """A function of float16 values that stalls.

  Attributes:
    values: [2], the values of a layer.
    function: Computes a result from the layer; calls its second argument on what the
      remedy computes in float32.
    text: What the message says.
    remedy: The function with the remedy of the message; None for `function` in float32;
      `NO_REMEDY` if the message says that no dtype helps.
  """

  values: tuple
  function: Callable
  text: str
  remedy: Union[Callable, str, None] = None


def logarithm_of_softmax(h, wide):
  return tf.log(tf.nn.softmax(wide(h)) + 1e-8)


def by_norm(epsilon):
  """Returns a quotient by a norm; with 1e-8, its gradient is too large for float16."""
  return lambda h, _: h / (tf.reduce_sum(tf.abs(h)) + epsilon)


def clipped(h, wide):
  return tf.log(1.0 - tf.clip_by_value(tf.sigmoid(wide(h)), 1e-7, 1.0 - 1e-7))


def layer_norm(h, wide):
  h = wide(h)
  deviation = h - tf.reduce_mean(h)
  return deviation * tf.rsqrt(tf.reduce_mean(tf.square(deviation)) + 1e-12)


def layer_norm_of_moments(h, wide):
  mean, variance = tf.nn.moments(wide(h), [1], keepdims=True)
  return (wide(h) - mean) * tf.rsqrt(variance + 1e-12)


def root_of_squares(h, wide):
  return tf.sqrt(tf.reduce_sum(tf.square(wide(h))))


def standard_deviation(h, wide):
  h = wide(h)
  return tf.sqrt(tf.reduce_mean(h * h) - tf.square(tf.reduce_mean(h)))


def log_softmax_by_hand(h, wide):
  exponential = tf.exp(wide(h) - tf.reduce_max(wide(h)))
  return tf.log(exponential / tf.reduce_sum(exponential))


def through_casts(h, wide):
  softmax = tf.nn.softmax(tf.cast(h, tf.float32))
  return tf.log(wide(tf.cast(softmax, h.dtype)) if wide is as_it_is else softmax)


def with_python_function(h, wide):
  """Returns the logarithm of a softmax, with a factor of one from a Python function."""
  h = wide(h)
  one = tf.py_func(np.ones_like, [h], h.dtype)
  one.set_shape(h.shape)
  return tf.log(tf.nn.softmax(h) * one)


def after_normalization(function):
  """Returns a function of a batch normalization, which has no kernel for float64."""

  def normalized(h, _):
    image = tf.cast(tf.reshape(h, [1, 1, 1, 2]), tf.float32)
    offset = tf.constant([12.0, 0.0])
    result, _, _ = tf.nn.fused_batch_norm(image, tf.ones([2]), offset, name="norm")
    return function(result)

  return normalized


def mean_of_selected(h, wide):
  """Returns the mean of the values above zero: 0 / 0 if all are rounded to 0."""
  h = wide(h)
  mask = tf.cast(h > 0.0, h.dtype)
  return tf.reduce_sum(h * mask) / tf.reduce_sum(mask)


def by_distance_from_largest(h, wide):
  """Returns a quotient by a difference of equal numbers, in every dtype."""
  y = tf.sigmoid(wide(h))
  return y / (y - tf.reduce_max(tf.abs(y)))


def by_distance_of_many_ops(h, wide):
  """Returns such a quotient, and reads a constant near it."""
  y = tf.sigmoid(wide(h) + 1e-8)
  largest = y
  for _ in range(10):
    largest = tf.abs(largest)
  return y / (y - tf.reduce_max(largest))


def after_cast(function, *constants):
  """Returns a function of float32 values and of constants that are cast to float32."""

  def cast(h, wide):
    narrow = [tf.constant(each, wide(h).dtype) for each in constants]
    return function(in_float32(h), *map(in_float32, narrow))

  return cast


def limited_in_bfloat16(limit):
  """Returns the logarithm of what a limited probability leaves."""

  def limited(h, wide):
    probability = tf.sigmoid(
      tf.cast(h, tf.bfloat16) if wide is as_it_is else in_float32(h)
    )
    return tf.log(1.0 - probability * limit)

  return limited


def with_gradient(function):
  """Returns the identity, with a gradient of `function` of the values."""

  @tf.custom_gradient
  def identity(x):
    return tf.identity(x), lambda gradient: gradient * function(x)

  return identity


def guarded_logarithm(h, wide):
  """Returns a logarithm whose values at -1 are not selected."""
  h = wide(h)
  return tf.where_v2(h > -1.0, tf.log1p(h), tf.zeros_like(h))


def norm_with_gradient(epsilon):
  """Returns a norm with a gradient of the program's own, which divides by it."""

  @tf.custom_gradient
  def norm(x):
    result = tf.sqrt(tf.reduce_sum(tf.square(x)))
    return result, lambda gradient: gradient * x / (result + epsilon)

  return lambda h, wide: norm(wide(h))


def recomputed_root(h, wide):
  root = tf.recompute_grad(lambda x: tf.sqrt(tf.square(x) + 1e-12))
  with tf.variable_scope("", use_resource=True):  # TensorFlow 2.0 wants it
    return root(wide(h))


of_arc_cosine = with_gradient(lambda x: tf.reciprocal(1.0 - tf.square(x)))
of_reciprocal = with_gradient(lambda x: x * tf.reciprocal(tf.square(x)))


def far_from_constant(h, wide):
  """Returns a logarithm, nine ops after a constant."""
  result = tf.nn.relu(wide(h)) + 1e-8
  for _ in range(8):
    result = tf.reshape(result, [1, 2])
  return tf.log(result)


def by_difference_of_sizes(h, wide):
  h = wide(h)
  one, other = [tf.size(tf.zeros([size])) for size in (2049, 2048)]
  return h / (tf.cast(one, h.dtype) - tf.cast(other, h.dtype))


def local_response(h, wide):
  """Returns a local response normalization, which has no kernel for float64."""
  image = tf.cast(tf.reshape(wide(h), [1, 1, 1, 2]), tf.float32)
  return tf.nn.lrn(image, bias=0.0, alpha=1.0, beta=0.5)


def beside_text(h, wide):
  """Returns the logarithm of a softmax that an op copies together with a string."""
  softmax = tf.nn.softmax(wide(h))
  copy, _ = tf.raw_ops.IdentityN(input=[softmax, tf.constant("text")])
  return tf.log(copy)


def in_branch(control_flow):
  """Returns a logarithm in a branch, for a version of control flow."""

  def logarithm(h, wide):
    with testing.control_flow(control_flow):
      return tf.cond(
        tf.placeholder_with_default(True, []),
        lambda: tf.log(tf.nn.softmax(wide(h))),
        lambda: wide(h),
      )

  return logarithm


def after_branch(h, wide):
  """Returns a logarithm of what a branch of control flow v2 computed."""
  with testing.control_flow(2):
    chosen = tf.switch_case(
      tf.placeholder_with_default(0, []), [lambda: wide(h), lambda: 2.0 * wide(h)]
    )
  return tf.log(tf.nn.softmax(chosen))


def masked_before(number):
  """Returns attention to large values, with a mask of a number that was made first."""

  def attention(h, wide):
    mask = tf.constant([[0.0, number]], wide(h).dtype)
    return tf.nn.softmax(tf.square(wide(h)) + mask)

  return attention


def masked_as_a_whole(number):
  """Returns attention of which a mask removes each value."""
  return lambda h, wide: tf.nn.softmax(h + tf.constant([[number] * 2], h.dtype))


def masked_in_bfloat16(number):
  """Returns attention in bfloat16 with a mask of a number."""

  def attention(h, _):
    mask = tf.placeholder_with_default(tf.constant([[0.0, 0.0]]), [1, 2])
    half = tf.cast((1.0 - mask) * number, tf.bfloat16, name="half")
    return tf.nn.softmax(tf.cast(h, tf.bfloat16) + half)

  return attention


def masked(number):
  """Returns attention with a mask of a number."""

  def attention(h, wide):
    mask = tf.placeholder_with_default(tf.constant([[1.0, 0.0]], h.dtype), [1, 2])
    return tf.nn.softmax(wide(h) + (1.0 - mask) * number)

  return attention


def masked_by_cast(number):
  """Returns attention with a mask that was made in float32."""

  def attention(h, _):
    mask = tf.placeholder_with_default(tf.constant([[0.0, 0.0]]), [1, 2])
    return tf.nn.softmax(h + tf.cast((1.0 - mask) * number, h.dtype, name="half"))

  return attention


def selected(h, wide):
  h = wide(h)
  return tf.where_v2(tf.equal(h, 0.0), tf.zeros_like(h), 1.0 / h)


def selected_twice(h, wide):
  """Returns 1 / h where that is finite; the input of the quotient is never zero."""
  h = wide(h)
  is_zero = tf.equal(h, 0.0)
  quotient = 1.0 / tf.where_v2(is_zero, tf.ones_like(h), h)
  return tf.where_v2(is_zero, tf.zeros_like(h), quotient)


ROUNDED = " because of rounding to float16. Compute {} in float32: "
CONSTANT = " a constant stands for every number that rounds to it: {}."
FORMULA = "by a formula in which nothing cancels or underflows"
NO_DTYPE = ": {}. Computed in a wider dtype from Placeholder, w on, it is not finite either. Corr"
SAME_CONSTANTS = (
  "in a wider dtype from Placeholder, w on, with the same constants, it is not finite e"
)
GRADIENT = " and the op whose gradient it is in float32"
TOO_LARGE = "because float16 ends at 65504: compute {} in float32"

MISTAKES = {
  "log of softmax": Mistake(
    (20.0, -20.0), logarithm_of_softmax, ROUNDED.format("Softmax, add, Log")
  ),
  "log of zeros and epsilon": Mistake(
    (-1.0, -1.0),
    lambda h, wide: tf.log(tf.nn.relu(wide(h)) + 1e-8),
    CONSTANT.format("add/y is 0"),
  ),
  "quotient by norm": Mistake(
    (0.0, 0.0),
    by_norm(1e-8),
    "compute mul, add/y, add, truediv in float32, or use one that the dtype has: float1",
    by_norm(1e-3),
  ),
  "difference from one": Mistake(
    (6.0, 5.0),
    lambda h, wide: tf.log(1.0 - tf.tanh(wide(h))),
    ROUNDED.format("Tanh, sub, Log"),
  ),
  "clipped probability": Mistake(
    (20.0, 1.0), clipped, CONSTANT.format("sub/x is 1, clip_by_value/Minimum/y is 1")
  ),
  "root of small squares": Mistake(
    (1e-5, 1e-5), root_of_squares, "Compute Square, Sum, Sqrt" + GRADIENT
  ),
  "exponential beyond float32": Mistake(
    (200.0, 1.0),
    lambda h, wide: tf.exp(h),
    "nor does float32, which ends at 3.4e38: the exact result of Exp is up to 7.23e+86.",
    lambda h, _: h,  # its logarithm
  ),
  "logarithm of zero": Mistake(
    (0.0, 1.0),
    lambda h, wide: tf.log(wide(h)),
    NO_DTYPE.format("Log computes the logarithm of zero"),
    NO_REMEDY,
  ),
  "difference beyond float32": Mistake(
    (12.0, 11.0),
    lambda h, wide: tf.log(1.0 - tf.tanh(h)),
    FORMULA,
    lambda h, _: np.log(2.0) + tf.log_sigmoid(-2.0 * h),
  ),
  "clipped by roundings": Mistake((8.0, 1.0), clipped, "Compute Sigmoid, clip"),
  "layer normalization": Mistake((1.0, 1.0), layer_norm, CONSTANT.format("add/y is 0")),
  "moments": Mistake((1e-3, 1.1e-3), layer_norm_of_moments, "Compute moments/"),
  "root of zeros and epsilon": Mistake(
    (0.0, 0.0),
    lambda h, wide: tf.sqrt(tf.square(wide(h)) + 1e-12),
    "compute add/y, add, Sqrt" + GRADIENT,
  ),
  "norm": Mistake(
    (1e-5, 1e-5),
    lambda h, wide: tf.sqrt(tf.reduce_sum(tf.square(wide(h)))),
    "Compute Square, Sum, Sqrt" + GRADIENT,
  ),
  "variance": Mistake(
    (20.0, 20.06), standard_deviation, ", Square, sub, Sqrt" + GRADIENT
  ),
  "softmax by hand": Mistake(
    (20.0, -20.0), log_softmax_by_hand, ROUNDED.format("Exp, Sum, truediv, Log")
  ),
  "casts": Mistake((20.0, -20.0), through_casts, ", Log in float32: "),
  "Python function": Mistake(
    (20.0, -20.0), with_python_function, ROUNDED.format("Softmax, mul_1, Log")
  ),
  "no kernel in float64": Mistake(
    (1.0, 2.0),
    after_normalization(tf.log),
    NO_DTYPE.format("Log computes the logarithm of zero"),
    NO_REMEDY,
  ),
  "no kernel before": Mistake(
    (1.0, 2.0),
    after_normalization(lambda h: tf.log(1.0 - tf.tanh(h))),
    "Replace Tanh, sub, Log " + FORMULA,
    after_normalization(lambda h: np.log(2.0) + tf.log_sigmoid(-2.0 * h)),
  ),
  "shape of values": Mistake(
    (0.0, 1.0),
    lambda h, wide: tf.log(tf.reshape(wide(h), tf.raw_ops.Shape(input=h))),
    NO_DTYPE.format("Log computes the logarithm of zero"),
    NO_REMEDY,
  ),
  "mask of rounded values": Mistake(
    (1e-9, 1e-9),
    mean_of_selected,
    "Compute Cast_2 and what comes before in float32, too. If nothing changes, ",
    lambda h, wide: tf.reduce_mean(h),
  ),
  "equal numbers": Mistake(
    (0.1, 0.1),
    by_distance_from_largest,
    NO_DTYPE.format("truediv divides by zero"),
    NO_REMEDY,
  ),
  "rounded integers": Mistake(
    (1.0, 1.0), by_difference_of_sizes, "Compute Cast_2, Cast_3 and what comes before "
  ),
  "constants of a vector": Mistake(
    (0.0, 0.0),
    lambda h, wide: tf.sqrt(
      tf.square(wide(h)) + tf.constant([1e-12] * 2, wide(h).dtype)
    ),
    CONSTANT.format("Const is 0"),
  ),
  "constant of two numbers": Mistake(
    (-1.0, -1.0),
    lambda h, wide: tf.log(
      tf.nn.relu(wide(h)) + tf.constant([1e-8, 0.5], wide(h).dtype)
    ),
    CONSTANT.format("Const is 0, 0.5"),
  ),
  "power of a negative number": Mistake(
    (-1.0, 0.0),
    lambda h, wide: tf.pow(wide(h), 0.5),
    ": Pow computes a power of zero or of a negative number. Computed "
    + SAME_CONSTANTS,
    NO_REMEDY,
  ),
  "only kernel in float32": Mistake(
    (1e-8, 1e-8),
    local_response,
    ". If values are rounded to float16 or bfloat16 before LRN, compute them in float",
    lambda h, wide: h,
  ),
  "branch of control flow v2": Mistake(
    (20.0, -20.0),
    in_branch(2),
    ". If cond overflows, because float16 ends at 65504, or values were rounded to 0, ",
  ),
  "after a branch of control flow v2": Mistake(
    (20.0, -20.0), after_branch, ROUNDED.format("Softmax, Log")
  ),
  "branch": Mistake(
    (20.0, -20.0), in_branch(1), ROUNDED.format("cond/Softmax, cond/Log")
  ),
  "constant after a cast": Mistake(
    (-1.0, -1.0),
    after_cast(lambda h, epsilon: tf.log(tf.nn.relu(h) + epsilon), 1e-8),
    "compute Const in float32",
  ),
  "constant after a cast, gradient": Mistake(
    (0.0, 0.0),
    after_cast(lambda h, epsilon: tf.sqrt(tf.square(h) + epsilon), 1e-12),
    "compute Const" + GRADIENT,
  ),
  "constant after a reshape": Mistake(
    (-1.0, -1.0),
    after_cast(
      lambda h, epsilon: tf.log(tf.nn.relu(h) + tf.reshape(epsilon, [1, 2])), [1e-8] * 2
    ),
    "compute Const in float32",
  ),
  "constant without gradient": Mistake(
    (-1.0, -1.0),
    lambda h, wide: tf.log(
      tf.nn.relu(wide(h)) + tf.stop_gradient(tf.constant(1e-8, wide(h).dtype))
    ),
    "compute Relu, Const, StopGradient, add, Log in float32",
  ),
  "constant and other roundings": Mistake(
    (6.0, 5.0),
    lambda h, wide: tf.log((1.0 - tf.tanh(wide(h))) * tf.constant(1e-8, wide(h).dtype)),
    "compute Tanh, sub, Const, mul_1, Log in float32",
  ),
  "constant of two signs": Mistake(
    (1.0, -1.0),
    lambda h, wide: tf.log(wide(h) * tf.constant([1e-8, -1e-8], wide(h).dtype)),
    CONSTANT.format("Const is 0"),
  ),
  "constant with infinity": Mistake(
    (0.5, 1.0),
    lambda h, wide: tf.log(
      1.0 - tf.minimum(wide(h), tf.constant([np.inf, 1.0 - 1e-7], wide(h).dtype))
    ),
    CONSTANT.format("sub/x is 1, Const is 1, inf"),
  ),
  "constant of nan": Mistake(
    (1.0, 1.0),
    lambda h, wide: wide(h) * tf.constant(np.nan, wide(h).dtype),
    "No scale makes the loss finite: correct the input Const.",
    NO_REMEDY,
  ),
  "constant of bfloat16": Mistake(
    (20.0, 1.0),
    limited_in_bfloat16(1.0 - 1e-7),
    "or use one that the dtype has: float16 has 1e-3 and 1 - 1e-3, bfloat16 has 1 - 1e-2",
    limited_in_bfloat16(1.0 - 1e-2),
  ),
  "constant far away": Mistake((-1.0, -1.0), far_from_constant, SAME_CONSTANTS),
  "one of many constants": Mistake(
    (-1.0, -1.0),
    lambda h, wide: tf.log(
      tf.reduce_sum(tf.nn.relu(wide(h)))
      + tf.stack([tf.constant(each, wide(h).dtype) for each in [0.5] * 16 + [1e-8]])
    ),
    SAME_CONSTANTS,
  ),
  "constant of a gradient": Mistake(
    (1.0, 0.0),
    lambda h, wide: of_arc_cosine(wide(h)),
    "/sub/x is 1. If the program has another one there, such as ",
    NO_REMEDY,
  ),
  "constant of TensorFlow's gradient": Mistake(
    (-1.0, 1.0),
    guarded_logarithm,
    "Reciprocal divides by zero. Computed in a wider dtype from Placeholder, w on, it is",
    NO_REMEDY,
  ),
  "norm with a gradient": Mistake(
    (0.0, 0.0),
    norm_with_gradient(1e-8),
    "/add/y is 0. If the program has another one there, such as 1e-8 or 1 - 1e-7, compute the op whose gradient it is in float32",
  ),
  "recomputed root": Mistake(
    (0.0, 0.0),
    recomputed_root,
    "/y is 0. If the program has another one there, such as",
  ),
  "forward op of a gradient": Mistake(
    (5.0, 0.0),
    lambda h, wide: of_arc_cosine(tf.tanh(wide(h))),
    "Compute Tanh" + GRADIENT,
  ),
  "gradient alone": Mistake(
    (1e-4, 1e-4),
    lambda h, wide: of_reciprocal(wide(h)),
    "Compute the op whose gradient it is in float32",
  ),
  "random numbers": Mistake(
    (0.0, 1.0),
    lambda h, wide: tf.log(tf.random.uniform([1, 2]) * in_float32(wide(h))),
    "/RandomUniform, Placeholder, w on, it is not finite either. Correct its inputs",
    NO_REMEDY,
  ),
  "text": Mistake(
    (20.0, -20.0), beside_text, "Compute IdentityN and what comes before "
  ),
  "constant before equal numbers": Mistake(
    (0.1, 0.1),
    by_distance_of_many_ops,
    SAME_CONSTANTS,
    NO_REMEDY,
  ),
  "power beyond float64": Mistake(
    (2e4, 1.0),
    lambda h, wide: tf.pow(in_float32(h), 100.0),
    ": Pow is not finite in float64 either. Computed in a wider dtype ",
    lambda h, _: 100.0 * tf.log(h),
  ),
  "product that overflows on the way": Mistake(
    (1e4, 1e4),
    lambda h, wide: tf.reduce_prod(
      tf.concat([1e26 * wide(in_float32(h)), 1e-26 / wide(in_float32(h))], axis=1)
    ),
    ": Prod overflows in float32, although its exact result is up to 1. Compute it in f",
    lambda h, _: tf.reduce_prod(
      tf.concat([1e26 * tf.cast(h, tf.float64), 1e-26 / tf.cast(h, tf.float64)], axis=1)
    ),
  ),
  "power beyond float32": Mistake(
    (2e4, 1.0),
    lambda h, wide: tf.pow(h, 10.0),
    "the exact result of Pow is up to 1.02e+43.",
    lambda h, _: 10.0 * tf.log(h),
  ),
  "exponential": Mistake(
    (12.0, 1.0), lambda h, wide: tf.log(1.0 + tf.exp(wide(h))), TOO_LARGE.format("Exp")
  ),
  "square": Mistake(
    (300.0, 1.0),
    lambda h, wide: tf.square(wide(h)) / (1.0 + tf.square(wide(h))),
    TOO_LARGE.format("Square"),
  ),
  "sum": Mistake(
    (6e4, 6e4),
    lambda h, wide: tf.square(1e-3 * tf.reduce_sum(wide(h))),
    TOO_LARGE.format("Sum"),
  ),
  "product of matrices": Mistake(
    (200.0, 200.0),
    lambda h, wide: tf.square(1e-3 * tf.matmul(wide(h), wide(h), transpose_b=True)),
    TOO_LARGE.format("MatMul"),
  ),
  "mask": Mistake(
    (1.0, 2.0), masked(-1e9), "such as a mask of -1e4 instead of -1e9", masked(-1e4)
  ),
  "mask beside an overflow": Mistake(
    (300.0, 1.0), masked_before(-np.inf), TOO_LARGE.format("Square")
  ),
  "mask of infinities": Mistake(
    (1.0, 2.0),
    masked_as_a_whole(-np.inf),
    ": Const contains infinities. If the program has finite numbers there, they overflow",
    masked_as_a_whole(-1e4),
  ),
  "mask in bfloat16": Mistake(
    (1.0, 2.0),
    masked_in_bfloat16(float(np.finfo(np.float32).min)),
    "half casts values of up to 3.40282e+38 to bfloat16, which ends at 3.39e38. Compute ",
    masked_in_bfloat16(-1e4),
  ),
  "mask in float32": Mistake(
    (1.0, 2.0),
    masked_by_cast(-1e9),
    "half casts values of up to 1e+09 to float16, which ends at 65504. Compute what ",
    masked_by_cast(-1e4),
  ),
  "root at zero": Mistake(
    (0.0, 1.0),
    lambda h, wide: tf.sqrt(wide(h)),
    ": gradients/Sqrt_grad/SqrtGrad computes the gradient of a root at zero. Computed "
    "in a wider dtype from Placeholder, w, current_loss_scale on, it is not finite eit",
    NO_REMEDY,
  ),
  "root before a function": Mistake(
    (0.0, 1.0),
    lambda h, wide: tf.function(tf.exp)(tf.sqrt(wide(h))),
    "it is not finite either. Keep the input of the op whose gradient it is away from ",
    NO_REMEDY,
  ),
  "selected": Mistake((0.0, 1.0), selected, "divides by zero", selected_twice),
  "zero by zero": Mistake(
    (0.0, 1.0),
    lambda h, wide: wide(h) / wide(h),
    NO_DTYPE.format("truediv divides by zero"),
    NO_REMEDY,
  ),
  "root of a negative number": Mistake(
    (-1.0, 1.0),
    lambda h, wide: tf.sqrt(wide(h)),
    NO_DTYPE.format("Sqrt computes the root of a negative number"),
    NO_REMEDY,
  ),
  "reciprocal of small values": Mistake(
    (1e-5, 1.0),
    lambda h, wide: 1e-2 / (1.0 + 1.0 / wide(h)),
    TOO_LARGE.format("gradients/truediv_grad/RealDiv_1"),
  ),
}
DEFAULT = [
  "after a branch of control flow v2",
  "branch of control flow v2",
  "constant of TensorFlow's gradient",
  "mask beside an overflow",
  "mask of infinities",
  "norm with a gradient",
  "power beyond float64",
  "product that overflows on the way",
  "Python function",
  "constant before equal numbers",
  "constant after a cast",
  "constant after a reshape",
  "constant and other roundings",
  "constant of a gradient",
  "constant of bfloat16",
  "constant of two numbers",
  "constant of two signs",
  "constant with infinity",
  "constant without gradient",
  "constants of a vector",
  "equal numbers",
  "forward op of a gradient",
  "mask of rounded values",
  "clipped probability",
  "difference from one",
  "exponential beyond float32",
  "log of softmax",
  "log of zeros and epsilon",
  "logarithm of zero",
  "no kernel before",
  "no kernel in float64",
  "quotient by norm",
  "root before a function",
  "root of small squares",
  "shape of values",
  "text",
]


def stall_of(function, wide, values):
  """Trains with a function of a layer; returns the message if the run stalls, or "" as
  soon as a step is applied.
  """
  with tf.Graph().as_default(), testing.control_flow(1):
    x = tf.placeholder(tf.float32, [1, 2])
    w = tf.get_variable("w", [2], initializer=tf.ones_initializer())
    hidden = tf.cast(x, tf.float16) * tf.cast(w, tf.float16)
    opt = Optimizer(tf.train.GradientDescentOptimizer(1e-9), "dynamic")
    loss = tf.reduce_mean(tf.cast(function(hidden, wide), tf.float32))
    fetches = [opt.minimize(loss), opt.step_applied, loss]
    hook = mp_compat.LossScaleHook(opt, max_consecutive_skips=50, min_scale_patience=2)
    try:
      with tf.train.MonitoredTrainingSession(hooks=[hook]) as sess:
        for _ in range(50):
          _, is_applied, value = sess.run(fetches, {x: [values]})
          if is_applied and np.isfinite(value):
            return ""
    except mp_compat.LossScaleStalledError as error:
      return str(error)
  raise AssertionError("The program neither trains nor stalls.")


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in DEFAULT else pytest.mark.matrix)
    for name in sorted(MISTAKES)
  ],
)
def test_program_with_remedy_trains(name):
  values, function, text, remedy = MISTAKES[name]
  message = stall_of(function, as_it_is, values)
  assert text in message.splitlines()[-1], message
  if remedy is None:
    assert stall_of(function, in_float32, values) == ""
  elif remedy is NO_REMEDY:
    assert "is not finite" in stall_of(function, in_float32, values)
  else:
    assert stall_of(remedy, as_it_is, values) == ""
