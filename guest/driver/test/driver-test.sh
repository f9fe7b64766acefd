#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# Drives the guest driver through a fake host: malformed publications, then random
# moves under load, each one checked by vnuma-check. Needs a running VM with a free
# PCIe root port and with the driver loaded; its vCPUs have the APIC ids 0 to
# VCPUS-1. Everything is said by environment variables:
#
#   GUEST   command that runs another one in the guest, e.g. "lab-vm exec a --"
#   QMP     QEMU monitor socket that nobody else uses, e.g. /run/lab-vm/a/ctl.sock
#   BUS     id of the free root port (vnuma0)
#   CHECK   vnuma-check in the guest (/root/vnuma-check)
#   HOST    vnuma-fake-host on this side (beside this script)
#   VCPUS, NODES   of the VM (4, 2)
#   ROUNDS  random publications (200), SEED (1), LOAD seconds (0: idle)
#   PORT    id of another free root port (vnuma1)
#   STAGES  which of checker, events, hostile, distances, devices, hotplug, reload, readers, safe, moves (all), sched_ext, caches,
#           churn, fifo, faults, others, selftests
#   HOSTILE which malformed publications, a regular expression for their names (all)
#   MODULE  vnuma.ko in the guest, to be unloaded and loaded again (empty: left out)
#   READERS  vnuma-readers.ko in the guest (/root/vnuma-readers.ko)
#   READ_S   seconds that it runs for (10)
#   AFFINITY  vnuma-affinity in the guest (/root/vnuma-affinity)
#   SELFTESTS  runner of the kernel's selftests of sched_ext in the guest (/root/runner)
#   FIFO     vnuma-fifo in the guest (/root/vnuma-fifo)
#   FAULTS   vnuma-faults in the guest (/root/vnuma-faults)
#   MODE     how MODULE is loaded again by stage faults (fast)
#   KNOWN    what the kernel may say without being wrong, a regular expression (nothing)
#   MESSAGES  that each task of stage churn sends before the stage can end (200)
#   STRICT   option of vnuma-check: what cannot be compared is wrong (--strict)
#   MOVES    yes, or empty: CPUs stay where they are while a load runs
#   SCHED_EXT  lab-sched-ext in the guest (/root/lab-sched-ext)
#   OTHERS   programs in the guest of schedulers of sched_ext, for stage others
#
# Exit status 0 if nothing was wrong. The last line has the latencies.
set -u
GUEST=${GUEST:?}
QMP=${QMP:?}
BUS=${BUS:-vnuma0}
PORT=${PORT:-vnuma1}
CHECK=${CHECK:-/root/vnuma-check}
HOST=${HOST:-$(dirname "$0")/vnuma-fake-host}
VCPUS=${VCPUS:-4}
NODES=${NODES:-2}
ROUNDS=${ROUNDS:-200}
LOAD=${LOAD:-0}
STAGES=${STAGES:-checker events hostile distances devices hotplug reload readers safe moves}
READERS=${READERS:-/root/vnuma-readers.ko}
READ_S=${READ_S:-10}
MOVES=${MOVES-yes}
SCHED_EXT=${SCHED_EXT:-/root/lab-sched-ext}
OTHERS=${OTHERS:-}
HOSTILE=${HOSTILE:-.*}
MODULE=${MODULE:-}
SELFTESTS=${SELFTESTS:-/root/runner}
FIFO=${FIFO:-/root/vnuma-fifo}
FAULTS=${FAULTS:-/root/vnuma-faults}
MODE=${MODE:-fast}
MESSAGES=${MESSAGES:-200}
STRICT=${STRICT---strict}
AFFINITY=${AFFINITY:-/root/vnuma-affinity}
RANDOM=${SEED:-1}

failures=0
present=
strict=$STRICT
refusals=0
# Random choices are made in this shell and left in $map: bash gives each subshell a
# seed of its own, so that $(...) would not come out the same with the same SEED.
map=
latencies=$(mktemp)
directory=$(mktemp -d)
trap 'rm -rf "$latencies" "$directory"' EXIT

fail() {
	echo "FAIL: $*"
	failures=$((failures + 1))
}

guest() {
	$GUEST "$@"
}

# One line to the fake host; the answer is in $answer.
host() {
	echo "$*" >&"${FAKE[1]}"
	read -r -t 60 answer <&"${FAKE[0]}" || { fail "no answer to: $*"; exit 1; }
}

