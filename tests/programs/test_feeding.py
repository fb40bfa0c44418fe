"""Programs that feed intermediate tensors, or that export the graph and train a
copy.
"""

import functools
import re

import numpy as np

import mp_compat
from tests.programs import table as programs
from tests.programs.test_control_flow import run_after
from tests.testing import tf

TABLE = programs.Table()


def make_gradient(x):
  """Returns an array [3] to feed for a gradient; it is nonfinite where `x` is."""
  return x * np.array([2.0, 0.5, 1.0], np.float32)


def compute_and_apply(t, loss, change=list, **ours):
  """Returns the gradients that `change` returns, and the train op that applies them."""
  optimizer = t.wrap(**ours)
  grads, variables = zip(*optimizer.compute_gradients(loss))
  changed = change(grads)
  return changed, optimizer.apply_gradients(zip(changed, variables), t.global_step)


def clip_norms(grads):
  return [tf.clip_by_norm(grad, 1.0) for grad in grads]


def clip_values(grads):
  return [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]


def use_as_defaults(grads):
  return [tf.placeholder_with_default(grad, grad.shape) for grad in grads]


def feed_first(t, grads, feed):
  return {**feed, grads[0]: make_gradient(feed[t.x])}


def feed_ones_for_first(t, grads, feed):
  return {**feed, grads[0]: np.ones(3, np.float32)}


def feed_values_of_second(t, grads, feed):
  return {**feed, grads[1].values: np.full([3, 2], feed[t.x][0], np.float32)}


def feed_all_without_inputs(t, grads, feed):
  return {
    grads[0]: make_gradient(feed[t.x]),
    grads[1]: np.full([6, 2], feed[t.x][0], np.float32),
  }


def train_with_fed_gradients(t, make_feed, sparse=False, change=list, **ours):
  grads, train_op = compute_and_apply(t, t.loss(sparse=sparse), change, **ours)
  return lambda sess, feed: sess.run(train_op, make_feed(t, grads, feed))


# of the clipped gradients, only the fed ones are read
ONLY_FED = {"check_computed_gradients": False}
for name, make_feed, settings, options in [
  ("a_returned_gradient_is_fed", feed_first, dict(sparse=True), {}),
  ("all_returned_gradients_are_fed_without_inputs", feed_all_without_inputs, {}, {}),
  (
    "values_of_a_sparse_gradient_are_fed",
    feed_values_of_second,
    dict(sparse=True),
    {"slow": True},
  ),
  (
    "gradients_clipped_by_norm_are_fed",
    feed_all_without_inputs,
    dict(change=clip_norms, **ONLY_FED),
    {},
  ),
  (
    "gradients_clipped_by_value_are_fed",
    feed_all_without_inputs,
    dict(change=clip_values, **ONLY_FED),
    {},
  ),
  (
    "a_clipped_gradient_is_fed_with_inputs",
    feed_ones_for_first,
    dict(change=clip_values),
    {"hidden": True, "slow": True},
  ),
  (
    "gradients_passed_through_placeholders_with_defaults",
    feed_first,
    dict(change=use_as_defaults),
    {},
  ),
]:
  TABLE.add(
    name,
    functools.partial(train_with_fed_gradients, make_feed=make_feed, **settings),
    **options,
  )


def feed_back_beside_an_input_pipeline(t, change, **ours):
  """The gradients show how many elements of the input were consumed."""
  number = tf.data.make_one_shot_iterator(tf.data.Dataset.range(1, 100)).get_next()
  changed, train_op = compute_and_apply(
    t, t.loss(t.x * tf.cast(number, tf.float32), sparse=False), change, **ours
  )
  return lambda sess, feed: sess.run(
    train_op, dict(zip(changed, sess.run(changed, feed)))
  )


for name, change in {
  "averaged": lambda grads: [(g + tf.add_n([g, g])) / 3.0 for g in grads],
  "clipped": lambda grads: tf.clip_by_global_norm(grads, 1.0)[0],
  "clipped_without_overflow": lambda grads: mp_compat.clip_by_global_norm(grads, 1.0)[
    0
  ],
  "defaulted": use_as_defaults,
}.items():
  TABLE.add(
    "gradients_{}_and_fed_beside_an_input_pipeline".format(name),
    functools.partial(
      feed_back_beside_an_input_pipeline,
      change=change,
      **({} if name == "defaulted" else ONLY_FED),
    ),
    overflow=(),
  )


