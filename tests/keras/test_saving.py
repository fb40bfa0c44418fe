"""Tests of saving and loading the Keras wrapper: configurations, models, checkpoints,
also of TensorFlow's class.
"""

import copy
import os
import pickle

import numpy as np
import pytest

import mp_compat
from mp_compat import keras as mp_keras
from mp_compat.keras import optimizer_kinds
from tests import testing
from tests.keras import cases as keras_cases
from tests.keras import golden_cases as goldens
from tests.testing import tf

pytestmark = pytest.mark.usefixtures("eager")
V2 = keras_cases.V2
each_golden = pytest.mark.parametrize(
  "folder", goldens.find_folders().values(), ids=goldens.find_folders()
)


def make_ours(family):
  return mp_keras.LossScaleOptimizer(
    family.optimizers.Adam(0.1),
    initial_scale=goldens.SCALE,
    dynamic_growth_steps=goldens.GROWTH,
  )


def make_native(family):
  return family.native_dynamic(
    family.optimizers.Adam(0.1), goldens.SCALE, goldens.GROWTH
  )


def make_run(optimizer):
  return keras_cases.Run(optimizer, sparse=False)


def train_until_saving(optimizer):
  run = make_run(optimizer)
  for x in goldens.make_inputs()[0]:
    run.step(tf.constant(x))
  return run


def assert_continues(path, run, expected):
  """Asserts that a restored run ends in the expected state."""
  goldens.make_checkpoint(run).restore(path).assert_existing_objects_matched()
  testing.assert_same([goldens.finish(run)], [expected])


@pytest.mark.each_choice
@each_golden
@pytest.mark.parametrize("make", [make_run, train_until_saving])
def test_tensorflow_checkpoint_continues(folder, make):
  with np.load(os.path.join(folder, "expected.npz")) as expected:
    assert_continues(
      os.path.join(folder, "ckpt-1"), make(make_ours(V2)), dict(expected)
    )


@keras_cases.each_family
def test_wrappers_exchange_checkpoints(family, tmp_path):
  writers = {"ours": make_ours}
  if family.name != "keras3":
    writers["native"] = make_native
  for writer, make in writers.items():
    run = train_until_saving(make(family))
    path = goldens.make_checkpoint(run).save(str(tmp_path / writer))
    expected = goldens.finish(run)
    for other in writers.values():
      assert_continues(path, make_run(other(family)), expected)


@pytest.mark.parametrize(
  "folder",
  [
    pytest.param(
      folder,
      id=version,
      marks=pytest.mark.skipif(
        keras_cases.VERSION < tuple(map(int, version.split("."))),
        reason="Keras cannot load models of later versions",
      ),
    )
    for version, folder in goldens.find_folders().items()
    if os.path.exists(os.path.join(folder, "model.h5"))
  ],
)
def test_tensorflow_model_loads_and_trains(folder):
  model = V2.keras.models.load_model(
    os.path.join(folder, "model.h5"), custom_objects=mp_keras.CUSTOM_OBJECTS
  )
  opt = model.optimizer
  assert isinstance(opt, mp_keras.LossScaleOptimizer)
  assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == (
    True,
    goldens.SCALE,
    goldens.GROWTH,
  )
  assert [np.shape(value) for value in opt.get_weights()] == [
    (),
    (3, 2),
    (2,),
    (3, 2),
    (2,),
  ]
  assert opt.get_weights()[0] == 1 and int(keras_cases.to_numpy(opt.iterations)) == 1
  moments = opt.get_weights()[1]
  model.fit(np.ones([4, 3], np.float32), np.ones([4, 2], np.float32), verbose=0)
  assert (opt.get_weights()[1] != moments).any() and int(
    keras_cases.to_numpy(opt.iterations)
  ) == 2


def get_values(opt):
  """Returns the values of the optimizer's variables, as lists."""
  variables = opt.variables() if callable(opt.variables) else opt.variables
  return [keras_cases.to_numpy(variable).tolist() for variable in variables]


