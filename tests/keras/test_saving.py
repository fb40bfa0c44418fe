"""The Keras wrapper saved: configurations of every era, whole models, checkpoints to and from TensorFlow's class."""

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

V2 = keras_cases.V2
each_family = pytest.mark.parametrize("family", keras_cases.FAMILIES, ids=repr)
each_golden = pytest.mark.parametrize("folder", goldens.folders().values(), ids=goldens.folders())


@pytest.fixture(autouse=True)
def _eager():
  with testing.eager_mode():
    yield


def ours(family, **kwargs):
  return mp_keras.LossScaleOptimizer(
      family.optimizers.Adam(0.1), initial_scale=goldens.SCALE, dynamic_growth_steps=goldens.GROWTH, **kwargs)


def theirs(family):
  return family.native_dynamic(family.optimizers.Adam(0.1), goldens.SCALE, goldens.GROWTH)


def trained(optimizer):
  run = keras_cases.Run(optimizer, sparse=False)
  for x in goldens.inputs()[0]:
    run.step(tf.constant(x))
  return run


def assert_goes_on(path, optimizer, expected):
  """Restored from there, before its first step, a fresh run comes to what was expected."""
  run = keras_cases.Run(optimizer, sparse=False)
  goldens.checkpoint(run).restore(path).assert_existing_objects_matched()
  testing.assert_same([goldens.go_on(run)], [expected])


@each_golden
def test_a_checkpoint_of_tensorflows_class_goes_on_whatever_version_wrote_it(folder):
  with np.load(os.path.join(folder, "expected.npz")) as expected:
    held = os.path.basename(folder) in ("1.15", "2.1", "2.2")
    assert_goes_on(os.path.join(folder, "ckpt-1"), ours(V2, count_skipped_steps=not held), dict(expected))


@each_golden
def test_a_checkpoint_is_restored_into_an_optimizer_that_was_used_too(folder):
  run = trained(ours(V2))
  goldens.checkpoint(run).restore(os.path.join(folder, "ckpt-1")).assert_existing_objects_matched()
  with np.load(os.path.join(folder, "expected.npz")) as expected:
    testing.assert_same([goldens.go_on(run)], [dict(expected)])


@each_family
def test_checkpoints_go_to_and_from_tensorflows_class_here(family, tmp_path):
  writers = {"ours": ours}
  if family.name != "keras3":
    writers["theirs"] = theirs
  for writer, make in writers.items():
    count = {"count_skipped_steps": keras_cases.VERSION >= (2, 3)} if make is ours else {}
    run = trained(make(family, **count))
    path = goldens.checkpoint(run).save(str(tmp_path / writer))
    expected = goldens.go_on(run)
    for other in writers.values():
      assert_goes_on(path, other(family), expected)


@pytest.mark.parametrize("folder", [
    pytest.param(folder, id=version, marks=pytest.mark.skipif(
        keras_cases.VERSION < tuple(map(int, version.split("."))), reason="Keras reads no models of later versions"))
    for version, folder in goldens.folders().items() if os.path.exists(os.path.join(folder, "model.h5"))])
def test_a_model_of_tensorflows_class_loads(folder):
  model = V2.keras.models.load_model(os.path.join(folder, "model.h5"), custom_objects=mp_keras.CUSTOM_OBJECTS)
  opt = model.optimizer
  assert isinstance(opt, mp_keras.LossScaleOptimizer)
  assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == (True, goldens.SCALE, goldens.GROWTH)
  assert [np.shape(value) for value in opt.get_weights()] == [(), (3, 2), (2,), (3, 2), (2,)]
  assert opt.get_weights()[0] == 1 and int(keras_cases.numpy(opt.iterations)) == 1
  moments = opt.get_weights()[1]
  model.fit(np.ones([4, 3], np.float32), np.ones([4, 2], np.float32), verbose=0)
  assert (opt.get_weights()[1] != moments).any() and int(keras_cases.numpy(opt.iterations)) == 2


