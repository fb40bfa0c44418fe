# SPDX-License-Identifier: Apache-2.0
"""Runs a program in this process, and records its variables: `training` says when,
`recording` what is written.

    python -m mp_compat.tools.compare.recorder SETTINGS PROGRAM [ARGUMENT ...]

Variables are read through tensors that the graph has already, so that it may be
finalized.
"""

import atexit
import collections
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
  Counter,
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

from mp_compat._tensorflow import VERSION_TEXT
from mp_compat._tensorflow import tf
from mp_compat.core import loss_scale
from mp_compat.core import naming_schemes
from mp_compat.graph import records
from mp_compat.tools import run
from mp_compat.tools.compare import loss_scaling
from mp_compat.tools.compare import processes
from mp_compat.tools.compare import recording
from mp_compat.tools.compare import run_effects
from mp_compat.tools.compare import seeds
from mp_compat.tools.compare import servers
from mp_compat.tools.compare import sessions
from mp_compat.tools.compare import steps
from mp_compat.tools.compare import training

# imported if one is used
_OPTIMIZERS = ("mp_compat.training.optimizer", "mp_compat.keras.loss_scale_optimizer")

# After these errors a session cannot be read, or waits.
_LOST = (tf.errors.AbortedError, tf.errors.UnavailableError)
_UNREADABLE = (tf.errors.OpError, RuntimeError)  # from a session that ended

Values = Dict[str, Any]  # of variables by name, as a session returns them


class _Graph:
  """What is known of a graph.

  Attributes:
    number: Its number in the recording.
    version: The number of ops when the attributes below were computed.
    effects: What runs do to variables, by the names of what is fetched, and of what is
      fed.
    tensors: The tensors that read its variables, by the names of these.
    variables: What the recording says of its variables.
  """

  def __init__(self, number: int) -> None:
    self.number = number
    self.version = -1
    self.effects: Dict[Tuple[FrozenSet[str], FrozenSet[str]], run_effects.Effects] = {}
    self.tensors: Dict[str, tf.Tensor] = {}
    self.variables = recording.Variables({}, {})


class _Session:
  """What is known of a session.

  Attributes:
    thread: The name of the thread that ran it first.
    number: Its number among those of that thread that have records; -1 without.
    count: How many records were made of it.
    steps: How many train steps it ran.
    since: What it did since its last record.
    digests: Checksums of its variables at the last record, by name; without those that
      are not initialized.
    written: The variables that its runs may have initialized; without those that could
      not be read, and that no run wrote since.
  """

  def __init__(self) -> None:
    self.thread = threading.current_thread().name
    self.number = -1
    self.count = 0
    self.steps = 0
    self.since = training.Interval()
    self.digests: Dict[str, int] = {}
    self.written: Set[str] = set()

  @property
  def index(self) -> str:
    """Returns the index of its next record, which does not depend on other threads."""
    return "{}.{}.{}".format(self.thread, self.number, self.count)


