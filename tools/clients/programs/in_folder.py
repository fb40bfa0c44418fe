# SPDX-License-Identifier: Apache-2.0
"""Runs a program in a folder of its own for each run of `mp_compat compare`.

in_folder.py PARENT (SCRIPT | -m MODULE) [ARGUMENT ...]
"""

import os
import sys

from mp_compat.tools import run

folder = os.path.join(sys.argv[1], os.environ["MP_COMPAT_RUN"])
os.makedirs(folder, exist_ok=True)
os.chdir(folder)
run.execute(*run.load(sys.argv[2:]))
