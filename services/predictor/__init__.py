"""Answers batches of feature rows with latency quantiles, from verified bundles that are swapped in live."""
