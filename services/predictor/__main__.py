"""`python -m services.predictor`."""

import sys

from shared.early_stop import end_at_sigterm

end_at_sigterm()

from services.predictor.main import main  # noqa: E402 - a second of imports, in which SIGTERM may come

sys.exit(main())
