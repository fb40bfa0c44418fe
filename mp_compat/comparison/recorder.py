# SPDX-License-Identifier: Apache-2.0
"""Runs a program in this process, and records all variables before its first train step and after each.

    python -m mp_compat.comparison.recorder SETTINGS PROGRAM [ARGUMENT ...]

A train step is a run of a session that may change a variable other than by initializing or restoring it. Variables are
read through tensors that the graph has already: nothing is added to it, and it may be finalized.
"""

import atexit
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import sys
import threading
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set
import weakref

import numpy as np

import mp_compat
from mp_compat._tensorflow import graphs
from mp_compat._tensorflow import log
from mp_compat._tensorflow import sessions
from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.comparison import recording
from mp_compat.migration import program

ORIGINAL, SCALED, UNSCALED = "original", "mp_compat", "without"
_OPTIMIZERS = ("mp_compat.training.optimizer", "mp_compat.keras.loss_scale_optimizer")  # modules that are then imported
SHOWN = 3  # variables whose values are kept where they differ


class Settings(NamedTuple):
  """What the parent passes, as JSON."""

  run: str  # ORIGINAL, SCALED or UNSCALED
  recording: str  # the file to write; values of variables go to files beside it
  steps: int
  every: int
  reference: Optional[str]  # the recording to compare with
  keep: Dict[str, List[str]]  # variables whose values are kept, by the index of the record


class _Graph:
  """What is known of a graph."""

  def __init__(self, number: int) -> None:
    self.number = number
    self.version = -1  # the number of ops when the attributes below were computed
    self.effects: Dict[str, sessions.Effects] = {}
    self.tensors: Dict[str, tf.Tensor] = {}
    self.variables: Any = None


class Recorder:
  """Records the runs of all sessions of this process."""

  def __init__(self, settings: Settings) -> None:
    self._settings = settings
    self._file: Any = open(settings.recording, "w", encoding="utf-8", buffering=1)  # complete after each line
    self._reference = recording.records(settings.reference) if settings.reference else iter(())
    self._lock = threading.Lock()
    self._pid = os.getpid()
    self._noted: Dict[str, Any] = {}
    self._step = self._index = 0
    self._steps: Any = weakref.WeakKeyDictionary()  # the number of train steps of each session
    self._differs = False
    self._numbers = itertools.count()
    self._last: Any = weakref.WeakKeyDictionary()  # the last digests of each session

  def note(self, kind: str, value: Any) -> None:
    """Writes a note, unless it is the same as the last of this kind."""
    if self._noted.get(kind) != value:
      self._noted[kind] = value
      self._write(note=kind, value=value)

  def around(self, sess: Any, elements: List[Any], run: Callable[[], Any]) -> Any:
    """Runs, and records the variables before and after it if this is a train step; see `sessions.observe`."""
    with self._lock:
      graph = self._graph(sess.graph)
      fetched = ",".join(sorted({element.name for element in elements}))
      if fetched not in graph.effects:
        graph.effects[fetched] = sessions.effects(sess.graph, elements)
      effects = graph.effects[fetched]
      is_step = effects.trains and os.getpid() == self._pid
      if effects.trains and not is_step:
        self.note("unseen", "Training in a forked process")
      elif is_step and sess not in self._last:
        self._record(sess, graph, effects, starts=True)
      is_step = is_step and not effects.written.isdisjoint(self._last.get(sess, ()))
      if effects.written and not is_step:
        self._last.pop(sess, None)  # Variables are initialized or restored: the next step has another start.
    result = run()
    if is_step:
      with self._lock:
        self._step += 1
        self._steps[sess] = self._steps.get(sess, 0) + 1
        self.note("steps", self._step)
        if self._steps[sess] % self._settings.every == 0:
          self._record(sess, self._graph(sess.graph), effects)
        if self._step == self._settings.steps:
          self._exit()
    return result

  def _graph(self, graph: tf.Graph) -> _Graph:
    """Returns what is known of a graph; computes it again if ops were added to it."""
    known = graphs.record_in(graph, "recording", lambda: _Graph(next(self._numbers)))
    if known.version != graph.version:
      known.version, known.effects = graph.version, {}
      tensors = sessions.variable_values(graph)
      if list(tensors) != list(known.tensors):
        shapes = {
          name: [-1] if tensor.shape.ndims is None else tensor.shape.as_list() for name, tensor in tensors.items()
        }
        renamed = files.tensorflow_names(graph) if self._settings.run == SCALED else {}
        known.variables = recording.Variables(shapes, renamed)
        self._write(graph=known.number, shapes=shapes, tensorflow_names=renamed)
      known.tensors = tensors
    return known

  def _record(self, sess: Any, graph: _Graph, effects: sessions.Effects, starts: bool = False) -> None:
    """Records the variables: before the first step of a session (`starts`), or after a step.

    Nothing starts if no variable that the run may change has a value yet: initializers may read other variables.
    """
    unreadable = sorted(effects.written.difference(graph.tensors))
    if unreadable:
      self.note("unreadable", unreadable)
    before = self._last.get(sess, {})
    names = graph.tensors if starts else {*before, *effects.written}.intersection(graph.tensors)
    values = sessions.read(sess, {name: graph.tensors[name] for name in names})
    digests = {name: _digest(value) for name, value in values.items()}
    if starts and effects.written.isdisjoint(digests):
      return
    changed = {name for name, digest in digests.items() if before.get(name) != digest}
    state = graph.variables.state
    record = recording.Record(
      variables=graph.variables,
      digests={name: digests.get(name) for name in graph.tensors},
      starts=starts,
      step=self._step,
      applied=self._applies(changed, effects, state),
      may_skip=self._may_skip(effects, state),
      written=_digest(sorted(effects.written)),
      scales={name: float(values[name]) for name, role in state.items() if role.endswith("scale") and name in values},
      global_step=np.asarray(values.get("global_step")).tolist(),
    )
    line = dict(record._asdict(), variables=graph.number, digests=list(record.digests.values()))
    self._write(**line)
    self._last[sess] = digests
    self._keep_values(values, record)
    self._index += 1
    if self._settings.run == ORIGINAL and not sys.modules.keys().isdisjoint(_OPTIMIZERS):
      self.note("uses", "mp_compat")

  def _applies(self, changed: Set[str], effects: sessions.Effects, state: Mapping[str, str]) -> bool:
    """Returns whether a step that changed these variables updated more than loss scales, global_step and averages."""
    changed = changed & effects.gated if self._may_skip(effects, state) else changed
    return bool(_without_counts(changed, state))

  def _may_skip(self, effects: sessions.Effects, state: Mapping[str, str]) -> bool:
    """Returns whether the optimizer is in a conditional of loss scaling."""
    wraps = self._settings.run == SCALED and "uses" in self._noted
    return bool(_without_counts(effects.gated, state)) and (wraps or not effects.written.isdisjoint(state))

  def _keep_values(self, values: Dict[str, Any], record: recording.Record) -> None:
    """Keeps values where they first differ from the reference; ends a run that starts from other values than that."""
    names = self._settings.keep.get(str(self._index), [])
    reference = None if self._differs else next(self._reference, None)
    if reference:
      pairs = recording.differences(reference, record, self._settings.run != UNSCALED)
      self._differs = bool(pairs)
      if pairs and not self._index and all(map(all, pairs)):
        self._exit()
      names = names or [name for _, name in pairs if name]
    numbers = {name: _as_numbers(values[name]) for name in names if name in values}
    if names:
      np.savez(
        "{}.{}.npz".format(self._settings.recording, self._index),
        finite=np.array([np.isfinite(array).all() for array in numbers.values()]),
        **{name + ":0": numbers[name] for name in list(numbers)[:SHOWN]},
      )

  def note_processes(self) -> None:
    """Notes whether the program waited for processes that used the CPU for more than a second."""
    if sum(os.times()[2:4]) > 1 and os.getpid() == self._pid:
      self.note("processes", True)

  def _exit(self) -> None:
    """Ends the process at once: an exception could be caught by the program."""
    self.note_processes()
    with contextlib.suppress(Exception):
      sys.stdout.flush()
      sys.stderr.flush()
    os._exit(0)

  def _write(self, **line: Any) -> None:
    self._file.write(json.dumps(line) + "\n")