# Keras 3 cannot load a SavedModel.
FORMS = [
  (family, form)
  for family in keras_cases.FAMILIES
  for form in (".h5", ".keras", "")
  if family.name != "keras3" or form
]


@pytest.mark.matrix
@pytest.mark.parametrize("family,form", FORMS, ids=str)
def test_saved_model_restores_inner_state(family, form, tmp_path):
  before, after = {}, {}
  for kind, optimizer in [
    ("ours", make_ours(family)),
    ("plain", family.optimizers.Adam(0.1)),
  ]:
    before[kind] = goldens.train_model(family, optimizer)
    path = str(tmp_path / kind) + form
    before[kind].save(path)
    after[kind] = family.keras.models.load_model(
      path, custom_objects=mp_keras.CUSTOM_OBJECTS
    )
  opt = after["ours"].optimizer
  assert isinstance(opt, mp_keras.LossScaleOptimizer)
  assert opt.get_config() == before["ours"].optimizer.get_config()
  assert get_values(opt.inner_optimizer) == get_values(after["plain"].optimizer)
  x = np.ones([4, 3], np.float32)
  assert (
    after["ours"].predict(x, verbose=0).tolist()
    == before["ours"].predict(x, verbose=0).tolist()
  )
  # Keras 3 cannot train such a model, with any optimizer
  if (family.name, form) != ("keras3", ".h5"):
    after["ours"].fit(x, np.ones([4, 2], np.float32), verbose=0)


needs_own_loading = pytest.mark.skipif(
  keras_cases.VERSION < (2, 3), reason="Keras cannot load a wrapper before 2.3"
)


@pytest.mark.matrix
@needs_own_loading
@pytest.mark.parametrize("family,form", FORMS, ids=str)
def test_models_load_without_custom_objects(family, form, tmp_path):
  """Checks that they load with Keras's own wrapper and then train as models saved with
  that wrapper.
  """
  weights = []
  for make in (make_ours, make_native):
    path = str(tmp_path / make.__name__) + form
    goldens.train_model(family, make(family)).save(path)
    model = family.keras.models.load_model(path)
    assert type(model.optimizer) is type(make_native(family))
    # Keras 3 cannot train such a model, with any optimizer
    if (family.name, form) != ("keras3", ".h5"):
      model.fit(np.ones([4, 3], np.float32), np.ones([4, 2], np.float32), verbose=0)
    weights.append([weight.tolist() for weight in model.get_weights()])
  assert weights[0] == weights[1]


@needs_own_loading
@keras_cases.each_family
def test_configs_load_without_custom_objects(family):
  opt = make_ours(family)
  for load in (family.keras.optimizers.deserialize, family.keras.optimizers.get):
    again = load(family.keras.optimizers.serialize(opt))
    assert type(again) is type(make_native(family))
    assert remove_names(again.get_config()) == remove_names(
      make_native(family).get_config()
    )


def remove_names(config):
  """Returns a configuration without names, to which Keras 3 appends a counter."""
  if not isinstance(config, dict):
    return config
  return {key: remove_names(value) for key, value in config.items() if key != "name"}


@keras_cases.needs_keras_3
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name == "ScheduleFreeAdamW" else pytest.mark.slow)
    for name in keras_cases.FAMILIES[-1].classes
  ],
)
def test_keras_3_optimizers_train_and_load(name, tmp_path):
  family = keras_cases.FAMILIES[-1]
  x, y = np.arange(12, dtype=np.float32).reshape([4, 3]), np.ones([4, 2], np.float32)
  weights = []
  # Keras does not save the running product of a Nadam in a wrapper, which has the same
  # variables as Keras's own.
  alone = (
    (lambda opt: family.native_dynamic(opt, 8.0, 2000))
    if name == "Nadam"
    else lambda opt: opt
  )
  for wrap in (alone, lambda opt: mp_keras.LossScaleOptimizer(opt, initial_scale=8.0)):
    model = family.keras.Sequential(
      [family.keras.layers.Dense(2, kernel_initializer="ones")]
    )
    model.compile(
      loss=family.keras.losses.MeanSquaredError(),
      optimizer=wrap(getattr(family.optimizers, name)()),
      jit_compile=False,
    )
    model.fit(x, y, verbose=0, shuffle=False)
    model.save(str(tmp_path / "model.keras"))
    model = family.keras.models.load_model(
      str(tmp_path / "model.keras"), custom_objects=mp_keras.CUSTOM_OBJECTS
    )
    model.fit(x, y, verbose=0, shuffle=False)
    weights.append([weight.tolist() for weight in model.get_weights()])
  assert isinstance(model.optimizer, mp_keras.LossScaleOptimizer)
  assert weights[0] == weights[1]


