"""One machine as a cluster: the objects of `manifests` run as processes. Linux only (loopback block, child subreaper).

Reading order: `addresses` (each pod its own 127.x.y.z) -> `volumes` and `containers` (pure: what a container's process
gets) -> `shim` (the process that holds a container's process tree) -> `processes` and `probes` -> `pods` (a tiny kubelet) ->
`workloads` (pure: StatefulSets and Deployments) -> `cluster` (the `Cluster` protocol) -> `folder` and `run` (`fp8rl run`).
"""
