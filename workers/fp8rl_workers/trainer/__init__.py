"""The trainer: one step's batch becomes new weights, and the weights become a sync.

Read in this order: `precision` (what `auto` became), `batch` (samples to micro-batches), `loss` (pure), `model` (the policy
and what it computes with), `optimizer`, `loop` (one step), `checkpoint` (atomic, exact), `publish` (weights to the wire),
`service` (what may happen when) and `server` (its routes).
"""
