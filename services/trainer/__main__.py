"""`python -m services.trainer`."""

import os
import sys

# NumPy's BLAS would take every core of the host, also of one that lends this container two; it reads this at import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from services.trainer.main import main

sys.exit(main())
