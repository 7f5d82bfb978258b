"""Parts of `bench_weight_sync.py`; `tests/gpu` drives real engines with them too."""