def kept(opt):
  """What a file keeps of an optimizer."""
  variables = opt.variables() if callable(opt.variables) else opt.variables
  return [keras_cases.numpy(variable).tolist() for variable in variables]


FORMS = [(family, form) for family in keras_cases.FAMILIES for form in (".h5", ".keras", "")
         if family.name != "keras3" or form]  # Keras 3 reads no SavedModel.


@pytest.mark.parametrize("family,form", FORMS, ids=str)
def test_a_whole_model_comes_back_with_what_keras_gives_a_plain_optimizer_back(family, form, tmp_path):
  before, after = {}, {}
  for kind, optimizer in [("ours", ours(family)), ("plain", family.optimizers.Adam(0.1))]:
    before[kind] = goldens.model(family, optimizer)
    path = str(tmp_path / kind) + form
    before[kind].save(path)
    after[kind] = family.keras.models.load_model(path, custom_objects=mp_keras.CUSTOM_OBJECTS)
  opt = after["ours"].optimizer
  assert isinstance(opt, mp_keras.LossScaleOptimizer)
  assert opt.get_config() == before["ours"].optimizer.get_config()
  assert kept(opt.inner_optimizer) == kept(after["plain"].optimizer)
  x = np.ones([4, 3], np.float32)
  assert after["ours"].predict(x, verbose=0).tolist() == before["ours"].predict(x, verbose=0).tolist()
  if (family.name, form) != ("keras3", ".h5"):  # after which Keras 3 cannot train, with any optimizer
    after["ours"].fit(x, np.ones([4, 2], np.float32), verbose=0)


needs_own_loading = pytest.mark.skipif(keras_cases.VERSION < (2, 3), reason="Keras loads no wrapper before 2.3")


@needs_own_loading
@pytest.mark.parametrize("family,form", FORMS, ids=str)
def test_saved_models_load_without_custom_objects(family, form, tmp_path):
  """They load as Keras's own wrapper, as models saved with it do, and train on with the same numbers."""
  weights = []
  for make in (ours, theirs):
    path = str(tmp_path / make.__name__) + form
    goldens.model(family, make(family)).save(path)
    model = family.keras.models.load_model(path)
    assert type(model.optimizer) is type(theirs(family))
    if (family.name, form) != ("keras3", ".h5"):  # after which Keras 3 cannot train, with any optimizer
      model.fit(np.ones([4, 3], np.float32), np.ones([4, 2], np.float32), verbose=0)
    weights.append([weight.tolist() for weight in model.get_weights()])
  assert weights[0] == weights[1]


@needs_own_loading
@each_family
def test_configurations_load_without_custom_objects(family):
  opt = ours(family)
  for load in (family.keras.optimizers.deserialize, family.keras.optimizers.get):
    again = load(family.keras.optimizers.serialize(opt))
    assert type(again) is type(theirs(family))
    assert without_names(again.get_config()) == without_names(theirs(family).get_config())


def without_names(config):
  """Returns a configuration without the names that Keras 3 counts up."""
  if not isinstance(config, dict):
    return config
  return {key: without_names(value) for key, value in config.items() if key != "name"}


KERAS_3_OPTIMIZERS = [
    name for name, value in sorted(vars(keras_cases.FAMILIES[-1].keras.optimizers).items())
    if isinstance(value, type) and name not in ("LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap")]


@keras_cases.needs_keras_3
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in ("Lamb", "ScheduleFreeAdamW") else pytest.mark.slow)
    for name in KERAS_3_OPTIMIZERS])
