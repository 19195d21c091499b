"""`python -m services.router`."""

import sys

from services.router.main import main

sys.exit(main())
