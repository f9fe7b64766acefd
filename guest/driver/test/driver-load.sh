# SPDX-License-Identifier: GPL-2.0
#
# Part of driver-test.sh: the stages with a load of their own, while CPUs move for READ_S seconds.

# CPUs move for READ_S seconds, and at least $1 times; before each $2nd time distances change
# (0: never). After each $3 is done. Leaves in $moved how often they did. Where MOVES is empty they
# stay, and all else is the same.
move() {
	local until=$((SECONDS + READ_S)) mode
	# Asked once: a busy guest takes longer to answer than to move.
	mode=$(attribute mode)
	moved=0
	while ((SECONDS < until || moved < $1)); do
		if [[ -z $MOVES ]]; then
			sleep 0.1
			moved=$((moved + 1))
			$3
			continue
		elif [[ $mode == safe ]]; then
			all_but_first
		else
			(($2 == 0 || moved % $2)) || random_distances
			random_move
		fi
		publish "$map"
		moved=$((moved + 1))
		$3
	done
}

readers_saw() {
	guest cat "/sys/module/vnuma_readers/parameters/$1" | tr -d '\r'
}

# What reads the maps without a lock finds CPUs in them at any time, whatever moves and however far
# away the nodes are.
readers() {
	local moved what rounds from to before
	before=$(guest sh -c 'cat /sys/devices/system/node/node*/distance' | tr -d '\r')
	guest insmod "$READERS" || { fail "insmod $READERS"; return; }
	move 8 4 :
	rounds=$(readers_saw rounds)
	((rounds > 0)) || fail "the readers did nothing"
	for what in no_cpu no_hops lost_cpus; do
		[[ $(readers_saw $what) == 0 ]] || fail "readers: $what $(readers_saw $what)"
	done
	guest rmmod vnuma_readers || fail "rmmod vnuma_readers"
	for ((from = 0; from < NODES; from++)); do
		for ((to = 0; to < NODES; to++)); do
			host "distance $from $to $(sed -n "$((from + 1))p" <<<"$before" | cut -d ' ' -f $((to + 1)))"
		done
	done
	publish "$map"
	check_now "after readers"
	echo "readers: $moved publications, $rounds rounds of readers"
}

# Cores of one socket on two nodes, and together again: the scheduler must not take them for sharers
# of a cache in between.
caches() {
	local round strict="$strict --kernel"
	for ((round = 0; round < ROUNDS; round++)); do
		random_move
		publish "$map"
		check_now "cores of sockets, round $round"
	done
	((failures)) || echo "caches: $ROUNDS publications"
}

# In the guest, until /run/churn is gone: the last CPU goes and comes, the drivers of two devices do so,
# and tasks wake each other.
readonly CHURN='
touch /run/churn
(count=0; while test -e /run/churn; do
	chcpu -d $3 && chcpu -e $3 && count=$((count + 1)); echo $count >/run/churn.cpu; sleep 0.1
done) >/dev/null 2>&1 &
(count=0; while test -e /run/churn; do
	for device in $1 $2; do
		driver=$(readlink -f /sys/bus/virtio/devices/$device/driver)
		echo $device >$driver/unbind && echo $device >$driver/bind && count=$((count + 1))
	done
	echo $count >/run/churn.devices
done) >/dev/null 2>&1 &
while test -e /run/churn; do perf bench sched messaging -g 1 -l $4; done >/dev/null 2>&1
wait
'

# The name of the virtio device of function $1 of the bus that sorts last.
virtio_device() {
	guest sh -c "cd /sys/bus/pci/devices && ls -d *.$1/virtio* | sort | tail -1" | tr -d '\r' | sed 's,.*/,,'
}

# What is plugged of the virtio-mem device of guest node 1.
plug() {
	host "qmp {\"execute\":\"qom-set\",\"arguments\":{\"path\":\"/machine/peripheral/vmem1\",\"property\":\"requested-size\",\"value\":$1}}"
}

# Of guest node 1.
memory_kib() {
	guest sed -n 's/.*MemTotal: *\([0-9]*\).*/\1/p' /sys/devices/system/node/node1/meminfo
}

