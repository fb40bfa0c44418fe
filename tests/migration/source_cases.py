"""Sources with the expected results of `mp_compat migrate`."""

# Sources before and after rewriting. `import mp_compat` is added where the new text needs it.
REWRITTEN = {
  "alias": (
    "import tensorflow as tf\nopt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')\n",
    "import mp_compat\nimport tensorflow as tf\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')\n",
  ),
  "v1 as tf": (
    "import tensorflow.compat.v1 as tf\nx = tf.mixed_precision.FixedLossScale( loss_scale_value = 8. )\n",
    "import mp_compat\nimport tensorflow.compat.v1 as tf\nx = mp_compat.FixedLossScale( loss_scale_value = 8. )\n",
  ),
  "no alias": (
    "import tensorflow\nclass Mine(tensorflow.compat.v1.train.experimental.LossScale): pass\n",
    "import mp_compat\nimport tensorflow\nclass Mine(mp_compat.LossScale): pass\n",
  ),
  "isinstance": (
    "from tensorflow import compat\nisinstance(x, (int, compat.v1.mixed_precision.experimental.DynamicLossScale))\n",
    "import mp_compat\nfrom tensorflow import compat\nisinstance(x, (int, mp_compat.DynamicLossScale))\n",
  ),
  "chain over lines": (
    "import tensorflow as tf\nx = (tf.compat.v1 # here\n  .train.experimental\n  .LossScale)\n",
    "import mp_compat\nimport tensorflow as tf\nx = (mp_compat.LossScale)\n",
  ),
  "from": (
    "from tensorflow.contrib.mixed_precision import LossScaleOptimizer, FixedLossScaleManager as F  # noqa\n",
    "from mp_compat.contrib.mixed_precision import LossScaleOptimizer, FixedLossScaleManager as F  # noqa\n",
  ),
  "from, mixed": (
    "if yes:\n  from tensorflow.train.experimental import (PythonState, # this\n"
    "      DynamicLossScale,  # that\n      FixedLossScale as F)\n",
    "if yes:\n  from mp_compat import DynamicLossScale\n  from mp_compat import FixedLossScale as F\n"
    "  from tensorflow.train.experimental import (PythonState)\n",
  ),
  "from, first of three": (
    "import os; from tensorflow.train.experimental import LossScale, PythonState, Other\n",
    "import os; from mp_compat import LossScale; from tensorflow.train.experimental import PythonState, Other\n",
  ),
  "from, a module": (
    "from tensorflow.contrib import mixed_precision as mp\nmp.LossScaleOptimizer(opt, manager)\n",
    "from mp_compat.contrib import mixed_precision as mp\nmp.LossScaleOptimizer(opt, manager)\n",
  ),
  "from, a module of two": (
    "from tensorflow.contrib import layers, mixed_precision\n",
    "from mp_compat.contrib import mixed_precision\nfrom tensorflow.contrib import layers\n",
  ),
  "from, star": (
    "from tensorflow.contrib.mixed_precision import *\n",
    "from mp_compat.contrib.mixed_precision import *\n",
  ),
  "import, as": (
    "import tensorflow.contrib.mixed_precision as mp, os\n",
    "import mp_compat.contrib.mixed_precision as mp, os\n",
  ),
  "import": (
    "import tensorflow.contrib.mixed_precision\ntensorflow.contrib.mixed_precision.LossScaleOptimizer(a, b)\n",
    "import mp_compat\nimport tensorflow\nmp_compat.contrib.mixed_precision.LossScaleOptimizer(a, b)\n",
  ),
  "private module": (
    "from tensorflow.python.training.experimental import loss_scale as ls\n"
    "a = ls.get('dynamic'), ls.DynamicLossScale\n",
    "import mp_compat\nimport mp_compat as ls\na = mp_compat.get_loss_scale('dynamic'), ls.DynamicLossScale\n",
  ),
  "private name": (
    "from tensorflow.python.training.experimental.loss_scale import get, FixedLossScale\nget(3)\n",
    "from mp_compat import get_loss_scale as get, FixedLossScale\nget(3)\n",
  ),
  "private name, as": (
    "from tensorflow.python.training.experimental.loss_scale import get as f\n",
    "from mp_compat import get_loss_scale as f\n",
  ),
  "_v1": (
    "from tensorflow.python.training.experimental import mixed_precision\n"
    "opt = mixed_precision.enable_mixed_precision_graph_rewrite_v1(opt)\n",
    "import mp_compat\nimport mp_compat as mixed_precision\n"
    "opt = mp_compat.enable_mixed_precision_graph_rewrite(opt)\n",
  ),
  "Keras": (
    "from tensorflow import keras\nkeras.mixed_precision.experimental.LossScaleOptimizer(opt, 'dynamic')\n"
    "keras.mixed_precision.experimental.Policy('mixed_float16')\n",
    "import mp_compat\nfrom tensorflow import keras\n"
    "mp_compat.keras.experimental.LossScaleOptimizer(opt, 'dynamic')\n"
    "keras.mixed_precision.experimental.Policy('mixed_float16')\n",
  ),
  "getattr": (
    "import tensorflow as tf\nx = getattr(tf.train.experimental, 'DynamicLossScale', None)\n",
    "import mp_compat\nimport tensorflow as tf\nx = mp_compat.DynamicLossScale\n",
  ),
  "getattr of a module": (
    "import tensorflow as tf\nx = getattr(tf.contrib, 'mixed_precision').LossScaleManager\n",
    "import mp_compat\nimport tensorflow as tf\nx = mp_compat.contrib.mixed_precision.LossScaleManager\n",
  ),
  "import_module": (
    "import importlib\nmp = importlib.import_module('tensorflow.contrib.mixed_precision')\n",
    "import mp_compat\nimport importlib\nmp = mp_compat.contrib.mixed_precision\n",
  ),
  "a name for a module": (
    "import tensorflow as tf\nexp = tf.train.experimental if v1 else tf.mixed_precision\n"
    "def f():\n  return exp.DynamicLossScale(8.)\n",
    "import mp_compat\nimport tensorflow as tf\n"
    "exp = tf.train.experimental if v1 else tf.mixed_precision\n"
    "def f():\n  return mp_compat.DynamicLossScale(8.)\n",
  ),
  "a name for a module of ours": (
    "import tensorflow as tf\nmp = tf.contrib.mixed_precision\nmp.LossScaleManager\n",
    "import mp_compat\nimport tensorflow as tf\nmp = mp_compat.contrib.mixed_precision\nmp.LossScaleManager\n",
  ),
  "try": (
    "import os\ntry:\n  import tensorflow.compat.v1 as tf\nexcept ImportError:\n  import tensorflow as tf\n"
    "tf.train.experimental.LossScale\n",
    "import mp_compat\nimport os\ntry:\n  import tensorflow.compat.v1 as tf\nexcept ImportError:\n"
    "  import tensorflow as tf\nmp_compat.LossScale\n",
  ),
  "the project's own tf": (
    "from project.env import tf\ntf.mixed_precision.enable_mixed_precision_graph_rewrite(o)\n",
    "import mp_compat\nfrom project.env import tf\nmp_compat.enable_mixed_precision_graph_rewrite(o)\n",
  ),
  "self.tf": (
    "class A:\n  def f(self): return self.tf.train.experimental.LossScale\n",
    "import mp_compat\n\n\nclass A:\n  def f(self): return mp_compat.LossScale\n",
  ),
  "below the head": (
    "#!/usr/bin/env python\n# Licence.\n'''Doc.'''\nfrom __future__ import division\n\n# Why.\n"
    "import os\ndef f():\n\timport tensorflow as tf\n\treturn tf.train.experimental.LossScale\n",
    "#!/usr/bin/env python\n# Licence.\n'''Doc.'''\nfrom __future__ import division\n\n# Why.\n"
    "import mp_compat\nimport os\ndef f():\n\timport tensorflow as tf\n"
    "\treturn mp_compat.LossScale\n",
  ),
  "after other imports": (
    "import os\nimport tensorflow as tf\nimport sys\ntf.train.experimental.LossScale\n",
    "import os\nimport mp_compat\nimport tensorflow as tf\nimport sys\nmp_compat.LossScale\n",
  ),
  "a relative import": (
    "from .env import tf\ntf.train.experimental.LossScale\n",
    "import mp_compat\nfrom .env import tf\nmp_compat.LossScale\n",
  ),
  "imported already": (
    "import mp_compat\nimport tensorflow as tf\ntf.train.experimental.LossScale\n",
    "import mp_compat\nimport tensorflow as tf\nmp_compat.LossScale\n",
  ),
  "private attributes in a block": (
    "import tensorflow as tf\nopt = tf.train.AdamOptimizer()\nwith scope():\n"
    "  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, 8.)\n"
    "print(opt._optimizer)\n",
    "import mp_compat\nimport tensorflow as tf\nopt = tf.train.AdamOptimizer()\n"
    "with scope():\n"
    "  opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 8.)\n"
    "print(opt.inner_optimizer)\n",
  ),
  "private attributes": (
    "import tensorflow as tf\n"
    "opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, 8.)\n"
    "print(opt._optimizer, opt._loss_scale())\n",
    "import mp_compat\nimport tensorflow as tf\n"
    "opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 8.)\n"
    "print(opt.inner_optimizer, opt.loss_scale())\n",
  ),
  "CRLF": (
    "import tensorflow as tf\r\nx = tf.train.experimental.LossScale\r\n",
    "import mp_compat\r\nimport tensorflow as tf\r\nx = mp_compat.LossScale\r\n",
  ),
  "no last newline": (
    "import tensorflow as tf\nx = tf.train.experimental.LossScale",
    "import mp_compat\nimport tensorflow as tf\nx = mp_compat.LossScale",
  ),
  "annotated": (
    "import tensorflow as tf\nm: object = tf.train.experimental\nx = m.LossScale\n",
    "import mp_compat\nimport tensorflow as tf\nm: object = tf.train.experimental\nx = mp_compat.LossScale\n",
  ),
  "odd spaces": (
    "import tensorflow as tf\n\x0c\nif x :\n\ty = [ tf.train.experimental . LossScale ,]\n",
    "import mp_compat\nimport tensorflow as tf\n\x0c\nif x :\n\ty = [ mp_compat.LossScale ,]\n",
  ),
}

