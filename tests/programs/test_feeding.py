"""Programs that feed intermediate tensors, or that export the graph and train a copy."""

import contextlib
import functools
import os
import shutil
import tempfile

import numpy as np

import mp_compat
from tests.programs import table as programs
from tests.programs.test_control_flow import run_after
from tests.testing import tf

TABLE = programs.Table()


def make_gradient(x):
  """Returns an array [3] to feed for a gradient; it is nonfinite where `x` is."""
  return x * np.array([2.0, 0.5, 1.0], np.float32)


@TABLE.program()
def a_returned_gradient_is_fed(t):
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss())
  train_op = optimizer.apply_gradients(pairs, t.global_step)
  return lambda sess, feed: sess.run(train_op, add_feed(feed, pairs[0][0], make_gradient(feed[t.x])))


def add_feed(feed, tensor, value):
  together = dict(feed)
  together[tensor] = value
  return together


@TABLE.program()
def all_returned_gradients_are_fed_without_inputs(t):
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss(sparse=False))
  train_op = optimizer.apply_gradients(pairs, t.global_step)
  return lambda sess, feed: sess.run(
    train_op, {pairs[0][0]: make_gradient(feed[t.x]), pairs[1][0]: np.full([6, 2], feed[t.x][0], np.float32)}
  )


@TABLE.program(slow=True)
def values_of_a_sparse_gradient_are_fed(t):
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss())
  train_op = optimizer.apply_gradients(pairs, t.global_step)
  return lambda sess, feed: sess.run(
    train_op, add_feed(feed, pairs[1][0].values, np.full([3, 2], feed[t.x][0], np.float32))
  )


# The functions by which the gradients are clipped, and arguments of our class with which only the fed ones are read.
CLIPS = {
  "norm": (lambda g: tf.clip_by_norm(g, 1.0), {}),
  "value": (lambda g: tf.clip_by_value(g, -1.0, 1.0), {"check_computed_gradients": False}),
}


def feed_clipped_without_inputs(clip, t):
  function, ours = CLIPS[clip]
  optimizer = t.wrap(**ours)
  pairs = [(function(grad), v) for grad, v in optimizer.compute_gradients(t.loss(sparse=False))]
  train_op = optimizer.apply_gradients(pairs, t.global_step)
  return lambda sess, feed: sess.run(
    train_op, {pairs[0][0]: make_gradient(feed[t.x]), pairs[1][0]: np.full([6, 2], feed[t.x][0], np.float32)}
  )


for _clip in CLIPS:
  TABLE.add("gradients_clipped_by_{}_are_fed".format(_clip), functools.partial(feed_clipped_without_inputs, _clip))


# How gradients that are fetched and fed back are changed in the graph.
CHANGES = {
  "averaged": lambda grads: [(g + tf.add_n([g, g])) / 3.0 for g in grads],
  "clipped": lambda grads: tf.clip_by_global_norm(grads, 1.0)[0],
  "clipped_without_overflow": lambda grads: mp_compat.clip_by_global_norm(grads, 1.0)[0],
  "defaulted": lambda grads: [tf.placeholder_with_default(g, g.shape) for g in grads],
}


def feed_back_beside_an_input_pipeline(change, t):
  """The gradients show how many elements of the input were consumed."""
  number = tf.data.make_one_shot_iterator(tf.data.Dataset.range(1, 100)).get_next()
  optimizer = t.wrap()
  grads, variables = zip(*optimizer.compute_gradients(t.loss(t.x * tf.cast(number, tf.float32), sparse=False)))
  changed = CHANGES[change](grads)
  train_op = optimizer.apply_gradients(zip(changed, variables), t.global_step)
  return lambda sess, feed: sess.run(train_op, dict(zip(changed, sess.run(changed, feed))))


for _change in CHANGES:
  TABLE.add(
    "gradients_{}_and_fed_beside_an_input_pipeline".format(_change),
    functools.partial(feed_back_beside_an_input_pipeline, _change),
    overflow=(),
  )


