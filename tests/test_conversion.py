"""Tests docs/float16.md: its diffs are those of the programs in examples/, and what
their absence does.
"""

import json
import os
import re
from typing import NamedTuple

import pytest

from tests import testing

EXAMPLES = os.path.join(testing.ROOT, "examples")
# Sums have the same order in each run.
REPEATABLE = {
  "TF_ENABLE_ONEDNN_OPTS": "0",
  "TF_NUM_INTEROP_THREADS": "1",
  "TF_NUM_INTRAOP_THREADS": "1",
}
FLOAT32 = ["--dtype", "float32", "--loss_scale", "1"]
COMMON = ("U-Net 1", "U-Net 7")  # import, flags, hook and Saver


class Diff(NamedTuple):
  """A diff of the page: its section ("U-Net 2"), and the text before and after."""

  section: str
  before: str
  after: str


def read(*path):
  with open(os.path.join(*map(str, path)), encoding="utf-8") as file:
    return file.read()


def side(diff, other):
  """Returns a diff without the lines that begin with `other`."""
  lines = [line for line in diff.splitlines(True) if line[0] != other]
  return "".join(line[1:] or line for line in lines)


def diffs():
  """Returns the diffs of the page, those of each program in sections that are
  numbered.
  """
  found = []
  page = read(testing.ROOT, "docs", "float16.md")
  for part in re.split("^#+ ", page, flags=re.MULTILINE):
    heading, _, text = part.partition("\n")
    for diff in re.findall("^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
      section = heading.partition(":")[0]
      found.append(Diff(section, side(diff, "+"), side(diff, "-")))
  return found


def without(program, *sections):
  """Returns the source of a program without the diffs of some sections."""
  source = read(EXAMPLES, program)
  for diff in diffs():
    if diff.section in sections:
      assert source.count(diff.after) == 1, diff.after
      source = source.replace(diff.after, diff.before)
  return source


def replaced(source, old, new):
  assert source.count(old) == 1, old
  return source.replace(old, new)


def losses(directory):
  return json.loads(read(directory, "numbers.json"))["loss"]


def float32_unet():
  """Returns the U-Net before its conversion."""
  return without("train_unet.py", *["U-Net {}".format(i) for i in range(1, 8)])


def float32_transformer():
  """Returns the transformer before its conversion."""
  sections = ["Transformer {}".format(i) for i in range(1, 6)]
  return without("train_transformer.py", *COMMON, *sections)


PROGRAMS = {"train_unet.py": float32_unet, "train_transformer.py": float32_transformer}


@pytest.fixture(name="run")
def _run(tmp_path):
  """Returns a function that trains with a source, little, and returns the directory of
  the results and the log.
  """

  def run(name, source, *arguments):
    source = source.replace("WARMUP = 200, ", "WARMUP = 8, ")  # test digits
    (tmp_path / (name + ".py")).write_text(source, "utf-8")
    flags = ["--out", tmp_path / name, "--steps", 3, "--batch", 4]
    options = dict(path=[EXAMPLES], variables=REPEATABLE, check=False)
    done = testing.run_python(tmp_path / (name + ".py"), *flags, *arguments, **options)
    return tmp_path / name, done.stdout + done.stderr

  return run


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_diffs_are_all_of_the_conversion(program):
  code = PROGRAMS[program]().split('"""', 2)[2]
  left = code.replace("x.dtype", "").replace("(labels, 0)", "")
  assert not re.search("mp_compat|float16|hook|loss_scale|dtype=|tf.cast.x", left)


def test_every_diff_belongs_to_a_program():
  sections = ["U-Net {}".format(i) for i in range(1, 8)]
  sections += ["Transformer {}".format(i) for i in range(1, 6)]
  others = {"Convert a model to float16", "BERT"}
  assert {diff.section for diff in diffs()} == others.union(sections)


@pytest.mark.matrix
def test_first_diff_trains_in_float16():
  (diff,) = [diff for diff in diffs() if diff.section.startswith("Convert")]
  page = read(testing.ROOT, "docs", "float16.md")
  code = """
import numpy as np
x = tf.placeholder(tf.float32, [None, 64])
labels = tf.placeholder(tf.int64, [None])

def normalize(x):
  mean, variance = tf.nn.moments(x, [1], keep_dims=True)
  return (x - mean) * tf.rsqrt(variance + 1e-3)

"""
  imports, model = diff.after.split("\n\n", 1)
  program = imports + "\ntf.disable_v2_behavior()" + code + model
  checks = """
random = np.random.RandomState(0)
feed = {x: random.normal(size=[8, 64]), labels: random.randint(10, size=8)}
with tf.train.MonitoredSession(hooks=hooks) as sess:
  losses = [sess.run([loss, train_op], feed)[0] for _ in range(20)]
assert losses[-1] < losses[0] / 2, losses
assert {v.dtype.base_dtype for v in tf.trainable_variables()} == {tf.float32}
"""
  (listing, output) = re.search(
    "```py\n(for op in .*?)```\n\n    (.*?\n)", page, re.DOTALL
  ).groups()
  done = testing.run_python("-c", program + listing + checks)
  assert done.stdout == output


@pytest.mark.matrix
def test_unet_trains_in_float16(run):
  directory, log = run("unet", read(EXAMPLES, "train_unet.py"))
  values = losses(directory)
  assert values[-1] < values[0], log
  assert "loss scale 32768 after 3 attempted steps: 0 of the last 2 skipped" in log


@pytest.mark.matrix
@pytest.mark.parametrize("program", list(PROGRAMS))
def test_float32_program_trains_the_same(program, run):
  pytest.importorskip("sklearn")
  original, log = run("original", PROGRAMS[program]())
  converted, _ = run("converted", read(EXAMPLES, program), *FLOAT32)
  assert len(set(losses(original))) == 4, log  # before and after each step
  assert losses(converted) == losses(original)


@pytest.mark.matrix
@pytest.mark.parametrize("program", list(PROGRAMS))
def test_converted_program_continues_float32_checkpoint(program, run):
  pytest.importorskip("sklearn")
  original, _ = run("original", PROGRAMS[program]())
  arguments = ["--restore", original / "model.ckpt"]
  continued, log = run("continued", read(EXAMPLES, program), *arguments)
  assert (
    "lacks state of the loss scale: current_loss_scale, good_steps initialized instead"
    in log
  )
  last, first = losses(original)[-1], losses(continued)[0]
  # The weights are the same, the arithmetic is float16.
  assert abs(first - last) < 2e-3 and first != last


@pytest.mark.matrix
@pytest.mark.parametrize(
  "program, model",
  [
    (
      "train_transformer",
      "transformer(tf.placeholder(tf.int32, [None, 64]), tf.placeholder(tf.float32, [None, 64]))",
    ),
    (
      "train_unet",
      "unet(tf.placeholder(tf.uint8, [None, 32, 32, 1]), tf.placeholder(tf.bool, []))",
    ),
  ],
)
def test_no_product_computes_in_float32(program, model):
  pytest.importorskip("sklearn")
  code = """
import {} as program, mp_compat, tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
program.FLAGS(["program"])
getter = mp_compat.float32_variable_storage_getter
with tf.variable_scope(tf.get_variable_scope(), dtype=tf.float16, custom_getter=getter):
  outputs = program.{}
print(mp_compat.float32_ops(outputs), outputs.dtype.name)
"""
  done = testing.run_python("-c", code.format(program, model), path=[EXAMPLES])
  assert done.stdout.endswith("[] float32\n")


FEW_STEPS = ["--loss_scale", "1", "--steps", "12"]
MIXED = "Op has type float32 that does not match type float16 of argument"
SYMPTOMS = {
  "dtype": ([], ("dtype=dtype, custom", "custom"), [], ["no float16 tensor"]),
  "getter": (
    [],
    (", custom_getter=getter", ""),
    FEW_STEPS,
    [
      "Adam trains float16 variables: ",
      "create the float16 ones with mp_compat.float32_variable_storage_getter",
    ],
  ),
  "embedding": (["Transformer 2"], None, [], []),
  "attention": (
    ["Transformer 3"],
    None,
    [],
    ["TypeError: Input 'y' of 'AddV2' " + MIXED],
  ),
  "mask": (
    ["Transformer 3"],
    (
      "(1.0 - visible[:, None, None, :])",
      "tf.cast(1.0 - visible[:, None, None, :], x.dtype)",
    ),
    FEW_STEPS,
    [
      "The first value of the forward pass that is not finite is "
      "transformer/layer_0/mul_1/y.",
      "such as a mask of -1e4 instead of -1e9",
    ],
  ),
  "norm": (["Transformer 4"], None, [], []),
  "logits": (["Transformer 5"], None, [], ["TypeError: Input 'y' of 'Mul' " + MIXED]),
  "labels": (
    ["Transformer 5"],
    ("labels=labels", "labels=tf.cast(labels, logits.dtype)"),
    [],
    ["step 3: test loss 0.00000"],
  ),
  "penalty": (["U-Net 6"], None, [], ["Op has type float16 that does not match"]),
  "saver": (
    [],
    ("mp_compat.checkpoints.Saver()", "tf.train.Saver()"),
    ["--restore"],
    ["Key current_loss_scale not found in checkpoint"],
  ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("left_out", list(SYMPTOMS))
def test_symptom_of_change_left_out(left_out, run):
  pytest.importorskip("sklearn")
  sections, replacement, flags, symptoms = SYMPTOMS[left_out]
  program = "train_unet.py" if left_out == "penalty" else "train_transformer.py"
  source = without(program, *sections)
  if replacement:
    source = replaced(source, *replacement)
  if flags == ["--restore"]:
    original, _ = run("original", PROGRAMS[program]())
    flags = ["--restore", original / "model.ckpt"]
  directory, log = run("changed", source, *flags)
  assert [text for text in symptoms if text not in log] == [], log
  if not symptoms:
    assert losses(directory)[-1] < losses(directory)[0]
