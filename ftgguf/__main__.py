"""`python -m ftgguf` is `ftgguf`."""

import sys

from ftgguf.cli import main

sys.exit(main())
