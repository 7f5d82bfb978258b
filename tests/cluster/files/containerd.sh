#!/bin/bash
# containerd of one node, in a mount namespace of its own (the kubelet joins it): what they mount ends with them.
# containerd.sh NODE: the node's folder. NODE/numa and NODE/meminfo are there when the node pretends to other hardware.
set -e
mount --make-rshared /
mount --bind "$1/kubelet" /var/lib/kubelet
if [ -d "$1/numa" ]; then
  mount --bind "$1/numa" /sys/devices/system/node
  mount --bind "$1/numa/cpu_online" /sys/devices/system/cpu/online
fi
if [ -f "$1/meminfo" ]; then mount --bind "$1/meminfo" /proc/meminfo; fi
exec containerd -c "$1/containerd.toml"
