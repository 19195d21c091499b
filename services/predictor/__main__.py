"""`python -m services.predictor`."""

import sys

from services.predictor.main import main

sys.exit(main())
