# SPDX-License-Identifier: Apache-2.0
"""Observes the runs of all sessions, and the gradients that are computed outside of
sessions. Reads variables in a session.
"""

import functools
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple

from mp_compat._tensorflow import sessions
from mp_compat._tensorflow import tf
from mp_compat.graph import graphs
from mp_compat.graph import runs

Tensors = List[tf.Tensor]


class Ran(NamedTuple):
  """What a run returned.

  Attributes:
    result: What the program gets.
    decided: The decisions that were read, by name.
  """

  result: Any
  decided: Dict[str, bool]


# Runs what the program runs, and reads scalar bool tensors, which decide whether steps
# are applied. A partial run reads only what is fed.
Run = Callable[[Tensors], Ran]
# Called as `around(session, elements, fed, run)`, in place of a run.
Around = Callable[[tf.Session, List[runs.Element], FrozenSet[str], Run], object]
_Function = Callable[..., Any]
_End = Callable[[tf.Session], None]

_NOT_INITIALIZED = (tf.errors.FailedPreconditionError, tf.errors.NotFoundError)


def _ignore(session: tf.Session) -> None:
  """Does nothing."""


def observe(around: Around, end: _End = _ignore) -> None:
  """Makes each run of any session call `around(session, elements, fed, run)`, and
  return what it returns; calls `end(session)` before a session is closed.

      def around(session, elements, fed, run):
        result, decided = run(decisions)
        return result

  `elements` are the ops and tensors that the run executes, `fed` the names of the
  tensors that it feeds. `around` calls `run(decisions)`, with the tensors to read.
  """
  base = sessions.Base
  base.close = _observed_close(base.close, end)
  sessions.wrap_run(lambda run: _observed_run(around))
  base.make_callable = _observed_make_callable(base.make_callable)
  wrap = functools.partial(_observed_make_callable_from_options, around)
  sessions.wrap_make_callable_from_options(wrap)


def _observed_close(close: _Function, end: _End) -> _Function:
  """Returns what replaces `BaseSession.close`."""

  @functools.wraps(close)
  def observed_close(self: tf.Session) -> None:
    end(self)
    close(self)

  return observed_close


def _observed_run(around: Around) -> _Function:
  """Returns what replaces `_run` of sessions, which `run` and `partial_run` call."""

  def observed_run(
    self: tf.Session, handle: Any, fetches: Any, feeds: Any, *args: object
  ) -> object:
    """Calls `around` in place of a run; arguments as for `BaseSession._run`.

    `handle` is that of a partial run; None for a whole one.
    """
    elements = runs.fetched_elements(self.graph, fetches)
    fed_tensors = runs.fetched_elements(self.graph, list(feeds or {}))
    fed = frozenset(tensor.name for tensor in fed_tensors)
    is_partial = handle is not None

    def run(decisions: Tensors) -> Ran:
      """Reads `decisions` in the run of the program; see `Run`."""
      readable = {}
      for tensor in decisions:
        if not is_partial or tensor.name in fed:
          readable[tensor.name] = tensor
      extended = fetches, readable
      returned = sessions.run(self, handle, extended, feeds, *args)
      return Ran(*returned)

    return around(self, elements, fed, run)

  return observed_run


def _observed_make_callable(make_callable: _Function) -> _Function:
  """Returns what replaces `BaseSession.make_callable`; its callables call `run`."""

  def observed_make_callable(
    self: Any,
    fetches: Any,
    feed_list: Any = None,
    accept_options: bool = False,
  ) -> _Function:
    # It checks the arguments.
    make_callable(self, fetches, feed_list, accept_options)

    def call(*values: object, **options: object) -> object:
      feeds = dict(zip(feed_list or [], values))
      return self.run(fetches, feeds, **options)

    return call

  return observed_make_callable


def _observed_make_callable_from_options(
  around: Around, make_callable: _Function
) -> _Function:
  """Returns what replaces `BaseSession._make_callable_from_options`, which Keras
  calls.

  The callable must fetch the decisions of its steps, too, which are known only when it
  is called: `callable_with(names)` makes an extended callable once for each set of
  names, and the results for the program are the first `count`.
  """

  def observed_make_callable(self: tf.Session, options: Any) -> _Function:
    elements: List[runs.Element] = []
    for name in (*options.target, *options.fetch):
      element = self.graph.as_graph_element(name)
      elements.append(element)
    fed = frozenset(options.feed)
    count = len(options.fetch)

    @functools.lru_cache(maxsize=None)
    def callable_with(*further: str) -> _Function:
      """Returns a callable that also fetches the tensors of the names `further`."""
      extended = type(options)()
      extended.CopyFrom(options)
      extended.fetch.extend(further)
      return make_callable(self, extended)

    def call(*values: object, **keywords: object) -> object:
      def run(decisions: Tensors) -> Ran:
        further = []
        for tensor in decisions:
          if tensor.name not in fed:
            further.append(tensor.name)
        run_extended = callable_with(*further)
        results = run_extended(*values, **keywords)
        decided = dict(zip(further, results[count:]))
        return Ran(results[:count], decided)

      return around(self, elements, fed, run)

    return call

  return observed_make_callable


def read(sess: tf.Session, tensors: Dict[str, tf.Tensor]) -> Dict[str, Any]:
  """Returns the values of variables by name, without those that are not initialized;
  the run is not observed.

  TensorFlow's error names one variable that is not initialized: the others are found by
  reading halves.
  """
  try:
    return sessions.run(sess, None, tensors, None, None, None)
  except _NOT_INITIALIZED:
    if len(tensors) == 1:
      return {}
  names = list(tensors)
  middle = len(names) // 2
  values = {}
  for half in (names[:middle], names[middle:]):
    some = {name: tensors[name] for name in half}
    values.update(read(sess, some))
  return values


def on_eager_gradients(report: Callable[[], None]) -> None:
  """Calls `report()` whenever gradients are computed in eager mode, or in a function
  that eager code calls.
  """

  def reporting(compute: _Function) -> _Function:
    """Returns a wrapper of a function that computes gradients."""

    def compute_and_report(*args: object, **kwargs: object) -> object:
      if graphs.init_scope_graph() is None:
        report()
      return compute(*args, **kwargs)

    return compute_and_report

  sessions.wrap_gradient_functions(reporting)
