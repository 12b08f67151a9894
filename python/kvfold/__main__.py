"""``python -m kvfold`` is the ``kvfold`` command."""

import sys

from .cli import main

sys.exit(main())
