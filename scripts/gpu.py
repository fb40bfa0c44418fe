# SPDX-License-Identifier: Apache-2.0
"""Measures and checks loss scaling on a GPU, with this machine's TensorFlow (2.4 to 2.21).

    scripts/gpu                  # every part
    scripts/gpu --part trace     # one of them; may be repeated

    digits      the demo's network, and a wide one, for which Tensor Cores matter: accuracy and time of a step in
                float32, in float16 without loss scaling, and in float16 with mp_compat
    programs    the programs of tests/programs, with overflows: all variables after every step, without loss scaling,
                with TensorFlow's class, and with mp_compat
    trace       the tensors that a full trace shows between devices: loss scaling must not add one, except scalars
    benchmark   four workloads of scripts/benchmark.py: the optimizer alone, the barrier, TensorFlow's class, mp_compat
    devices     MirroredStrategy on two virtual devices of the GPU
    xla         auto-clustering, and a function with jit_compile
    rewrite     the graph rewrite to float16, in a Session and in Keras

Each part is a process (scripts/gpu_parts.py); limits on their time aim at ten minutes in total. A part whose packages
are missing is left out. Prints a table, and writes gpu.json, gpu.png and a log of each part to --out. The exit status
is 1 if there is no GPU or a check failed.
"""

import argparse
import collections
import datetime
import importlib.util
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MINUTES = 5  # for a part at most

# The packages of each part besides TensorFlow and NumPy: {module: distribution}.
PARTS = collections.OrderedDict(
  [
    ("digits", {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "tqdm": "tqdm"}),
    ("programs", {"pytest": "pytest"}),
    ("trace", {"tqdm": "tqdm"}),
    ("benchmark", {"tqdm": "tqdm"}),
    ("devices", {"tqdm": "tqdm"}),
    ("xla", {"tqdm": "tqdm"}),
    ("rewrite", {"tqdm": "tqdm"}),
  ]
)
ENVIRONMENT = {
  "TF_CPP_MIN_LOG_LEVEL": "0",  # In the logs, TensorFlow names libraries that it does not find.
  "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # Leaves memory to libraries that allocate their own.
}
DETERMINISTIC = {"TF_DETERMINISTIC_OPS": "1"}  # Only for `programs`: some ops are slower.


def missing(packages):
  """Returns the command that installs those of `packages` that are missing; None if none is."""
  names = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
  return "python3 -m pip install " + " ".join(names) if names else None


def make_row(result, failed):
  """Returns a row about a whole part."""
  return dict(name="", milliseconds=None, result=result, failed=failed, details={})


def run_part(part, folder):
  """Runs a part in its own process, with a log in `folder`; returns its rows (see scripts/gpu_parts.py).

  If the process fails or does not end in time, the last row says so.
  """
  rows, log = (os.path.join(folder, part + extension) for extension in (".rows", ".log"))
  path = os.pathsep.join([os.path.dirname(HERE)] + [entry for entry in [os.environ.get("PYTHONPATH")] if entry])
  environment = dict(os.environ, PYTHONPATH=path, **ENVIRONMENT)
  if part == "programs":
    environment.update(DETERMINISTIC)
  with open(log, "w") as output:
    try:
      status = subprocess.run(
        [sys.executable, os.path.join(HERE, "gpu_parts.py"), part, rows],
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        timeout=60 * MINUTES,
        check=False,
      ).returncode
      problem = status and "ended with status {}; see {}".format(status, log)
    except subprocess.TimeoutExpired:
      problem = "did not end in {} minutes; see {}".format(MINUTES, log)
  found = []
  if os.path.exists(rows):
    with open(rows) as file:
      found = [json.loads(line) for line in file if line.endswith("\n")]
    os.remove(rows)
  if problem:
    found.append(make_row(problem, failed=True))
  return found


def describe_driver():
  """Returns the versions of the NVIDIA drivers, one for each GPU; [] if nvidia-smi does not work."""
  try:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode().split()
  except (OSError, subprocess.CalledProcessError):
    return []