@TABLE.program(hidden=True, slow=True)
def a_clipped_gradient_is_fed_with_inputs(t):
  optimizer = t.wrap()
  pairs = [(tf.clip_by_value(grad, -1.0, 1.0), v) for grad, v in optimizer.compute_gradients(t.loss(sparse=False))]
  train_op = optimizer.apply_gradients(pairs, t.global_step)
  return lambda sess, feed: sess.run(train_op, add_feed(feed, pairs[0][0], np.ones(3, np.float32)))


@TABLE.program()
def gradients_passed_through_placeholders_with_defaults(t):
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss(sparse=False))
  pairs = [(tf.placeholder_with_default(grad, grad.shape), v) for grad, v in pairs]
  train_op = optimizer.apply_gradients(pairs, t.global_step)
  return lambda sess, feed: sess.run(train_op, add_feed(feed, pairs[0][0], make_gradient(feed[t.x])))


@TABLE.program()
def a_partial_run(t):
  second = t.input(tf.float32, [3], lambda x, flag: x * 2.0)
  loss, optimizer = t.loss(), t.wrap()
  (stepped,) = run_after(optimizer.minimize(loss + t.loss(second), t.global_step))

  def step(sess, feed):
    handle = sess.partial_run_setup([loss, stepped], [t.x, second])
    sess.partial_run(handle, loss, {t.x: feed[t.x]})
    sess.partial_run(handle, stepped, {second: feed[second]})

  return step


@TABLE.program()
def a_partial_run_that_feeds_a_gradient(t):
  optimizer = t.wrap()
  loss = t.loss()
  pairs = optimizer.compute_gradients(loss)
  (stepped,) = run_after(optimizer.apply_gradients(pairs, t.global_step))

  def step(sess, feed):
    handle = sess.partial_run_setup([loss, stepped], [t.x, pairs[0][0]])
    sess.partial_run(handle, loss, {t.x: feed[t.x]})
    sess.partial_run(handle, stepped, {pairs[0][0]: make_gradient(feed[t.x])})

  return step


@TABLE.program()
def a_session_callable_that_feeds_a_gradient(t):
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss())
  train_op = optimizer.apply_gradients(pairs, t.global_step)
  return lambda sess, feed: sess.make_callable(train_op, [t.x, pairs[0][0]])(feed[t.x], make_gradient(feed[t.x]))


# --- copies of the graph ----------------------------------------------------------------------------------------------


def read_by_name(t, names):
  """Lets `t` read the variables by name, from a copy of the graph."""
  t.read = lambda sess: dict(zip(names, sess.run([name.replace(":0", "_to_read:0") for name in names])))


def add_named_reads():
  """Adds an op "..._to_read" for every variable; returns the variables' names."""
  with tf.name_scope(None):
    for variable in tf.global_variables():
      tf.identity(variable, name=variable.op.name + "_to_read")
  return [variable.name for variable in tf.global_variables()]


@contextlib.contextmanager
def temporary_folder():
  folder = tempfile.mkdtemp()
  try:
    yield folder
  finally:
    shutil.rmtree(folder)


def make_program_with_meta_graph(make_train_op):

  def build(t):
    train_op = make_train_op(t)
    # The collection may contain ops of branches, which cannot be imported.
    t.graph.clear_collection(tf.GraphKeys.TRAIN_OP)
    meta_graph, name = tf.train.export_meta_graph(graph=t.graph, clear_devices=False), train_op.name
    t.graph = tf.Graph()
    with t.graph.as_default():
      tf.train.import_meta_graph(meta_graph)
      tf.constant(0)  # tests that ops can be added to the copy
    return lambda sess, feed: sess.run(name, {key.name: value for key, value in feed.items()})

  return build


def minimize_in_branches(t):
  t.make_variables()
  optimizer = t.wrap()
  return tf.cond(
    t.flag,
    lambda: optimizer.minimize(t.loss(), t.global_step),
    lambda: optimizer.minimize(t.loss(t.x * 2.0), t.global_step),
  )