@pytest.mark.each_choice
@keras_cases.needs_keras_3
@pytest.mark.parametrize("reader", [make_ours, make_native])
@pytest.mark.parametrize("writer", [make_ours, make_native])
@pytest.mark.parametrize(
  "arguments",
  [{}]
  + [
    pytest.param(each, marks=pytest.mark.slow)
    for each in ({"use_ema": True}, {"gradient_accumulation_steps": 2})
  ],
  ids=str,
)
def test_keras_3_wrappers_exchange_checkpoints(arguments, writer, reader, tmp_path):
  family = keras_cases.FAMILIES[-1]
  x, y = (
    np.arange(27, dtype=np.float32).reshape([9, 3]) / 9,
    np.ones([9, 2], np.float32),
  )

  def model(make):
    keras = family.keras
    made = keras.Sequential(
      [keras.layers.Input([3]), keras.layers.Dense(2, kernel_initializer="ones")]
    )
    opt = make(family)
    opt = type(opt)(
      family.optimizers.Adam(0.1, **arguments),
      initial_scale=8.0,
      dynamic_growth_steps=3,
    )
    made.compile(loss=keras.losses.MeanSquaredError(), optimizer=opt, jit_compile=False)
    opt.build(made.trainable_variables)
    return made

  def fit(made, examples):
    made.fit(x[examples], y[examples], batch_size=1, shuffle=False, verbose=0)

  def state(made):
    return [
      keras_cases.to_numpy(value).tolist()
      for value in made.weights + made.optimizer.variables
    ]

  before = model(writer)
  fit(before, slice(5))
  path = tf.train.Checkpoint(model=before, optimizer=before.optimizer).save(
    str(tmp_path / "model")
  )
  after = model(reader)
  tf.train.Checkpoint(model=after, optimizer=after.optimizer).restore(
    path
  ).assert_existing_objects_matched()
  assert state(after) == state(before)
  for made in (before, after):
    fit(made, slice(5, 9))
  assert state(after) == state(before) and float(after.optimizer.dynamic_scale) > 8.0


@keras_cases.needs_keras_3
def test_keras_3_files_contain_loss_scale(tmp_path):
  family = keras_cases.FAMILIES[-1]
  model = goldens.train_model(family, make_ours(family))
  for x in ([[1.0, np.inf, 1.0]], [[1.0, 1.0, 1.0]]):
    model.fit(np.array(x), np.ones([1, 2]), verbose=0)
  assert float(keras_cases.scale_of(model.optimizer)) == goldens.SCALE / 2
  model.save(str(tmp_path / "model.keras"))
  after = family.keras.models.load_model(
    str(tmp_path / "model.keras"), custom_objects=mp_keras.CUSTOM_OBJECTS
  )
  assert get_values(after.optimizer) == get_values(model.optimizer)
  assert (
    float(keras_cases.scale_of(after.optimizer)) == goldens.SCALE / 2
    and int(after.optimizer.dynamic_counter) == 1
  )


@keras_cases.each_family
@pytest.mark.parametrize(
  "cls",
  [mp_keras.LossScaleOptimizer, mp_keras.experimental.LossScaleOptimizer],
  ids=["later", "experimental"],
)
def test_dynamic_has_configuration_of_native(family, cls):
  opt = cls(family.optimizers.Adam(0.1), "dynamic")
  native = family.native_dynamic(family.optimizers.Adam(0.1), 2.0**15, 2000)
  if keras_cases.VERSION >= (2, 0):  # TensorFlow 1.15's class has no configuration
    assert remove_names(opt.get_config()) == remove_names(native.get_config())
  again = type(opt).from_config(opt.get_config())
  assert remove_names(again.get_config()) == remove_names(opt.get_config())