def test_models_of_every_keras_3_optimizer_train_and_load(name, tmp_path):
  family = keras_cases.FAMILIES[-1]
  x, y = np.arange(12, dtype=np.float32).reshape([4, 3]), np.ones([4, 2], np.float32)
  weights = []
  for wrap in (lambda opt: opt, lambda opt: mp_keras.LossScaleOptimizer(opt, initial_scale=8.)):
    model = family.keras.Sequential([family.keras.layers.Dense(2, kernel_initializer="ones")])
    model.compile(loss=family.keras.losses.MeanSquaredError(), optimizer=wrap(getattr(family.optimizers, name)()),
                  jit_compile=False)
    model.fit(x, y, verbose=0, shuffle=False)
    model.save(str(tmp_path / "model.keras"))
    model = family.keras.models.load_model(
        str(tmp_path / "model.keras"), custom_objects=mp_keras.CUSTOM_OBJECTS)
    model.fit(x, y, verbose=0, shuffle=False)
    weights.append([weight.tolist() for weight in model.get_weights()])
  assert isinstance(model.optimizer, mp_keras.LossScaleOptimizer)
  assert weights[0] == weights[1]


INNER = {"plain": {}, "moving_average": {"use_ema": True}, "accumulation": {"gradient_accumulation_steps": 2}}


@keras_cases.needs_keras_3
@pytest.mark.parametrize("reader", [ours, theirs])
@pytest.mark.parametrize("writer", [ours, theirs])
@pytest.mark.parametrize("arguments", [
    pytest.param(arguments, id=name, marks=[] if name == "plain" else pytest.mark.slow)
    for name, arguments in INNER.items()])
def test_keras_3_continues_from_either_wrapper(arguments, writer, reader, tmp_path):
  family = keras_cases.FAMILIES[-1]
  x, y = np.arange(27, dtype=np.float32).reshape([9, 3]) / 9, np.ones([9, 2], np.float32)

  def model(make):
    keras = family.keras
    made = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(2, kernel_initializer="ones")])
    opt = make(family)
    opt = type(opt)(family.optimizers.Adam(.1, **arguments), initial_scale=8., dynamic_growth_steps=3)
    made.compile(loss=keras.losses.MeanSquaredError(), optimizer=opt, jit_compile=False)
    opt.build(made.trainable_variables)
    return made

  def fit(made, examples):
    made.fit(x[examples], y[examples], batch_size=1, shuffle=False, verbose=0)

  def state(made):
    return [keras_cases.numpy(value).tolist() for value in made.weights + made.optimizer.variables]

  before = model(writer)
  fit(before, slice(5))
  path = tf.train.Checkpoint(model=before, optimizer=before.optimizer).save(str(tmp_path / "model"))
  after = model(reader)
  tf.train.Checkpoint(model=after, optimizer=after.optimizer).restore(path).assert_existing_objects_matched()
  assert state(after) == state(before)
  for made in (before, after):
    fit(made, slice(5, 9))
  assert state(after) == state(before) and float(after.optimizer.dynamic_scale) > 8.


@keras_cases.needs_keras_3
def test_keras_3_wrapper_keeps_its_name():
  optimizers = keras_cases.FAMILIES[-1].optimizers
  opt = mp_keras.LossScaleOptimizer(optimizers.SGD(), name="mine")
  assert opt.name == optimizers.deserialize(optimizers.serialize(opt)).name == "mine"
  assert mp_keras.LossScaleOptimizer.from_config(opt.get_config()).name == "mine"


@keras_cases.needs_keras_3
def test_files_of_keras_3_hold_the_scale(tmp_path):
  family = keras_cases.FAMILIES[-1]
  model = goldens.model(family, ours(family))
  for x in ([[1., np.inf, 1.]], [[1., 1., 1.]]):
    model.fit(np.array(x), np.ones([1, 2]), verbose=0)
  assert float(model.optimizer.loss_scale) == goldens.SCALE / 2
  model.save(str(tmp_path / "model.keras"))
  after = family.keras.models.load_model(str(tmp_path / "model.keras"), custom_objects=mp_keras.CUSTOM_OBJECTS)
  assert kept(after.optimizer) == kept(model.optimizer)
  assert float(after.optimizer.loss_scale) == goldens.SCALE / 2 and int(after.optimizer.dynamic_counter) == 1
  # In the order of Keras's own class, so that its variables and these are each other's.
  native = goldens.model(family, theirs(family))
  assert [np.shape(value) for value in kept(native.optimizer)] == [np.shape(value) for value in kept(model.optimizer)]
  names = [[variable.path.split("/")[-1] for variable in optimizer.variables[:6]]
           for optimizer in (model.optimizer, native.optimizer)]
  assert names[0] == names[1]