def _note_warnings(recorder: Recorder) -> None:
  """Notes the warnings of this package, also those that the program's verbosity hides."""
  messages: Set[str] = set()

  def note(message: str) -> None:
    messages.add(message)
    recorder.note("warnings", sorted(messages))

  log.observers.append(note)


def _without_counts(names: Iterable[str], state: Mapping[str, str]) -> Set[str]:
  """Returns the names of variables other than global_step and those of loss scales."""
  return {name for name in names if re.sub("/replica_[0-9]+$", "", name) not in {*state, "global_step"}}


def _digest(value: Any) -> str:
  """Returns a digest of the dtype, the shape and the bits of a value."""
  array = np.asarray(value)
  digest = hashlib.sha1("{} {}".format(array.dtype, array.shape).encode())  # the fastest on most CPUs
  bits: Any = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).view(np.uint8)
  digest.update(bits)
  return digest.hexdigest()[:16]


def _as_numbers(value: Any) -> Any:
  """Returns a value as float64 or complex128, which NumPy can write; the number of its elements for strings."""
  array = np.asarray(value)
  return array.size if array.dtype.kind in "OSU" else array.astype("c16" if array.dtype.kind == "c" else "f8")


def _install(settings: Settings, recorder: Recorder) -> None:
  """Makes this package the program's loss scaling; without loss scaling, makes its optimizers the inner ones."""
  from mp_compat.keras import loss_scale_optimizer as keras_optimizer
  from mp_compat.migration import installation

  installation.install()
  _note_warnings(recorder)
  optimizer: Any = mp_compat.MixedPrecisionLossScaleOptimizer
  keras: Any = keras_optimizer.LossScaleOptimizer
  for wrapper in (optimizer, keras):
    wrapper.__init__ = _noting(wrapper.__init__, recorder, settings.run == UNSCALED)
  if settings.run == UNSCALED:
    optimizer.compute_gradients = lambda self, *args, **kwargs: self._optimizer.compute_gradients(*args, **kwargs)
    optimizer.apply_gradients = lambda self, *args, **kwargs: self._optimizer.apply_gradients(*args, **kwargs)
    keras._apply = lambda self, pairs, apply: apply(list(pairs))


def _noting(construct: Callable[..., None], recorder: Recorder, unscaled: bool) -> Callable[..., None]:
  @functools.wraps(construct)
  def construct_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
    construct(self, *args, **kwargs)
    recorder.note("uses", "mp_compat")
    if unscaled:
      self._loss_scale = mp_compat.FixedLossScale(1)

  return construct_and_note


def main() -> None:
  """Runs the program of the command line."""
  with open(sys.argv[1], encoding="utf-8") as file:
    settings = Settings(**json.load(file))
  recorder = Recorder(settings)
  atexit.register(recorder.note_processes)
  recorder.note("tensorflow", tf.__version__)
  if settings.run != ORIGINAL:
    _install(settings, recorder)
  sessions.observe(recorder.around)
  sessions.on_eager_gradients(lambda: recorder.note("unseen", "Eager training"))
  sessions.make_seeds_repeatable()
  random.seed(0)
  np.random.seed(0)
  program.execute(*program.load(sys.argv[2:]))


if __name__ == "__main__":
  main()
