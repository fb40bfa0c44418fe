"""Sources with the expected results of `mp_compat migrate`."""

import re

# Sources in which `<<before|after>>` is rewritten. `import mp_compat` is added where
# the new text needs it.
MARKED = {
  "v1 as tf": "<<import>>import tensorflow.compat.v1 as tf\n<<tf.mixed_precision|mp_compat>>.FixedLossScale( 8. )\n",
  "no alias": "<<import>>import tensorflow\nclass A(<<tensorflow.train.experimental|mp_compat>>.LossScale): pass\n",
  "compat": (
    "<<import>>from tensorflow import compat\n"
    "isinstance(x, (int, <<compat.v1.mixed_precision.experimental|mp_compat>>.DynamicLossScale))\n"
  ),
  "from": "<<from tensorflow|from mp_compat>>.contrib.mixed_precision import LossScaleManager as M  # noqa\n",
  "from, mixed": (
    "if yes:\n  <<from tensorflow.train.experimental import (PythonState,\n      LossScale, FixedLossScale as F)|"
    "from tensorflow.train.experimental import PythonState\n  from mp_compat import LossScale, FixedLossScale as F>>\n"
  ),
  "from, in one line": (
    "import os; <<from tensorflow.train.experimental import LossScale, A|from "
    "mp_compat import LossScale; from tensorflow.train.experimental import A>>; x = 1\n"
  ),
  "from, after a backslash": (
    "if True: \\\n  <<from tensorflow.train.experimental import LossScale, A|from mp_compat import LossScale; "
    "from tensorflow.train.experimental import A>>\n"
  ),
  "private module": (
    "<<import>>from tensorflow.python.training.experimental import loss_scale as ls\n"
    "a = <<ls.get|mp_compat.get_loss_scale>>('dynamic'), <<ls|mp_compat>>.DynamicLossScale, ls.ops\n"
  ),
  "private name": (
    "<<from tensorflow.python.training.experimental.loss_scale import get, FixedLossScale|"
    "from mp_compat import get_loss_scale as get, FixedLossScale>>\nget(3)\n"
  ),
  "_v1": (
    "<<import>>from tensorflow.python.training.experimental import mixed_precision as m\n"
    "opt = <<m.enable_mixed_precision_graph_rewrite_v1|mp_compat.enable_mixed_precision_graph_rewrite>>(opt)\n"
  ),
  "Keras": (
    "<<import>>from tensorflow import keras\n"
    "<<keras.mixed_precision|mp_compat.keras>>.experimental.LossScaleOptimizer(opt, 'dynamic')\n"
    "keras.mixed_precision.experimental.Policy('mixed_float16')\n"
  ),
  "imports that agree": (
    "<<import>>import os\ntry:\n  import tensorflow.compat.v1 as tf\nexcept ImportError:\n  import tensorflow as tf\n"
    "<<old>>.LossScale\n"
  ),
  "below the head": (
    "#!/usr/bin/env python\n# Licence.\n'''Doc.'''\nfrom __future__ import division\n\n# Why.\n<<import>>import os\n"
    "def f():\n\timport tensorflow as tf\n\treturn <<old>>.LossScale\n"
  ),
  "imported already": "import mp_compat\nimport tensorflow as tf\n<<old>>.LossScale\n",
  "imported later": "import tensorflow as tf\nimport mp_compat\ndef f(): return <<old>>.LossScale\n",
  "no import at the top": "'Doc.'\n<<import>>def f():\n  import tensorflow as tf\n  return <<old>>.LossScale\n",
  "used above imports": "<<import>>@g\ndef f():\n  import tensorflow as tf\n  return <<old>>.LossScale\nimport x\n",
  "one line": "'Doc.'<<|; import mp_compat>>; import tensorflow as tf; x = <<old>>.LossScale\n",
  "after a star import": "<<import>>from mine import *\nimport tensorflow as tf\nx = <<old>>.LossScale\n",
  "CRLF": "<<|import mp_compat\r\n>>import tensorflow as tf\r\nx = <<old>>.LossScale\r\n",
  "local": "tf = 3\n<<import>>def f():\n  import tensorflow as tf\n  return <<old>>.LossScale\n",
  # Nothing is rewritten:
  "rebound by vars": "import tensorflow as tf\nvars()['tf'] = 3\nx = tf.train.experimental.LossScale\n",
  "other names": "import tensorflow as tf\ntf.train.experimental.PythonState()  # LossScale\n",
  "a class of its own": "from mine import LossScaleOptimizer, FixedLossScale\nLossScaleOptimizer(FixedLossScale)\n",
  "text": "'''tf.train.experimental.LossScale'''\nx = 1  # tf.train.experimental.LossScale\n",
  "a package of this name": "from .tensorflow.contrib.mixed_precision import LossScaleManager\n",
  "of an element": "x[0].LossScale, f().LossScale, f()()\n",
}
# Sources below "import tensorflow as tf".
MARKED_BELOW_IMPORT = {
  "chain over lines": "x = (<<tf.compat.v1\n  .train.experimental\n  .LossScale|mp_compat.LossScale>>)\n",
  "a method": "class A:\n  tf = tf.train\n  def f(self): return <<old>>.LossScale\n",
  "annotations": "def f(x: <<old>>.LossScale = <<old>>.LossScale) -> <<old>>.LossScale: pass\n",
  "targets": "d[<<old>>.LossScale], f().x = 1, 2\na, *b = <<old>>.LossScale, 3\n",
  "comprehensions": "x = {y: [<<old>>.LossScale for _ in z] for x in w for y in x if x}\n",
  "shadowed elsewhere": "def f(tf): return tf.x\ng = lambda tf: tf\nx = [tf for tf in y], <<old>>.LossScale\n",
  "no last newline": "x = <<old>>.LossScale",
  "odd spaces": "\x0c\nif x :\n\ty = [ <<tf.train.experimental . LossScale|mp_compat.LossScale>> ,]\n",
  "f-string": "x = f'{<<old>>.LossScale!r}'\n",
}
# Sources below "import tensorflow as tf" in which nothing is rewritten and lines with
# "# stays" are reported.
UNCERTAIN = {
  "an alias": "e = tf.train.experimental  # stays\ne.LossScale  # stays\n",
  "a conditional alias": "e = tf.train.experimental if v1 else x  # stays\n",
  "an alias in a loop": "while x:\n  e.LossScale  # stays\n  e = tf.train.experimental  # stays\n",
  "an attribute": "class A:\n  def f(self):\n    self.e = tf.train.experimental  # stays\n",
  "a tf of the object": "class A:\n  def f(self): return self.tf.train.experimental.LossScale  # stays\n",
  "bound anew": "x = tf.train.experimental.LossScale  # stays\ntf = x\n",
  "bound anew in a branch": "if x: tf = tf.compat.v1\ntf.train.experimental.LossScale  # stays\n",
  "bound anew by a loop": "for tf in x: pass\ntf.train.experimental.LossScale  # stays\n",
  "bound anew by with": "with x as tf: pass\ntf.train.experimental.LossScale  # stays\n",
  "bound anew by except": "try: x()\nexcept ValueError as tf: tf.train.experimental.LossScale  # stays\n",
  "bound anew by def": "def tf(): pass\ntf.train.experimental.LossScale  # stays\n",
  "bound anew by an import": "import x as tf\ntf.train.experimental.LossScale  # stays\n",
  "one of two imports": (
    "try: from other import experimental as e\nexcept ImportError: from tensorflow.train import experimental as e\n"
    "e.LossScale  # stays\n"
  ),
  "None without TensorFlow": (
    "try: import tensorflow as t\nexcept ImportError: t = None\nt.train.experimental.LossScale  # stays\n"
  ),
  "global": "def f():\n  global tf\n  tf = other\ntf.train.experimental.LossScale  # stays\n",
  "global around a local": (
    "def f():\n  import tensorflow as t\n  def g():\n    global t\n    t.train.experimental.LossScale  # stays\n"
  ),
  "nonlocal": (
    "def f():\n  import tensorflow as t\n  def g():\n    def h():\n      nonlocal t\n      t = 3\n"
    "  t.train.experimental.LossScale  # stays\n"
  ),
  "an expression that binds": "any((tf := x) for x in y)\ntf.train.experimental.LossScale  # stays\n",
  "a pattern": "match x:\n  case {'a': 1, **tf}: tf.train.experimental.LossScale  # stays\n",
  "a pattern with a star": "match x:\n  case [1, *tf]: tf.train.experimental.LossScale  # stays\n",
  "a pattern with a name": "match x:\n  case 3 as tf: tf.train.experimental.LossScale  # stays\n",
  "deleted": "del tf\nfrom other import *\ntf.train.experimental.LossScale  # stays\n",
  "a parameter": "def f(tf): return tf.train.experimental.LossScale  # stays\n",
  "a lambda": "f = lambda tf: tf.train.experimental.LossScale  # stays\n",
  "a comprehension": "x = [tf.train.experimental.LossScale for tf in x]  # stays\n",
  "a name of a class": (
    "class A:\n  if x: import other as tf\n  x = tf.train.experimental.LossScale  # stays\n"
    "class B:\n  import tensorflow.compat.v1 as tf\n  x = tf.train.experimental.LossScale  # stays\n"
  ),
  "a later star import": "from other import *\ntf.train.experimental.LossScale  # stays\n",
  "exec": "exec(x)\ntf.train.experimental.LossScale  # stays\n",
  "globals": "globals()['tf'] = x\ntf.train.experimental.LossScale  # stays\n",
  "an attribute of tf": "tf.train = x\ntf.train.experimental.LossScale  # stays\n",
  "a name that is replaced": "tf.train.experimental.LossScale = A  # stays\ntf.train.experimental.LossScale  # stays\n",
  "a name that is deleted": "del tf.train.experimental.LossScale  # stays\n",
  "printed by name": "x = f'{tf.train.experimental.LossScale=}'  # stays\n",
  "printed in a nested string": "x = f'{f\"{tf.train.experimental.LossScale}\"=}'  # stays\n",
  "a comment in a chain": "x = (tf.train  # stays\n  .experimental.LossScale)\n",
  "a comment in an import": "from tensorflow.train.experimental import (  # stays\n  LossScale)\n",
  "the project's own tf": "from project.env import tf as x\nx.tf.train.experimental.LossScale  # stays\n",
  "a relative import": "from .env import tf as t\nt.LossScale  # stays\n",
  "a module that is passed": "setattr(tf.train.experimental, name, Mine)  # stays\n",
  "a module of contrib": "from tensorflow.contrib import mixed_precision, layers  # stays\n",
  "a module of contrib, as": "import tensorflow.contrib.mixed_precision as mp  # stays\n",
  "a star import of old names": "from tensorflow.contrib.mixed_precision import *  # stays\n",
  "a star import above old names": "from tensorflow.contrib import *  # stays\nmixed_precision.LossScaleOptimizer\n",
}


