"""`python -m services.trainer`."""

import sys

from services.trainer.main import main

sys.exit(main())
