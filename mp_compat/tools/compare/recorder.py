# SPDX-License-Identifier: Apache-2.0
"""Runs a program in this process, and records all variables before its first train step
and after each.

    python -m mp_compat.tools.compare.recorder SETTINGS PROGRAM [ARGUMENT ...]

A train step is a run of a session that executes what `apply_gradients` of an optimizer
returned. Variables are read through tensors that the graph has already, so that it may
be finalized.

A recording has one JSON object in a line: the variables of a graph, a record of their
values, or notes on the run.
"""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import sys
import tempfile
import threading
from typing import (
  Any,
  Callable,
  Dict,
  FrozenSet,
  Iterator,
  List,
  NamedTuple,
  Optional,
  Set,
  Tuple,
  Union,
)
import weakref
import zlib

import numpy as np

import mp_compat
from mp_compat._tensorflow import log
from mp_compat._tensorflow import tf
from mp_compat.checkpoints import files
from mp_compat.checkpoints import matching
from mp_compat.core import loss_scale
from mp_compat.core import naming_schemes
from mp_compat.graph import graphs
from mp_compat.tools import run
from mp_compat.tools.compare import processes
from mp_compat.tools.compare import sessions
from mp_compat.training import step

ORIGINAL, SCALED, UNSCALED = "original", "mp_compat", "without"
# imported if one is used
_OPTIMIZERS = ("mp_compat.training.optimizer", "mp_compat.keras.loss_scale_optimizer")
SHOWN = 3  # variables whose values are kept where they differ

Notes = Dict[str, Any]  # what `Recorder.note` wrote on a run, by kind
Values = Dict[str, Any]  # of variables by name, as a session returns them


