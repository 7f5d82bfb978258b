"""The three workers of an FP8RLJob: trainer, inference, orchestrator.

Reading order: `config` (what the operator hands to each), `protocol` (what they say to each other), `weights` (the path
of one weight from trainer to engine), then `trainer`, `inference`, `orchestrator`.
"""
