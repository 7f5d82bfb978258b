"""The operator's process: kopf's watches fill a store, a queue of jobs, passes, leader election, metrics, probes."""
