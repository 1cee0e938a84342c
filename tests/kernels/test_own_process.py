"""Collected only where these tests share a process with others and there is no CUDA device: see ``conftest.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1200)
def test_the_kernel_tests_pass_in_a_process_of_their_own():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
