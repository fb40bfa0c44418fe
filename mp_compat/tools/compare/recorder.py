# SPDX-License-Identifier: Apache-2.0
"""Runs a program in this process, and records its variables: `training` says when,
`recording` what is written.

    python -m mp_compat.tools.compare.recorder SETTINGS PROGRAM [ARGUMENT ...]

Variables are read through tensors that the graph has already, so that it may be
finalized.
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
  NoReturn,
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
from mp_compat.core import distribute
from mp_compat.core import loss_scale
from mp_compat.core import naming_schemes
from mp_compat.graph import records
from mp_compat.tools import run
from mp_compat.tools.compare import processes
from mp_compat.tools.compare import recording
from mp_compat.tools.compare import sessions
from mp_compat.tools.compare import training
from mp_compat.training import step

# imported if one is used
_OPTIMIZERS = ("mp_compat.training.optimizer", "mp_compat.keras.loss_scale_optimizer")

Values = Dict[str, Any]  # of variables by name, as a session returns them


class _Graph:
  """What is known of a graph."""

  def __init__(self, number: int) -> None:
    self.number = number
    self.version = -1  # the number of ops when the attributes below were computed
    # by what is fetched and fed
    self.effects: Dict[Tuple[FrozenSet[str], FrozenSet[str]], sessions.Effects] = {}
    self.tensors: Dict[str, tf.Tensor] = {}
    self.variables = recording.Variables({}, {}, {})
    self.trained: FrozenSet[str] = frozenset()  # the variables that its steps train


class _Session:
  """What is known of a session: what it did, and its variables at the last record."""

  def __init__(self, every: int) -> None:
    self.history = training.Session(every)
    self.digests: Dict[str, int] = {}  # of those that are initialized
    # those that were not initialized, and that no run changed since
    self.unread: Set[str] = set()


class Recorder:
  """Records the runs of all sessions of this process."""

  def __init__(self, settings: recording.Settings) -> None:
    self._settings = settings
    # complete after each line
    self._file = open(settings.recording, "w", encoding="utf-8", buffering=1)
    self._reference: Iterator[recording.Record] = iter(())
    self._known_steps: List[sessions.KnownStep] = []  # of this and the first run
    if settings.reference:
      self._reference = recording.read_records(settings.reference)
      self._known_steps += _read_steps(settings.reference)
    self._lock = threading.Lock()
    self._pid = os.getpid()
    self._index = 0
    self._numbers = itertools.count()
    self._sessions: weakref.WeakKeyDictionary[tf.Session, _Session] = (
      weakref.WeakKeyDictionary()
    )
    self._totals = training.Totals()
    self.notes: recording.Notes = {}
    self.note(
      compared=bool(settings.reference),
      tensorflow=tf.__version__,
      read=0,
      variables=0,
      scales={},
      trained=False,
      trained_without=False,
      assigned=[],
      difference=None,
      **dataclasses.asdict(self._totals),
    )

  def note(self, **notes: object) -> None:
    """Writes notes, unless they are the same as the last of their kinds."""
    if any(
      kind not in self.notes or self.notes[kind] != value
      for kind, value in notes.items()
    ):
      self.notes.update(notes)
      self._write(notes=notes)

  def know(self, step: sessions.KnownStep) -> None:
    """Notes a step that was built, to find it in a graph that imports it, also in a
    later run. Those that tell their executions only tell them in this process.
    """
    self._known_steps.append(step)
    if step.told is None:
      self._write(step=step._asdict())

  def around(
    self,
    sess: tf.Session,
    elements: List[Union[tf.Operation, tf.Tensor]],
    fed: FrozenSet[str],
    run: sessions.Run,
  ) -> Any:
    """Runs, and records the variables before and after it where `training` says so; see
    `sessions.observe`.
    """
    with self._lock:
      graph = self._graph(sess.graph)
      key = frozenset(element.name for element in elements), fed
      if key not in graph.effects:
        graph.effects[key] = sessions.effects_of(sess.graph, elements, fed)
      effects = graph.effects[key]
      is_forked = os.getpid() != self._pid
      if is_forked and effects.change.may_train:
        self.note(unseen="fork")
      if not is_forked:
        self._before(sess, graph, effects.change)
    decided = None
    try:
      result, decided = run([] if is_forked else effects.decisions)
      return result
    finally:
      with self._lock:
        executions = sessions.take_executions(effects.steps, decided or {})
        if not is_forked:
          self._sessions[sess].unread -= effects.change.written
        if not is_forked and decided is not None:  # not if the run failed
          self._after(sess, graph, effects.change, executions)

  def _before(self, sess: tf.Session, graph: _Graph, change: training.Change) -> None:
    """Records what a session starts from, if that is due before a run."""
    if sess not in self._sessions:
      self._sessions[sess] = _Session(self._settings.every)
    if self._sessions[sess].history.starts(change):
      self._record(sess, graph, training.START)

  def _after(
    self,
    sess: tf.Session,
    graph: _Graph,
    change: training.Change,
    executions: List[training.Execution],
  ) -> None:
    """Counts and records a run; ends the process after the last step."""
    if change.unseen:
      self.note(unseen="training", unseen_names=sorted(change.unseen))
    kind = self._sessions[sess].history.add(change, executions, graph.trained)
    self._totals.assignments += kind == training.ASSIGNMENT
    if executions:
      unreadable = sorted(change.written.difference(graph.tensors))
      if unreadable:
        self.note(unreadable=unreadable)
      self._totals.add(executions)
    self.note(**dataclasses.asdict(self._totals))
    if kind is not None:
      self._record(sess, graph, kind)
    if self.notes["steps"] == self._settings.steps:
      self._exit()

  def _graph(self, graph: tf.Graph) -> _Graph:
    """Returns what is known of a graph; computes it again if ops were added to it."""
    known = records.record_in(graph, "recording", lambda: _Graph(next(self._numbers)))
    if known.version != graph.version:
      known.version, known.effects, earlier = graph.version, {}, list(known.tensors)
      sessions.find_imported(graph, self._known_steps)
      known.trained = sessions.trained_variables(graph)
      known.tensors = sessions.variable_values(graph)
      if list(known.tensors) != earlier:
        shapes = {
          name: [-1] if tensor.shape.ndims is None else tensor.shape.as_list()
          for name, tensor in known.tensors.items()
        }
        # The variables that a LossScale registered, and those of TensorFlow's.
        registered = sorted(loss_scale.state_names(graph).intersection(shapes))
        state = {**dict(zip(registered, registered)), **naming_schemes.state(shapes)}
        is_scaled = self._settings.run == recording.SCALED
        renamed = files.tensorflow_names(graph) if is_scaled else {}
        known.variables = recording.Variables(shapes, renamed, state)
        self._write(graph=known.number, variables=dataclasses.asdict(known.variables))
    return known

  def _record(self, sess: tf.Session, graph: _Graph, kind: str) -> None:
    """Records all variables of a session: anything may have changed them, such as
    functions of `tf.data`, which no op of a run tells, or other sessions of a server.
    """
    known, kept = self._sessions[sess], self._settings.keep.get(str(self._index), [])
    if sess.sess_str:
      known.unread.clear()
    read = {
      name: tensor for name, tensor in graph.tensors.items() if name not in known.unread
    }
    values = sessions.read(sess, read)
    known.unread.update(read.keys() - values.keys())
    digests = {name: _digest(value) for name, value in values.items()}
    changed = {
      name for name, digest in digests.items() if known.digests.get(name) != digest
    }
    known.digests.update(digests)
    record = recording.Record(
      graph.variables,
      {
        "graph": graph.number,
        "kind": kind,
        # None for a variable that is not initialized
        "digests": [known.digests.get(name) for name in graph.tensors],
        "assigned": sorted(known.history.assigned),
        "skipped": known.history.skipped,
        "global_step": np.asarray(values.get("global_step")).tolist(),
      },
    )
    self._write(**record.line)
    self._note_scales(graph.variables.state, values)
    self.note(variables=max(self.notes["variables"], len(known.digests)))
    assigned = {*self.notes["assigned"], *known.history.assigned}
    self.note(assigned=sorted(assigned))
    without, scaled = known.history.end_record(changed)
    if kind == training.STEP:
      self.note(
        read=self.notes["read"] + 1,
        trained=self.notes["trained"] or scaled,
        trained_without=self.notes["trained_without"] or without,
      )
    differing = self._differing(record)
    self._keep({name: values[name] for name in kept or differing if name in values})
    self._index += 1
    is_original = self._settings.run == recording.ORIGINAL
    if is_original and not sys.modules.keys().isdisjoint(_OPTIMIZERS):
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

  def _differing(self, record: recording.Record) -> List[str]:
    """Returns the names of the variables in the first difference from the reference,
    which it notes; [] for others.

    Ends a run that starts from other values than the reference.
    """
    reference = None if self.notes["difference"] else next(self._reference, None)
    if reference is None:
      return []
    counts_state = self._settings.run != recording.UNSCALED
    difference = recording.difference(
      reference, record, self._index, self.notes["steps"], counts_state
    )
    if difference is None:
      return []
    self.note(difference=dataclasses.asdict(difference))
    if difference.is_of_initial_values:
      self._exit()
    return list(filter(None, difference.names[1]))

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
        recording.values_path(self._settings.recording, self._index),
        finite=np.array([np.isfinite(array).all() for array in numbers.values()]),
        **{name + ":0": numbers[name] for name in list(numbers)[: recording.SHOWN]},
      )

  def note_exec(self, is_replaced: bool) -> None:
    """Notes that the program replaces itself by another one, or that it did not."""
    if os.getpid() == self._pid:
      self.note(replaced=is_replaced)

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


def _read_steps(path: str) -> Iterator[sessions.KnownStep]:
  """Yields the steps that another run noted."""
  for line in recording.read_lines(path):
    if "step" in line:
      yield sessions.KnownStep(**line["step"])


def _observe_exec(recorder: Recorder) -> None:
  """Notes whether the program replaces itself by another one."""

  def noting(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(execute)
    def note_and_execute(*args: Any) -> NoReturn:
      recorder.note_exec(True)
      try:
        execute(*args)
      finally:
        recorder.note_exec(False)  # It failed.

    return note_and_execute

  # All other functions of os call these.
  os.execv, os.execve = noting(os.execv), noting(os.execve)


def _install(settings: recording.Settings, recorder: Recorder) -> None:
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
      wrapper.__init__,
      recorder,
      unscaled if settings.run == recording.UNSCALED else None,
    )
  if settings.run == recording.UNSCALED:
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


def _part_of(
  part: step.Part, decision: step.Decision, index: int = 0, *_: object, **__: object
) -> Tuple[List[Any], object]:
  """Returns the gradients and variables of what `step.apply` applies, and whether."""
  pairs = []
  for grad, variable in part.grads_and_vars:
    pairs += [(local, variable) for local in distribute.local_results(grad)]
  return pairs, decision.apply[index]


def main() -> None:
  """Runs the program of the command line."""
  with open(sys.argv[1], encoding="utf-8") as file:
    settings = recording.Settings(**json.load(file))
  recorder = Recorder(settings)
  atexit.register(recorder.note_processes)
  if settings.run != recording.ORIGINAL:
    _install(settings, recorder)
  sessions.observe(recorder.around)
  sessions.observe_optimizers(_scales_loss, recorder.know)
  sessions.observe_parts(step, "apply", _part_of, recorder.know)
  sessions.observe_decisions(step, "decide", lambda _, decision: decision.apply)
  sessions.on_eager_gradients(lambda: recorder.note(unseen="eager"))
  sessions.make_seeds_repeatable()
  _observe_exec(recorder)
  random.seed(0)
  np.random.seed(0)
  try:
    main_module, code = run.load(sys.argv[2:])
  except run.NotFoundError as error:
    processes.give_up(error)
  run.execute(main_module, code)


if __name__ == "__main__":
  main()