def split(marked):
  """Returns a marked source before and after rewriting."""
  marked = marked.replace("<<import>>", "<<|import mp_compat\n>>")
  marked = marked.replace("<<old>>", "<<tf.train.experimental|mp_compat>>")
  return tuple(
    re.sub(r"<<(.*?)\|(.*?)>>", side, marked, flags=re.S) for side in (r"\1", r"\2")
  )


REWRITTEN = {name: split(marked) for name, marked in MARKED.items()}
REWRITTEN.update(
  (name, split("<<import>>import tensorflow as tf\n" + marked))
  for name, marked in MARKED_BELOW_IMPORT.items()
)
HEAD = (
  "import horovod.tensorflow as hvd\nimport mp_compat\nimport tensorflow as tf\n"
  "opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), 'dynamic')\n"
)
OURS = "mp_compat.MixedPrecisionLossScaleOptimizer"
THEIRS = "tf.train.experimental.MixedPrecisionLossScaleOptimizer"
REWRITE = "tf.train.experimental.enable_mixed_precision_graph_rewrite"
# Sources that follow HEAD, with the decisions that they require, in alphabetical order.
DECISIONS = [
  ("def f():\n  'Like tf.contrib.mixed_precision.'", ""),
  ("class Mine(Another):\n  def update(self, grads): return None, True", ""),
  ("isinstance(x, (int, tf.train.AdamOptimizer))", ""),
  ("isinstance(x, tf.contrib.mixed_precision.LossScaleManager)", ""),
  ("def f(x):\n  return tf.clip_by_value(x, -1., 1.)", ""),
  ("self._optimizer = Another(self._loss_scale)", ""),
  ("tf.train.Saver().restore(sess, path)", "checkpoints"),
  (
    "with tf.train.MonitoredTrainingSession(checkpoint_dir='logs') as sess: pass",
    "checkpoints",
  ),
  (
    "from tensorflow.estimator import Estimator\nEstimator(model_fn, 'logs')",
    "checkpoints",
  ),
  (
    "x = [tf.clip_by_value(g, -1., 1.) for g, v in opt.compute_gradients(loss)]",
    "clipped-gradients",
  ),
  ("opt = hvd.DistributedOptimizer(opt)", "horovod"),
  ("a = tf.contrib.mixed_precision.LossScaleOptimizer(x, y)", "sparse-gradients"),
  (
    "from tensorflow.contrib.mixed_precision import LossScaleOptimizer as Scaled\n"
    "class Mine(Scaled): pass\nMine(x, y), Scaled(x, y)",
    "sparse-gradients sparse-gradients",
  ),
  ("isinstance(x, tf.contrib.mixed_precision.LossScaleOptimizer)", ""),
  ("opt = " + REWRITE + "(sgd)\nopt = " + THEIRS + "(opt, 'dynamic')", "wrapped-twice"),
  ("class Mine(tf.train.experimental.DynamicLossScale): pass", "subclass"),
  (
    "isinstance(x, (int, tf.mixed_precision.experimental.DynamicLossScale))",
    "isinstance",
  ),
  (
    "issubclass(x, tf.keras.mixed_precision.experimental.LossScaleOptimizer)",
    "isinstance",
  ),
  ("opt._optimizer, opt._loss_scale()", "private-state private-state"),
  ("sess.run(opt.loss_scale._num_good_steps)", "private-state"),
  ("a = " + THEIRS + "(x, 128.)", "fixed-scale"),
  ("a = " + OURS + "(x, loss_scale=mp_compat.FixedLossScale(8))", "fixed-scale"),
  ("tf.keras.mixed_precision.LossScaleOptimizer(x)", "keras"),
  ("from tensorflow.keras.mixed_precision import LossScaleOptimizer", "keras"),
  ("if hasattr(module, 'DynamicLossScale'): pass", "text"),
  (
    "mock.patch('tensorflow.python.training.experimental.loss_scale.DynamicLossScale')",
    "text",
  ),
  ("x = importlib.import_module('tf.compat.v1.mixed_precision')", "text"),
  ("x = load(f'tensorflow.keras.mixed_precision.experimental.{name}')", "text"),
  ("def f(x: 'tf.train.experimental.LossScale') -> 'A': pass", "text"),
  (
    "x = ['a text that is longer than 80 characters: tf.train.experimental.LossScale, of course']",
    "text",
  ),
  ("module.DynamicLossScale()", "unresolved"),
]
# Sources below "import tensorflow as tf", with their only decision: its kind and what
# to write.
ONE_DECISION = [
  ('os.environ["TF_ENABLE_AUTO_MIXED_PRECISION"] = "1"\n', "automatic-casts", ""),
  (
    'os.environ.setdefault("TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE", "1")\n',
    "automatic-casts",
    "",
  ),
  (
    "config.graph_options.rewrite_options.auto_mixed_precision = 1\n",
    "automatic-casts",
    "",
  ),
  ("options = RewriterConfig(auto_mixed_precision=on)\n", "automatic-casts", ""),
  (
    'tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})\n',
    "automatic-casts",
    "",
  ),
  (
    "try: from tensorflow.train.experimental import LossScale\nexcept ImportError: LossScale = None\n",
    "guard",
    "",
  ),
  (
    "try: from tensorflow.contrib.mixed_precision import LossScaleManager\nexcept: pass\n",
    "guard",
    "",
  ),
  (
    "try: x = tf.train.experimental.LossScale\nexcept AttributeError: x = None\n",
    "guard",
    "",
  ),
  (
    "try:\n  try: x = tf.train.experimental.LossScale\n  finally: pass\n"
    "except AttributeError: x = None\n",
    "guard",
    "",
  ),
  (
    "try: x = tf.train.experimental.LossScale\nexcept ValueError: x = 0\n"
    "except AttributeError: x = None\n",
    "guard",
    "",
  ),
  # Without an optimizer that scales the loss, a checkpoint has no loss scale.
  (
    "tf.train.Saver().restore(sess, path)\nx.DynamicLossScale\n",
    "unresolved",
    "mp_compat.DynamicLossScale",
  ),
  (
    "try: import mp_compat\nexcept ImportError: mp_compat = None\n",
    "name-taken",
    "mp_compat.LossScale",
  ),
  ("import other as mp_compat\n", "name-taken", "mp_compat.LossScale"),
  ("import mp_compat\ndel mp_compat\n", "name-taken", "mp_compat.LossScale"),
  ("def f():\n  import mp_compat\n", "name-taken", "mp_compat.LossScale"),
  (
    "def f():\n  global mp_compat\n  mp_compat = other\n",
    "name-taken",
    "mp_compat.LossScale",
  ),
  ("x.DynamicLossScale", "unresolved", "mp_compat.DynamicLossScale"),
  (
    "f().tf.train.experimental.FixedLossScale",
    "unresolved",
    "mp_compat.FixedLossScale",
  ),
  (
    "x.tf.keras.mixed_precision.LossScaleOptimizer",
    "keras",
    "mp_compat.keras.LossScaleOptimizer",
  ),
]