def minimize_in_a_loop(t):
  t.make_variables()
  optimizer = t.wrap()

  def body(i):
    with tf.control_dependencies([optimizer.minimize(t.loss(), t.global_step)]):
      return i + 1

  return tf.while_loop(lambda i: i < 2, body, [tf.constant(0)], parallel_iterations=1)


TABLE.add(
  "an_imported_meta_graph_with_branches",
  make_program_with_meta_graph(minimize_in_branches),
  variants=programs.NO_V2_REFERENCE,
)
TABLE.add(
  "an_imported_meta_graph_with_a_loop",
  make_program_with_meta_graph(minimize_in_a_loop),
  variants=programs.NO_V2_REFERENCE,
)
TABLE.add(
  "an_imported_meta_graph_with_adam",
  make_program_with_meta_graph(lambda t: t.wrap(tf.train.AdamOptimizer(0.1)).minimize(t.loss(), t.global_step)),
)


@TABLE.program(tensorflow_fails="it adds an op of a branch to the collection of train ops")
def an_imported_meta_graph_with_its_train_op(t):
  t.wrap().minimize(t.loss(), t.global_step)
  meta_graph = tf.train.export_meta_graph(graph=t.graph)
  t.graph = tf.Graph()
  with t.graph.as_default():
    tf.train.import_meta_graph(meta_graph)
    (train_op,) = tf.get_collection(tf.GraphKeys.TRAIN_OP)
  return lambda sess, feed: sess.run(train_op, {key.name: value for key, value in feed.items()})


@TABLE.program(variants=programs.RESOURCE)
def an_imported_graph_def_with_another_gradient(t):
  optimizer = t.wrap()
  pairs = optimizer.compute_gradients(t.loss())
  train_op = optimizer.apply_gradients(pairs, t.global_step)
  initializer, names = tf.global_variables_initializer(), add_named_reads()
  graph_def, grad_name, train_name = t.graph.as_graph_def(), pairs[0][0].name, train_op.name
  t.graph = tf.Graph()
  with t.graph.as_default():
    replacement = tf.placeholder(tf.float32, [3], "replacement")
    tf.import_graph_def(graph_def, {grad_name: replacement * 2.0}, name="")
  t.initialize = lambda sess: sess.run(initializer.name)
  read_by_name(t, names)
  return lambda sess, feed: sess.run(
    train_name, {t.x.name: feed[t.x], t.flag.name: feed[t.flag], "replacement:0": feed[t.x] * np.float32(0.5)}
  )


@TABLE.program()
def a_saved_model_that_continues_training(t):
  train_op = t.wrap().minimize(t.loss(), t.global_step)
  with temporary_folder() as folder:
    path = os.path.join(folder, "model")
    t.graph.clear_collection(tf.GraphKeys.TRAIN_OP)
    with tf.Session() as sess:
      sess.run(tf.global_variables_initializer())
      sess.run(train_op, {t.x: np.ones(3, np.float32)})
      builder = tf.saved_model.Builder(path)
      builder.add_meta_graph_and_variables(sess, ["train"])
      builder.save()
    t.graph, restored = tf.Graph(), {}
    with t.graph.as_default(), tf.Session() as sess:
      tf.saved_model.load(sess, ["train"], path)
      restored.update(zip([v.name for v in tf.global_variables()], sess.run(tf.global_variables())))

  def initialize(sess):
    for variable in tf.global_variables():
      variable.load(restored[variable.name], sess)

  t.initialize = initialize
  return lambda sess, feed: sess.run(train_op.name, {key.name: value for key, value in feed.items()})


@TABLE.program(overflow=())
def variables_frozen_after_training(t):
  loss = t.loss()
  train_op = t.wrap().minimize(loss, t.global_step)
  training = t.read

  def read(sess):
    frozen = tf.graph_util.convert_variables_to_constants(sess, t.graph.as_graph_def(), [loss.op.name])
    with tf.Graph().as_default() as graph:
      tf.import_graph_def(frozen, name="")
      with tf.Session(graph=graph) as own:
        return dict(training(sess), frozen=own.run(loss.name, {t.x.name: np.ones(3, np.float32)}))

  t.read = read
  return train_op


test_program_trains_with_the_same_numbers = TABLE.make_test()