# Memory comes and goes as CPUs move.
churn_memory() {
	case $((moved % 10)) in
	3) plug 268435456 ;;
	8) plug 0 ;;
	7) (($(memory_kib) <= total)) || plugged=$((plugged + 1)) ;;
	esac
}

# CPUs move while a CPU, memory, a network card and a disk come and go.
churn() {
	local moved watcher disk card bus what count total done_so= plugged=0
	bus=$(guest sh -c 'ls /sys/class/pci_bus' | tr -d '\r' | sort | tail -1)
	guest modprobe -a virtio_net virtio_mem || fail "modprobe"
	host 'qmp {"execute":"blockdev-add","arguments":{"driver":"null-co","node-name":"nothing","size":16777216}}'
	host "qmp {\"execute\":\"device_add\",\"arguments\":{\"driver\":\"virtio-blk-pci\",\"id\":\"disk\",\"bus\":\"$PORT\",\"addr\":\"0.1\",\"drive\":\"nothing\",\"num-queues\":$VCPUS}}"
	host "qmp {\"execute\":\"device_add\",\"arguments\":{\"driver\":\"virtio-net-pci\",\"id\":\"card\",\"bus\":\"$PORT\",\"addr\":\"0.0\",\"multifunction\":true}}"
	await_device "$bus:00.0" && await_device "$bus:00.1" || return
	disk=$(virtio_device 1)
	card=$(virtio_device 0)
	guest sh -c "$CHURN" churn "$disk" "$card" $((VCPUS - 1)) "$MESSAGES" >"$directory/events" 2>&1 &
	watcher=$!
	total=$(memory_kib)
	move 20 8 churn_memory
	plug 0
	guest rm /run/churn
	wait $watcher || fail "churn: $(cat "$directory/events")"
	guest chcpu -e $((VCPUS - 1)) >/dev/null
	publish "$map"
	check_now "after all that came and went"
	for what in cpu devices; do
		count=$(guest cat "/run/churn.$what" | tr -d '\r')
		((count > 0)) || fail "churn: $what: $count times"
		done_so+=" $what $count"
	done
	((plugged > 0)) || fail "churn: no memory came"
	echo "churn: $moved publications,$done_so, memory $plugged times"
}

# CPUs move while a scheduler of sched_ext runs all tasks of the guest: one that keeps idle CPUs by
# node, then one with tasks in the queues of nodes.
sched_ext() {
	local kind
	if ! guest test -e /sys/kernel/sched_ext; then
		echo "this kernel has no sched_ext"
		return
	fi
	for kind in per-node global; do
		sched_ext_runs $kind
	done
	sched_ext_comes_and_goes
}

# A scheduler comes and goes while each rebuild of the scheduler's domains waits in its middle, so that
# they meet several times a minute if nothing keeps them apart. The kernel refuses one then, once the
# domains have been rebuilt some twenty times.
sched_ext_comes_and_goes() {
	local moved READ_S=$((READ_S < 60 ? READ_S : 60))
	READ_S=0 move 20 0 :
	guest insmod "$READERS" rebuild_ms=100 || { fail "insmod $READERS"; return; }
	sched_ext_runs again
	guest rmmod vnuma_readers || fail "rmmod vnuma_readers"
}

# Tasks sleep, and CPUs are idle, between some moves.
tasks_sleep() {
	((moved % 3)) || sleep 0.2
}

sched_ext_runs() {
	local kind=$1 moved watcher status
	guest "$SCHED_EXT" "$kind" $((READ_S + 15)) >"$directory/events" 2>&1 &
	watcher=$!
	await_line loaded || { kill $watcher; return; }
	move 8 0 tasks_sleep
	check_now "with a scheduler of sched_ext ($kind)"
	# What is left behind in a queue shows some time after the last move.
	wait $watcher
	status=$?
	((status == 0)) || fail "sched_ext, $kind, status $status: $(cat "$directory/events")
$(guest dmesg | grep sched_ext | tail -4)"
	echo "sched_ext: $kind, $moved publications, $(tail -1 "$directory/events")"
}

