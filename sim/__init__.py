"""Simulated model servers and the loads that drive them.

`engine` is a pure step model of a vLLM-like server; `server` serves it over real HTTP; `workload` and `loadgen` make
and send the requests. No service imports this package, and it imports nothing from `services`.
"""
