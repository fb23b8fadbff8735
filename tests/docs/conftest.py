"""Lets the tests of this folder import the drawing code that lies beside the pictures of the documents."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "pictures"))
