"""Tests docs/real_model.md: its diffs are those of examples/train_transformer.py, and
what their absence does.
"""

import json
import os
import re

import pytest

from tests import testing

EXAMPLES = os.path.join(testing.ROOT, "examples")
PROGRAM = os.path.join(EXAMPLES, "train_transformer.py")
# Sums have the same order in each run.
REPEATABLE = {
  "TF_ENABLE_ONEDNN_OPTS": "0",
  "TF_NUM_INTEROP_THREADS": "1",
  "TF_NUM_INTRAOP_THREADS": "1",
}
FLOAT32 = ["--dtype", "float32", "--loss_scale", "1"]


def read(*path):
  with open(os.path.join(*map(str, path)), encoding="utf-8") as file:
    return file.read()


def diffs():
  """Returns the diffs of the page as (number of the section, text before, text
  after).
  """
  return [
    (
      int(section[0]),
      *(
        "".join(line[1:] or line for line in diff if line[0] != other) for other in "+-"
      ),
    )
    for section in re.split(
      "^## (?=[0-9])", read(testing.ROOT, "docs", "real_model.md"), flags=re.M
    )[1:]
    for diff in (
      text.splitlines(True)
      for text in re.findall("^```diff\n(.*?)^```", section, re.M | re.S)
    )
  ]


def without(*sections):
  """Returns the source of the program without the diffs of some sections of the
  page.
  """
  source = read(PROGRAM)
  for section, before, after in diffs():
    if section in sections:
      assert source.count(after) == 1, after
      source = source.replace(after, before)
  return source


def replaced(source, old, new):
  assert source.count(old) == 1, old
  return source.replace(old, new)


def losses(directory):
  return json.loads(read(directory, "numbers.json"))["loss"]


FLOAT32_PROGRAM = without(*range(1, 8))


@pytest.fixture(name="run")
def _run(tmp_path):
  """Returns a function that trains with a source, little, and returns the directory of
  the results and the log.
  """
  pytest.importorskip("sklearn")

  def run(name, source, *arguments):
    source = replaced(source, "WARMUP = 200, ", "WARMUP = 8, ")  # test digits
    (tmp_path / (name + ".py")).write_text(source, "utf-8")
    flags = ["--out", tmp_path / name, "--steps", 3, "--batch", 4]
    options = dict(path=[EXAMPLES], variables=REPEATABLE, check=False)
    done = testing.run_python(tmp_path / (name + ".py"), *flags, *arguments, **options)
    return tmp_path / name, done.stdout + done.stderr

  return run


def test_diffs_are_all_of_the_conversion():
  code = FLOAT32_PROGRAM.split('"""', 2)[2]
  assert not re.search(
    "mp_compat|float16|dtype|hook|loss_scale", code.replace("x.dtype", "")
  )
  assert len(diffs()) == 10


@pytest.mark.matrix
def test_float32_program_trains_the_same(run):
  original, log = run("original", FLOAT32_PROGRAM)
  converted, _ = run("converted", read(PROGRAM), *FLOAT32)
  assert len(set(losses(original))) == 4, log  # before and after each step
  assert losses(converted) == losses(original)


@pytest.mark.matrix
def test_converted_program_continues_float32_checkpoint(run):
  original, _ = run("original", FLOAT32_PROGRAM)
  continued, log = run("continued", read(PROGRAM), "--restore", original / "model.ckpt")
  assert (
    "lacks state of the loss scale: current_loss_scale, good_steps initialized instead"
    in log
  )
  last, first = (
    json.loads(read(original, "numbers.json"))["loss"][-1],
    json.loads(read(continued, "numbers.json"))["loss"][0],
  )
  # The weights are the same, the arithmetic is float16.
  assert abs(first - last) < 1e-4 and first != last


@pytest.mark.matrix
def test_no_product_computes_in_float32():
  pytest.importorskip("sklearn")
  code = """
import train_transformer as program, mp_compat, tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
program.FLAGS(["program"])
masks = program.transformer(tf.placeholder(tf.int32, [None, 64]), tf.placeholder(tf.float32, [None, 64]))
print(mp_compat.float32_ops(masks), masks.dtype.name)
"""
  assert testing.run_python("-c", code, path=[EXAMPLES]).stdout.endswith("[] float32\n")


MASK, SCOPE, LABELS = (
  "(1.0 - visible[:, None, None, :])",
  "dtype=dtype, custom_getter=getter",
  "labels=labels",
)
NATIVE_SAVER = ("mp_compat.checkpoints.Saver()", "tf.train.Saver()")


@pytest.mark.matrix
@pytest.mark.parametrize(
  "sections, replacement, flags, symptoms",
  [
    (
      [],
      (SCOPE, "custom_getter=getter"),
      [],
      ["the backward pass of Adam has no float16 tensor"],
    ),
    (
      [],
      (SCOPE, "dtype=dtype"),
      ["--loss_scale", "1", "--steps", "12"],
      [
        "Adam trains float16 variables: ",
        "create the float16 ones with mp_compat.float32_variable_storage_getter",
      ],
    ),
    ([3], None, [], []),
    (
      [4],
      None,
      [],
      [
        "TypeError: Input 'y' of 'AddV2' Op has type float32 that does not match type float16 of arg"
      ],
    ),
    (
      [4],
      (MASK, "tf.cast{}, x.dtype)".format(MASK[:-1])),
      ["--loss_scale", "1", "--steps", "12"],
      [
        "The first value of the forward pass that is not finite is transformer/layer_0/mul_1/y.",
        "such as a mask of -1e4 instead of -1e9",
      ],
    ),
    ([5], None, [], []),
    (
      [6],
      None,
      [],
      [
        "TypeError: Input 'y' of 'Mul' Op has type float32 that does not match type float16 of argument"
      ],
    ),
    (
      [6],
      (LABELS, "labels=tf.cast(labels, logits.dtype)"),
      [],
      ["step 3: test loss 0.00000"],
    ),
    (
      [],
      NATIVE_SAVER,
      ["--restore"],
      ["Key current_loss_scale not found in checkpoint"],
    ),
  ],
  ids=[
    "dtype",
    "getter",
    "embedding",
    "attention",
    "mask",
    "norm",
    "loss",
    "labels",
    "saver",
  ],
)
def test_symptom_of_step_left_out(run, sections, replacement, flags, symptoms):
  source = without(*sections)
  if replacement:
    source = replaced(source, *replacement)
  if flags == ["--restore"]:
    flags = flags + [run("original", FLOAT32_PROGRAM)[0] / "model.ckpt"]
  directory, log = run("changed", source, *flags)
  assert [text for text in symptoms if text not in log] == []
  if not symptoms:
    assert losses(directory)[-1] < losses(directory)[0]
