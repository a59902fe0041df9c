"""The least time of one version over links, from bandwidths alone: what `weight_sync.py` measures against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LinkPrice:
    """Seconds of one version over links of a bandwidth, by two ways."""

    pairs_s: float
    broadcast_s: float

    @property
    def is_broadcast_cheaper(self) -> bool:
        return self.broadcast_s < self.pairs_s


def price(sent: np.ndarray, *, sender_bytes_per_s: float, receiver_bytes_per_s: float, num_links: int = 1) -> LinkPrice:
    """The least time that bandwidths allow for `num_links` replicas; each gets `sent` [sources, destinations] bytes.

    pairs      max(most that a destination receives / bw_rx, num_links * most that a source sends / bw_tx)
    broadcast  all that any destination wants, once, in a pipeline through all of them: B / min(bw_tx, bw_rx)
    """
    received = float(sent.sum(0).max(initial=0)) / receiver_bytes_per_s
    pairs_s = max(received, num_links * float(sent.sum(1).max(initial=0)) / sender_bytes_per_s)
    whole = float(sent.max(1, initial=0).sum())
    return LinkPrice(pairs_s, whole / min(sender_bytes_per_s, receiver_bytes_per_s))
