"""`python -m rapidformer_cli` is the rapidformer command."""

import sys

from rapidformer_cli.main import main

sys.exit(main())
