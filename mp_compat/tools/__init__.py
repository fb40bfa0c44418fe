# SPDX-License-Identifier: Apache-2.0
"""What is run on a program from outside, and what a training program never imports.
Private: use the command line.
"""