# CPUs move while schedulers of others run all tasks of the guest, one after the other.
others() {
	local program ran=0
	for program in $OTHERS; do
		other_runs "$program"
	done
	((ran > 0)) || fail "none of these schedulers runs while CPUs stay: $OTHERS"
}

# In $map: CPUs on all nodes.
spread() {
	local cpu list=
	for ((cpu = 0; cpu < VCPUS; cpu++)); do
		list+=,$cpu:$((cpu % NODES))
	done
	map=${list#,}
}

# One that does not run while CPUs stay is named. In safe mode CPUs come and go, for which the kernel ends
# most of them, and their programs load them again or not.
other_runs() {
	local name=${1##*/} moved watcher status options= words=
	[[ $(attribute mode) != safe ]] || words=--anew
	[[ $name != scx_layered ]] || options=--run-example
	# What a scheduler does by node it may leave out where only one node has CPUs.
	spread
	publish "$map"
	guest "$SCHED_EXT" other $((READ_S + 15)) $words -- "$1" $options >"$directory/events" 2>&1 &
	watcher=$!
	await_line '\(loaded\|refused\)' 600 || { kill $watcher; return; }
	if grep '^refused' "$directory/events"; then
		wait $watcher || fail "$name, status $?: $(cat "$directory/events")"
		return
	fi
	ran=$((ran + 1))
	move 8 0 tasks_sleep
	check_now "with $name"
	wait $watcher
	status=$?
	((status == 0)) || fail "$name, status $status: $(cat "$directory/events")
$(guest dmesg | grep sched_ext | tail -4)"
	echo "others: $name, $moved publications, $(tail -1 "$directory/events")"
}

# CPUs move while a thread on each of them, which no other task can take the CPU from, reads /dev/vnuma.
fifo() {
	local moved=0 watcher status stop=/run/vnuma-fifo.stop
	guest rm -f $stop
	guest "$FIFO" 60 $stop >"$directory/events" 2>&1 &
	watcher=$!
	await_line ready || { kill $watcher; return; }
	move 20 8 :
	guest touch $stop
	wait $watcher
	status=$?
	((status == 0)) || fail "readers of SCHED_FIFO, status $status: $(cat "$directory/events")"
	guest sysctl -q kernel.sched_rt_runtime_us=950000
	check_now "after readers of SCHED_FIFO"
	echo "fifo: $moved publications, $(tail -1 "$directory/events")"
}

# Runs the kernel's own tests of sched_ext, where $1 is yes while CPUs move. Leaves in $failed which of
# them failed, in $ran how many passed.
selftests_run() {
	local watcher out=$directory/selftests
	guest timeout 3600 "$SELFTESTS" -q >"$out" 2>&1 &
	watcher=$!
	while kill -0 $watcher 2>/dev/null; do
		if [[ -z $1 ]]; then
			sleep 1
		else
			random_move
			publish "$map"
			moved=$((moved + 1))
		fi
	done
	wait $watcher
	failed=$(tr -d '\r' <"$out" | sed -n 's/^not ok [0-9]* \([^ ]*\) # .*/\1/p' | tr '\n' ' ')
	ran=$(tr -d '\r' <"$out" | grep -c '^ok [0-9]* [^ ]* # *$')
	grep -q '^RESULTS:' "$out" || fail "selftests: $(tail -n 20 "$out")"
}

# Those that need not pass while CPUs move. `dequeue` counts what its scheduler is told of each task. A
# task for which the scheduler has chosen a queue in select_cpu() is in none of its queues when the
# scheduler is bypassed before the task is queued, and the kernel does not tell (scx_do_enqueue_task()).
readonly SELFTESTS_MOVED="dequeue"

# Those that pass while no CPU moves pass while CPUs do.
selftests() {
	local moved=0 failed ran before name
	selftests_run ""
	before=$failed
	echo "selftests: $ran passed without moves, not: ${before:-none}"
	((failures)) || selftests_run yes
	for name in $failed; do
		[[ " $before $SELFTESTS_MOVED " == *" $name "* ]] ||
			fail "selftest $name, with moves: $(grep -B 20 "^not ok [0-9]* $name " "$directory/selftests")"
	done
	check_now "after selftests"
	echo "selftests: $ran passed with $moved moves, not: ${failed:-none}"
}
