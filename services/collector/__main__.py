"""`python -m services.collector`."""

from shared.early_stop import end_at_sigterm

end_at_sigterm()

from services.collector.main import main  # noqa: E402 - a second of imports, in which SIGTERM may come

raise SystemExit(main())