@needs_own_loading
@pytest.mark.parametrize(
  "family,form",
  [
    pytest.param(*each, marks=[] if each[0].name == "keras3" else [pytest.mark.matrix])
    for each in FORMS
  ],
  ids=str,
)
def test_model_with_dynamic_loads_as_native(family, form, tmp_path):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.Adam(0.1), "dynamic")
  path = str(tmp_path / "model") + form
  goldens.train_model(family, opt).save(path)
  native = family.keras.models.load_model(path).optimizer
  assert type(native) is type(make_native(family))
  ours = family.keras.models.load_model(path, custom_objects=mp_keras.CUSTOM_OBJECTS)
  assert isinstance(ours.optimizer, mp_keras.LossScaleOptimizer)
  assert remove_names(ours.optimizer.get_config()) == remove_names(native.get_config())


def test_saved_model_loads_in_scope(tmp_path):
  """`load_model` of TensorFlow 1.15 does not pass `custom_objects` on."""
  model, keras = goldens.train_model(V2, make_ours(V2)), V2.keras
  model.save(str(tmp_path / "model"), save_format="tf")
  with keras.utils.custom_object_scope(mp_keras.CUSTOM_OBJECTS):
    loaded = keras.models.load_model(str(tmp_path / "model"))
  assert isinstance(loaded.optimizer, mp_keras.LossScaleOptimizer)
  assert loaded.optimizer.get_config() == model.optimizer.get_config()


@keras_cases.needs_keras_3
@pytest.mark.parametrize("content", ["optimizer", "model"])
def test_checkpoint_without_loss_scaling_raises(content, tmp_path):
  """Keras's own class raises a less clear error; the docs have the remedies."""
  family = keras_cases.FAMILIES[-1]

  def make_model():
    model = goldens.train_model(family, family.optimizers.Adam(0.1))
    return model, model.optimizer

  def checkpoint(model, optimizer):
    whole = {"model": model} if content == "model" else {"optimizer": optimizer}
    return tf.train.Checkpoint(**whole)

  model, inner = make_model()
  path = checkpoint(model, inner).save(str(tmp_path / "model"))
  expected = get_values(inner)
  after, _ = make_model()
  opt = make_ours(family)
  after.compile(opt, "mse")
  for built in (False, True):
    if built:
      opt.build(after.trainable_variables)
    with pytest.raises(
      ValueError, match="but got one of an optimizer without loss sca"
    ):
      checkpoint(after, opt).restore(path)
  inner = family.optimizers.Adam(0.1)
  after.compile(inner, "mse")
  inner.build(after.trainable_variables)
  checkpoint(after, inner).restore(path)
  opt = mp_keras.LossScaleOptimizer(inner)
  after.compile(opt, "mse")
  assert get_values(opt.inner_optimizer) == expected and int(opt.iterations) == 1


# Configurations that versions of TensorFlow's class wrote, with (dynamic, initial
# scale, growth interval, multiplier).
SGD = {
  "class_name": "SGD",
  "config": dict(
    name="SGD", learning_rate=0.5, decay=0.0, momentum=0.0, nesterov=False
  ),
}


def old_config(class_name, **config):
  return {"optimizer": SGD, "loss_scale": {"class_name": class_name, "config": config}}


def new_config(dynamic, initial_scale, steps):
  return dict(
    inner_optimizer=SGD,
    dynamic=dynamic,
    initial_scale=initial_scale,
    dynamic_growth_steps=steps,
  )


OLD_SCALE = dict(initial_loss_scale=64.0, increment_period=5)
CONFIGS = [
  (old_config("DynamicLossScale", multiplier=2.0, **OLD_SCALE), (True, 64.0, 5, 2.0)),
  (old_config("DynamicLossScale", multiplier=4.0, **OLD_SCALE), (True, 64.0, 5, 4.0)),
  (old_config("FixedLossScale", loss_scale_value=32.0), (False, 32.0, None, None)),
  (new_config(True, 64.0, 5), (True, 64.0, 5, 2.0)),
  (new_config(False, 32.0, None), (False, 32.0, None, None)),
]