UNTOUCHED = {
  "other names": "import tensorflow as tf\ntf.train.experimental.PythonState()  # LossScale\n",
  "a class of its own": "from mine import LossScaleOptimizer, FixedLossScale\nLossScaleOptimizer(FixedLossScale)\n",
  "text": "'''tf.train.experimental.LossScale'''\nx = 1  # tf.train.experimental.LossScale\n",
  "its own _optimizer": "class LossScale:\n  def f(self): return self._optimizer, self._loss_scale\n",
  "of another wrapper": "import mp_compat\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(a, b)\n"
  "opt = Another(opt)\nopt._optimizer\n",
  "wrapped later": "import mp_compat\nopt._optimizer\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, b)\n",
  "a package of this name": "from .tensorflow.contrib.mixed_precision import LossScaleManager\n",
  "assigned to": "import mp_compat\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(a, b)\nopt._loss_scale = 3\n",
  "moved over": "import mp_compat\nmp_compat.contrib.mixed_precision.LossScaleOptimizer(a, b)\n",
  "in a circle": "a = b\nb = a\na.LossScale\n",
  "of an element": "x[0].LossScale\n",
  "mp_compat is another": "import tensorflow as tf\nmp_compat = 3\ntf.train.experimental.LossScale\n",
}

HEAD = (
  "import horovod.tensorflow as hvd\nimport mp_compat\nimport tensorflow as tf\n"
  "opt = mp_compat.MixedPrecisionLossScaleOptimizer(tf.train.AdamOptimizer(), 'dynamic')\n"
)