class Recorder:
  """Records the variables of all sessions of this process where `training` says so.

  A record is written and compared with that of the reference in the same place. The
  first difference is noted, and its values are kept in a file.

  Attributes:
    notes: What was noted last, by kind.
  """

  def __init__(self, settings: recording.Settings) -> None:
    """Begins the recording of a run of the program."""
    self._settings = settings
    # complete after each line
    self._file = open(settings.recording, "w", encoding="utf-8", buffering=1)
    self._reference: Optional[recording.Reference] = None
    self._known_steps: List[steps.KnownStep] = []  # of this and the first run
    if settings.reference:
      self._reference = recording.Reference(settings.reference)
      self._known_steps += _read_steps(settings.reference)
    self._lock = threading.RLock()
    self._pid = os.getpid()
    self._numbers = itertools.count()  # of graphs
    self._threads: Counter[str] = collections.Counter()  # numbers of their sessions
    self._sessions: weakref.WeakKeyDictionary[tf.Session, _Session] = (
      weakref.WeakKeyDictionary()
    )
    # Those with runs that are not recorded, which Python does not delete.
    self._due: Set[tf.Session] = set()
    self._totals = training.Totals()
    self._records: Counter[str] = collections.Counter()  # by thread
    self.notes: recording.Notes = {}
    self.note(
      compared=bool(settings.reference),
      tensorflow=VERSION_TEXT,
      records={},
      variables=0,
      scales={},
      trained=False,
      trained_without=False,
      difference=None,
      **dataclasses.asdict(self._totals),
    )

  def note(self, **notes: object) -> None:
    """Writes notes, unless they are the same as the last of their kinds."""
    updated = {**self.notes, **notes}
    if updated != self.notes:
      self.notes.update(notes)
      self._write(notes=notes)

  def know(self, step: steps.KnownStep) -> None:
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
    """Runs, and records the variables; see `sessions.observe`.

        effects = what the run does to variables, from the graph
        begin to record the session, in its first run
        result = run(effects.decisions)     also reads what decides on steps
        executions = the steps that it executed
        count them, and record the variables, if that is due

    The lock is not held during the run, because a run may wait for that of another
    thread.

    Args:
      sess: the session.
      elements: the ops and tensors that the program fetches.
      fed: the names of the tensors that it feeds.
      run: makes the run; gets the tensors to read as well.

    Returns:
      What the program's run returns.
    """
    with self._lock:
      servers.place(sess)
      graph = self._graph(sess.graph)
      effects = self._effects(sess.graph, graph, elements, fed)
      is_forked = os.getpid() != self._pid
      if is_forked and effects.steps:
        self.note(unseen="fork")
      elif not is_forked and sess not in self._sessions:
        self._begin(sess, graph)
    if is_forked:
      return self._run_forked(effects, run)
    try:
      result, decided = run(effects.decisions)
    except BaseException as error:
      with self._lock:
        executions = steps.take_executions(effects.steps, None)
        if not isinstance(error, _LOST):
          self._after_failure(sess, graph, effects.written, executions)
      raise
    with self._lock:
      executions = steps.take_executions(effects.steps, decided)
      self._after(sess, graph, effects.written, executions)
    return result

  def _run_forked(self, effects: run_effects.Effects, run: sessions.Run) -> Any:
    """Runs in a forked process, which has no recording of its own."""
    try:
      result, _ = run([])
      return result
    finally:
      with self._lock:
        steps.take_executions(effects.steps, {})

  def _effects(
    self,
    graph: tf.Graph,
    known: _Graph,
    elements: List[Union[tf.Operation, tf.Tensor]],
    fed: FrozenSet[str],
  ) -> run_effects.Effects:
    """Returns what a run of `elements` does to variables; remembers it in `known`.

    `_graph` forgets it when ops are added to the graph.
    """
    key = frozenset(element.name for element in elements), fed
    if key not in known.effects:
      known.effects[key] = run_effects.effects_of(graph, elements, fed)
    return known.effects[key]

  def _begin(self, sess: tf.Session, graph: _Graph) -> None:
    """Begins to record a session: first, what other sessions of its thread did, which
    may explain its values; then the values that sessions of a server share.
    """
    known = self._sessions[sess] = _Session()
    for other in list(self._due):
      if self._sessions[other].thread == known.thread:
        self._record_last(other)
    if sess.sess_str:
      with contextlib.suppress(*_UNREADABLE):
        self._record(sess, graph)

  def _record_last(self, sess: tf.Session) -> None:
    """Records what is due of a session, if anything is, and if it can be read."""
    if sess in self._due:
      with contextlib.suppress(*_UNREADABLE):
        self._record(sess, self._graph(sess.graph))
      self._due.discard(sess)

  def end(self, sess: tf.Session) -> None:
    """Records what is due of a session that is about to be closed."""
    # Python deletes, and closes, only sessions of which nothing is due.
    if sess in self._due and os.getpid() == self._pid:
      with self._lock:
        self._record_last(sess)

  def _after_failure(
    self,
    sess: tf.Session,
    graph: _Graph,
    written: FrozenSet[str],
    executions: List[training.Execution],
  ) -> None:
    """Counts and records a run that failed, which may have done a part of what `_after`
    takes, or all: a step was executed if it told so, or changed what it trains.
    """
    known = self._sessions[sess]
    known.written |= written
    if not written:
      return
    with contextlib.suppress(*_UNREADABLE):
      changed = _changed(known.digests, _digests(self._read(sess, graph)))
      if sess in self._due:
        changed = set()  # Earlier runs may explain the values.
      made = []
      for each in executions:
        if each.applied is not None or training.changed_any(each.variables, changed):
          made.append(each)
      self._after(sess, graph, written & changed, made)

  def _after(
    self,
    sess: tf.Session,
    graph: _Graph,
    written: FrozenSet[str],
    executions: List[training.Execution],
  ) -> None:
    """Counts and records a run; ends the process after the last step.

    Args:
      sess: the session.
      graph: what is known of its graph.
      written: the variables that the run may have changed.
      executions: the steps that it executed; [] if it was no train step.
    """
    if not written and not executions:
      return
    known = self._sessions[sess]
    known.written |= written
    known.since.add(written, executions)
    self._due.add(sess)
    if executions:
      known.steps += 1
      self._totals.add(executions)
      self.note(**dataclasses.asdict(self._totals))
      unreadable = sorted(written.difference(graph.tensors))
      if unreadable:
        self.note(unreadable=unreadable)
    if known.steps % self._settings.every == 0:
      self._record(sess, graph)
    if self._totals.steps == self._settings.steps:
      self.finish()
      _exit()

  def _graph(self, graph: tf.Graph) -> _Graph:
    """Returns what is known of a graph; computes it again if ops were added to it.

    Writes a line on the variables only if there are others than before: a record
    belongs to the last such line of its graph.
    """
    known = records.record_in(graph, "recording", lambda: _Graph(next(self._numbers)))
    if known.version == graph.version:
      return known
    known.version = graph.version
    known.effects = {}
    earlier = list(known.tensors)
    steps.find_imported(graph, self._known_steps)
    known.tensors = run_effects.variable_values(graph)
    if list(known.tensors) != earlier:
      known.variables = self._variables(graph, known.tensors)
      self._write(graph=known.number, variables=dataclasses.asdict(known.variables))
    return known

  def _variables(
    self, graph: tf.Graph, tensors: Dict[str, tf.Tensor]
  ) -> recording.Variables:
    """Returns what the recording says of the variables of a graph, which `tensors`
    read.
    """
    shapes = {}
    for name, tensor in tensors.items():
      shapes[name] = [-1]
      if tensor.shape.ndims is not None:
        shapes[name] = tensor.shape.as_list()
    # The variables that a LossScale registered, and those of TensorFlow's.
    registered = sorted(loss_scale.state_names(graph).intersection(shapes))
    state = {name: name for name in registered}
    state.update(naming_schemes.state(shapes))
    return recording.Variables(shapes, state)

  def _record(self, sess: tf.Session, graph: _Graph) -> None:
    """Records all variables of a session: anything may have changed them, such as
    functions of `tf.data`, which no op of a run tells, or other sessions of a server.

        read the variables, and compute their digests
        write the record                  unless nothing changed, and no step was run
        note scales, the number of variables, and whether steps trained
        keep the values, if they differ from the reference, or the parent asked for them
    """
    known = self._sessions[sess]
    values = self._read(sess, graph)
    digests = _digests(values)
    changed = _changed(known.digests, digests)
    known.digests.update(digests)
    since, known.since = known.since, training.Interval()
    self._due.discard(sess)
    if not changed and not since.steps:
      return
    if known.number < 0:
      known.number = self._threads[known.thread]
      self._threads[known.thread] += 1
    record = self._record_of(graph, known, since)
    self._write(**record.line)
    has_trained = self.notes["trained"]
    self._records[known.thread] += 1
    self._note_scales(graph.variables.state, values)
    self.note(
      variables=max(self.notes["variables"], len(known.digests)),
      trained=has_trained or training.changed_any(since.scaled, changed),
      trained_without=(
        self.notes["trained_without"] or training.changed_any(since.unscaled, changed)
      ),
      records=dict(self._records),
    )
    differing = self._differing(record, has_trained)
    kept = self._settings.keep.get(known.index) or differing
    self._keep(known.index, {name: values[name] for name in kept if name in values})
    known.count += 1
    is_original = self._settings.run == recording.ORIGINAL
    if is_original and not sys.modules.keys().isdisjoint(_OPTIMIZERS):
      self.note(uses="mp_compat")

  def _record_of(
    self, graph: _Graph, session: _Session, since: training.Interval
  ) -> recording.Record:
    """Returns the record of a session, with its digests and what it did before."""
    line = {
      "index": session.index,
      "graph": graph.number,
      # None for a variable that is not initialized
      "digests": [session.digests.get(name) for name in graph.tensors],
      "steps": since.steps,
      "skipped": since.skipped,
      "changed": sorted(since.scaled | since.assigned),
    }
    return recording.Record(graph.variables, line)

  def _read(self, sess: tf.Session, graph: _Graph) -> Values:
    """Returns the values of the variables that are initialized; tries only those that
    runs wrote, unless other sessions share them.
    """
    known = self._sessions[sess]
    tried = {}
    for name, tensor in graph.tensors.items():
      if sess.sess_str or name in known.written:
        tried[name] = tensor
    values = sessions.read(sess, tried)
    known.written.intersection_update(values)
    return values

  def _note_scales(self, state: Dict[str, str], values: Values) -> None:
    """Notes the first and the last value of each loss scale; `state` has roles by
    name.
    """
    scales = dict(self.notes["scales"])
    for name, role in state.items():
      if role.endswith("scale") and name in values:
        scales[name] = scales.get(name, [])[:1] + [float(values[name])]
    self.note(scales=scales)

  def _differing(self, record: recording.Record, has_trained: bool) -> List[str]:
    """Returns the names of the variables in the first difference from the reference,
    which it notes; [] for others.

    After the first difference, the reference is no longer read. `has_trained`: whether
    an earlier record is of training with loss scaling.
    """
    reference, index = None, record.line["index"]
    if self._reference and not self.notes["difference"]:
      reference = self._reference.take(index)
      if reference is None and self._reference.lacks_thread(index):
        self.note(unseen="thread")
    if reference is None:
      return []
    counts_state = self._settings.run != recording.UNSCALED
    difference = recording.difference(
      reference, record, index, self.notes["steps"], has_trained, counts_state
    )
    if difference is None:
      return []
    self.note(difference=dataclasses.asdict(difference))
    return list(filter(None, difference.names[1]))

  def _keep(self, index: str, values: Values) -> None:
    """Writes the numbers of the first variables of a record, as float64 or complex128,
    and whether those of each are finite.
    """
    if not values:
      return
    numbers: Values = {}
    for name, value in values.items():
      array = np.asarray(value)
      if array.dtype.kind == "c":
        numbers[name] = array.astype(np.complex128)
      elif array.dtype.kind not in "OSU":  # objects and strings
        numbers[name] = array.astype(np.float64)
    finite = [np.isfinite(array).all() for array in numbers.values()]
    shown = {name + ":0": numbers[name] for name in list(numbers)[: recording.SHOWN]}
    path = recording.values_path(self._settings.recording, index)
    with _giving_up():
      np.savez(path, finite=np.array(finite), **shown)

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

  def finish(self) -> None:
    """Records what is due at the end of the process; not of a server, which may have
    ended.
    """
    if os.getpid() != self._pid:
      return
    with self._lock:
      for sess in list(self._sessions):
        if not sess.sess_str:
          self._record_last(sess)
      self.note_processes()

  def _write(self, **line: object) -> None:
    """Writes a line of the recording."""
    with _giving_up():
      self._file.write(json.dumps(line) + "\n")


