"""Replay in virtual time: a trace against simulated pods, by the router's own decisions and the trainer's learning.

`trace` says what is asked, `cluster` runs it, `measure` turns outcomes into figures, `picture` draws them.
"""
