"""Tests which sessions are those of servers of this process."""

import pytest

from mp_compat.tools.compare import servers


@pytest.mark.parametrize(
  "target, is_own",
  [
    ("grpc://localhost:2222", True),
    ("grpc://127.0.0.1:2222", True),
    ("grpc://localhost:2223", False),
    ("grpc://192.0.2.1:2222", False),  # another host with the same port
    ("grpc://unknown.invalid:2222", False),
    ("", False),  # no server
  ],
)
def test_own_servers_are_found_by_any_name(target, is_own, monkeypatch):
  monkeypatch.setitem(servers._cpus, 2222, "/job:worker/task:0/device:CPU:0")
  assert (servers._find_cpu(target) is not None) == is_own
