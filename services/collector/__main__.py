"""`python -m services.collector`."""

from services.collector.main import main

raise SystemExit(main())
