"""Sources with the expected results of `mp_compat migrate`."""

import re

# Sources in which `<<before|after>>` is rewritten. `import mp_compat` is added where the new text needs it.
MARKED = {
  "v1 as tf": (
    "<<import>>import tensorflow.compat.v1 as tf\n"
    "x = <<tf.mixed_precision|mp_compat>>.FixedLossScale( loss_scale_value = 8. )\n"
  ),
  "no alias": (
    "<<import>>import tensorflow\nclass Mine(<<tensorflow.compat.v1.train.experimental|mp_compat>>.LossScale): pass\n"
  ),
  "isinstance": (
    "<<import>>from tensorflow import compat\n"
    "isinstance(x, (int, <<compat.v1.mixed_precision.experimental|mp_compat>>.DynamicLossScale))\n"
  ),
  "from": (
    "from <<tensorflow|mp_compat>>.contrib.mixed_precision import LossScaleOptimizer, "
    "FixedLossScaleManager as F  # noqa\n"
  ),
  "from, mixed": (
    "if yes:<<|\n  from mp_compat import DynamicLossScale\n  from mp_compat import FixedLossScale as F>>\n"
    "  from tensorflow.train.experimental import (PythonState<<, # this\n      DynamicLossScale,  # that\n"
    "      FixedLossScale as F|>>)\n"
  ),
  "from, first of three": (
    "import os<<|; from mp_compat import LossScale>>; "
    "from tensorflow.train.experimental import <<LossScale, |>>PythonState, Other\n"
  ),
  "from, a module": (
    "from <<tensorflow|mp_compat>>.contrib import mixed_precision as mp\nmp.LossScaleOptimizer(opt, manager)\n"
  ),
  "from, a module of two": (
    "<<|from mp_compat.contrib import mixed_precision\n>>from tensorflow.contrib import layers<<, mixed_precision|>>\n"
  ),
  "from, star": "from <<tensorflow|mp_compat>>.contrib.mixed_precision import *\n",
  "from, star, beside other names": (
    "from <<tensorflow|mp_compat>>.contrib.mixed_precision import *\nfrom mine import *\nx = f(LossScaleOptimizer)\n"
  ),
  "import, as": "import <<tensorflow|mp_compat>>.contrib.mixed_precision as mp, os\n",
  "import": (
    "<<import>>import tensorflow<<.contrib.mixed_precision|>>\n"
    "<<tensorflow|mp_compat>>.contrib.mixed_precision.LossScaleOptimizer(a, b)\n"
  ),
  "private module": (
    "<<import>><<from tensorflow.python.training.experimental import loss_scale|import mp_compat>> as ls\n"
    "a = <<ls.get|mp_compat.get_loss_scale>>('dynamic'), ls.DynamicLossScale\n"
  ),
  "private name": (
    "from <<tensorflow.python.training.experimental.loss_scale|mp_compat>> "
    "import <<get|get_loss_scale as get>>, FixedLossScale\n"
    "get(3)\n"
  ),
  "private name, as": (
    "from <<tensorflow.python.training.experimental.loss_scale|mp_compat>> import <<get|get_loss_scale>> as f\n"
  ),
  "_v1": (
    "<<from tensorflow.python.training.experimental import|import mp_compat\nimport mp_compat as>> mixed_precision\n"
    "opt = <<mixed_precision.enable_mixed_precision_graph_rewrite_v1|"
    "mp_compat.enable_mixed_precision_graph_rewrite>>(opt)\n"
  ),
  "Keras": (
    "<<import>>from tensorflow import keras\n"
    "<<keras.mixed_precision|mp_compat.keras>>.experimental.LossScaleOptimizer(opt, 'dynamic')\n"
    "keras.mixed_precision.experimental.Policy('mixed_float16')\n"
  ),
  "import_module": (
    "<<import>>import importlib\n"
    "mp = <<importlib.import_module('tensorflow.contrib.mixed_precision')|mp_compat.contrib.mixed_precision>>\n"
  ),
  "a private module of which more is used": (
    "<<import>>from tensorflow.python.training.experimental import loss_scale as ls\n"
    "x = <<ls.get|mp_compat.get_loss_scale>>('dynamic'), ls.ops\n"
  ),
  "try": (
    "<<import>>import os\ntry:\n  import tensorflow.compat.v1 as tf\nexcept ImportError:\n  import tensorflow as tf\n"
    "<<old>>.LossScale\n"
  ),
  "the project's own tf": (
    "<<import>>from project.env import tf\n<<tf.mixed_precision|mp_compat>>.enable_mixed_precision_graph_rewrite(o)\n"
  ),
  "below the head": (
    "#!/usr/bin/env python\n# Licence.\n'''Doc.'''\nfrom __future__ import division\n\n# Why.\n<<import>>import os\n"
    "def f():\n\timport tensorflow as tf\n\treturn <<old>>.LossScale\n"
  ),
  "after other imports": "import os\n<<import>>import tensorflow as tf\nimport sys\n<<old>>.LossScale\n",
  "a relative import": "<<import>>from .env import tf\n<<old>>.LossScale\n",
  "imported already": "import mp_compat\nimport tensorflow as tf\n<<old>>.LossScale\n",
  "a star import before another import": (
    "from project.env import *\n<<|import mp_compat\n>>import tensorflow\n"
    "def f(): return <<tensorflow.train.experimental|mp_compat>>.LossScale\n"
  ),
  "no import at the top": (
    "'Doc.'\nfrom __future__ import division\n"
    "<<import>>def f():\n  import tensorflow as tf\n  return <<old>>.LossScale\n"
  ),
  "a star import": (
    "<<import>>from tensorflow.contrib import *\nx = <<|mp_compat.contrib.>>mixed_precision.LossScaleOptimizer\n"
  ),
  "used before the first import at the top": (
    "try:\n  import tensorflow as tf\nexcept ImportError: raise\n"
    "<<import>>@f\n@g(<<old>>.LossScale)\ndef h(): pass\nimport os\n"
  ),
  "used in a function above the imports": (
    "<<import>>def f():\n  import tensorflow as tf\n  return <<old>>.LossScale\nf()\nimport os\n"
  ),
  "a decorated function": (
    "<<import>>@g\ndef f():\n  from tensorflow.train import experimental\n"
    "  return <<experimental|mp_compat>>.LossScale\nimport os\n"
  ),
  "imported later": "import tensorflow as tf\nimport mp_compat\ndef f(): return <<old>>.LossScale\n",
  "one line": "'Doc.'<<|; import mp_compat>>; import tensorflow as tf; x = <<old>>.LossScale\n",
  "star imports of a tf": (
    "from project.env import *\n<<import>>import tensorflow as tf\nfrom project.other import *\nx = <<old>>.LossScale\n"
  ),
  "the tf of a module of the project": (
    "<<import>>import project.env as env\nx = <<env.tf.train.experimental|mp_compat>>.LossScale\n"
  ),
  "CRLF": "<<|import mp_compat\r\n>>import tensorflow as tf\r\nx = <<old>>.LossScale\r\n",
  # Nothing is rewritten:
  "other names": "import tensorflow as tf\ntf.train.experimental.PythonState()  # LossScale\n",
  "a class of its own": "from mine import LossScaleOptimizer, FixedLossScale\nLossScaleOptimizer(FixedLossScale)\n",
  "text": "'''tf.train.experimental.LossScale'''\nx = 1  # tf.train.experimental.LossScale\n",
  "its own _optimizer": "class LossScale:\n  def f(self): return self._optimizer, self._loss_scale\n",
  "of another wrapper": (
    "import mp_compat\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(a, b)\nopt = Another(opt)\nopt._optimizer\n"
  ),
  "wrapped later": "import mp_compat\nopt._optimizer\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, b)\n",
  "a package of this name": "from .tensorflow.contrib.mixed_precision import LossScaleManager\n",
  "assigned to": "import mp_compat\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(a, b)\nopt._loss_scale = 3\n",
  "moved over": "import mp_compat\nmp_compat.contrib.mixed_precision.LossScaleOptimizer(a, b)\n",
  "in a circle": "a = b\nb = a\na.LossScale\n",
  "of an element": "x[0].LossScale\n",
  "a folder of this name": "from project.tensorflow.contrib.mixed_precision import LossScaleManager\n",
  "what is in a private module": "from tensorflow.python.training.experimental.loss_scale import *\n",
  "imported as a whole": (
    "import tensorflow.python.training.experimental.loss_scale\n"
    "tensorflow.python.training.experimental.loss_scale._assign_if_finite\n"
  ),
  "mp_compat is another": "import tensorflow as tf\nmp_compat = 3\ntf.train.experimental.LossScale\n",
}
# Sources below "import tensorflow as tf".
MARKED_BELOW_IMPORT = {
  "alias": "opt = <<old>>.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')\n",
  "chain over lines": "x = (<<tf.compat.v1\n  .train.experimental\n  |mp_compat>>.LossScale)\n",
  "getattr": "x = <<getattr(tf.train.experimental, 'DynamicLossScale', None)|mp_compat.DynamicLossScale>>\n",
  "getattr of a module": (
    "x = <<getattr(tf.contrib, 'mixed_precision')|mp_compat.contrib.mixed_precision>>.LossScaleManager\n"
  ),
  "a name for a module": (
    "exp = tf.train.experimental if v1 else tf.mixed_precision\ndef f():\n"
    "  return <<exp|mp_compat>>.DynamicLossScale(8.)\n"
  ),
  "a name for a module of ours": "mp = <<tf|mp_compat>>.contrib.mixed_precision\nmp.LossScaleManager\n",
  "private attributes": (
    "opt = <<old>>.MixedPrecisionLossScaleOptimizer(opt, 8.)\n"
    "print(opt.<<_optimizer|inner_optimizer>>, opt.<<_loss_scale|loss_scale>>())\n"
  ),
  "imported below": "x = <<old>>.LossScale\nimport mp_compat\n",
  "bound anew on every path": (
    "if x:\n  e = other\nelse:\n  e = another\ne = tf.train.experimental\nfor x in y:\n  <<e|mp_compat>>.LossScale\n"
  ),
  "bound anew in a loop": ("for x in y:\n  e = tf.train.experimental\n  <<e|mp_compat>>.LossScale\n  e = other\n"),
  "after finally": (
    "try:\n  e = tf.train.experimental\nexcept KeyError:\n  raise\nfinally:\n  x = 3\n<<e|mp_compat>>.LossScale\n"
  ),
  "deleted in the end": "e = tf.train.experimental\ndef g(): return <<e|mp_compat>>.LossScale\ndel e\n",
  "in a default": ("e = other\ne = tf.train.experimental\ndef f(x=<<e|mp_compat>>.LossScale): pass\n"),
  "a method": "class A:\n  tf = tf.train\n  def f(self): return <<old>>.LossScale\n",
  "annotations": "def f(x: <<old>>.LossScale) -> <<old>>.LossScale: pass\n",
  "targets": "e: object\nd[<<old>>.LossScale], f().x = 1, 2\na, *b = <<old>>.LossScale, 3\n",
  "comprehensions": "x = {y: [<<old>>.LossScale for _ in z] for x in w for y in x if x}\n",
  "no last newline": "x = <<old>>.LossScale",
  "annotated": "m: object = tf.train.experimental\nx = <<m|mp_compat>>.LossScale\n",
  "odd spaces": "\x0c\nif x :\n\ty = [ <<tf.train.experimental . |mp_compat.>>LossScale ,]\n",
}