refused() {
	guest cat /sys/class/misc/vnuma/refused | tr -d '\r'
}

log_lines() {
	guest dmesg | grep -c 'publication refused'
}

check_now() {
	local output
	output=$(guest "$CHECK" $strict "$present" 2>&1) ||
		fail "$1: $present: $output"
}

publish() {
	host "publish $1"
	case $answer in
	acknowledged*) present=$1; echo "${answer##* }" >>"$latencies" ;;
	*) fail "publish $1: $answer" ;;
	esac
}

random_map() {
	local cpu list=
	for ((cpu = 0; cpu < VCPUS; cpu++)); do
		list+=,$cpu:$((RANDOM % NODES))
	done
	map=${list#,}
}

# One vCPU of $present to another node.
single_move() {
	local cpu=$((RANDOM % VCPUS)) list=,$present, old
	old=${list#*,"$cpu":}
	old=${old%%,*}
	list=${list/,$cpu:$old,/,$cpu:$(((old + 1) % NODES)),}
	list=${list#,}
	map=${list%,}
}

all_on() {
	local cpu list=
	for ((cpu = 0; cpu < VCPUS; cpu++)); do
		list+=,$cpu:$1
	done
	map=${list#,}
}

# In $map: one vCPU moves, any of them, or all to one node.
random_move() {
	case $((RANDOM % 4)) in
	0 | 1) single_move ;;
	2) random_map ;;
	3) all_on $((RANDOM % NODES)) ;;
	esac
}

# Waits until the guest has refused so many publications: a busy machine takes its time.
await_refused() {
	local try
	for ((try = 0; try < 300; try++)); do
		(($(refused) >= $1)) && return
		sleep 0.2
	done
	fail "refused $(refused), not $1"
	return 1
}

# The host can know that the guest refused generation $1, and why.
host_sees_refusal() {
	local try
	for ((try = 0; try < 300; try++)); do
		host refused
		[[ $answer == "refused $1 -"* ]] && return
		sleep 0.2
	done
	return 1
}

# The publication that is in the memory now must be refused, in one line.
expect_refusal() {
	local before after lines silent
	before=$(refused)
	lines=$(log_lines)
	# Only silence is waited for so shortly: a busy machine acknowledges later.
	host "timeout 500"
	host ring-await
	[[ $answer == silent* ]] || fail "$1: $answer"
	silent=$answer
	await_refused $((before + 1))
	host ring-await
	[[ $answer == silent* ]] || fail "$1, again: $answer"
	await_refused $((before + 2))
	host "timeout 50000"
	host_sees_refusal "${silent#silent }" ||
		fail "$1: $silent, but the guest says: $answer"
	after=$(refused)
	((after == before + 2)) || fail "$1: refused $before, then $after"
	lines=$(($(log_lines) - lines))
	((lines == 1)) || fail "$1: $lines log lines"
	check_now "after $1"
	refusals=$((refusals + 1))
	echo "refused: $1: $(guest dmesg | grep 'publication refused' | tail -1 |
		sed 's/.*publication refused: //')"
	# The kernel lets ten of these lines pass in five seconds.
	((refusals % 8)) || sleep 5
}

wanted() {
	[[ $1 =~ ^($HOSTILE)$ ]]
}

# Something in the header is wrong: OFFSET BYTES BAD GOOD, while a good slot waits.
bad_header() {
	wanted "$1" || return 0
	single_move
	host "write $map"
	host "poke $2 $3 $4"
	expect_refusal "$1"
	host "poke $2 $3 $5"
	publish "$present"
}

# Something in the slot is wrong: offset in it, with a + in its section of vCPUs, or with a @
# in its section of devices; bytes, value.
bad_slot() {
	local start slot vcpus devices
	wanted "$1" || return 0
	single_move
	host "write $map"
	host slot
	read -r slot vcpus devices <<<"$answer"
	case $2 in
	+*) start=$vcpus ;;
	@*) start=$devices ;;
	*) start=$slot ;;
	esac
	host "poke $((start + ${2#[+@]})) $3 $4"
	expect_refusal "$1"
	publish "$present"
}

bad_map() {
	wanted "$1" || return 0
	host "write $2"
	expect_refusal "$1"
	publish "$present"
}