class Settings(NamedTuple):
  """What the parent passes, as JSON."""

  run: str  # ORIGINAL, SCALED or UNSCALED
  recording: str  # the file to write; values of variables go to files beside it
  steps: int
  every: int
  reference: Optional[str]  # the recording to compare with
  # variables whose values are kept, by the index of the record
  keep: Dict[str, List[str]]


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first record that differs from that of the reference. Pairs have the
  reference's value first.
  """

  index: int  # of the record
  step: int  # the number of steps before it
  starts: bool  # whether it is the record before the first step of a session
  # the variables that differ; None for one that a run lacks
  names: Tuple[List[Optional[str]], List[Optional[str]]]
  # how many decisions were to skip a step, since the record before
  skipped: Tuple[int, int]
  global_step: Tuple[Any, Any]

  @property
  def is_of_initial_values(self) -> bool:
    """Returns whether the runs have the same variables, and start from other values."""
    return not self.index and all(map(all, self.names))


@dataclasses.dataclass(eq=False)
class Variables:
  """The variables of a graph."""

  shapes: Dict[str, List[int]]  # in the order in which they were created
  # the names that TensorFlow's class gives to some of them
  tensorflow_names: Dict[str, str]
  state: Dict[str, str]  # those of loss scales, and their roles


_Line = Dict[str, Any]
_Record = Tuple[Variables, _Line]
_Pairs = List[Tuple[Optional[str], Optional[str]]]


def read_notes(path: str) -> Notes:
  """Returns the last note of each kind in a recording, which has at least those that
  `Recorder` writes first.
  """
  notes: Notes = {}
  for line in _lines(path):
    notes.update(line.get("notes", {}))
  return notes


def difference_in(notes: Notes) -> Optional[Difference]:
  return Difference(**notes["difference"]) if notes["difference"] else None


def _records(path: str) -> Iterator[_Record]:
  """Yields the records in a recording, each with the variables of its graph."""
  variables: Dict[int, Variables] = {}
  for line in _lines(path):
    if "variables" in line:
      variables[line["graph"]] = Variables(**line["variables"])
    elif "digests" in line:
      yield variables[line["graph"]], line


def _lines(path: str) -> Iterator[_Line]:
  with open(path, encoding="utf-8") as file:
    yield from map(json.loads, file)


@functools.lru_cache(maxsize=16)
def _pairs(reference: Variables, variables: Variables, state: bool) -> _Pairs:
  """Returns pairs of names, None for a variable that only one has; `state`: whether
  those of loss scales count.
  """
  # Shapes are in the order of creation.
  wanted = matching.Variables(
    variables.shapes,
    list(variables.shapes),
    tensorflow_names=variables.tensorflow_names,
  )
  found = matching.Variables(reference.shapes, list(reference.shapes))
  matched = matching.match(wanted, found, matching.differ).names
  missing = set(reference.shapes) - set(matched.values())
  pairs = [(matched.get(name), name) for name in variables.shapes] + [
    (name, None) for name in sorted(missing)
  ]
  return [
    (one, two)
    for one, two in pairs
    if state or one not in reference.state and two not in variables.state
  ]


def _differences(reference: _Record, record: _Record, state: bool) -> _Pairs:
  """Returns the pairs of variables that differ in two records at the same place of
  their recordings.
  """
  theirs, ours = [
    dict(zip(variables.shapes, line["digests"]))
    for variables, line in (reference, record)
  ]
  pairs = _pairs(reference[0], record[0], state)
  return [
    (one, two) for one, two in pairs if not one or not two or theirs[one] != ours[two]
  ]


class _Graph:
  """What is known of a graph."""

  def __init__(self, number: int) -> None:
    self.number = number
    self.version = -1  # the number of ops when the attributes below were computed
    # by what is fetched and fed
    self.effects: Dict[Tuple[FrozenSet[str], FrozenSet[str]], sessions.Effects] = {}
    self.tensors: Dict[str, tf.Tensor] = {}
    self.variables = Variables({}, {}, {})


class _Session:
  """What is known of a session: its train steps, its variables at the last record, and
  what changed since.
  """

  def __init__(self) -> None:
    self.steps = 0
    self.digests: Dict[str, int] = {}
    self.skipped = 0  # how many decisions were to skip a step
    # variables that steps of optimizers may have changed
    self.trained: Set[str] = set()
    self.written: Set[str] = set()  # variables that runs may have changed


class Recorder:
  """Records the runs of all sessions of this process."""

  def __init__(self, settings: Settings) -> None:
    self._settings = settings
    # complete after each line
    self._file = open(settings.recording, "w", encoding="utf-8", buffering=1)
    self._reference = _records(settings.reference) if settings.reference else iter(())
    self._lock = threading.Lock()
    self._pid = os.getpid()
    self._index = 0
    self._numbers = itertools.count()
    # that trained
    self._sessions: weakref.WeakKeyDictionary[tf.Session, _Session] = (
      weakref.WeakKeyDictionary()
    )
    self.notes: Notes = {}
    self.note(
      compared=bool(settings.reference),
      tensorflow=tf.__version__,
      steps=0,
      read=0,
      variables=0,
      scales={},
    )
    self.note(skipped=None, trained=False, scaled=False, difference=None)

  def note(self, **notes: object) -> None:
    """Writes notes, unless they are the same as the last of their kinds."""
    if any(
      kind not in self.notes or self.notes[kind] != value
      for kind, value in notes.items()
    ):
      self.notes.update(notes)
      self._write(notes=notes)

  def around(
    self,
    sess: tf.Session,
    elements: List[Union[tf.Operation, tf.Tensor]],
    fed: FrozenSet[str],
    run: sessions.Run,
  ) -> Any:
    """Runs, and records the variables before and after it if this is a train step; see
    `sessions.observe`.
    """
    with self._lock:
      graph = self._graph(sess.graph)
      key = frozenset(element.name for element in elements), fed
      if key not in graph.effects:
        graph.effects[key] = sessions.effects_of(sess.graph, elements, fed)
      effects = graph.effects[key]
      if effects.steps and os.getpid() != self._pid:
        self.note(unseen="Training in a forked process")
        effects = effects._replace(steps=[], decisions=[])
      if effects.steps and sess not in self._sessions:
        self._sessions[sess] = _Session()
        self._record(sess, graph, starts=True)
    decisions = None
    try:
      result, decisions = run(effects.decisions)
      return result
    finally:
      with self._lock:
        executed = effects._replace(steps=sessions.take_executed(effects.steps))
        if sess in self._sessions:
          self._sessions[sess].written |= executed.written
        if executed.steps and decisions is not None:  # not if the run failed
          self._note_step(sess, graph, executed, decisions)

  def _note_step(
    self,
    sess: tf.Session,
    graph: _Graph,
    executed: sessions.Effects,
    decisions: List[bool],
  ) -> None:
    """Counts a train step; ends the process after the last one."""
    known, unreadable = (
      self._sessions[sess],
      sorted(executed.written.difference(graph.tensors)),
    )
    if unreadable:
      self.note(unreadable=unreadable)
    known.trained.update(*[step.variables for step in executed.steps])
    known.steps += 1
    # `apply_gradients_together` and GradientAccumulator decide, and call the inner
    # optimizer themselves.
    is_scaled = bool(decisions) or any(step.is_scaled for step in executed.steps)
    self.note(steps=self.notes["steps"] + 1, scaled=self.notes["scaled"] or is_scaled)
    if decisions:
      known.skipped += sum(not applied for applied in decisions)
      self.note(skipped=(self.notes["skipped"] or 0) + (not all(decisions)))
    if known.steps % self._settings.every == 0:
      self._record(sess, graph)
    if self.notes["steps"] == self._settings.steps:
      self._exit()

  def _graph(self, graph: tf.Graph) -> _Graph:
    """Returns what is known of a graph; computes it again if ops were added to it."""
    known = graphs.record_in(graph, "recording", lambda: _Graph(next(self._numbers)))
    if known.version != graph.version:
      known.version, known.effects, earlier = graph.version, {}, list(known.tensors)
      known.tensors = sessions.variable_values(graph)
      if list(known.tensors) != earlier:
        shapes = {
          name: [-1] if tensor.shape.ndims is None else tensor.shape.as_list()
          for name, tensor in known.tensors.items()
        }
        # The variables that a LossScale registered, and those of TensorFlow's.
        registered = sorted(loss_scale.state_names(graph).intersection(shapes))
        state = {**dict(zip(registered, registered)), **naming_schemes.state(shapes)}
        renamed = files.tensorflow_names(graph) if self._settings.run == SCALED else {}
        known.variables = Variables(shapes, renamed, state)
        self._write(graph=known.number, variables=dataclasses.asdict(known.variables))
    return known

  def _record(self, sess: tf.Session, graph: _Graph, starts: bool = False) -> None:
    """Records the variables: before the first step of a session (`starts`), or after a
    step.

    Reads those that a run of the session may have changed; on a server, other sessions
    may have changed all.
    """
    known, kept = self._sessions[sess], self._settings.keep.get(str(self._index), [])
    names = (
      graph.tensors
      if starts or sess.sess_str
      else {*known.written, *kept}.intersection(graph.tensors)
    )
    values = sessions.read(sess, {name: graph.tensors[name] for name in names})
    digests = {name: _digest(value) for name, value in values.items()}
    changed = {
      name for name, digest in digests.items() if known.digests.get(name) != digest
    }
    known.digests.update(digests)
    record = {
      "graph": graph.number,
      # None for a variable that is not initialized
      "digests": [known.digests.get(name) for name in graph.tensors],
      "skipped": known.skipped,
      "global_step": np.asarray(values.get("global_step")).tolist(),
    }
    self._write(**record)
    self._note_scales(graph.variables.state, values)
    self.note(variables=max(self.notes["variables"], len(known.digests)))
    if not starts:
      has_changed = not known.trained.isdisjoint(changed)
      self.note(
        read=self.notes["read"] + 1, trained=self.notes["trained"] or has_changed
      )
    known.skipped, known.trained, known.written = 0, set(), set()
    differing = self._differing(graph.variables, record, starts)
    self._keep({name: values[name] for name in kept or differing if name in values})
    self._index += 1
    if self._settings.run == ORIGINAL and not sys.modules.keys().isdisjoint(
      _OPTIMIZERS
    ):
      self.note(uses="mp_compat")

  def _note_scales(self, state: Dict[str, str], values: Values) -> None:
    """Notes the first and the last value of each loss scale; `state` has roles by
    name.
    """
    scales = dict(self.notes["scales"])
    for name, role in state.items():
      if role.endswith("scale") and name in values:
        scales[name] = scales.get(name, [])[:1] + [float(values[name])]
    self.note(scales=scales)

  def _differing(self, variables: Variables, record: _Line, starts: bool) -> List[str]:
    """Returns the names of the variables in the first difference from the reference,
    which it notes; [] for others.

    Ends a run that starts from other values than the reference.
    """
    reference = None if self.notes["difference"] else next(self._reference, None)
    pairs = reference and _differences(
      reference, (variables, record), self._settings.run != UNSCALED
    )
    if not reference or not pairs:
      return []
    difference = Difference(
      self._index,
      self.notes["steps"],
      starts,
      names=([name for name, _ in pairs], [name for _, name in pairs]),
      skipped=(reference[1]["skipped"], record["skipped"]),
      global_step=(reference[1]["global_step"], record["global_step"]),
    )
    self.note(difference=dataclasses.asdict(difference))
    if difference.is_of_initial_values:
      self._exit()
    return [name for _, name in pairs if name]

  def _keep(self, values: Values) -> None:
    """Writes the numbers of the first variables, as float64 or complex128, and whether
    those of each are finite.
    """
    if not values:
      return
    arrays = {name: np.asarray(value) for name, value in values.items()}
    numbers: Values = {
      name: array.astype("c16" if array.dtype.kind == "c" else "f8")
      for name, array in arrays.items()
      if array.dtype.kind not in "OSU"
    }
    with _giving_up():
      np.savez(
        "{}.{}.npz".format(self._settings.recording, self._index),
        finite=np.array([np.isfinite(array).all() for array in numbers.values()]),
        **{name + ":0": numbers[name] for name in list(numbers)[:SHOWN]},
      )

  def note_processes(self) -> None:
    """Notes whether the program waited for processes that used the CPU for more than a
    second.
    """
    if sum(os.times()[2:4]) > 1:
      self.note(processes=True)

  def _exit(self) -> None:
    """Ends the process at once: an exception could be caught by the program."""
    self.note_processes()
    with contextlib.suppress(Exception):
      sys.stdout.flush()
      sys.stderr.flush()
    os._exit(0)

  def _write(self, **line: object) -> None:
    with _giving_up():
      self._file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def _giving_up() -> Iterator[None]:
  """Makes a context manager that ends the process if what it records cannot be
  written.
  """
  try:
    yield
  except OSError as error:
    processes.give_up(
      "The variables cannot be recorded in {}: {}".format(tempfile.gettempdir(), error)
    )


def _digest(value: Any) -> int:
  """Returns a checksum of the dtype, the shape and the bits of a value; other bits in
  one number change it always.
  """
  array = np.asarray(value)
  kind = zlib.crc32("{} {}".format(array.dtype, array.shape).encode())
  bits: Any = (
    repr(array.tolist()).encode()
    if array.dtype == object
    else np.ascontiguousarray(array).view(np.uint8)
  )
  return zlib.crc32(bits, kind)


def _install(settings: Settings, recorder: Recorder) -> None:
  """Makes this package the program's loss scaling; without loss scaling, with scale 1
  and every step applied.
  """
  from mp_compat.keras import loss_scale_optimizer as keras_optimizer
  from mp_compat.migration import installation

  installation.install()
  messages: Set[str] = set()
  log.observers += [messages.add, lambda _: recorder.note(warnings=sorted(messages))]
  unscaled = mp_compat.FixedLossScale(1)
  wrappers: List[Any] = [
    mp_compat.MixedPrecisionLossScaleOptimizer,
    keras_optimizer.LossScaleOptimizer,
  ]
  for wrapper in wrappers:
    # One loss scale for all: some share theirs.
    wrapper.__init__ = _noting(
      wrapper.__init__, recorder, unscaled if settings.run == UNSCALED else None
    )
  if settings.run == UNSCALED:
    decide = step.decide

    def decide_to_apply(*args: Any, **kwargs: Any) -> step.Decision:
      decision = decide(*args, **kwargs)
      # tensors: programs fetch them
      return decision._replace(apply=[tf.constant(True) for _ in decision.apply])

    step.decide = decide_to_apply


def _noting(
  construct: Callable[..., None],
  recorder: Recorder,
  unscaled: Optional[loss_scale.LossScale],
) -> Callable[..., None]:
  @functools.wraps(construct)
  def construct_and_note(self: Any, *args: object, **kwargs: object) -> None:
    if unscaled:
      # so that programs can read whether the gradients are finite
      kwargs.pop("skip_nonfinite", None)
    construct(self, *args, **kwargs)
    recorder.note(uses="mp_compat")
    if unscaled:
      self._loss_scale = unscaled

  return construct_and_note


def _scales_loss(optimizer: object) -> bool:
  """Returns whether an optimizer scales the loss.

  Makes graphs record which steps of one of TensorFlow's optimizers its loss scale
  applies.
  """
  is_scaled = any(
    base.__module__.startswith("mp_compat.") for base in type(optimizer).__mro__
  )
  for attribute, method, decisions_of in (
    ("_loss_scale", "update", lambda _, result: [result[1]]),
    ("_loss_scale_manager", "update_loss_scale", lambda finite, _: [finite]),  # contrib
  ):
    scale = getattr(optimizer, attribute, None)
    if hasattr(scale, method) and not isinstance(scale, mp_compat.LossScale):
      definer = next(cls for cls in type(scale).__mro__ if method in vars(cls))
      sessions.observe_decisions(definer, method, decisions_of)
      is_scaled = True
  return is_scaled


def main() -> None:
  """Runs the program of the command line."""
  with open(sys.argv[1], encoding="utf-8") as file:
    settings = Settings(**json.load(file))
  recorder = Recorder(settings)
  atexit.register(recorder.note_processes)
  if settings.run != ORIGINAL:
    _install(settings, recorder)
  sessions.observe(recorder.around)
  sessions.observe_optimizers(_scales_loss)
  sessions.observe_decisions(step, "decide", lambda _, decision: decision.apply)
  sessions.on_eager_gradients(lambda: recorder.note(unseen="Eager training"))
  sessions.make_seeds_repeatable()
  random.seed(0)
  np.random.seed(0)
  try:
    main_module, code = run.load(sys.argv[2:])
  except run.NotFoundError as error:
    processes.give_up(error)
  run.execute(main_module, code)


if __name__ == "__main__":
  main()