def split(marked):
  """Returns a marked source before and after rewriting."""
  marked = marked.replace("<<import>>", "<<|import mp_compat\n>>")
  marked = marked.replace("<<old>>", "<<tf.train.experimental|mp_compat>>")
  return tuple(re.sub(r"<<(.*?)\|(.*?)>>", side, marked, flags=re.S) for side in (r"\1", r"\2"))


REWRITTEN = {name: split(marked) for name, marked in MARKED.items()}
REWRITTEN.update(
  (name, split("<<import>>import tensorflow as tf\n" + marked)) for name, marked in MARKED_BELOW_IMPORT.items()
)


def name_wrappers(code):
  """Returns code with the names of the wrappers that OURS and THEIRS stand for."""
  code = code.replace("THEIRS", "tf.train.experimental.MixedPrecisionLossScaleOptimizer")
  return code.replace("OURS", "mp_compat.MixedPrecisionLossScaleOptimizer")


# By the kind of decision: the lines with "# stays" are not rewritten, because they are not old names on every path, and
# are reported.
UNCERTAIN = {
  "unresolved": {
    "a branch": "e = other\nif x:\n  e = tf.train.experimental\ne.LossScale  # stays\n",
    "a name that is bound twice in a class": "class A:\n  tf = tf.train\n  x = tf.experimental.LossScale  # stays\n",
    "a name that is only declared": ("e: object\ne = tf.train.experimental\ndef f(): return e.LossScale  # stays\n"),
    "a name that an expression binds": "(e := tf.train.experimental)  # stays\ne.LossScale  # stays\n",
    "an expression that binds in a generator": (
      "e = tf.train.experimental\nany((e := x) for x in y)\ne.LossScale  # stays\n"
    ),
    "an expression that binds before it reads": (
      "e = tf.train.experimental\nx = e.LossScale if (e := other) else None  # stays\n"
    ),
    "part of a list": "e, x = tf.train.experimental, 3  # stays\ne.LossScale  # stays\n",
    "a class that may bind a name": (
      "e = other\nclass A:\n  if x: e = tf.train.experimental\n  e.LossScale  # stays\n"
    ),
    "a comment in a chain": "x = (tf.train  # stays\n  .experimental.LossScale)\n",
    "a branch that returns": (
      "def f(x):\n  if x:\n    e = other\n    return e\n  else:\n    e = tf.train.experimental\n"
      "  return e.LossScale  # stays\n"
    ),
    "an exception in a context": (
      "e = other\nwith contextlib.suppress(AttributeError):\n  e = tf.train.experimental\ne.LossScale  # stays\n"
    ),
    "the second time in a loop": "e = tf.train.experimental\nwhile x:\n  e.LossScale  # stays\n  e = e.other\n",
    "finally": "e = other\ntry:\n  e = tf.train.experimental\nfinally:\n  e.LossScale  # stays\n",
    "a lambda": "e = tf.train.experimental\nf = lambda: e.LossScale  # stays\ne = other\n",
    "a generator": "e = tf.train.experimental\nf = (e.LossScale for _ in x)  # stays\ne = other\n",
    "global": "e = tf.train.experimental\ndef f():\n  global e\n  e = other\nf()\ne.LossScale  # stays\n",
    "global in a function around which it is local": (
      "def f():\n  e = tf.train.experimental\n  def g():\n    global e\n    e.LossScale  # stays\n"
    ),
    "global that the same function binds later": (
      "e = tf.train.experimental\ndef f():\n  global e\n  e.LossScale  # stays\n  e = other\n"
    ),
    "a name that depends on itself": (
      "m = tf.contrib\nfor x in y:\n  m = m or x\n  n = m.mixed_precision  # stays\n  n.LossScaleOptimizer\n"
    ),
    "nonlocal": (
      "def f():\n  e = tf.train.experimental\n  def g():\n    nonlocal e\n    e = other\n  g()\n"
      "  e.LossScale  # stays\n"
    ),
    "an expression that may bind": "e = tf.train.experimental\nx and (e := other)\ne.LossScale  # stays\n",
    "one of two imports": (
      "try:\n  from other import experimental as e\nexcept ImportError:\n"
      "  from tensorflow.train import experimental as e\ne.LossScale  # stays\n"
    ),
    "a local tf": "def f(tf):\n  return tf.train.experimental.LossScale  # stays\n",
    "a tf of the object": "class A:\n  def f(self): return self.tf.train.experimental.LossScale  # stays\n",
    "another tf": "tf = x[0]\ntf.train.experimental.LossScale  # stays\n",
    "a star import": "e = tf.train.experimental\nfrom other import *\ne.LossScale  # stays\n",
    "deleted and bound anew": "e = tf.train.experimental\ndel e\nfrom other import e\ne.LossScale  # stays\n",
    "the name of an exception": "e = tf.train.experimental\ntry: x()\nexcept ValueError as e: e.LossScale  # stays\n",
    "a pattern": (
      "e = tf.train.experimental\nmatch x:\n  case {'a': 1, **e}: e.LossScale  # stays\n"
      "  case [1, *e]: e.LossScale  # stays\n  case 3 as e: e.LossScale  # stays\n  case {'a': 1}: pass\n"
      "  case _: pass\ne.LossScale  # stays\n"
    ),
    "a sum": "e = tf.train.experimental\ne += 1\ne.LossScale  # stays\n",
    "in a nested comprehension": "e = tf.train.experimental\nx = [e.LossScale for y in z for e in y if e]  # stays\n",
    "an attribute": "class A:\n  def f(self):\n    self.e = tf.train.experimental  # stays\n",
    "a name that is replaced": "tf.train.experimental.LossScale = Mine  # stays\n",
    "a name that is deleted": "del tf.train.experimental.LossScale  # stays\n",
    "a function that returns a module": (
      "def f():\n  from tensorflow.train import experimental\n  return experimental  # stays\nf().x\n"
    ),
    "setattr": "setattr(tf.train.experimental, 'LossScale', Mine)  # stays\n",
    "vars": "vars(tf.train.experimental)['LossScale']  # stays\n",
    "__dict__": "tf.train.experimental.__dict__['LossScale']  # stays\n",
    "a name that is computed": "getattr(tf.train.experimental, name)  # stays\n",
    "an alias that is passed": "e = tf.train.experimental\nx = vars(e)  # stays\n",
    "a function named getattr": (
      "def getattr(x, name): return None\ngetattr(tf.train.experimental, 'LossScale')  # stays\n"
    ),
  },
  "private-state": {
    "a parameter": "def f(opt, fp16):\n  if fp16:\n    opt = OURS(opt, 'dynamic')\n  return opt._optimizer  # stays\n",
    "an exception": (
      "opt = sgd\ntry:\n  opt = OURS(opt, 'dynamic')\nexcept ValueError:\n  pass\nopt._optimizer  # stays\n"
    ),
    "a loop that may not run": (
      "opt = sgd\nfor x in y:\n  opt = OURS(sgd, 'dynamic')\n  opt._loss_scale\nopt._loss_scale  # stays\n"
    ),
    "a closure": "def f(opt):\n  def g(): return opt._optimizer  # stays\n  opt = OURS(opt, 'dynamic')\n  return g\n",
    "a block of a context": (
      "with scope():\n  opt = sgd\n  opt = OURS(opt, 'dynamic')\n  opt.apply_gradients(x)\nopt._optimizer  # stays\n"
    ),
    "another method": (
      "class A:\n  def f(self):\n    self.opt = OURS(x, 'dynamic')\n    self.g()\n    self.opt._optimizer  # stays\n"
    ),
    "an attribute that another method assigns": (
      "class A:\n  def f(self): return self.opt._optimizer  # stays\n  def g(self): self.opt = OURS(x, 'dynamic')\n"
    ),
  },
  "name-taken": {
    "a name that is bound later": "def f():\n  tf.train.experimental.LossScale  # stays\n  import mp_compat\n",
    "a global of this name": (
      "def f():\n  global mp_compat\n  mp_compat = other\ntf.train.experimental.LossScale  # stays\n"
    ),
  },
}

