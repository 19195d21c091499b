"""`python -m services.trainer`."""

import os
import sys

from shared.early_stop import end_at_sigterm

end_at_sigterm()
# NumPy's BLAS would take every core of the host, also of one that lends this container two; it reads this at import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from services.trainer.main import main  # noqa: E402 - a second of imports, in which SIGTERM may come

sys.exit(main())
