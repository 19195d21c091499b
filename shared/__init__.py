"""What two services must agree on, or must run identically. Nothing else lives here.

Test of entry: two services use it, and their disagreement would be a bug in production. No service, no network
client, no plugin, no training is imported. Side effects happen only when a service's `main.py` calls
`settings.load` (reads the environment) or `telemetry.configure_logging`.
"""
