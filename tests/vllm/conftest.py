"""``jobs`` and ``compare`` are plain modules beside the tests, so that a child process can load them by path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