bad_device() {
	wanted "$1" || return 0
	host "devices $2"
	host "write $present"
	expect_refusal "$1"
	host devices
	publish "$present"
}

hostile() {
	bad_header 'magic' 0 8 0x1234 0x484354414d554e56
	bad_header 'layout' 8 2 1 2
	bad_header 'header size' 12 4 0xffffffff 192
	bad_header 'region size' 16 4 0x40000000 0x80000
	bad_header 'slot size' 20 4 0 0x3f000
	bad_header 'slot offset beyond the end' 24 8 0xfffffff8fffffff8 \
		0x0004100000002000
	bad_header 'slots that overlap' 24 8 0x0000200800002000 \
		0x0004100000002000
	bad_header 'slot over the header' 24 8 0 0x0004100000002000
	bad_header "slot over the guest's area" 28 4 0x1008 0x41000
	bad_slot 'torn generation' 0 8 0
	bad_slot 'length beyond the slot' 8 4 0x7fffffff
	bad_slot 'too many sections' 12 4 65
	bad_slot 'a section less' 12 4 1
	bad_slot 'section beyond the end' $((16 + 8)) 4 0xfffffff8
	bad_slot 'section without a length' $((16 + 8)) 4 0
	bad_slot 'unknown required section' 16 8 0x0001000100017001
	bad_slot 'no nodes' $((16 + 16)) 4 0
	bad_slot 'too many nodes' $((16 + 16)) 4 65
	bad_slot 'distances beyond the end' $((16 + 20)) 4 0xffffff00
	bad_slot 'no vCPUs' +16 4 0
	bad_slot 'too many vCPUs' +16 4 0xffffffff
	bad_slot 'vCPUs beyond the end' +20 4 0x7ffffff8
	bad_slot 'vCPUs of no size' +24 4 0
	bad_slot 'local distance' $((16 + 24)) 1 11
	bad_slot 'remote distance' $((16 + 25)) 1 9
	bad_slot 'node beyond nr_nodes' +36 4 "$NODES"
	bad_slot 'node 65536' +36 4 65536
	bad_map 'an APIC id twice' '0:0,0:1'
	host "devices 0:0:1.0=0,0:0:2.0=1"
	bad_slot 'too many devices' @16 4 257
	bad_slot 'devices beyond the end' @20 4 0x7ffffff8
	bad_slot 'devices of no size' @24 4 0
	bad_slot 'device on a node beyond nr_nodes' @36 4 "$NODES"
	bad_slot 'a device twice' @40 8 0x08000000
	bad_slot 'devices twice' +0 2 3
	host devices
	host "nodes 64"
	bad_device 'device on a node that the guest lacks' "0:0:1.0=$NODES"
	bad_map 'a node that the guest lacks' "0:$NODES"
	host "nodes $NODES"
	((refusals > 0)) || fail "HOSTILE=$HOSTILE names no malformed publication"
	echo "hostile: $refusals malformed publications"
}

# The command must exit with 1 and print a disagreement of that check.
expect_disagreement() {
	local check=$1 output status
	shift
	output=$("$@" 2>&1)
	status=$?
	((status == 1)) && grep -qF ": $check: " <<<"$output" ||
		fail "status $status, no disagreement of $check: $output"
}

# The checker sees a wrong node, and --strict what cannot be compared.
checker() {
	local wrong
	single_move
	wrong=$map
	expect_disagreement cpulist guest "$CHECK" "$wrong"
	expect_disagreement 'first touch' guest "$CHECK" "$wrong"
	guest env PATH=/nowhere "$CHECK" "$present" >/dev/null 2>&1 ||
		fail "a guest without lscpu and numactl"
	expect_disagreement lscpu \
		guest env PATH=/nowhere "$CHECK" --strict "$present"
	expect_disagreement 'numactl -H' \
		guest env PATH=/nowhere "$CHECK" --strict "$present"
	expect_disagreement 'scheduler domain' guest unshare -m sh -c \
		"mount --bind /dev/null /proc/schedstat && $CHECK --strict $present"
	echo "checker: finds what is wrong and what is missing"
}

# Up to a minute, or $2 seconds, until the watching program in the guest has printed that line.
await_line() {
	local try
	for ((try = 0; try < ${2:-60} * 5; try++)); do
		grep -q "^$1" "$directory/events" && return
		sleep 0.2
	done
	fail "no line '$1' but: $(cat "$directory/events")"
	return 1
}

