"""Every op that loss scaling adds to the path of a gradient has a GPU kernel, so that
gradients stay on the GPU.

GPU builds of TensorFlow know their kernels without a GPU. Ops of the inner optimizer
(behind the gate) and of variables are not checked: they are the same without loss
scaling.
"""

import functools

import numpy as np
import pytest

import mp_compat
from mp_compat.graph import gate
from tests import testing
from tests.testing import Optimizer
from tests.testing import tf

pytestmark = pytest.mark.skipif(
  not tf.test.is_built_with_cuda(), reason="a CPU build knows no GPU kernels"
)

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
SMALL, LARGE = [64, 4], [512, 512]  # up to 64 KB, the finite check stacks gradients


def large_floating(tensor):
  return tensor.dtype.base_dtype.is_floating and tensor.shape.num_elements() != 1


def has_gpu_kernel(op, host_memory_argument=lambda name: False):
  """Returns whether a GPU kernel exists for the dtypes of an op, whose given arguments
  are not in host memory.
  """
  from tensorflow.python.framework import kernels

  for kernel in kernels.get_registered_kernels_for_op(op.type).kernel:
    if kernel.device_type not in ("GPU", "DEFAULT") or any(
      map(host_memory_argument, kernel.host_memory_arg)
    ):
      continue
    if all(
      op.get_attr(constraint.name)
      in [tf.as_dtype(dtype) for dtype in constraint.allowed_values.list.type]
      for constraint in kernel.constraint
    ):
      return True
  return False


def ops_on_gradients(graph):
  """Yields (op, names of its arguments that hold gradients) for the ops that loss
  scaling adds.
  """
  for op in graph.get_operations():
    if (
      op.type
      in (
        "Placeholder",
        "VarHandleOp",
        "ReadVariableOp",
        "AssignVariableOp",
      )
      or op in gate.gated_ops(op.graph).predicates
    ):
      continue
    arguments = [argument.name for argument in op.op_def.input_arg]
    tensors = list(op.inputs)
    if len(tensors) == len(arguments):
      touched = [
        name for name, tensor in zip(arguments, tensors) if large_floating(tensor)
      ]
    else:  # a list of tensors, such as those of Pack
      touched = arguments[:1] if any(map(large_floating, tensors)) else []
    if touched:
      yield op, touched


def gradients_for(dtype):
  """Returns placeholders for gradients of every kind with their variables."""
  pairs = []
  for number, shape in enumerate([SMALL, SMALL, LARGE]):
    with tf.variable_scope("", use_resource=True):
      variable = tf.get_variable(
        "v{}".format(number), shape, dtype, initializer=tf.zeros_initializer()
      )
    pairs.append((tf.placeholder(dtype, shape), variable))
  table = tf.get_variable(
    "table", LARGE, dtype, initializer=tf.zeros_initializer(), use_resource=True
  )
  slices = tf.IndexedSlices(
    tf.placeholder(dtype, [8, 512]), tf.constant(np.arange(8)), tf.constant(LARGE)
  )
  pairs.append((slices, table))
  return pairs


def wrap(scale):
  return Optimizer(tf.train.GradientDescentOptimizer(0.1), scale)


def unscale(pairs, scale):
  opt = wrap(scale)
  opt.scale_loss(tf.placeholder(tf.float32, []))
  grads = opt.unscale_gradients(grad for grad, _ in pairs)
  opt.apply_gradients(
    zip(grads, [variable for _, variable in pairs]),
    tf.train.get_or_create_global_step(),
  )


def clip(pairs):
  with testing.control_flow(1):  # TensorFlow lowers v2 to the same ops
    mp_compat.clip_by_global_norm([grad for grad, _ in pairs], 1.0)


def accumulate(pairs):
  window = mp_compat.GradientAccumulator(wrap("dynamic"))
  window.add(pairs)
  window.apply_gradients(window.mean())


def share_loss_scale(pairs):
  scale = mp_compat.DynamicLossScale()
  mp_compat.apply_gradients_together(
    [(wrap(scale), pairs[:2]), (wrap(scale), pairs[2:])], skip="each"
  )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
  "build, expected",
  [
    (functools.partial(unscale, scale=128.0), {"Mul", "Pack", "Sum", "IsFinite"}),
    (functools.partial(unscale, scale="dynamic"), {"Mul", "Pack", "Sum", "IsFinite"}),
    (clip, set()),
    (accumulate, set()),
    (share_loss_scale, set()),
  ],
  ids=["unscale 128", "unscale dynamic", "clip", "accumulate", "share"],
)
def test_ops_on_gradients_have_gpu_kernels(build, expected, dtype, graph):
  build(gradients_for(dtype))
  checked = list(ops_on_gradients(graph))
  assert not [
    op
    for op, touched in checked
    if not has_gpu_kernel(op, lambda name, touched=touched: name in touched)
  ]
  assert expected <= {op.type for op, _ in checked}


@pytest.mark.usefixtures("graph")
def test_ops_without_gpu_kernel_are_found():
  assert not has_gpu_kernel(tf.raw_ops.UnicodeScript(input=[1]).op)
  assert has_gpu_kernel(tf.add(tf.placeholder(tf.float32, [2]), 1.0).op)
  shape_on_host = tf.reshape(
    tf.placeholder(tf.float32, [2]), tf.placeholder(tf.int32, [1])
  ).op
  assert has_gpu_kernel(shape_on_host) and not has_gpu_kernel(
    shape_on_host, lambda name: name == "shape"
  )