def _exit() -> NoReturn:
  """Ends the process at once: an exception could be caught by the program."""
  with contextlib.suppress(Exception):
    sys.stdout.flush()
    sys.stderr.flush()
  os._exit(0)


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


def _digests(values: Values) -> Dict[str, int]:
  """Returns the checksums of values by name."""
  return {name: _digest(value) for name, value in values.items()}


def _changed(before: Dict[str, int], after: Dict[str, int]) -> Set[str]:
  """Returns the names of the digests that are not the same as before."""
  return {name for name, digest in after.items() if before.get(name) != digest}


def _digest(value: Any) -> int:
  """Returns a checksum of the dtype, the shape and the bits of a value; other bits in
  one number change it always.
  """
  array = np.asarray(value)
  kind = zlib.crc32("{} {}".format(array.dtype, array.shape).encode())
  bits: Any
  if array.dtype == object:  # strings
    bits = repr(array.tolist()).encode()
  else:
    bits = np.ascontiguousarray(array).view(np.uint8)
  return zlib.crc32(bits, kind)


def _read_steps(path: str) -> Iterator[steps.KnownStep]:
  """Yields the steps that another run noted."""
  for line in recording.read_lines(path):
    if "step" in line:
      yield steps.KnownStep(**line["step"])


def _observe_exec(recorder: Recorder) -> None:
  """Notes whether the program replaces itself by another one."""

  def noting(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Returns a wrapper of a function that replaces the program; it returns only by an
    error.
    """

    @functools.wraps(execute)
    def note_and_execute(*args: Any) -> NoReturn:
      recorder.note_exec(is_replaced=True)
      try:
        execute(*args)
      finally:
        recorder.note_exec(is_replaced=False)  # It failed.

    return note_and_execute

  # All other functions of os call these.
  os.execv, os.execve = noting(os.execv), noting(os.execve)


def main() -> None:
  """Runs the program of the command line.

      python -m mp_compat.tools.compare.recorder SETTINGS PROGRAM ARGUMENTS...

  SETTINGS is a file with the fields of `recording.Settings` as JSON; then come the
  program and its arguments, as `run.load` takes them. First replaces what the recorder
  observes, so that the program imports the replaced functions.
  """
  with open(sys.argv[1], encoding="utf-8") as file:
    settings = recording.Settings(**json.load(file))
  recorder = Recorder(settings)
  atexit.register(recorder.finish)
  if settings.run != recording.ORIGINAL:
    loss_scaling.replace(settings.run, recorder.note)
  sessions.observe(recorder.around, recorder.end)
  loss_scaling.observe_steps(recorder.know)
  servers.observe()
  sessions.on_eager_gradients(lambda: recorder.note(unseen="eager"))
  seeds.make_repeatable()
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