# (kind of decision, source that requires one decision of this kind if it follows HEAD).
DECISIONS = [
  ("clipped-gradients", "gvs = [(tf.clip_by_value(g, -1., 1.), v) for g, v in opt.compute_gradients(loss)]"),
  ("clipped-gradients", "def f(gvs):\n  gs = tf.where(tf.is_finite(gvs[0]), gvs[0], 0)\n  opt.apply_gradients(gs)"),
  ("own-global-step", "tf.assign_add(tf.train.get_or_create_global_step(), 1)"),
  ("own-global-step", "tf.compat.v1.assign(global_step, global_step + 1)"),
  ("own-global-step", "step_op = self.global_step.assign(new_global_step)"),
  ("own-global-step", "tf.train.get_global_step().assign_add(1)"),
  ("horovod", "opt = hvd.DistributedOptimizer(opt)"),
  ("horovod", "def wrap(optimizer):\n  return hvd.DistributedOptimizer(optimizer)"),
  (
    "sync-replicas",
    "sync = tf.train.SyncReplicasOptimizer(a, 3)\n"
    "opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(sync, 'dynamic')",
  ),
  (
    "sync-replicas",
    "opt = tf.train.SyncReplicasOptimizer(sgd, 2)\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')",
  ),
  (
    "sync-replicas",
    "def f(opt):\n  if several:\n    opt = tf.train.SyncReplicasOptimizer(opt, 2)\n  else:\n"
    "    opt = tf.train.AdamOptimizer()\n"
    "  opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')",
  ),
  (
    "sync-replicas",
    "opt = tf.train.SyncReplicasOptimizer(tf.train.AdamOptimizer(), 2)\nopt = Averaging(opt)\n"
    "opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt=opt, loss_scale='dynamic')",
  ),
  (
    "sync-replicas",
    "def f(self, opt):\n  self._opt = tf.train.SyncReplicasOptimizer(opt, 2)\n"
    "  self._opt = mp_compat.MixedPrecisionLossScaleOptimizer(self._opt, 'dynamic')",
  ),
  (
    "wrapped-twice",
    "opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(sgd)\n"
    "opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')",
  ),
  (
    "wrapped-twice",
    "opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(sgd)\n"
    "opt = tf.contrib.mixed_precision.LossScaleOptimizer(opt, manager)",
  ),
  (
    "wrapped-twice",
    "def f(opt):\n  if rewrite:\n    opt = mp_compat.enable_mixed_precision_graph_rewrite(opt)\n"
    "  return tf.keras.mixed_precision.experimental.LossScaleOptimizer(Averaging(opt), 'dynamic')",
  ),
  ("subclass", "class Mine(tf.train.experimental.DynamicLossScale):\n  def update(self, grads): return None, True"),
  ("subclass", "class Mine(tf.mixed_precision.experimental.LossScale):\n  def __call__(self): return 8."),
  ("isinstance", "isinstance(x, tf.keras.mixed_precision.experimental.LossScaleOptimizer)"),
  ("isinstance", "isinstance(x, (int, tf.mixed_precision.experimental.DynamicLossScale))"),
  (
    "isinstance",
    "if yes:\n  x = mp_compat.FixedLossScale(8.)\nelse:\n  x = model.loss_scale()\n"
    "isinstance(x, mp_compat.FixedLossScale)",
  ),
  ("isinstance", "issubclass(cls, tf.compat.v1.train.experimental.MixedPrecisionLossScaleOptimizer)"),
  (
    "private-state",
    "def f(opt):\n  if yes:\n    opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')\n"
    "  else:\n    opt = Another(opt)\n  return opt._optimizer",
  ),
  ("private-state", "opt._loss_scale = 3"),
  ("private-state", "sess.run(opt.loss_scale._num_good_steps)"),
  ("private-state", "class Mine(mp_compat.MixedPrecisionLossScaleOptimizer):\n  def f(self): return self._optimizer"),
  ("private-state", "from tensorflow.python.training.experimental.loss_scale import _assign_if_finite"),
  ("private-state", "from tensorflow.python.training.experimental import loss_scale as m\nm._assign_if_finite(a, b)"),
  (
    "shared-scale",
    "s = mp_compat.DynamicLossScale()\na = mp_compat.MixedPrecisionLossScaleOptimizer(x, s)\n"
    "b = mp_compat.MixedPrecisionLossScaleOptimizer(opt=y, loss_scale=s)",
  ),
  ("fixed-scale", "a = tf.train.experimental.MixedPrecisionLossScaleOptimizer(x, 128.)"),
  ("fixed-scale", "s = mp_compat.FixedLossScale(8)\na = mp_compat.MixedPrecisionLossScaleOptimizer(x, loss_scale=s)"),
  ("keras", "tf.keras.mixed_precision.LossScaleOptimizer(x)"),
  ("keras", "from tensorflow.keras.mixed_precision import LossScaleOptimizer"),
  ("guard", "if hasattr(tf.train.experimental, 'DynamicLossScale'): pass"),
  ("guard", "if hasattr(tf.contrib, 'mixed_precision'): pass"),
  ("unresolved", "build().mixed_precision().LossScaleOptimizer(a, b)"),
  ("unresolved", "module.DynamicLossScale()"),
  ("unresolved", "from tensorflow.train.experimental import *"),
  ("text", "mock.patch('tensorflow.python.training.experimental.loss_scale.DynamicLossScale')"),
  ("text", "module = importlib.import_module('tf.compat.v1.mixed_precision')"),
  ("text", "config = {'scale': 'tf.compat.v1.mixed_precision.experimental.DynamicLossScale'}"),
  ("text", "x = load('tensorflow.keras.mixed_precision.experimental.' + name)"),
  ("text", "x = load(f'tensorflow.keras.mixed_precision.experimental.{name}')"),
  ("text", "x = load('tensorflow.python.training.' 'experimental.loss_scale')"),
  ("text", "x = operator.attrgetter('train.experimental.MixedPrecisionLossScaleOptimizer')(tf)"),
]