def require_gpu(folder):
  """Returns the description of this machine. Raises SystemExit with a message if TensorFlow sees no GPU."""
  absent = missing({"numpy": "numpy", "tensorflow": "'tensorflow[and-cuda]'", "tqdm": "tqdm"})
  if absent:
    sys.exit("Expected TensorFlow's GPU build and its packages in {}. Run: {}".format(sys.executable, absent))
  row = run_part("machine", folder)[-1]
  if row["failed"]:
    sys.exit("TensorFlow could not describe this machine: " + row["result"])
  machine = row["details"]
  if not machine["gpus"]:
    sys.exit(
      "No GPU is visible to TensorFlow {} (built with CUDA: {}). Expected a GPU, its driver (nvidia-smi) and CUDA's "
      "libraries; TensorFlow names what is missing in {}. CUDA_VISIBLE_DEVICES is {}.".format(
        machine["tensorflow"],
        machine["cuda"] or machine["cuda_build"],
        os.path.join(folder, "machine.log"),
        repr(os.environ["CUDA_VISIBLE_DEVICES"]) if "CUDA_VISIBLE_DEVICES" in os.environ else "not set",
      )
    )
  return dict(machine, date=datetime.datetime.now().isoformat(timespec="seconds"), driver=describe_driver())


def show(part, rows):
  for row in rows:
    time = "" if row["milliseconds"] is None else "{:.3f}".format(row["milliseconds"])
    result = "FAILED: " + row["result"] if row["failed"] else row["result"]
    print("{:<10}{:<42}{:>10}  {}".format(part, row["name"], time, result).rstrip(), flush=True)


def draw(results, title, path):
  """Draws the times of the steps: a panel for each part that has any, with a bar for each row."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  panels = [(part, [row for row in rows if row["milliseconds"]]) for part, rows in results.items()]
  panels = [(part, rows) for part, rows in panels if rows]
  heights = [len(rows) + 1 for _, rows in panels]
  figure, all_axes = pyplot.subplots(
    len(panels), squeeze=False, figsize=(11, 1 + 0.32 * sum(heights)), gridspec_kw={"height_ratios": heights}
  )
  for (part, rows), axes in zip(panels, all_axes[:, 0]):
    times = [row["milliseconds"] for row in rows]
    colors = ["tab:green" if "mp_compat" in row["name"] or "dynamic" in row["name"] else "tab:gray" for row in rows]
    axes.barh(range(len(rows)), times, color=colors)
    for position, time in enumerate(times):
      axes.text(time, position, " {:.3g}".format(time), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels([row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_title(part, loc="left", fontsize=10)
  all_axes[-1, 0].set_xlabel("median time of a step, ms; green: with mp_compat")
  figure.suptitle(title, fontsize=10)
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def report(results, machine, folder):
  """Writes gpu.json and, if it is possible, gpu.png."""
  with open(os.path.join(folder, "gpu.json"), "w") as file:
    json.dump(dict(machine=machine, parts=results), file, indent=2)
  absent = missing({"matplotlib": "matplotlib"})
  if absent:
    print("gpu.png left out; to draw it: " + absent)
  elif any(row["milliseconds"] for rows in results.values() for row in rows):
    title = "{}, TensorFlow {}, {}".format(", ".join(machine["gpus"]), machine["tensorflow"], machine["date"])
    draw(results, title, os.path.join(folder, "gpu.png"))


def parse_arguments():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be repeated")
  parser.add_argument("--out", default=os.path.join("runs", "gpu"), metavar="DIR", help="default: %(default)s")
  return parser.parse_args()


def main():
  arguments = parse_arguments()
  os.makedirs(arguments.out, exist_ok=True)
  machine = require_gpu(arguments.out)
  for name, value in machine.items():
    print("{:<12}{}".format(name, ", ".join(value) if isinstance(value, list) else value))
  print("\n{:<10}{:<42}{:>10}  {}".format("part", "", "ms", "result"))
  results = collections.OrderedDict()
  for part in arguments.part or PARTS:
    absent = missing(PARTS[part])
    if absent:
      results[part] = [make_row("left out; to run it: " + absent, failed=False)]
    else:
      results[part] = run_part(part, arguments.out)
    show(part, results[part])
  report(results, machine, arguments.out)
  failed = sum(row["failed"] for rows in results.values() for row in rows)
  print("{} checks failed. Numbers: {}".format(failed, os.path.join(arguments.out, "gpu.json")))
  sys.exit(1 if failed else 0)


if __name__ == "__main__":
  main()
