"""The collector: turns finished requests into samples that teach, and publishes them to JetStream."""
