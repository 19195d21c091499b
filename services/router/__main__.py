"""`python -m services.router`."""

import sys

from shared.early_stop import end_at_sigterm

end_at_sigterm()

from services.router.main import main  # noqa: E402 - a second of imports, in which SIGTERM may come

sys.exit(main())