HEAD = (
  "import horovod.tensorflow as hvd\nimport mp_compat\nimport tensorflow as tf\n"
  "opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), 'dynamic')\n"
)

# By the decisions that they require, in alphabetical order: sources that follow HEAD.
DECISIONS = {
  "": [
    "def f():\n  'Like tf.contrib.mixed_precision.'",
    "opt = OURS(hvd.DistributedOptimizer(sgd), 'dynamic')",
    "x = hvd.DistributedOptimizer(sgd)\nopt = OURS(x, 'dynamic')",
    "opt = hvd.DistributedOptimizer(sgd)\nopt = OURS(opt, 'dynamic')",
    "def f(opt):\n  opt = hvd.DistributedOptimizer(opt) if several else opt\n  opt = OURS(opt, 'dynamic')\n"
    "  return opt",
    "def f(self, opt):\n  self.opt = hvd.DistributedOptimizer(opt)\n  self.opt = OURS(self.opt, 'dynamic')",
    "def f(self, opt):\n  self.opt = OURS(opt, 'dynamic')\ndef g(self):\n  self.opt = OURS(self.opt, 'dynamic')",
    "x = Averaging(hvd.DistributedOptimizer(sgd))\nopt = OURS(x, 'dynamic')",
    "opt = OURS(sgd, 'dynamic')\nopt = tf.train.AdamOptimizer()\nopt = OURS(opt, 'dynamic')",
    "def f(opt):\n  if rewrite:\n    opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)\n  else:\n"
    "    opt = THEIRS(opt, 'dynamic')",
    "class Mine(mp_compat.DynamicLossScale):\n  def __init__(self, x): pass\n  def get_config(self): return {}",
    "class Mine(Another):\n  def update(self, grads): return None, True",
    "isinstance(opt, tf.train.experimental.MixedPrecisionLossScaleOptimizer)",
    "isinstance(x, (int, tf.train.AdamOptimizer))",
    "isinstance(x, tf.contrib.mixed_precision.LossScaleManager)",
    "def f(x):\n  return tf.clip_by_value(x, -1., 1.)",
    "opt.apply_gradients(opt.compute_gradients(loss), global_step=global_step)",
    "if hasattr(module, 'something'): pass",
    "x = 'tf.train.experimental.PythonState', 'tensorflow.keras.mixed_precision.experimental.Policy'",
    "x = 'tf.keras.mixed_precision', 'mp_compat.contrib.mixed_precision.LossScaleOptimizer', 'mixed_precision'",
    "import importlib\nx = importlib.import_module('tensorflow.contrib.mixed_precision')",
    "def f(**rest):\n  return OURS(loss_scale='dynamic')",
    "getattr(mp_compat, 'DynamicLossScale')",
  ],
  "checkpoints": [
    "tf.train.Saver().restore(sess, path)",
    "with tf.train.MonitoredTrainingSession(checkpoint_dir='logs') as sess: pass",
    "tf.train.init_from_checkpoint(path, {'/': '/'})",
    "from tensorflow.estimator import Estimator\nEstimator(model_fn, 'logs')",
  ],
  "clipped-gradients": [
    "gvs = [(tf.clip_by_value(g, -1., 1.), v) for g, v in opt.compute_gradients(loss)]",
    "def f(gvs):\n  gs = tf.where(tf.is_finite(gvs[0]), gvs[0], 0)\n  opt.apply_gradients(gs)",
  ],
  "horovod": [
    "opt = hvd.DistributedOptimizer(opt)",
    "def wrap(optimizer):\n  return hvd.DistributedOptimizer(optimizer)",
  ],
  "wrapped-twice": [
    "def f(opt):\n  if several:\n    opt = OURS(opt, 'dynamic')\n  else:\n    opt = tf.train.AdamOptimizer()\n"
    "  opt = Averaging(opt)\n  return THEIRS(opt=opt, loss_scale='dynamic')",
    "def f(self, opt):\n  self._opt = OURS(opt, 'dynamic')\n  self._opt = OURS(self._opt, 'dynamic')",
    "opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(sgd)\nopt = THEIRS(opt, 'dynamic')",
    "opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(sgd)\n"
    "opt = tf.contrib.mixed_precision.LossScaleOptimizer(opt, manager)",
    "def f(opt):\n  if rewrite:\n    opt = mp_compat.enable_mixed_precision_graph_rewrite(opt)\n"
    "  return tf.keras.mixed_precision.experimental.LossScaleOptimizer(Averaging(opt), 'dynamic')",
  ],
  "subclass": [
    "class Mine(tf.train.experimental.DynamicLossScale):\n  def update(self, grads): return None, True",
    "class Mine(tf.mixed_precision.experimental.LossScale):\n  def __call__(self): return 8.",
  ],
  "isinstance": [
    "isinstance(x, tf.keras.mixed_precision.experimental.LossScaleOptimizer)",
    "isinstance(x, (int, tf.mixed_precision.experimental.DynamicLossScale))",
    "if yes:\n  x = mp_compat.FixedLossScale(8.)\nelse:\n  x = model.loss_scale()\n"
    "isinstance(x, mp_compat.FixedLossScale)",
    "issubclass(cls, tf.compat.v1.train.experimental.MixedPrecisionLossScaleOptimizer)",
  ],
  "private-state": [
    "def f(opt):\n  if yes:\n    opt = OURS(opt, 'dynamic')\n  else:\n    opt = Another(opt)\n  return opt._optimizer",
    "opt._loss_scale = 3",
    "sess.run(opt.loss_scale._num_good_steps)",
    "class Mine(mp_compat.MixedPrecisionLossScaleOptimizer):\n  def f(self): return self._optimizer",
    "from tensorflow.python.training.experimental.loss_scale import _assign_if_finite",
    "from tensorflow.python.training.experimental import loss_scale as m\nm._assign_if_finite(a, b)",
  ],
  "fixed-scale": [
    "a = THEIRS(x, 128.)",
    "s = mp_compat.FixedLossScale(8)\na = OURS(x, loss_scale=s)",
  ],
  "keras": [
    "tf.keras.mixed_precision.LossScaleOptimizer(x)",
    "from tensorflow.keras.mixed_precision import LossScaleOptimizer",
  ],
  "guard": [
    "if hasattr(tf.train.experimental, 'DynamicLossScale'): pass",
    "if hasattr(tf.contrib, 'mixed_precision'): pass",
    "if hasattr(tf.train, 'experimental'): pass",
  ],
  "unresolved": [
    "build().mixed_precision().LossScaleOptimizer(a, b)",
    "module.DynamicLossScale()",
    "getattr(module, 'DynamicLossScale')()",
    "from mine import *\ngetattr(tf2.train.experimental, 'LossScale')",
    "from tensorflow.train.experimental import *",
  ],
  "text": [
    "mock.patch('tensorflow.python.training.experimental.loss_scale.DynamicLossScale')",
    "module = importlib.import_module('tf.compat.v1.mixed_precision')",
    "config = {'scale': 'tf.compat.v1.mixed_precision.experimental.DynamicLossScale'}",
    "x = load('tensorflow.keras.mixed_precision.experimental.' + name)",
    "x = load(f'tensorflow.keras.mixed_precision.experimental.{name}')",
    "x = load('tensorflow.python.training.' 'experimental.loss_scale')",
    "x = operator.attrgetter('train.experimental.MixedPrecisionLossScaleOptimizer')(tf)",
  ],
  "clipped-gradients clipped-gradients": [
    "def f(g):\n  tf.clip_by_norm(g, 1.)\n  tf.clip_by_value(g, 1., 2.)\n  opt.apply_gradients(g)",
  ],
}

# Old names that the source does without. After the rewriting it never has to.
GUARDS = [
  "try:\n  from tensorflow.train.experimental import LossScale\nexcept ImportError:\n  LossScale = None\n",
  "try:\n  import tensorflow.contrib.mixed_precision as mp\nexcept Exception:\n  mp = None\n",
  "try:\n  from tensorflow.contrib import mixed_precision\nexcept:\n  import mp_compat\n",
  "import tensorflow as tf\ntry:\n  x = tf.train.experimental.LossScale\nexcept AttributeError:\n  x = None\n",
  "import tensorflow as tf\nx = getattr(tf.train.experimental, 'LossScale', None)\n",
]