# poll() wakes and one uevent comes for each change; nothing for anything else.
events() {
	local count=6 published=() watcher kind i before=$failures
	guest "$CHECK" --events $count --timeout 120 >"$directory/events" 2>&1 &
	watcher=$!
	await_line 'watching [0-9a-f]' || { kill $watcher; return; }
	for ((i = 0; i < count; i++)); do
		single_move
		publish "$map"
		published+=("${answer#acknowledged }")
		published[i]=${published[i]%% *}
		await_line "poll ${published[i]}" || { kill $watcher; return; }
		# Told again, and one that is refused: no change.
		host ring-await
		[[ $answer == acknowledged* ]] || fail "published again: $answer"
		host "timeout 500"
		host "write 0:0,0:1"
		host ring-await
		[[ $answer == silent* ]] || fail "an APIC id twice: $answer"
		host "timeout 50000"
	done
	wait $watcher || fail "vnuma-check --events: status $?"
	for kind in poll uevent; do
		grep "^$kind " "$directory/events" |
			diff <(printf "$kind %s\n" "${published[@]}") - ||
			fail "not one $kind per change"
	done
	((failures > before)) ||
		echo "events: $count changes, one poll() and one uevent for each"
}

moves() {
	local round
	for ((round = 0; round < ROUNDS; round++)); do
		random_move
		publish "$map"
		check_now "round $round"
	done
}

# $present without the last vCPU, which is offline.
without_last() {
	echo "${present%,*}"
}

# Neither a move of an offline CPU nor hotplug after a move may be lost.
hotplug() {
	local last=$((VCPUS - 1)) full
	all_on 0
	publish "$map"
	guest chcpu -d "$last" >/dev/null || fail "chcpu -d $last"
	publish "${present%:*}:1"
	full=$present
	present=$(without_last)
	check_now "with CPU $last offline"
	present=$full
	guest chcpu -e "$last" >/dev/null || fail "chcpu -e $last"
	check_now "moved while offline"
	all_on 1
	publish "$map"
	guest chcpu -d "$last" >/dev/null
	guest chcpu -e "$last" >/dev/null
	check_now "offline and online after a move"
	# The kernel builds its NUMA levels anew, without the node that loses its last CPU.
	all_on 0
	publish "${map%:*}:1"
	guest chcpu -d "$last" >/dev/null || fail "chcpu -d $last"
	all_on 1
	publish "$map"
	full=$present
	present=$(without_last)
	check_now "to a node that has lost its last CPU"
	present=$full
	guest chcpu -e "$last" >/dev/null || fail "chcpu -e $last"
	check_now "all CPUs there again"
}

# Sets all distances between different nodes to $1, in the next publication.
set_distances() {
	local from to
	for ((from = 0; from < NODES; from++)); do
		for ((to = 0; to < NODES; to++)); do
			((from == to)) || host "distance $from $to $1"
		done
	done
}

# From all nodes as near as each other to no two alike: the scheduler's levels become more and fewer.
random_distances() {
	local from to kinds=$((1 + RANDOM % NODES)) value
	for ((from = 0; from < NODES; from++)); do
		for ((to = 0; to < from; to++)); do
			value=$((20 + RANDOM % kinds))
			host "distance $from $to $value"
			host "distance $to $from $value"
		done
	done
}