# Configurations as TensorFlow's class wrote them, by version, and what they mean.
SGD = {"class_name": "SGD", "config": {
    "name": "SGD", "learning_rate": 0.5, "decay": 0.0, "momentum": 0.0, "nesterov": False}}
CONFIGS = [
    ({"optimizer": SGD, "loss_scale": {"class_name": "DynamicLossScale", "config": {
        "initial_loss_scale": 64., "increment_period": 5, "multiplier": 2.}}}, (True, 64., 5, 2.)),
    ({"optimizer": SGD, "loss_scale": {"class_name": "DynamicLossScale", "config": {
        "initial_loss_scale": 64., "increment_period": 5, "multiplier": 4.}}}, (True, 64., 5, 4.)),
    ({"optimizer": SGD, "loss_scale": {"class_name": "FixedLossScale", "config": {"loss_scale_value": 32.}}},
     (False, 32., None, None)),
    ({"inner_optimizer": SGD, "dynamic": True, "initial_scale": 64., "dynamic_growth_steps": 5}, (True, 64., 5, 2.)),
    ({"inner_optimizer": SGD, "dynamic": False, "initial_scale": 32., "dynamic_growth_steps": None},
     (False, 32., None, None)),
]


@pytest.mark.parametrize("config,meaning", CONFIGS, ids=["2.0", "2.0-times-4", "2.0-fixed", "2.4", "2.4-fixed"])
@pytest.mark.parametrize("cls", [mp_keras.LossScaleOptimizer, mp_keras.experimental.LossScaleOptimizer],
                         ids=["later", "experimental"])
def test_a_configuration_of_every_era_loads_and_returns(cls, config, meaning):
  before = repr(config)
  opt = cls.from_config(config)
  assert isinstance(opt, cls) and repr(config) == before
  described = opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps, opt.loss_scale.get_config().get("multiplier")
  assert described == meaning and keras_cases.numpy(opt.lr) == .5
  again = cls.from_config(opt.get_config())
  assert again.get_config() == opt.get_config()
  assert ("loss_scale" in opt.get_config()) == (meaning[3] == 4. or keras_cases.VERSION < (2, 4))
  assert opt.get_config() == mp_keras.LossScaleOptimizer.from_config(config).get_config()


def test_what_the_later_form_cannot_say_is_said_in_the_earlier_one():
  scale = mp_compat.DynamicLossScale(64., 5, overflow_tolerance=3)
  opt = mp_keras.LossScaleOptimizer(V2.optimizers.SGD(0.5), scale)
  assert opt.get_config()["loss_scale"] == {"class_name": "DynamicLossScale", "config": scale.get_config()}
  again = mp_keras.LossScaleOptimizer.from_config(opt.get_config())
  assert again.loss_scale.overflow_tolerance == 3


@each_family
def test_a_configuration_may_hold_the_optimizer_itself(family):
  # As Keras hands it over where it has made the inner objects first.
  inner = family.optimizers.SGD(0.5)
  opt = type(ours(family)).from_config({"inner_optimizer": inner, "dynamic": False, "initial_scale": 2.})
  assert opt.inner_optimizer is inner


@pytest.mark.skipif(len(keras_cases.FAMILIES) == 1, reason="this TensorFlow has one kind of Keras optimizers")
def test_the_optimizer_itself_may_be_of_another_kind_than_the_class_that_is_asked():
  inner = keras_cases.FAMILIES[1].optimizers.SGD(0.5)
  opt = type(ours(V2)).from_config({"inner_optimizer": inner, "dynamic": False, "initial_scale": 2.})
  assert opt.inner_optimizer is inner and type(opt) is type(ours(keras_cases.FAMILIES[1]))


