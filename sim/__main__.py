"""`python -m sim`: the simulated servers of `sim.server`, which end at SIGTERM from the first moment."""

import sys

from shared.early_stop import end_at_sigterm

end_at_sigterm()

from sim.server import main  # noqa: E402 - a second of imports, in which SIGTERM may come

sys.exit(main())
