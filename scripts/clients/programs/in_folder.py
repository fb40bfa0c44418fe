# SPDX-License-Identifier: Apache-2.0
"""Runs a program in the folder of a run of `mp_compat compare`: in_folder.py (SCRIPT | -m MODULE) [ARGUMENT ...]."""

import os
import sys

from mp_compat.migration import program

os.makedirs(os.environ["MP_COMPAT_RUN"], exist_ok=True)
os.chdir(os.environ["MP_COMPAT_RUN"])
program.execute(*program.load(sys.argv[1:]))