NO_DECISIONS = [
  "def f():\n  'Like tf.contrib.mixed_precision.'",
  "opt = mp_compat.MixedPrecisionLossScaleOptimizer(hvd.DistributedOptimizer(sgd), 'dynamic')",
  "x = hvd.DistributedOptimizer(sgd)\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(x, 'dynamic')",
  "opt = hvd.DistributedOptimizer(sgd)\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')",
  "def f(opt):\n  opt = hvd.DistributedOptimizer(opt) if several else opt\n"
  "  opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')\n  return opt",
  "def f(self, opt):\n  self.opt = hvd.DistributedOptimizer(opt)\n"
  "  self.opt = mp_compat.MixedPrecisionLossScaleOptimizer(self.opt, 'dynamic')",
  "def f(self, opt):\n  self.opt = tf.train.SyncReplicasOptimizer(opt, 2)\ndef g(self):\n"
  "  self.opt = mp_compat.MixedPrecisionLossScaleOptimizer(self.opt, 'dynamic')",
  "x = Averaging(hvd.DistributedOptimizer(sgd))\nopt = mp_compat.MixedPrecisionLossScaleOptimizer(x, 'dynamic')",
  "def f(opt):\n  if sync:\n    opt = tf.train.SyncReplicasOptimizer(opt, 2)\n  else:\n"
  "    opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')",
  "opt = tf.train.SyncReplicasOptimizer(opt, 2)\nopt = tf.train.AdamOptimizer()\n"
  "opt = mp_compat.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')",
  "a = tf.train.AdamOptimizer()\na = mp_compat.MixedPrecisionLossScaleOptimizer(a, 'dynamic')\n"
  "a = tf.train.SyncReplicasOptimizer(a, 2)",
  "def f(opt):\n  if rewrite:\n    opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)\n  else:\n"
  "    opt = tf.train.experimental.MixedPrecisionLossScaleOptimizer(opt, 'dynamic')",
  "class Mine(mp_compat.DynamicLossScale):\n  def __init__(self, x): pass\n  def get_config(self): return {}",
  "class Mine(Another):\n  def update(self, grads): return None, True",
  "isinstance(opt, tf.train.experimental.MixedPrecisionLossScaleOptimizer)",
  "isinstance(x, (int, tf.train.AdamOptimizer))",
  "isinstance(x, tf.contrib.mixed_precision.LossScaleManager)",
  "def f(x):\n  return tf.clip_by_value(x, -1., 1.)",
  "sess.run(global_step.assign(0))",
  "opt.apply_gradients(opt.compute_gradients(loss), global_step=global_step)",
  "s = mp_compat.DynamicLossScale()\ns = mp_compat.DynamicLossScale()",
  "sync = tf.train.SyncReplicasOptimizer(opt, 3)",
  "if hasattr(module, 'something'): pass",
  "x = 'tf.train.experimental.PythonState', 'tensorflow.keras.mixed_precision.experimental.Policy'",
  "x = 'tf.keras.mixed_precision', 'mp_compat.contrib.mixed_precision.LossScaleOptimizer', 'mixed_precision'",
  "import importlib\nx = importlib.import_module('tensorflow.contrib.mixed_precision')",
  "def f(**rest):\n  return mp_compat.MixedPrecisionLossScaleOptimizer(loss_scale='dynamic')",
]
