#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Runs driver-test.sh on the lab server, as root, against a VM of its own. Expects
# vnuma.ko, vnuma-readers.ko, vnuma-check, vnuma-affinity, vnuma-fifo, vnuma-fake-host and
# driver-*.sh beside it, for stages sched_ext and others lab-sched-ext, and for the latter scx_*.
#
#	on-lab.sh [ROUNDS [LOAD_SECONDS [KERNEL]]]
#
# STAGES, HOSTILE, NODES, SEED and READ_S of the environment are driver-test.sh's. MODE is
# how the module is loaded (auto), APPEND words for the guest's kernel, CORES those of a
# socket, which share a cache (1), PLACE the node of each vCPU (VCPU:NODE,...), MEMORY of the guest
# (512M), PLUGGABLE what can be plugged into each node. A warning ends the guest. Exit status 75: the emulated processor
# has ended it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
vm=driver-test
chmod +x "$here/vnuma-check" "$here/vnuma-affinity" "$here/vnuma-fifo" "$here/vnuma-fake-host"

vcpus="--vcpus 4"
[ -z "${PLACE:-}" ] || vcpus="--place $PLACE"
lab-vm start $vm --kernel "${3:-6.12}" --nodes "${NODES:-2}" --cores "${CORES:-1}" --memory "${MEMORY:-512M}" \
	--append "panic_on_warn=1 ${APPEND:-}" $vcpus ${PLUGGABLE:+--pluggable "$PLUGGABLE"}
# What a kernel has said that is gone is on its console.
leave() {
	status=$?
	if [ $status != 0 ]; then
		tail -n 60 /run/lab-vm/$vm/console.log
		! lab-vm fault $vm || status=75
	fi
	lab-vm stop $vm
	exit $status
}
trap leave EXIT
# dash runs no EXIT trap when a signal ends it.
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
for file in vnuma.ko vnuma-readers.ko vnuma-check vnuma-affinity vnuma-fifo; do
	lab-vm put $vm "$here/$file" "/root/$file"
done
others=
for file in "$here"/lab-sched-ext "$here"/runner "$here"/scx_*; do
	[ -e "$file" ] || continue
	lab-vm put $vm "$file" "/root/${file##*/}"
	case $file in */scx_*) others="$others /root/${file##*/}" ;; esac
done
lab-vm exec $vm -- insmod /root/vnuma.ko mode="${MODE:-auto}"
GUEST="lab-vm exec $vm --" QMP=/run/lab-vm/$vm/ctl.sock MODULE=/root/vnuma.ko AFFINITY=/root/vnuma-affinity \
	VCPUS=4 NODES="${NODES:-2}" OTHERS="$others" ROUNDS="${1:-60}" LOAD="${2:-0}" \
	bash "$here/driver-test.sh"