@pytest.mark.parametrize(
  "config,expected",
  CONFIGS,
  ids=["2.0", "2.0-times-4", "2.0-fixed", "2.4", "2.4-fixed"],
)
@pytest.mark.parametrize(
  "cls",
  [mp_keras.LossScaleOptimizer, mp_keras.experimental.LossScaleOptimizer],
  ids=["later", "experimental"],
)
def test_old_configs_round_trip(cls, config, expected):
  before, multiplier = repr(config), expected[3]
  opt = cls.from_config(config)
  assert isinstance(opt, cls) and repr(config) == before
  settings = (
    opt.dynamic,
    opt.initial_scale,
    opt.dynamic_growth_steps,
    opt._loss_scale.get_config().get("multiplier"),
  )
  assert settings == expected and keras_cases.to_numpy(opt.lr) == 0.5
  again = cls.from_config(opt.get_config())
  assert again.get_config() == opt.get_config()
  assert ("loss_scale" in opt.get_config()) == (
    multiplier == 4.0 or keras_cases.VERSION < (2, 4)
  )
  assert (
    opt.get_config() == mp_keras.LossScaleOptimizer.from_config(config).get_config()
  )


@keras_cases.each_family
def test_configs_of_optimizers_round_trip(family):
  for cls in family.classes.values():
    opt = mp_keras.LossScaleOptimizer(cls())
    again = type(opt).from_config(opt.get_config())
    assert type(again.inner_optimizer) is cls and again.get_config() == opt.get_config()


@keras_cases.each_family
def test_experimental_configs_round_trip(family):
  scale = mp_compat.DynamicLossScale(64.0, 5)
  opt = mp_keras.experimental.LossScaleOptimizer(family.optimizers.SGD(0.5), scale)
  again = type(opt).from_config(opt.get_config())
  assert type(again) is type(opt) and again.get_config() == opt.get_config()


@keras_cases.each_family
def test_from_config_accepts_objects(family):
  """Keras passes such a configuration if it makes the inner objects first. They select
  the class.
  """
  for other in keras_cases.FAMILIES:
    inner = family.optimizers.SGD(0.5)
    opt = type(make_ours(other)).from_config(
      {"inner_optimizer": inner, "dynamic": False, "initial_scale": 2.0}
    )
    assert opt.inner_optimizer is inner and type(opt) is type(make_ours(family))


@keras_cases.needs_keras_3
def test_keras_2_config_without_tf_keras_raises(monkeypatch):
  config = make_ours(V2).get_config()
  monkeypatch.setattr(optimizer_kinds, "_exists", lambda module: module != "tf_keras")
  with pytest.raises(
    ValueError,
    match="of a Keras 3 optimizer, but this is one of Keras 2.*pip install tf_keras",
  ):
    mp_keras.LossScaleOptimizer.from_config(config)


def test_configs_contain_any_loss_scale():
  scale = mp_compat.DynamicLossScale(64.0, 5, overflow_tolerance=3)
  opt = mp_keras.LossScaleOptimizer(V2.optimizers.SGD(0.5), scale)
  assert opt.get_config()["loss_scale"] == {
    "class_name": "DynamicLossScale",
    "config": scale.get_config(),
  }
  assert (
    mp_keras.LossScaleOptimizer.from_config(
      opt.get_config()
    )._loss_scale.overflow_tolerance
    == 3
  )

  class Mine(V2.optimizers.SGD):
    """A custom optimizer."""

  class Ten(mp_compat.LossScale):
    """A custom loss scale."""

    def __call__(self):
      return tf.constant(10.0)

    def update(self, grads):
      return None, True

    def get_config(self):
      return {}

  opt = mp_keras.LossScaleOptimizer(Mine(0.5), Ten())
  config = opt.get_config()
  assert config["loss_scale"] == {"class_name": "Ten", "config": {}}
  again = type(opt).from_config(config, custom_objects={"Mine": Mine, "Ten": Ten})
  assert (
    isinstance(again.inner_optimizer, Mine)
    and float(keras_cases.scale_of(again)) == 10.0
  )


