"""Tests read nothing from the user's folders and leave nothing there.

What is learned of costs lies in the Hugging Face library's folder for such data; the
variable must be set before that library is imported, and child processes follow it.
"""

import atexit
import os
import shutil
import tempfile

FOLDER = tempfile.mkdtemp(prefix="mlx_mtp_test_")
os.environ["HF_ASSETS_CACHE"] = FOLDER
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