@TABLE.program()
def a_partial_run_that_feeds_a_gradient(t):
  loss = t.loss()
  (grad, _), train_op = compute_and_apply(t, loss)
  (stepped,) = run_after(train_op)

  def step(sess, feed):
    handle = sess.partial_run_setup([loss, stepped], [t.x, grad])
    sess.partial_run(handle, loss, {t.x: feed[t.x]})
    sess.partial_run(handle, stepped, {grad: make_gradient(feed[t.x])})

  return step


@TABLE.program()
def a_session_callable_that_feeds_a_gradient(t):
  (grad, _), train_op = compute_and_apply(t, t.loss())
  return lambda sess, feed: sess.make_callable(train_op, [t.x, grad])(
    feed[t.x], make_gradient(feed[t.x])
  )


# --- copies of the graph
# ----------------------------------------------------------------------------------------------


def feed_by_name(feed):
  return {key.name: value for key, value in feed.items()}


def minimize_in_branches(t):
  optimizer = t.wrap()
  return tf.cond(
    t.flag,
    lambda: optimizer.minimize(t.loss(), t.global_step),
    lambda: optimizer.minimize(t.loss(t.x * 2.0), t.global_step),
  )


def minimize_in_a_loop(t):
  optimizer = t.wrap()

  def body(i):
    with tf.control_dependencies([optimizer.minimize(t.loss(), t.global_step)]):
      return i + 1

  return tf.while_loop(lambda i: i < 2, body, [tf.constant(0)], parallel_iterations=1)


def minimize_adam(t):
  return t.wrap(tf.train.AdamOptimizer(0.1)).minimize(t.loss(), t.global_step)


def import_meta_graph(t, make_train_op, is_collected=False):
  """Trains a copy of the graph, with the train op of the collection or with that of the
  same name.
  """
  train_op = make_train_op(t).name
  # The collection may contain ops of branches, which cannot be imported.
  if not is_collected:
    t.graph.clear_collection(tf.GraphKeys.TRAIN_OP)
  meta_graph = tf.train.export_meta_graph(graph=t.graph, clear_devices=False)
  t.graph = tf.Graph()
  with t.graph.as_default():
    tf.train.import_meta_graph(meta_graph)
    tf.constant(0)  # tests that ops can be added to the copy
    if is_collected:
      (train_op,) = tf.get_collection(tf.GraphKeys.TRAIN_OP)
  return lambda sess, feed: sess.run(train_op, feed_by_name(feed))


for name, make_train_op, variants in [
  ("branches", minimize_in_branches, programs.NO_V2_REFERENCE),
  ("a_loop", minimize_in_a_loop, programs.NO_V2_REFERENCE),
  ("adam", minimize_adam, programs.ALL),
]:
  TABLE.add(
    "an_imported_meta_graph_with_" + name,
    import_meta_graph,
    make_train_op,
    variants=variants,
  )
TABLE.add(
  "an_imported_meta_graph_with_its_train_op",
  import_meta_graph,
  minimize_adam,
  True,
  tensorflow_fails="it adds an op of a branch to the collection of train ops",
)


@TABLE.program(variants=programs.RESOURCE)
def an_imported_graph_def_with_another_gradient(t):
  (grad, _), train_op = compute_and_apply(t, t.loss())
  initializer = tf.global_variables_initializer()
  with tf.name_scope(None):
    reads = {
      v.name: tf.identity(v, name=v.op.name + "_to_read").name
      for v in tf.global_variables()
    }
  graph_def = t.graph.as_graph_def()
  t.graph = tf.Graph()
  with t.graph.as_default():
    replacement = tf.placeholder(tf.float32, [3], "replacement")
    tf.import_graph_def(graph_def, {grad.name: replacement * 2.0}, name="")
  t.initialize = lambda sess: sess.run(initializer.name)
  t.read = lambda sess: sess.run(reads)
  return lambda sess, feed: sess.run(
    train_op.name, {**feed_by_name(feed), replacement: feed[t.x] * np.float32(0.5)}
  )


@TABLE.program(overflow=())
def variables_frozen_after_training(t):
  loss = t.loss()
  train_op = t.wrap().minimize(loss, t.global_step)
  training = t.read

  def read(sess):
    frozen = tf.graph_util.convert_variables_to_constants(
      sess, t.graph.as_graph_def(), [loss.op.name]
    )
    with tf.Graph().as_default() as graph:
      tf.import_graph_def(frozen, name="")
      nodes = " ".join(node.name + " " + node.op for node in frozen.node)
      assert not re.search(
        "loss_scale|good_steps|apply_or_skip|is_finite|IsFinite", nodes
      )
      with tf.Session(graph=graph) as own:
        return dict(
          training(sess), frozen=own.run(loss.name, {t.x.name: np.ones(3, np.float32)})
        )

  t.read = read
  return train_op


test_program_trains_with_the_same_numbers = TABLE.make_test()
