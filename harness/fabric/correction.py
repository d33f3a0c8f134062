"""What was announced, corrected by what ports counted. Pure.

Interface counters give the bytes that each ToR sent and received, not to whom. The matrix nearest
to the announced one (in relative entropy) with these totals is found by iterative proportional
fitting (Deming and Stephan 1940; Sinkhorn 1967). Where the announced pairs cannot explain the
totals, somebody sends who announced nothing: that part begins as the gravity model has it, in
proportion to what both ends send and receive (tomogravity: Zhang, Roughan, Duffield and Greenberg,
SIGMETRICS 2003).
"""

from __future__ import annotations

import numpy as np

from harness.fabric.demand import Demand, Floats

TOLERANCE = 1e-6
"""Of all bytes: so near are totals met, where fitting gets there in `ROUNDS_MAX`."""
ROUNDS_MAX = 500
UNEXPLAINED_MIN = 1e-3
"""Of all bytes, where the announced pairs do not explain the totals."""


def corrected(announced: Demand, sent_by_tor: Floats, received_by_tor: Floats) -> Demand:
    """Return the demand with these totals, bytes by ToR in its order, across ToRs only.

    Counters of both sides differ a little: both are taken to add up to their mean. A ToR that sent
    nothing sends nothing. Raises `ValueError` where totals are negative or not as many as ToRs.
    """
    out, in_ = np.array(sent_by_tor, np.float64), np.array(received_by_tor, np.float64)
    if not out.shape == in_.shape == (len(announced.tors),) or min(*out, *in_) < 0:
        raise ValueError("one total from 0 on for what each ToR sent, and one for what it received")
    if not (out.any() and in_.any()):
        return announced * 0
    bytes_ = (out.sum() + in_.sum()) / 2
    out, in_ = out * (bytes_ / out.sum()), in_ * (bytes_ / in_.sum())
    fitted = _fitted(announced.sent_bytes, out, in_)
    explained = _within(fitted, out, in_)
    unexplained = 1 - explained.sum() / bytes_
    if unexplained > TOLERANCE:
        gravity = _gravity(out, in_)
        share = max(unexplained, UNEXPLAINED_MIN) * bytes_ / max(gravity.sum(), 1e-300)
        fitted = _fitted(explained + share * gravity, out, in_)
    return Demand(announced.name, announced.tors, fitted)


def _fitted(seed: Floats, out: Floats, in_: Floats) -> Floats:
    """Return the seed with its rows and columns scaled in turn until they add up to the totals."""
    sent, near = seed.copy(), TOLERANCE * out.sum()
    for _ in range(ROUNDS_MAX):
        sent *= _ratio(in_, sent.sum(0))
        sent *= _ratio(out, sent.sum(1))[:, None]
        if np.abs(sent.sum(0) - in_).sum() <= near and np.abs(sent.sum(1) - out).sum() <= near:
            break
    return sent


def _within(sent: Floats, out: Floats, in_: Floats) -> Floats:
    """Return as much of it as exceeds no total."""
    sent = sent * np.minimum(1.0, _ratio(out, sent.sum(1)))[:, None]
    return np.asarray(sent * np.minimum(1.0, _ratio(in_, sent.sum(0))))


def _gravity(out: Floats, in_: Floats) -> Floats:
    """Return bytes in proportion to both ends; none where one ToR has a part in all there are."""
    found: Floats = np.outer(out, in_).astype(np.float64)
    np.fill_diagonal(found, 0.0)
    part = (out + in_) / out.sum()
    hub = int(part.argmax())
    if part[hub] >= 1 - TOLERANCE:  # the others have nothing for each other
        others = np.arange(len(out)) != hub
        found[np.ix_(others, others)] = 0.0
    return found


def _ratio(wanted: Floats, there: Floats) -> Floats:
    return np.divide(wanted, there, out=np.zeros_like(wanted), where=there > 0)
