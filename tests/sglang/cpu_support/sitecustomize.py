"""Lets SGLang run on a machine without a GPU: Python imports this at its start where the folder is on PYTHONPATH.

So the stages and servers that a test starts are patched as the test's own process is. Nothing is imported here but
hooks; a process that never imports SGLang pays nothing.
"""

import os

import sglang_on_cpu

sglang_on_cpu.install(os.environ)