def test_subclasses_load_with_own_arguments():
  class Earlier(mp_keras.LossScaleOptimizer):
    def __init__(self, optimizer, loss_scale):
      super().__init__(optimizer, loss_scale)

  class Later(mp_keras.LossScaleOptimizer):
    def __init__(
      self, inner_optimizer, dynamic=True, initial_scale=None, dynamic_growth_steps=None
    ):
      super().__init__(inner_optimizer, dynamic, initial_scale, dynamic_growth_steps)

  # has the earlier form in every version
  scale = mp_compat.DynamicLossScale(64.0, multiplier=4.0)
  opt = Earlier(V2.optimizers.SGD(0.5), scale)
  assert type(opt).from_config(opt.get_config())._loss_scale.multiplier == 4.0
  # has the later form from 2.4 on
  opt = Earlier(V2.optimizers.SGD(0.5), mp_compat.DynamicLossScale(64.0, 5))
  again = type(opt).from_config(opt.get_config())
  assert type(again) is type(opt) and (
    again.initial_scale,
    again.dynamic_growth_steps,
  ) == (64.0, 5)
  if keras_cases.VERSION >= (2, 4):
    opt = Later(V2.optimizers.SGD(0.5), initial_scale=64.0)
    assert type(opt).from_config(opt.get_config()).initial_scale == 64.0


@pytest.mark.skipif(
  keras_cases.VERSION < (2, 4), reason="configurations have the earlier form"
)
@keras_cases.each_family
def test_subclass_with_further_argument_loads(family):
  class Further(mp_keras.LossScaleOptimizer):
    def __init__(self, inner_optimizer, further=3, **kwargs):
      super().__init__(inner_optimizer, **kwargs)
      assert further == 3

  opt = Further(family.optimizers.SGD(0.5), initial_scale=64.0)
  assert type(opt).from_config(opt.get_config()).initial_scale == 64.0


@keras_cases.each_family
def test_derived_classes_are_kept(family):
  # Horovod's DistributedOptimizer makes its classes in this way.
  opt = make_ours(family)
  derived = type("LossScaleOptimizer", (type(opt),), {"extra": lambda self: "kept"})
  assert derived.from_config(opt.get_config()).extra() == "kept"
  # later Keras optimizers are copied by their configurations, or cannot be copied
  if family.name == "v2":
    assert copy.deepcopy(derived(family.optimizers.SGD(0.5))).extra() == "kept"


@keras_cases.each_family
def test_keras_serializes_wrapper(family):
  name = {"name": "mine"} if family.name == "keras3" else {}
  counts = not family.counts_skipped  # not the default
  arguments = dict(
    initial_scale=64.0, dynamic_growth_steps=5, count_skipped_steps=counts, **name
  )
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.5), **arguments)
  serialized = family.keras.optimizers.serialize(opt)
  assert serialized["class_name"] == type(make_native(family)).__name__
  again = family.keras.optimizers.deserialize(
    serialized, custom_objects=mp_keras.CUSTOM_OBJECTS
  )
  assert (
    isinstance(again, mp_keras.LossScaleOptimizer)
    and again.get_config() == opt.get_config()
  )
  assert again.get_config()["count_skipped_steps"] is counts
  if name:
    del arguments["count_skipped_steps"]  # which Keras's own class does not know
    opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.5), **arguments)
    native = family.keras.optimizers.deserialize(family.keras.optimizers.serialize(opt))
    assert again.name == opt.name == native.name == "mine"


@keras_cases.each_family
def test_classes_are_pickled(family, monkeypatch):
  """As by libraries that send the class of an optimizer to other processes."""
  concrete = type(mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.5)))
  derived = type(concrete)("Derived", (concrete,), {"__module__": __name__})
  monkeypatch.setitem(globals(), "Derived", derived)
  for cls in (concrete, derived):
    assert pickle.loads(pickle.dumps(cls)) is cls