@keras_cases.needs_keras_3
def test_what_only_keras_2_can_read_asks_for_tf_keras(monkeypatch):
  config = ours(V2).get_config()
  monkeypatch.setattr(optimizer_kinds, "_exists", lambda module: module != "tf_keras")
  with pytest.raises(ValueError, match="of a Keras 2 optimizer, but the Keras here is Keras 3.*pip install tf_keras"):
    mp_keras.LossScaleOptimizer.from_config(config)


def test_classes_of_ones_own_are_found_among_the_custom_objects():

  class Mine(V2.optimizers.SGD):
    """An optimizer of one's own."""

  class Ten(mp_compat.LossScale):
    """A loss scale of one's own."""

    def __call__(self):
      return tf.constant(10.)

    def update(self, grads):
      return None, True

    def get_config(self):
      return {}

  opt = mp_keras.LossScaleOptimizer(Mine(0.5), Ten())
  config = opt.get_config()
  assert config["loss_scale"] == {"class_name": "Ten", "config": {}}
  again = type(opt).from_config(config, custom_objects={"Mine": Mine, "Ten": Ten})
  assert isinstance(again.inner_optimizer, Mine) and float(again.loss_scale) == 10.


@each_family
def test_a_subclass_of_what_it_is_made_into_is_kept(family):
  # As Horovod's DistributedOptimizer makes its classes.
  opt = ours(family)
  derived = type("LossScaleOptimizer", (type(opt),), {"extra": lambda self: "kept"})
  assert derived.from_config(opt.get_config()).extra() == "kept"
  if family.name == "v2":  # Keras's later optimizers copy themselves by their configurations, or not at all
    assert copy.deepcopy(derived(family.optimizers.SGD(.5))).extra() == "kept"


@each_family
def test_keras_serializes_and_deserializes_it(family):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.5), initial_scale=64., dynamic_growth_steps=5,
                                    count_skipped_steps=False)
  optimizers = family.keras.optimizers
  serialized = optimizers.serialize(opt)
  assert serialized["class_name"] == type(theirs(family)).__name__
  again = optimizers.deserialize(serialized, custom_objects=mp_keras.CUSTOM_OBJECTS)
  assert isinstance(again, mp_keras.LossScaleOptimizer) and again.get_config() == opt.get_config()
  assert again.get_config()["count_skipped_steps"] is False


@each_family
def test_copies_and_pickles_are_of_the_same_class(family):
  opt = mp_keras.LossScaleOptimizer(family.optimizers.SGD(0.5), initial_scale=64., dynamic_growth_steps=5)
  duplicates = []
  try:
    pickle.dumps(theirs(family))
  except (AttributeError, NotImplementedError, TypeError):
    pass  # Keras 2.4 to 2.15 pickle no optimizers
  else:
    duplicates.append(pickle.loads(pickle.dumps(opt)))
  try:
    copy.deepcopy(opt.inner_optimizer)
  except RuntimeError:
    pass  # Keras 2's newer optimizers cannot be copied
  else:
    duplicates.append(copy.deepcopy(opt))
  if not duplicates:
    pytest.skip("Keras can neither pickle nor copy these optimizers")
  for duplicate in duplicates:
    assert type(duplicate) is type(opt)
    assert without_names(duplicate.get_config()) == without_names(opt.get_config())


@pytest.mark.skipif(not hasattr(V2.keras.utils, "register_keras_serializable"), reason="Keras has no registry")
@pytest.mark.parametrize("family,form", FORMS, ids=str)
def test_registered_subclasses_load(family, form, tmp_path):

  @family.keras.utils.register_keras_serializable("tests of {}{}".format(family, form))
  class Registered(mp_keras.LossScaleOptimizer):
    """A subclass, which Keras finds in its registry."""

  made = goldens.model(family, Registered(family.optimizers.SGD(0.5), initial_scale=64.))
  path = str(tmp_path / "model") + form
  made.save(path)
  assert isinstance(family.keras.models.load_model(path).optimizer, Registered)
