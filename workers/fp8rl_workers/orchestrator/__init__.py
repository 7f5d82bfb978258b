"""The orchestrator: samples from the engines, scores, builds batches, keeps staleness, conducts each weight sync.

Reading order: `loop` (the order of a run), `staleness`, `advantage`, `lineage`, `epochs`, `sync` (pure decisions), `rollouts`,
`dispatch`, `syncing`, `group`, `members`, `training` (the few places that act), `journal`, `records` (its files), `status`.
"""