def get_pickled(optimizer):
  return pickle.loads(pickle.dumps(optimizer))


@keras_cases.each_family
@pytest.mark.parametrize(
  "duplicate", [get_pickled, copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_duplicates_keep_class(family, duplicate):
  opt = mp_keras.LossScaleOptimizer(
    family.optimizers.SGD(0.5), initial_scale=64.0, dynamic_growth_steps=5
  )
  # Keras 2.4 to 2.15 cannot pickle wrappers, and cannot copy its newer optimizers.
  try:
    duplicate(
      make_native(family) if duplicate is get_pickled else family.optimizers.SGD(0.5)
    )
  except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
    with pytest.raises(type(error)):
      duplicate(opt)
  else:
    made = duplicate(opt)
    assert type(made) is type(opt)
    assert remove_names(made.get_config()) == remove_names(opt.get_config())


@pytest.mark.each_choice
@pytest.mark.skipif(
  keras_cases.VERSION < (2, 10), reason="earlier versions cannot copy models"
)
@keras_cases.each_family
@pytest.mark.parametrize(
  "duplicate, loss_scale",
  [
    pytest.param(get_pickled, 8.0, id="pickle-fixed"),
    pytest.param(
      copy.deepcopy, mp_compat.DynamicLossScale(8.0, 5), id="deepcopy-object"
    ),
    pytest.param(copy.deepcopy, 8.0, id="deepcopy-fixed", marks=pytest.mark.matrix),
    pytest.param(get_pickled, "dynamic", id="pickle-dynamic", marks=pytest.mark.matrix),
  ],
)
def test_copies_of_models_skip_steps_in_scope(family, duplicate, loss_scale, caplog):
  if family.name == "v2" and (2, 12) <= keras_cases.VERSION < (2, 15):
    pytest.skip("Keras 2.12 to 2.14 copies no model with an OptimizerV2")
  if family.name == "newer" and keras_cases.VERSION[:2] == (2, 11):
    pytest.skip("Keras 2.11 copies no model with its own wrapper of such an optimizer")
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.5), loss_scale)
  model = goldens.train_model(family, opt)
  is_fixed = loss_scale == 8.0
  with family.keras.utils.custom_object_scope(mp_keras.CUSTOM_OBJECTS):
    copied = duplicate(model)
  assert type(copied.optimizer) is type(opt) and copied.optimizer.dynamic != is_fixed
  if is_fixed:
    assert copied.optimizer.initial_scale == 8.0
  before = [value.tolist() for value in copied.get_weights()]
  copied.fit(np.array([[1.0, np.inf, 1.0]]), np.ones([1, 2]), verbose=0)
  assert [value.tolist() for value in copied.get_weights()] == before
  is_silent = "applies steps that are not finite" not in caplog.text
  assert is_silent == (not is_fixed or family.name == "keras3")


@keras_cases.needs_keras_3
def test_copy_with_fixed_scale_out_of_scope_raises():
  family = keras_cases.FAMILIES[-1]
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.5), 8.0)
  with pytest.raises(ValueError, match="dynamic=False"):
    copy.deepcopy(goldens.train_model(family, opt))


@pytest.mark.matrix
@pytest.mark.skipif(
  not hasattr(V2.keras.utils, "register_keras_serializable"),
  reason="Keras has no registry",
)
@pytest.mark.parametrize("family,form", FORMS, ids=str)
def test_registered_subclass_loads(family, form, tmp_path):

  @family.keras.utils.register_keras_serializable("tests of {}{}".format(family, form))
  class Registered(mp_keras.LossScaleOptimizer):
    """A subclass, which Keras finds in its registry."""

  made = goldens.train_model(
    family, Registered(family.optimizers.SGD(0.5), initial_scale=64.0)
  )
  path = str(tmp_path / "model") + form
  made.save(path)
  assert isinstance(family.keras.models.load_model(path).optimizer, Registered)
