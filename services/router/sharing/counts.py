"""What happened between routers, counted. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class ShareCounts:
    """Since the start. `late`: ends of a peer's requests that were given up before. `orphans_*`: why they went."""

    batches_sent: int = 0
    batches_received: int = 0
    duplicates: int = 0
    gaps: int = 0
    resent: int = 0
    snapshots_sent: int = 0
    snapshots_taken: int = 0
    mismatches: int = 0
    invalid: int = 0
    late: int = 0
    peers_lost: int = 0
    peers_returned: int = 0
    orphans_by_outcome: int = 0
    orphans_by_load: int = 0
    orphans_by_age: int = 0
    prefix_blocks_taken: int = 0
