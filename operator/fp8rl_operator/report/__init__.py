"""What a run folder says: `records` reads it, `summary` computes (pure), `plots` draws, `build` writes all of it."""