expect_distance() {
	local line
	line=$(guest cat /sys/devices/system/node/node0/distance)
	line=${line//$'\r'/}
	[[ $line == "10 $1"* ]] || fail "distance 0 1 is not $1: $line"
}

distances() {
	local before
	random_map
	publish "$map"
	before=$(guest cat /sys/devices/system/node/node0/distance)
	before=${before//$'\r'/}
	before=${before#10 }
	before=${before%% *}
	set_distances 31
	random_map
	publish "$map"
	check_now "with other distances"
	expect_distance 31
	host "distance 0 1 32"
	random_map
	publish "$map"
	check_now "with asymmetric distances"
	expect_distance 31
	set_distances 10
	random_map
	publish "$map"
	check_now "with all nodes at one place"
	expect_distance 31
	set_distances "$before"
	random_map
	publish "$map"
	check_now "with the old distances"
	expect_distance "$before"
}

device_node() {
	guest cat "/sys/bus/pci/devices/$1/numa_node" | tr -d '\r'
}

# Device $1 must be on node $2 for the kernel, with its interrupts; $3 says when.
expect_device() {
	local node cpus expected irqs
	node=$(device_node "$1")
	[[ $node == "$2" ]] || { fail "$3: $1 is on node $node, not $2"; return; }
	((node < 0)) && return
	cpus=$(guest cat "/sys/bus/pci/devices/$1/local_cpulist")
	expected=$(guest cat "/sys/devices/system/node/node$2/cpulist")
	[[ $cpus == "$expected" ]] || fail "$3: local CPUs of $1: $cpus, not $expected"
	irqs=$(guest sh -c "cd /sys/bus/pci/devices/$1/msi_irqs && for i in *; do cat /proc/irq/\$i/node; done" |
		tr -d '\r' | sort -u)
	[[ $irqs == "$2" ]] || fail "$3: interrupts of $1 are on nodes $irqs"
}

# The device of class $1 that sorts last, or nothing.
device_of_class() {
	guest sh -c "cd /sys/bus/pci/devices && for d in *; do case \$(cat \$d/class) in $1) echo \$d ;; esac; done" |
		tr -d '\r' | tail -1
}

# Up to a minute until device $1 is there (with its interrupts), or with $2 = ! until it is not.
await_device() {
	local try
	for ((try = 0; try < 300; try++)); do
		guest sh -c "${2:-} test -d /sys/bus/pci/devices/$1/msi_irqs" && return
		sleep 0.2
	done
	fail "$1 is ${2:+still there}${2:-not there}"
}

# PCI devices get the node that is published for them, whenever they come, and theirs back.
devices() {
	local disk later bus before count found node
	disk=$(device_of_class 0x010000)
	found=$(device_node "$disk")
	all_on 0
	for node in 1 0 1; do
		host "devices $disk=$node"
		publish "$map"
		expect_device "$disk" "$node" "published"
	done
	[[ $(attribute devices) == 1 ]] || fail "devices: $(attribute devices)"

	# Published before it is there: its driver gets all that it allocates from that node. The free
	# port has the highest bus of the two.
	bus=$(guest sh -c 'ls /sys/class/pci_bus' | tr -d '\r' | sort | tail -1)
	later=$bus:00.0
	host "devices $disk=1,$later=1"
	publish "$map"
	host changes
	before=${answer#changes }
	guest modprobe virtio_net || fail "modprobe virtio_net"
	host "qmp {\"execute\":\"device_add\",\"arguments\":{\"driver\":\"virtio-net-pci\",\"id\":\"later\",\"bus\":\"$PORT\"}}"
	await_device "$later"
	expect_device "$later" 1 "plugged"
	[[ $(attribute devices) == 2 ]] || fail "devices: $(attribute devices)"
	for ((count = 0; count < 50; count++)); do
		host changes
		((${answer#changes } > before)) && break
		sleep 0.2
	done
	((${answer#changes } > before)) || fail "a device has come, and the host does not know"
	host "devices $disk=1,$later=0"
	publish "$map"
	expect_device "$later" 0 "published anew"
	host 'qmp {"execute":"device_del","arguments":{"id":"later"}}'
	await_device "$later" !
	[[ $(attribute devices) == 1 ]] || fail "unplugged, devices: $(attribute devices)"

	# Not named any more; by a host that does not know devices; by nobody.
	host "devices"
	publish "$map"
	expect_device "$disk" "$found" "not published any more"
	host "devices $disk=1"
	publish "$map"
	expect_device "$disk" 1 "published once more"
	host no-devices
	publish "$map"
	expect_device "$disk" "$found" "an older host"
	host "devices $disk=1"
	publish "$map"
	if [[ $MODULE ]]; then
		guest rmmod vnuma || fail rmmod
		expect_device "$disk" "$found" "unloaded"
		guest insmod "$MODULE" || fail insmod
		host ring-await
		expect_device "$disk" 1 "loaded again"
	fi
	host "devices"
	publish "$map"
	((failures)) || echo "devices: $disk and $later follow, and get theirs back"
}

# Unloading keeps the topology; loading takes over what is published meanwhile.
reload() {
	local last=$((VCPUS - 1))
	random_map
	publish "$map"
	guest rmmod vnuma || fail rmmod
	strict=	# /dev/vnuma is gone
	check_now unloaded
	expect_disagreement /dev/vnuma guest "$CHECK" --strict "$present"
	guest chcpu -d "$last" >/dev/null
	guest chcpu -e "$last" >/dev/null
	check_now "hotplug without the driver"
	strict=$STRICT
	random_map
	present=$map
	host "write $present"
	guest insmod "$MODULE" || fail insmod
	check_now "loaded again"
}

attribute() {
	guest cat "/sys/class/misc/vnuma/$1" | tr -d '\r'
}

# In $map: CPU 0, which is in no mode but fast to be moved, on node 0; the others at random,
# or on node $1.
all_but_first() {
	local cpu list=0:0
	for ((cpu = 1; cpu < VCPUS; cpu++)); do
		list+=,$cpu:${1:-$((RANDOM % NODES))}
	done
	map=$list
}

# Loads the module in mode $1; what was published last is in force when this returns.
load() {
	guest insmod "$MODULE" mode="$1" || fail "insmod mode=$1"
	host ring-await
	[[ $answer == "acknowledged "*" $(attribute mode) "* ]] ||
		fail "loaded with mode=$1, which is $(attribute mode): $answer"
	strict=$STRICT
}

unload() {
	guest rmmod vnuma || fail rmmod
	strict=	# /dev/vnuma is gone
}

# CPU 0 cannot go offline: the others move, and all of that shows.
safe_first_cpu() {
	local try

	all_but_first 0
	publish "$map"
	all_but_first 1
	# There must be no acknowledgement, not while the others move and not afterwards.
	host "timeout 200"
	host "publish 0:1${map#0:0}"
	for ((try = 0; try < 50; try++)); do
		[[ $answer == silent* ]] || break
		[[ $(attribute cpus_unapplied) == 1 ]] && break
	done
	host "await"
	[[ $answer == silent* ]] || fail "CPU 0 moved in safe mode: $answer"
	host "timeout 50000"
	present=$map
	[[ $(attribute cpus_unapplied) == 1 ]] || fail "cpus_unapplied: $(attribute cpus_unapplied)"
	guest dmesg | grep '1 CPUs are not on their published node, among them CPU 0 (-1)' >/dev/null ||
		fail "no log line for CPU 0"
	check_now "CPU 0 published elsewhere"
	publish "$map"
	[[ $(attribute cpus_unapplied) == 0 ]] || fail "cpus_unapplied: $(attribute cpus_unapplied)"
}

# Tasks keep what they were bound to, and get what they ask for meanwhile.
safe_affinity() {
	local seconds=6 stop=/run/vnuma-affinity.stop watcher status before=$failures
	local until=$((SECONDS + seconds)) moved=0
	guest rm -f $stop
	guest "$AFFINITY" $seconds $stop >"$directory/events" 2>&1 &
	watcher=$!
	await_line ready
	while ((SECONDS < until || moved < 3)); do
		all_but_first
		publish "$map"
		moved=$((moved + 1))
	done
	check_now "with bound tasks"
	# A fork() that took long is found later: when all looks are over (affinity.c, 20 ms to 2560 ms).
	sleep 6
	guest touch $stop
	wait $watcher
	status=$?
	((status == 0)) || fail "affinities, status $status: $(cat "$directory/events")"
	((failures > before)) ||
		echo "affinities: $(tail -1 "$directory/events"), $moved publications meanwhile"
}

# Cpusets of cgroup v1 would stay without a CPU that was offline.
safe_v1_cpusets() {
	local before
	if ! guest sh -c 'mkdir -p /run/v1 && mount -t cgroup -o cpuset none /run/v1' \
		2>/dev/null; then
		echo "this kernel has no cpusets of cgroup v1"
		return
	fi
	before=$(refused)
	all_but_first $((${present##*:} ^ 1))
	host "timeout 500"
	host "publish $map"
	[[ $answer == silent* ]] || fail "with cpusets of v1: $answer"
	host "timeout 50000"
	await_refused $((before + 1))
	guest dmesg | grep 'refused: .*cpusets of cgroup v1 are mounted' >/dev/null ||
		fail "no log line about cpusets of v1"
	check_now "with cpusets of v1"
	guest umount /run/v1 || fail "umount"
	# The kernel lets go of a hierarchy some time after that.
	sleep 1
	publish "$map"
	check_now "without cpusets of v1"
	echo "cpusets of v1: refused"
}

safe_hotplug() {
	local last=$((VCPUS - 1)) node
	for node in 1 0; do
		all_but_first $node
		publish "$map"
		guest chcpu -d "$last" >/dev/null || fail "chcpu -d $last"
		guest chcpu -e "$last" >/dev/null || fail "chcpu -e $last"
		check_now "safe mode, offline and online after a move to node $node"
	done
	# Told while it is offline, it moves when it comes online.
	guest chcpu -d "$last" >/dev/null
	publish "${present%:*}:1"
	guest chcpu -e "$last" >/dev/null
	check_now "safe mode, moved while offline"
}

# All of it with the driver in safe mode. Unloaded, it leaves the nodes that the CPUs have
# when they come up, here those of the last fast publication.
safe() {
	local node times=$directory/safe boot
	all_but_first 0
	publish "$map"
	unload
	load safe
	boot=$present
	[[ $(attribute mode) == safe ]] || fail "mode $(attribute mode)"
	: >"$latencies"
	host "timeout 50000"
	for node in 1 0; do
		all_but_first $node
		publish "$map"
		check_now "safe mode, all on node $node"
	done
	safe_first_cpu
	safe_hotplug
	safe_affinity
	safe_v1_cpusets
	sort -n "$latencies" >"$times"
	all_but_first 1
	publish "$map"
	unload
	present=$boot
	check_now "unloaded from safe mode"
	guest chcpu -d $((VCPUS - 1)) >/dev/null
	guest chcpu -e $((VCPUS - 1)) >/dev/null
	check_now "hotplug after safe mode"
	present=$map
	load auto
	check_now "in fast mode after safe mode"
	host "timeout 50000"
	awk '{ v[NR] = $1 / 1000 }
	END { printf "safe mode: %d publications, published to acknowledged ms: p50 %.0f max %.0f\n",
		NR, v[int((NR + 1) / 2)], v[NR] }' "$times"
}

kernel_log() {
	local bad
	bad=$(guest dmesg | grep -E 'WARNING:|BUG:|kernel BUG at|Oops|Call Trace|borken|soft lockup|hung task|rcu:.*stall' |
		grep -vE "${KNOWN:-^$}")
	[[ -z $bad ]] || fail "kernel log: $bad"
	# lockdep looks no further when it has found something, or has no room left.
	guest sh -c '! grep "debug_locks: *0" /proc/lockdep_stats 2>/dev/null' ||
		fail "lockdep has been turned off"
}

. "$(dirname "$0")/driver-load.sh"
. "$(dirname "$0")/driver-faults.sh"

coproc FAKE { "$HOST" --qmp "$QMP" --bus "$BUS" --listen "$directory/channel"; }
read -r -t 60 answer <&"${FAKE[0]}" || answer=
[[ $answer == attached ]] || { echo "FAIL: the fake host did not attach"; exit 1; }
host "nodes $NODES"
# All nodes here are those of the guest. What the firmware calls them is in its log.
host "order $(guest dmesg | sed -n 's/.*SRAT: Node \([0-9]*\) PXM \([0-9]*\) .*/\1 \2/p' | sort -u | tr '\n' ' ')"
[[ $answer == ok ]] || fail "order: $answer"
# The driver's probe comes some time after the hot-plug.
for _ in {1..300}; do
	guest grep -q vnuma /proc/interrupts && break
	sleep 0.2
done

all_on 0
publish "$map"
check_now first
for stage in $STAGES; do
	echo "stage $stage, $SECONDS s after the start"
	case $stage in
	checker | events | hostile | distances | devices | hotplug | readers | sched_ext | caches | churn | fifo | others | selftests) $stage ;;
	reload | safe | faults) [[ -z $MODULE ]] || $stage ;;
	moves)
		: >"$latencies"
		((LOAD == 0)) || guest "$CHECK" --load "$LOAD"
		moves
		;;
	*) fail "no stage $stage" ;;
	esac
done
kernel_log
echo quit >&"${FAKE[1]}"

sort -n "$latencies" | awk -v f="$failures" '
	{ v[NR] = $1 / 1000 }
	function at(share,   i) { i = int(NR * share) + 1; return v[i > NR ? NR : i] }
	END { printf "%d failures, %d moves, published to acknowledged ms: p50 %.1f p99 %.1f max %.1f\n",
		f, NR, at(0.5), at(0.99), v[NR] }'
((failures == 0))
