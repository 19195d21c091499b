"""Keeps a window of samples, fits and judges latency models, and publishes bundles and calibrations."""
